from __future__ import annotations

from pathlib import Path

import pytest

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.manifest import Damage, Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.writer.commit import delete_checkpoint
from tests.checkpoint.power_loss import Call, RecordingDisk, crashes, lay_out
from tests.checkpoint.states import write_small


def record(folder: Path, *, saves: int, keep: int) -> RecordingDisk:
    """Saves, acknowledges and prunes, as the writer does."""
    folder.mkdir()
    disk = RecordingDisk(folder)
    for step in range(1, saves + 1):
        write_small(folder, step, disk=disk)
        disk.acknowledge(step)
        for name in list_names(folder)[keep:]:
            delete_checkpoint(folder / str(name), disk)
    return disk


def load_newest(folder: Path) -> int | None:
    """What the loader would resume from."""
    for name in list_names(folder):
        try:
            manifest = verify_checkpoint(folder / str(name), is_direct=False, threads=1)
        except Damage:
            continue
        body = (folder / str(name) / "model.safetensors").read_bytes()
        assert body.endswith(bytes([name.step]) * 68), "it loads wrongly"
        assert manifest.step == name.step
        return name.step
    return None


def judge(disk: RecordingDisk, place: Path) -> int:
    """Runs the loader on every state; returns how many there were."""
    count = 0
    for crash in crashes(disk.calls, disk.folders):
        count += 1
        loaded = load_newest(lay_out(crash, disk.folders, place))
        if crash.acknowledged:
            assert loaded is not None and loaded >= crash.acknowledged[-1], f"lost after call {crash.after}"
    return count


def test_no_power_cut_loses_what_was_acknowledged_or_loads_anything_else(tmp_path: Path) -> None:
    disk = record(tmp_path / "real", saves=3, keep=2)
    count = judge(disk, tmp_path / "replay")
    print(f"{len(disk.calls)} calls, {count} states after a power cut")
    assert count > 100


@pytest.mark.parametrize("dropped", ["folder", "parent", "manifest", "model"])
def test_the_replay_would_notice_a_missing_sync(tmp_path: Path, dropped: str) -> None:
    """A harness that finds nothing must be able to find something: each fsync is there for a reason."""
    disk = record(tmp_path / "real", saves=2, keep=2)
    links = {call.target: call.name for call in disk.calls if call.kind == "link"}
    words = {"model": "model.safetensors", "manifest": "manifest.json"}

    def is_dropped(call: Call) -> bool:
        if call.kind != "sync":
            return False
        if dropped == "parent":
            return call.place == 0
        if dropped == "folder":
            return call.place in disk.folders - {0}
        return links.get(call.place) == words[dropped]

    assert any(is_dropped(call) for call in disk.calls)
    disk.calls = [call for call in disk.calls if not is_dropped(call)]
    with pytest.raises(AssertionError, match="lost after call"):
        judge(disk, tmp_path / "replay")


def test_a_folder_name_is_never_two_steps(tmp_path: Path) -> None:
    disk = record(tmp_path / "real", saves=1, keep=2)
    assert list_names(tmp_path / "real") == [Name(1)]
    assert disk.calls[-1] == Call("ack", 1)
