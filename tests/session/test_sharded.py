"""attach() on FSDP2: every rank saves its part, and the checkpoint loads with any number of ranks or none."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jackline.checkpoint.format.export import export_weights
from jackline.checkpoint.state.load import load_newest
from jackline.errors import UsageError
from jackline.session.ranks import require_same_program, save_together
from tests.session.ranks_torture import Crew, losses, start, steps_saved, torment

CHECKPOINTS = "runs/job/checkpoints"


def load_alone(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """The newest checkpoint in one process without ranks: all of model and optimizer by name."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    receipt = load_newest(folder, {"model": model, "optimizer": optimizer}, hash_frozen=lambda tensor: "")
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, values in enumerate(optimizer.state.values()):
        found |= {f"optimizer.{number}.{word}": value for word, value in values.items()}
    return found, receipt


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def kill_and_resume(work: Path) -> None:
    """Rank 1 is killed in step 8, before it could be saved. The steps that are trained again have the same losses."""
    words = {"MODE": "fsdp", "DROPOUT": "0.1", "EVERY": "4"}
    cut = start(work, 2, 9, SIGNAL="SIGKILL", WHO="1", AT="8", **words)
    codes = cut.wait()
    assert codes[0] != 0 and codes[1] == -9, cut.text
    saved = steps_saved(work)
    job = start(work, 2, 9, STATE=str(work / "trained"), **words)
    assert job.wait() == [0, 0], job.text
    first, again = losses(cut), losses(job)
    twice = sorted(first.keys() & again.keys())
    assert {5, 6, 7} <= set(twice)  # step 4 is the last that can have been saved
    assert [first[step] for step in twice] == [again[step] for step in twice]
    assert min(again) > max(saved, default=0)  # no acknowledged checkpoint is lost
    assert max(again) == 9


def test_parts_of_two_ranks_are_one_checkpoint_for_everybody(tmp_path: Path) -> None:
    kill_and_resume(tmp_path)
    folder = tmp_path / CHECKPOINTS
    newest = max(folder.glob("step-*"))
    files = {path.name for path in newest.iterdir()}
    assert {f"{key}.rank-{rank}.safetensors" for key in ("model", "optimizer") for rank in (0, 1)} <= files
    assert "model.safetensors" not in files  # nobody may take a part for the whole
    with (folder / "writer.lock").open() as lock:  # the writer may outlive the training, to read back what it wrote
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not list(folder.glob(".parts-*"))
    trained = load_file(tmp_path / "trained")

    loaded, receipt = load_alone(folder)
    assert receipt.step == 9
    assert is_equal(loaded, trained)

    export_weights(newest, tmp_path / "export")
    exported = load_file(tmp_path / "export/model.safetensors")
    assert is_equal(
        {f"model.{name}": value for name, value in exported.items()},
        {name: value for name, value in trained.items() if name.startswith("model.")},
    )

    _refuses_wrong_shards(tmp_path, folder, newest)


def _refuses_wrong_shards(work: Path, folder: Path, newest: Path) -> None:
    """A shard that is missing, or that belongs to another save: the checkpoint before it is used, and said so."""
    before = sorted(folder.glob("step-*"))[-2]
    shard = "optimizer.rank-1.safetensors"
    shutil.copy(newest / shard, work / "kept")
    (newest / shard).unlink()
    _, receipt = load_alone(folder)
    assert receipt.path == before
    assert [refusal.why for refusal in receipt.refused] == [f"{shard} cannot be read: No such file or directory"]
    other = bytearray((work / "kept").read_bytes())
    other[-1] ^= 1
    (newest / shard).write_bytes(other)
    _, receipt = load_alone(folder)
    assert receipt.path == before
    assert shard in receipt.refused[0].why


def fake_ranks(*others: dict[str, Any]) -> Any:
    """Ranks of which the others tell what they are given here."""
    told = lambda text: [text, *(json.dumps({**json.loads(text), **other}) for other in others)]  # noqa: E731
    return SimpleNamespace(rank=0, size=1 + len(others), gather=told)


