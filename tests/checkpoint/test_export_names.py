"""`checkpoints export`: names in a checkpoint, which anybody may have chosen, decide neither paths nor code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jackline.checkpoint.format.export import export_weights, read_state, safe_file_name
from jackline.checkpoint.format.hashing import chunk_offsets, digest
from jackline.checkpoint.format.manifest import MAX_SHOWN_STATE_PARTS, Damage, FileEntry, parse_manifest
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.errors import JacklineError
from jackline.rundir.registry import register
from tests.rundir.made import make_run

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-1" / "step-00000003"


def forge(folder: Path, change: Any) -> Path:
    """The golden checkpoint with another state.json, whose checksums are right: an attacker can compute them."""
    place = folder / GOLDEN.name
    shutil.copytree(GOLDEN, place)
    state = json.loads((place / "state.json").read_text())
    data = json.dumps(change(state)).encode()
    (place / "state.json").write_bytes(data)
    manifest = parse_manifest((place / "manifest.json").read_bytes())
    assert len(chunk_offsets(len(data))) == 1
    entry = FileEntry("state.json", len(data), (digest(manifest.algorithm, data),))
    files = tuple(entry if file.name == "state.json" else file for file in manifest.files)
    changed = type(manifest)(**{**manifest.__dict__, "files": files})
    (place / "manifest.json").write_bytes(changed.to_bytes())
    return place


@pytest.mark.parametrize(
    "key",
    ["../models/prod", "/etc/cron.d/x", "..", ".bashrc", "a/b", "x; import os", "m\n__import__('os')", "\x1b[2J"],
)
def test_a_key_never_leads_out_of_the_folder_or_into_the_printed_code(tmp_path: Path, key: str) -> None:
    place = forge(tmp_path, lambda state: {**state, key: state["model"]})
    out = tmp_path / "deep" / "out"
    written = export_weights(place, out)
    assert all(part.path.parent == out and part.path.exists() for part in written)
    assert [
        path for path in tmp_path.rglob("*.safetensors") if out not in path.parents and place not in path.parents
    ] == []
    for part in written:
        assert part.lines[-1].split(".")[0].isidentifier()
        compile("\n".join(part.lines), "printed", "exec")
        assert part.lines[1].startswith("state = load_file('") and len(part.lines) == 3


def test_two_keys_with_the_same_safe_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    place = forge(tmp_path, lambda state: {**state, "a/b": state["model"], "a?b": state["model"]})
    assert len({part.path for part in export_weights(place, tmp_path / "out")}) == 3


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": 5},
        {"w": {"file": "model"}},
        {"w": {"file": [], "name": 7}},
        {"w": None},
        {"w": {"file": "x", "name": "y"}},
    ],
)
def test_a_hostile_state_is_refused_in_words(tmp_path: Path, tensors: Any) -> None:
    place = forge(tmp_path, lambda state: {"model": {**state["model"], "tensors": tensors}, "checkpoint": 5})
    with pytest.raises(JacklineError, match=r"cannot be exported: state\.json makes no sense"):
        export_weights(place, tmp_path / "out")


def test_a_huge_state_of_somebody_else_is_not_parsed_and_ones_own_is(tmp_path: Path) -> None:
    """A list of numbers takes many times its bytes once it is parsed; 1 GB of it took all memory."""
    run = make_run(tmp_path / "runs" / "x")
    place = forge(run.path / "checkpoints", lambda state: {**state, "many": [1] * MAX_SHOWN_STATE_PARTS})
    manifest = verify_checkpoint(place)  # every byte is as it was saved
    with pytest.raises(Damage, match=r"state\.json has too many parts to be looked at in a run that was not made"):
        read_state(place, manifest)
    register(run, vouched=True)
    assert len(read_state(place, manifest)["many"]) == MAX_SHOWN_STATE_PARTS
    assert export_weights(place, tmp_path / "out")


def test_a_state_that_is_longer_than_its_manifest_says_is_read_no_further(tmp_path: Path) -> None:
    place = forge(tmp_path, lambda state: state)
    manifest = verify_checkpoint(place)
    os.truncate(place / "state.json", 10 << 30)
    with pytest.raises(Damage, match=r"state\.json cannot be read: larger than \d+ bytes"):
        read_state(place, manifest)
    (place / "state.json").unlink()
    (place / "state.json").symlink_to("/dev/zero")
    with pytest.raises(Damage, match=r"state\.json cannot be read: "):
        read_state(place, manifest)


def test_ordinary_names_stay_as_they_are() -> None:
    assert [safe_file_name(name) for name in ("model", "ema_model", "net.2-a")] == ["model", "ema_model", "net.2-a"]
