"""Going back to an earlier checkpoint: nothing is deleted, nothing left behind is taken up again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from jackline.checkpoint.format.catalogue import (
    BEST,
    LATEST,
    LOCK,
    list_left_behind,
    list_names,
    list_rewinds,
    point_at,
)
from jackline.checkpoint.format.manifest import Name, Rewind, is_left_behind, parse_rewind
from jackline.checkpoint.mirror.fetch import bring_newer, fetch_newest, look_into
from jackline.checkpoint.mirror.progress import MirrorWatch
from jackline.checkpoint.mirror.store import FolderStore
from jackline.checkpoint.mirror.upload import OwnCheckpoints, own_mirror
from jackline.checkpoint.rewind import Choice, go_back, mirror_of, parse_choice, rewind_for
from jackline.checkpoint.writer.retention import left_behind_to_delete
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.rundir.layout import RunDir
from tests.checkpoint.states import write_small
from tests.deadline import HANGS_S


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "story")
    found.checkpoints.mkdir(parents=True)
    found.run_file.write_text('{"name": "story"}')
    for step in (2, 4, 6):
        write_small(found.checkpoints, step)
    return found


def back(run: RunDir, text: str, mirror: str | None = None) -> tuple[Name, list[str]]:
    said: list[str] = []
    return go_back(run, text, mirror=mirror, say=said.append), said


def live(run: RunDir) -> list[str]:
    return [str(name).removeprefix("step-000000").lstrip("0") for name in list_names(run.checkpoints)]


def left(run: RunDir) -> list[str]:
    return [str(name).removeprefix("step-000000").lstrip("0") for name in list_left_behind(run.checkpoints)]


def test_a_rewind_is_its_file_name() -> None:
    assert str(Rewind(2, 1)) == "rewind-00000002-r1.json"
    assert parse_rewind("rewind-00000002-r1.json") == Rewind(2, 1)
    for text in ("rewind-2-r1.json", "rewind-00000002-r0.json", "rewind-00000002.json", "step-00000002", ""):
        assert parse_rewind(text) is None


def test_what_is_later_and_was_not_saved_anew_is_left_behind() -> None:
    rewinds = [Rewind(2, 1), Rewind(5, 3)]
    names = [Name(2), Name(3), Name(3, 1), Name(6, 1), Name(6, 2), Name(6, 3)]
    assert [is_left_behind(name, rewinds) for name in names] == [False, True, False, True, True, False]
    assert rewind_for(2, [Name(2, 7), Name(3), Name(4, 2)], []) == Rewind(2, 3)
    assert rewind_for(2, [], [Rewind(9, 4)]) == Rewind(2, 5)


def test_a_choice_is_a_step_or_a_name() -> None:
    assert parse_choice("1200") == Choice(1200)
    assert parse_choice("step-00000006") == parse_choice("step-00000006") == Choice(6, Name(6))
    assert parse_choice("00000006-r1") == Choice(6, Name(6, 1))
    with pytest.raises(UsageError) as caught:
        parse_choice("six")
    assert str(caught.value) == (
        "error: --step 'six' is no step\nhint: a number, or a name out of `jackline checkpoints`"
    )


def test_later_ones_stay_on_the_disk_and_steps_saved_again_get_names_of_their_own(run: RunDir) -> None:
    point_at(run.checkpoints, BEST, Name(6))
    chosen, said = back(run, "2")
    assert (chosen, live(run), left(run)) == (Name(2), ["2"], ["6", "4"])
    assert said == [
        "going back to step-00000002; left behind, not deleted: step-00000004, step-00000006",
        "their numbers stay in metrics-0.jsonl, the new ones follow them",
    ]
    assert (run.checkpoints / LATEST).read_text() == "step-00000002\n"
    assert not (run.checkpoints / BEST).exists()
    assert write_small(run.checkpoints, 3).name == "step-00000003-r1"
    assert write_small(run.checkpoints, 4).name == "step-00000004-r1"
    assert live(run) == ["4-r1", "3-r1", "2"]
    back(run, "3")
    assert (live(run), left(run)) == (["3-r1", "2"], ["6", "4-r1", "4"])
    assert write_small(run.checkpoints, 4).name == "step-00000004-r2"


def test_going_back_to_the_newest_changes_nothing(run: RunDir) -> None:
    assert back(run, "6") == (Name(6), [])
    assert list_rewinds(run.checkpoints) == []


def test_one_that_was_left_behind_is_taken_up_again_by_its_name(run: RunDir) -> None:
    bytes_of_six = (run.checkpoints / "step-00000006" / "model.safetensors").read_bytes()
    back(run, "2")
    for step in (4, 8):
        write_small(run.checkpoints, step, content=b"n")
    assert back(run, "step-00000006")[0] == Name(6, 1)  # and `6` would have meant the same: this line has none
    assert (live(run), left(run)) == (["6-r1", "4-r1", "2"], ["8-r1", "4"])
    assert (run.checkpoints / "step-00000006-r1" / "model.safetensors").read_bytes() == bytes_of_six
    assert back(run, "step-00000004")[0] == Name(4, 2)  # although this line has one of that step
    assert live(run) == ["4-r2", "4-r1", "2"]


def test_a_missing_step_is_an_error_that_lists_what_there_is(run: RunDir, tmp_path: Path) -> None:
    back(run, "4")
    far = upload(run, tmp_path, 4)
    with pytest.raises(UsageError) as caught:
        back(run, "3", str(far))
    assert str(caught.value) == (
        f"error: there is no checkpoint of step 3 in {run.checkpoints}\n"
        "       here: step-00000004, step-00000002\n"
        "       left behind: step-00000006\n"
        "       in the mirror: step-00000004\n"
        "hint: --step N of those above"
    )
    empty = RunDir(run.path.with_name("empty"))
    empty.path.mkdir()
    with pytest.raises(UsageError) as caught:
        back(empty, "step-00000003")
    assert str(caught.value) == (
        f"error: there is no checkpoint named step-00000003 in {empty.checkpoints}\n"
        "       there is none at all\n"
        "hint: --step N of those above"
    )


def test_a_damaged_step_is_an_error_and_nothing_is_changed(run: RunDir) -> None:
    path = run.checkpoints / "step-00000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CannotResume) as caught:
        back(run, "2")
    assert str(caught.value) == (
        "error: the checkpoint of step 2 is damaged\n"
        "       step-00000002 is not whole: model.safetensors has wrong bytes between 0 B and 4.1 KiB\n"
        "       here: step-00000006, step-00000004, step-00000002\n"
        "hint: choose another: --step N of those above"
    )
    assert (live(run), list_rewinds(run.checkpoints)) == (["6", "4", "2"], [])


def test_a_run_with_a_supervisor_or_a_writer_is_refused(run: RunDir) -> None:
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    with hold(holding, run.lock):
        with pytest.raises(UsageError) as caught:
            back(run, "2")
        assert str(caught.value) == "error: run 'story' is alive\nhint: jackline stop story"
    trainer = (
        "import os, sys; from pathlib import Path; from jackline.checkpoint.writer.lock import WriterLock\n"
        "from jackline.rundir.process_id import identify\n"
        "WriterLock(Path(sys.argv[1]), identify(os.getpid())).acquire(print); print('held', flush=True); input()"
    )
    with hold(trainer, run.checkpoints / LOCK) as process:
        with pytest.raises(UsageError) as caught:
            back(run, "2")
        assert str(caught.value) == (
            f"error: run 'story' is alive: process {process.pid} is already writing checkpoints into this run\n"
            "hint: jackline stop story"
        )
    assert live(run) == ["6", "4", "2"]


class hold:
    """A process that holds something until the block is left."""

    def __init__(self, program: str, path: Path) -> None:
        words = [sys.executable, "-c", program, str(path)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.communicate("\n", timeout=HANGS_S)


def dying_at(number: int, run: RunDir, text: str) -> bool:
    """Goes back in a child that is killed just before its n-th change of the disk; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(function: Any) -> Any:
            def call(*words: Any, **more: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*words, **more)

            return call

        for word in ("rename", "replace", "fsync", "unlink", "write", "mkdir"):
            setattr(os, word, counted(getattr(os, word)))
        try:
            back(run, text)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(("text", "newest", "may_be"), [("2", "2", ["6", "2"]), ("9", "9-r1", ["10-r1", "9-r1"])])