def test_ranks_with_other_code_or_settings_are_refused() -> None:
    known = {"code": {"train.py": "1"}, "arguments": {"argv": "train.py --lr=1 --local-rank=0"}, "schedule": {}}
    places = {"model.weight": "float32[2, 3] on cpu"}
    require_same_program(fake_ranks({}), known, places)
    require_same_program(fake_ranks({"the code of": {"train.py": "1", "curves.py": "3"}}), known, places)
    require_same_program(fake_ranks({"the arguments of": {"argv": "train.py --lr=1"}}), known, places)
    for other, words in (
        ({"the code of": {"train.py": "2"}}, "the code of rank 1 differ from those of rank 0: train.py: 1 on rank 0"),
        ({"the arguments of": {"argv": "train.py --lr=2"}}, "--lr=2"),
        ({"the parameters of": {"model.weight": "float32[4, 3] on cpu"}}, r"float32\[4, 3\] on cpu on rank 1"),
    ):
        with pytest.raises(UsageError, match=words):
            require_same_program(fake_ranks(other), known, places)


def sharded_session(others: tuple[bool, bool, bool], *, is_first: bool = True, is_saved: bool = False) -> Any:
    """A session of sharded state; `others`: whether another rank wants a save, is busy, or cannot save."""
    saver = SimpleNamespace(last_step=5 if is_saved else 3, why_off="", skipped=[], off=[])
    saver.engine = SimpleNamespace(is_busy=False, save_number=0)
    saver.skip, saver.turn_off = saver.skipped.append, saver.off.append

    def agree(*flags: bool) -> list[bool]:
        return [flag or other for flag, other in zip(flags, others[: len(flags)], strict=True)]

    ranks = SimpleNamespace(
        is_first=is_first,
        is_sharded=True,
        agree=agree,
        gather=lambda text: [text, text],
        wrappers=[],
        size=2,
        machine=None,
        turns=SimpleNamespace(copier=None, is_copying=False),
    )
    best = SimpleNamespace(wants_save=lambda step: False)
    rng_state = SimpleNamespace(state_dict=dict)
    return SimpleNamespace(
        ranks=ranks, saver=saver, stepper=SimpleNamespace(steps_done=5), best=best, rng_state=rng_state
    )


def test_all_ranks_save_their_part_or_none_does() -> None:
    calls: list[tuple[str, bool]] = []

    def save(wait: Any, again: bool) -> bool:
        calls.append((wait, again))
        return True

    how: Any = {"wait": "never", "again": False, "alone": False}
    assert save_together(sharded_session((False, False, False)), save, **how)
    assert calls == [("never", True)]
    busy = sharded_session((False, True, False))
    assert not save_together(busy, save, **how)
    assert busy.saver.skipped == [5]
    off = sharded_session((False, False, True))
    assert not save_together(off, save, **how)
    assert off.saver.off == ["saving is off on another rank"]
    assert save_together(sharded_session((False, False, False), is_saved=True), save, **how)
    assert not save_together(sharded_session((False, False, False)), save, **{**how, "alone": True})
    follower = sharded_session((True, False, False), is_first=False, is_saved=True)  # rank 0 has not saved this step
    assert save_together(follower, save, **how)
    assert (len(calls), follower.saver.engine.save_number) == (2, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_two_one_ddp_and_fsdp_again(tmp_path: Path) -> None:
    """Each form loads the state of the one before it, bit-equal, and trains on; losses agree with one process."""
    found: dict[int, float] = {}
    total, last = 0, tmp_path / "none"
    for size, mode in ((4, "fsdp"), (2, "fsdp"), (1, "ddp"), (2, "ddp"), (4, "fsdp")):
        if total:
            seen = tmp_path / f"loaded-{total}"
            job = start(tmp_path, size, total, MODE=mode, STATE=str(seen))  # complete: it only loads
            assert job.wait() == [0] * size, job.text
            assert is_equal(load_file(seen), load_file(last)), (size, mode)
        total, last = total + 3, tmp_path / f"trained-{total}"
        job = start(tmp_path, size, total, MODE=mode, STATE=str(last))
        assert job.wait() == [0] * size, job.text
        found.update(losses(job))
    whole = tmp_path / "whole"
    whole.mkdir()
    reference = start(whole, 1, total)
    assert reference.wait() == [0], reference.text
    assert found == pytest.approx(losses(reference), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_ranks_of_fsdp_resume_bit_equal(tmp_path: Path) -> None:
    crew = Crew(mode="fsdp", total=200)
    wanted = crew.undisturbed(tmp_path / "whole")
    assert torment(crew, tmp_path / "cut", wanted, random.Random(1), kills=5)[1] == ""
