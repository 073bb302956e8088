"""Writing into a run's folder: never through a link, never into another user's file."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from jackline.rundir import atomic
from jackline.rundir.access.writing import NotOurs, folder_inside, open_own, private_folder
from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.lock import RunLock
from jackline.rundir.records.seen import SeenWriter
from jackline.supervisor.output.log_writer import LogWriter
from jackline.supervisor.output.room import empty_files, make_reserve

PRECIOUS = b"precious\n" * 10_000


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link in a run's folder that leads to a file elsewhere."""
    (tmp_path / "precious").write_bytes(PRECIOUS)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "file"
    path.symlink_to(tmp_path / "precious")
    return path


def write_log(path: Path) -> None:
    LogWriter(path, size_bytes=0).note("hello", 0.0)


def punch(path: Path) -> None:
    empty_files([path])


WRITERS = {
    "out.log": write_log,
    "events": JsonlWriter,
    "lock": lambda path: RunLock(path).try_acquire(),
    "seen": SeenWriter,
    "reserve": make_reserve,
    "old logs that give way": punch,
    "spares": lambda path: atomic.keep_spares(path.with_name("x"), 100),
    "plain": lambda path: open_own(path, os.O_WRONLY | os.O_TRUNC),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_a_run_is_not_followed_for_writing(link: Path, name: str) -> None:
    if name == "spares":
        link = link.rename(link.with_name(".x.spare0"))
    with contextlib.suppress(OSError):
        WRITERS[name](link)
    assert link.resolve().read_bytes() == PRECIOUS
    assert link.resolve().stat().st_blocks > 0


def test_a_record_replaces_a_link_instead_of_what_it_leads_to(link: Path) -> None:
    atomic.write_json(link, {"a": 1})
    assert (link.parents[1] / "precious").read_bytes() == PRECIOUS
    assert not link.is_symlink()


def test_a_planted_draft_of_a_record_is_not_followed(link: Path) -> None:
    draft = link.rename(link.with_name(f".run.json.{os.getpid()}.tmp"))
    with pytest.raises(OSError):
        atomic.write_json(draft.with_name("run.json"), {"a": 1})
    assert (link.parents[1] / "precious").read_bytes() == PRECIOUS


def test_a_fifo_is_not_written_to_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    reader = os.open(tmp_path / "lock", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(NotOurs, match="not a plain file"):
            open_own(tmp_path / "lock", os.O_WRONLY)
    finally:
        os.close(reader)


def test_new_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        os.close(open_own(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
        private_folder(tmp_path / "folder")
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


def test_a_private_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o777)
    with pytest.raises(NotOurs):
        private_folder(tmp_path / "folder")


def test_a_private_folder_of_an_older_version_is_closed_to_the_group(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o775)
    assert stat.S_IMODE(private_folder(tmp_path / "folder").stat().st_mode) == 0o700


def test_a_folder_that_a_library_loads_from_holds_only_what_we_write(tmp_path: Path) -> None:
    """A run of somebody else may have files in it that would be unpickled."""
    folder = tmp_path / "resume"
    (folder / "deep").mkdir(parents=True)
    for name in ("state.json", ".state.json.7.tmp", "optimizer.pt", "deep/rng.pth"):
        (folder / name).write_text("x")
    (folder / "link.pt").symlink_to(tmp_path)
    folder_inside(folder, only="state.json")
    assert sorted(path.name for path in folder.iterdir()) == [".state.json.7.tmp", "state.json"]
    folder_inside(tmp_path / "new", only="state.json")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "new")
    with pytest.raises(NotOurs):
        folder_inside(tmp_path / "elsewhere")