def test_a_death_at_any_instant_leaves_the_run_as_it_was_or_gone_back(
    run: RunDir, text: str, newest: str, may_be: list[str]
) -> None:
    if text != "2":  # one that was left behind is taken up
        write_small(run.checkpoints, 9)
        back(run, "6")
        write_small(run.checkpoints, 10)
    stood = len(live(run) + left(run))
    number, killed = 1, 0
    while dying_at(number, run, text):
        assert live(run)[0] in may_be
        assert len(live(run) + left(run)) == stood
        number, killed = number + 1, killed + 1
    assert killed >= 4
    back(run, text)
    assert live(run)[0] == newest
    assert len(live(run) + left(run)) == stood


def upload(run: RunDir, tmp_path: Path, *steps: int) -> Path:
    mirror = own_mirror(run, FolderStore(tmp_path / "far"), 0.0, place=str(tmp_path / "far"))
    mirror.load()
    source = OwnCheckpoints(run.name, run.checkpoints)
    for step in steps:
        mirror.upload(source.item_of(next(name for name in list_names(run.checkpoints) if name.step == step)))
    return tmp_path / "far"


class Vague(FolderStore):
    """A store that takes everything and vouches for nothing."""

    def local_path(self, name: str) -> Path | None:
        return None


def in_mirror(far: Path) -> list[str]:
    there = look_into(FolderStore(far), "story").generations
    return sorted(str(generation.name)[12:] for generation in there)


