from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jackline.checkpoint.format.catalogue import BEST, MIRROR, STATUS, VERIFIED, list_names, point_at, write_notes
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.rewind import go_back
from jackline.cli.commands.checkpoints import _is_deleted, command
from jackline.cli.commands.model import export
from jackline.errors import JacklineError, UsageError
from jackline.rundir.layout import RunDir
from tests.checkpoint.states import write_small
from tests.deadline import HANGS_S


@pytest.fixture
def run(clean_environment: Path) -> RunDir:
    path = clean_environment / "story"
    (path / "checkpoints").mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return RunDir(path)


def call(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), catch_exceptions=False)


def shown(result: Result) -> str:
    return "\n".join(line.rstrip() for line in result.output.rstrip().split("\n"))


def test_an_empty_run_says_so(run: RunDir) -> None:
    assert shown(call()) == f"there is no checkpoint in {run.checkpoints}"
    for word in ("verify", "show", "export"):
        with pytest.raises(UsageError) as caught:
            call(word, "story")
        assert str(caught.value) == (
            f"error: there is no checkpoint in {run.checkpoints}\n"
            "hint: `jackline status` tells when the next one is due"
        )


def test_the_list_shows_state_mirror_best_and_damage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        write_small(run.checkpoints, step, metrics={"loss": 1.0 / step})
    (run.checkpoints / "step-00000003" / "state.json").unlink()
    write_notes(run.checkpoints, STATUS, {Name(2): {"verified_at_s": 61.0}})
    write_notes(run.checkpoints, MIRROR, {Name(1): {"state": "confirmed"}})
    point_at(run.checkpoints, BEST, Name(1))
    monkeypatch.setattr("time.time", lambda: 181.0)
    expected = f"""\
STEP      AGE    SIZE     STATE                                                            MIRROR
00000003  3 min  4.1 KiB  DAMAGED: state.json cannot be read: No such file or directory  local      loss 0.3333
00000002  3 min  4.1 KiB  saved, read back 2 min ago                                     local      latest  loss 0.5
00000001  3 min  4.1 KiB  saved                                                          confirmed  best  loss 1
in {run.checkpoints}"""
    lines = shown(call("story")).split("\n")
    assert [line.split() for line in lines] == [line.split() for line in expected.split("\n")]


def test_the_list_as_json(run: RunDir) -> None:
    write_small(run.checkpoints, 2, metrics={"loss": 0.5})
    (row,) = json.loads(call("--json").output)
    assert row == {
        "name": "step-00000002",
        "step": 2,
        "saved_at_s": 1.0,
        "size_bytes": row["size_bytes"],
        "problem": None,
        "read_back_at_s": None,
        "mirror": "local",
        "is_latest": True,
        "is_best": False,
        "is_left_behind": False,
        "metrics": {"loss": 0.5},
    }


def test_damage_that_verify_has_found_is_in_the_list(run: RunDir) -> None:
    for step in (1, 2):
        write_small(run.checkpoints, step)
    path = run.checkpoints / "step-00000002" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    assert call("verify").exit_code == 1
    newest, older = json.loads(call("--json").output)
    assert newest["problem"] == "model.safetensors has wrong bytes between 0 B and 4.1 KiB"
    assert (newest["is_latest"], older["is_latest"], older["problem"]) == (False, True, None)
    assert older["read_back_at_s"] is not None
    assert "DAMAGED: model.safetensors has wrong bytes" in call().output
    path.write_bytes(whole)
    assert call("verify", "--step", "2").exit_code == 0
    assert json.loads(call("--json").output)[0]["problem"] is None


def test_damaged_notes_of_verify_do_not_break_the_list(run: RunDir) -> None:
    write_small(run.checkpoints, 1)
    body = {"checkpoints": {"step-00000001": {"why": ["x"], "verified_at_s": "soon"}}}
    (run.checkpoints / VERIFIED).write_text(json.dumps(body))
    assert json.loads(call("--json").output)[0]["problem"] is None


def test_when_all_were_set_aside_the_list_names_them_and_their_place(run: RunDir) -> None:
    for number in range(7):
        (run.checkpoints / f"damaged-step-0000000{number}-ab").mkdir(parents=True)
    lines = call().output.splitlines()
    assert lines[:3] == [
        f"there is no whole checkpoint in {run.checkpoints}",
        "7 damaged, set aside:",
        f"  {run.checkpoints}/damaged-step-00000006-ab",
    ]
    assert lines[-1] == "  and 2 more"
    with pytest.raises(UsageError, match=r"there is no whole checkpoint in .*\n       7 damaged, set aside:"):
        call("verify")