def test_a_mirror_neither_brings_back_nor_deletes_what_was_left_behind(run: RunDir, tmp_path: Path) -> None:
    far = upload(run, tmp_path, 2, 4, 6)
    assert mirror_of(run) == str(far)
    back(run, "2")
    assert bring_newer(str(far), "story", run.checkpoints) == []
    there = look_into(FolderStore(far), "story")
    assert there.rewinds == (Rewind(2, 1),)
    assert [generation.name for generation in there.live()] == [Name(2)]
    watch = MirrorWatch(run.checkpoints)
    assert [event.text for event in watch.look(time.monotonic() + 10)] == [
        "uploaded step-00000002 to the mirror (confirmed)"
    ]
    for step in (3, 4, 5, 6):
        write_small(run.checkpoints, step)
        upload(run, tmp_path, step)
    there = look_into(FolderStore(far), "story")
    assert sorted(str(generation.name)[12:] for generation in there.generations) == ["4", "4-r1", "5-r1", "6", "6-r1"]
    # A machine that has nothing but the mirror takes the new line, and gives its names.
    empty = tmp_path / "empty"
    fetched = fetch_newest(FolderStore(far), "story", empty)
    assert fetched is not None and fetched.path.name == "step-00000006-r1"
    assert list_rewinds(empty) == [Rewind(2, 1)]
    assert write_small(empty, 7).name == "step-00000007-r1"


def test_what_a_person_deleted_of_those_left_behind_leaves_the_mirror_when_the_new_line_is_confirmed_there(
    run: RunDir, tmp_path: Path
) -> None:
    far = upload(run, tmp_path, 2, 4, 6)
    write_small(run.checkpoints, 8)
    upload(run, tmp_path, 8)  # 2 leaves the mirror: three are kept
    lost = run.checkpoints / "step-00000008"
    lost.rename(run.checkpoints / "damaged-step-00000008-ab12")
    back(run, "2")
    assert in_mirror(far) == ["4", "6", "8"]
    for name in list_left_behind(run.checkpoints):
        shutil.rmtree(run.checkpoints / str(name))
    upload(run, tmp_path, 2)
    assert in_mirror(far) == ["2", "4", "6", "8"]  # what the new line begins with is no word of the new line

    write_small(run.checkpoints, 3)
    mirror = own_mirror(run, Vague(far), 0.0, place=str(far))
    mirror.load()
    mirror.upload(OwnCheckpoints(run.name, run.checkpoints).item_of(Name(3, 1)))
    assert in_mirror(far) == ["2", "3-r1", "4", "6", "8"]  # uploaded, but nobody has said that it is whole

    write_small(run.checkpoints, 4)
    upload(run, tmp_path, 4)
    assert in_mirror(far) == ["2", "3-r1", "4-r1", "8"]  # the only copy of 8 is there: nobody deleted it