def test_those_left_behind_are_listed_verified_and_deleted_only_when_asked(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write_small(run.checkpoints, step)
    go_back(run, "1", mirror=None, say=lambda text: None)
    write_small(run.checkpoints, 2)
    monkeypatch.setattr("time.time", lambda: 181.0)
    expected = f"""\
STEP         AGE    SIZE     STATE        MIRROR
00000002-r1  3 min  4.1 KiB  saved        local   latest
00000001     3 min  4.1 KiB  saved        local
00000003     3 min  4.1 KiB  left behind  local
00000002     3 min  4.1 KiB  left behind  local
left behind by `jackline resume --step`: 2; no attempt resumes from them by itself
  take one up again: jackline resume --step step-00000003
  delete them: jackline checkpoints prune --left-behind
in {run.checkpoints}"""
    assert shown(call()) == expected
    assert [row["is_left_behind"] for row in json.loads(call("--json").output)] == [False, False, True, True]
    assert call("verify", "--step", "3").exit_code == 0
    assert shown(call("prune", "--keep", "2")) == "nothing to delete"
    assert shown(call("prune", "--left-behind")).split("\n") == [
        "deleted step-00000003 (4.1 KiB)",
        "deleted step-00000002 (4.1 KiB)",
        "freed 8.2 KiB; 1 newest read and whole",
    ]
    assert [str(name) for name in list_names(run.checkpoints)] == ["step-00000002-r1", "step-00000001"]
    for path in run.checkpoints.glob("step-*/state.json"):
        path.unlink()
    done = shown(call("prune", "--left-behind")).split("\n")
    assert done[-1] == "nothing deleted: 0 could be verified whole, and one good one must stay"


def test_verify_reads_all_names_the_damage_and_fails(run: RunDir) -> None:
    for step in (1, 2):
        write_small(run.checkpoints, step)
    done = call("verify")
    assert done.exit_code == 0
    assert shown(done) == "step-00000002  whole  4.1 KiB\nstep-00000001  whole  4.1 KiB"
    path = run.checkpoints / "step-00000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = call("verify", "story")
    assert done.exit_code == 1
    assert shown(done).split("\n")[1] == (
        "step-00000001  damaged: model.safetensors has wrong bytes between 0 B and 4.1 KiB"
    )
    assert call("verify", "--step", "2").exit_code == 0
    found = json.loads(call("verify", "--json").output)
    assert [entry["is_whole"] for entry in found] == [True, False]


def test_prune_keeps_what_it_must_and_says_what_it_freed(run: RunDir) -> None:
    for step in range(1, 7):
        write_small(run.checkpoints, step, metrics={"loss": float(step)})
    dry = shown(call("prune", "--keep", "2", "--dry-run", "--best", "loss"))
    assert dry.split("\n")[-1] == "would free 12.2 KiB; 2 newest read and whole"
    assert len(list_names(run.checkpoints)) == 6
    done = shown(call("prune", "--keep", "2", "--best", "loss"))
    assert done.split("\n")[0] == "deleted step-00000004 (4.1 KiB)"
    assert [name.step for name in list_names(run.checkpoints)] == [6, 5, 1]
    assert shown(call("prune")) == "nothing to delete"


def test_prune_deletes_nothing_before_two_good_ones_are_verified(run: RunDir) -> None:
    for step in (1, 2, 3):
        write_small(run.checkpoints, step)
    for step in (2, 3):
        path = run.checkpoints / f"step-0000000{step}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = call("prune", "--keep", "1")
    assert done.output.endswith("nothing deleted: 1 could be verified whole, and two good ones must stay\n")
    assert len(list_names(run.checkpoints)) == 3


def test_show_tells_what_is_inside_without_reading_tensors(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_small(run.checkpoints, 3, metrics={"loss": 0.25})
    monkeypatch.setattr("time.time", lambda: 62.0)
    assert shown(call("show", "--tensors")).split("\n") == [
        "step-00000003: step 3, saved 1 min 1 s ago",
        f" in {place}".replace(" in", "  in"),
        "  loss = 0.25",
        "  step: 3",
        "  model.safetensors: 4.1 KiB, 2 tensors",
        "    n  I64 []",
        "    w  F32 [3, 5]",
        "  state.json: 10 B",
        "  lengths and manifest are right; `jackline checkpoints verify --step 3` reads every byte",
    ]
    assert json.loads(call("show", "--json").output)["step"] == 3
    (place / "manifest.json").write_text("{}")
    with pytest.raises(JacklineError) as caught:
        call("show")
    assert str(caught.value) == (
        "error: step-00000003 is not whole: manifest.json is not one of ours\n"
        "hint: `jackline checkpoints verify` tells which ones are"
    )


def test_a_missing_step_is_refused_with_those_there_are(run: RunDir) -> None:
    write_small(run.checkpoints, 3)
    with pytest.raises(UsageError) as caught:
        call("show", "--step", "4")
    assert str(caught.value) == (
        f"error: there is no checkpoint of step 4 in {run.checkpoints}\nhint: the newest are: 3"
    )


def test_an_export_is_loaded_by_the_three_lines_it_prints(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from jackline.checkpoint.engine import CheckpointEngine
    from tests.checkpoint.states import make_state

    state = make_state()
    engine = CheckpointEngine(run)
    assert engine.save(state, step=1).wait(HANGS_S)
    engine.close()
    monkeypatch.chdir(tmp_path)
    lines = shown(call("export", "--out", "away")).split("\n")
    assert lines[0] == "# step-00000001, 8 tensors, 6.3 KiB"
    assert lines[1:] == [
        "from safetensors.torch import load_file",
        f"state = load_file('{tmp_path}/away/model.safetensors')",
        "model.load_state_dict(state)",
    ]
    model = make_state(seed=9)["model"]
    exec("\n".join(lines[1:]), {"model": model})
    assert torch.equal(model[3].weight, state["model"][3].weight)
    assert torch.equal(model[1].running_mean, state["model"][1].running_mean)
    assert json.loads(call("export", "--json").output)["files"][0]["key"] == "model"
    assert engine_saves_again(run, state)
    for words, step in (((), 1), (("--checkpoint", "latest"), 2), (("--checkpoint", "2"), 2)):
        made = CliRunner().invoke(export, ["story", "--to", "safetensors", "--json", *words], catch_exceptions=False)
        assert json.loads(made.output)["step"] == step, "the best one, if no other is asked for"
    with pytest.raises(UsageError, match="writes the weights as they are stored, not as bf16"):
        CliRunner().invoke(export, ["story", "--to", "safetensors", "--dtype", "bf16"], catch_exceptions=False)
    with pytest.raises(UsageError, match="step-00000002 holds no model called 'actor'"):
        call("export", "--key", "actor")


def engine_saves_again(run: RunDir, state: dict[str, Any]) -> bool:
    from jackline.checkpoint.engine import CheckpointEngine

    engine = CheckpointEngine(run)
    is_saved = engine.save(state, step=2).wait(HANGS_S)
    engine.close()
    point_at(run.checkpoints, BEST, Name(1))
    return is_saved


def test_a_damaged_checkpoint_is_not_exported(run: RunDir) -> None:
    place = write_small(run.checkpoints, 1)
    (place / "model.safetensors").write_bytes(b"x")
    with pytest.raises(JacklineError) as caught:
        call("export")
    assert str(caught.value) == (
        "error: step-00000001 is not whole and was not exported: "
        "model.safetensors is 1 B, the manifest says 4.1 KiB\n"
        "hint: `jackline checkpoints verify` tells which ones are; choose one with --step"
    )


def test_one_that_is_being_deleted_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    going, staying = tmp_path / "going", tmp_path / "staying"
    going.mkdir()
    staying.mkdir()
    thread = threading.Timer(0.1, going.rmdir)
    thread.start()

    assert _is_deleted(going)
    assert not _is_deleted(staying)
    thread.join()


def test_prune_says_deleted_only_of_what_it_deleted(run: RunDir) -> None:
    from tests.places import Unavailable, read_only, small_disk

    try:
        with small_disk(run.checkpoints, "4M"):
            for step in range(1, 7):
                write_small(run.checkpoints, step)
            with read_only(run.checkpoints), pytest.raises(JacklineError) as caught:
                call("prune", "--keep", "2")
            assert str(caught.value).split("\n") == [
                "error: step-00000004 cannot be deleted: the disk is read-only",
                "hint: make the disk writable, then prune again",
            ]
            assert len(list_names(run.checkpoints)) == 6
    except Unavailable as reason:
        pytest.skip(str(reason))