def test_another_machine_deletes_none_of_those_left_behind_in_the_mirror(run: RunDir, tmp_path: Path) -> None:
    far = upload(run, tmp_path, 2, 4, 6)
    back(run, "2")
    other = RunDir(tmp_path / "other" / "story")
    other.checkpoints.mkdir(parents=True)
    assert fetch_newest(FolderStore(far), "story", other.checkpoints) is not None
    for step in (3, 4, 5, 7):
        write_small(other.checkpoints, step)
        upload(other, tmp_path, step)
    assert in_mirror(far) == ["4", "4-r1", "5-r1", "6", "7-r1"]


def test_only_deleted_ones_of_a_line_that_was_left_behind_may_leave_a_mirror() -> None:
    rewinds, there = [Rewind(2, 1), Rewind(6, 2)], [Name(2), Name(4), Name(4, 1), Name(8), Name(8, 1), Name(8, 2)]

    def go(deleted: Collection[Name], confirmed: Name | None) -> list[Name]:
        return left_behind_to_delete(there, rewinds=rewinds, deleted_here=deleted, confirmed=confirmed)

    assert go(there, None) == go((), Name(9, 2)) == go(there, Name(2)) == []
    assert go(there, Name(4, 1)) == [Name(4), Name(8)]  # 8-r1 was left behind at step 6: nothing replaces it yet
    assert go(there, Name(8, 2)) == [Name(4), Name(8), Name(8, 1)]
    assert go([Name(8)], Name(8, 2)) == [Name(8)]


def test_a_machine_with_old_checkpoints_learns_of_it_from_the_mirror(run: RunDir, tmp_path: Path) -> None:
    far = upload(run, tmp_path, 2)
    other = RunDir(tmp_path / "other" / "story")
    other.checkpoints.mkdir(parents=True)
    for step in (6, 8):
        write_small(other.checkpoints, step)
    back(run, "2")
    assert bring_newer(str(far), "story", other.checkpoints) == [f"fetched step-00000002 from the mirror {far}"]
    assert (live(other), left(other)) == (["2"], ["8", "6"])


def test_a_step_that_only_the_mirror_has_is_fetched(run: RunDir, tmp_path: Path) -> None:
    far = upload(run, tmp_path, 2, 4)
    here = RunDir(tmp_path / "here" / "story")
    here.path.mkdir(parents=True)
    chosen, said = back(here, "2", str(far))
    assert (chosen, live(here)) == (Name(2), ["2"])
    assert said == [
        f"fetched step-00000002 from the mirror {far}",
        "going back to step-00000002; left behind, not deleted: step-00000004",
        "their numbers stay in metrics-0.jsonl, the new ones follow them",
    ]


class Deaf(FolderStore):
    """A store that answers nothing."""

    is_deaf = True

    def names(self, folder: str) -> list[str]:
        if self.is_deaf:
            raise OSError(110, "Connection timed out")
        return super().names(folder)


def test_a_mirror_that_does_not_answer_is_told_by_the_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Deaf(tmp_path / "far")
    monkeypatch.setattr("jackline.checkpoint.rewind.open_store", lambda place: store)
    _, said = back(run, "6", "far://away")
    assert said == [
        "the mirror cannot be read: [Errno 110] Connection timed out; going by what is here",
        "the mirror does not know of it yet ([Errno 110] Connection timed out); "
        "the run tells it before its next upload",
    ]
    assert list_rewinds(run.checkpoints) == [Rewind(6, 1)]  # it may hold later ones
    store.is_deaf = False
    assert own_mirror(run, store, 0.0).work(0.0)
    assert look_into(store, "story").rewinds == (Rewind(6, 1),)


def test_an_internal_error_is_one_of_ours(run: RunDir) -> None:
    (run.checkpoints / "step-00000002" / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(JacklineError):
        back(run, "2")
