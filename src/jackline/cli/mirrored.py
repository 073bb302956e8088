"""A mirror's place instead of a run or a runs folder, for commands that only read: its records are copied here first.

Commands that change a run do not take one: they would change the copy.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jackline.errors import JacklineError, UsageError
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.find import find_run, is_mirror, is_url, runs_folder
from jackline.rundir.layout import RunDir
from jackline.units import format_duration

if TYPE_CHECKING:
    from jackline.checkpoint.mirror.stories import Copies

T = TypeVar("T")
RENEW_EVERY_S = 10.0  # records reach a mirror once a minute
SLOW_AFTER_S = 2.0


def find_to_read(run: str | None, runs_dir: str | None, *, is_told: bool = True) -> RunDir:
    """The requested run, or a copy of its records in a mirror; `is_told`: say on stderr how old such a copy is."""
    found, place = _find(run, runs_dir)
    if place and is_told:
        say_age(found)
    return found


def find_to_follow(
    run: str | None, runs_dir: str | None, *, within_s: float | None = None, is_told: bool = True
) -> tuple[RunDir, Renewing | None]:
    """The requested run. Of one in a mirror newer records are brought from now on; `is_told`: say on stderr when they
    cannot be. Raises MirrorSilent when nothing has come from there within the time."""
    is_mirrored = bool(mirror_of(runs_dir)) or (run is not None and _is_in_mirror(run, runs_folder(runs_dir)))
    if within_s is None or not is_mirrored:
        found, place = _find(run, runs_dir)
    else:
        found, place = _within(within_s, lambda: _find(run, runs_dir))
    if not place:
        return found, None
    from jackline.checkpoint.mirror.stories import Copies

    say_age(found)
    return found, Renewing(Copies(place), found.name, is_told=is_told)


def _find(run: str | None, runs_dir: str | None) -> tuple[RunDir, str]:
    """The requested run, and the place of the mirror whose copy it is; '' for a run that is here."""
    if place := mirror_of(runs_dir):
        return find_run(run, folder_to_read(runs_dir), is_read_only=True), place
    if run is not None and _is_in_mirror(run, runs_folder(runs_dir)):
        return _bring(run)
    return find_run(run, runs_folder(runs_dir), is_read_only=True), ""


class MirrorSilent(JacklineError):
    """A mirror has not answered in the time that a person gave it."""

    exit_code = 124  # as `timeout` has it


def _within(seconds: float, work: Callable[[], T]) -> T:
    """In a thread that is left behind: a store may never answer."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as problem:
            failed.append(problem)

    thread = threading.Thread(target=run, name="mirror-reader", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise MirrorSilent(
            f"the mirror has not answered within {format_duration(seconds)}",
            hint="check the network and the mirror's address; with a longer --timeout it is waited for longer",
        )
    return found[0]


def folder_to_read(runs_dir: str | None) -> Path:
    """The runs folder, or copies of all runs of a mirror."""
    place = mirror_of(runs_dir)
    if not place:
        return runs_folder(runs_dir)
    from jackline.checkpoint.mirror.stories import Copies

    copies = Copies(place)
    with _told_when_slow(place):
        for text in copies.renew():
            _say(text)
    if not any(copies.folder.glob("*/run.json")):
        raise UsageError(
            f"{without_secrets(place)} holds no mirrored run",
            hint="name the folder or URL that was given as --mirror of the runs",
        )
    return copies.folder


def mirror_of(runs_dir: str | None) -> str:
    """The mirror that was given as the runs folder; '' for a folder of runs."""
    place = runs_dir or os.environ.get("JACKLINE_RUNS") or ""
    if is_url(place):
        return place
    # What tells a folder of runs comes first: otherwise all of them would be listed.
    is_one = bool(place) and not any(Path(place).expanduser().glob("*/run.json")) and is_mirror(place)
    return place if is_one else ""


class Renewing:
    """Brings newer records from now on, in a thread: a store may take long, or never answer, and is asked again."""

    def __init__(self, copies: Copies, name: str | None = None, *, is_told: bool = False) -> None:
        """`name`: of one run; without it those of all. `is_told`: say on stderr when it cannot be read."""
        self.trouble = ""
        self._copies, self._name, self._is_told = copies, name, is_told
        threading.Thread(target=self._work, name="mirror-reader", daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(RENEW_EVERY_S)
            before, self.trouble = self.trouble, self._renew()
            if self._is_told and self.trouble != before:
                _say(f"{self.trouble}; trying again" if self.trouble else "the mirror can be read again")

    def _renew(self) -> str:
        try:
            self._copies.renew(self._name)
        except JacklineError as problem:
            return problem.message
        except OSError as problem:
            return str(problem)
        return ""


def keep_all_renewed(runs_dir: str | None) -> None:
    """The same for all runs of a mirror that was given as the runs folder."""
    if place := mirror_of(runs_dir):
        from jackline.checkpoint.mirror.stories import Copies

        Renewing(Copies(place))


def say_age(run: RunDir) -> None:
    from jackline.rundir.records.supervisor import read_supervisor

    at_s = read_supervisor(run).at_s
    if at_s is not None:
        age = format_duration(max(0.0, time.time() - at_s))
        _say(f"from the mirror: the records of '{run.name}' are {age} old")


def _is_in_mirror(word: str, folder: Path) -> bool:
    return not (folder / word / "run.json").exists() and is_mirror(word)


def _bring(word: str) -> tuple[RunDir, str]:
    """A copy of a run's records, and the place of the mirror."""
    from jackline.checkpoint.mirror.stories import Copies, find_in_mirror
    from jackline.rundir.records.ranks import is_part_of_job
    from jackline.rundir.records.supervisor import read_supervisor

    with _told_when_slow(word):
        place, name = find_in_mirror(word)
        copies = Copies(place)
        copies.renew(name)
        found = RunDir(copies.folder / name)
        if is_part_of_job(read_supervisor(found).ranks):
            copies.renew()  # the other machines of its job
    return found, place


@contextlib.contextmanager
def _told_when_slow(place: str) -> Iterator[None]:
    timer = threading.Timer(SLOW_AFTER_S, _say, (f"reading the mirror {without_secrets(place)} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    from jackline.cli.text.safety import safe_text

    print(f"[jackline] {safe_text(text, 400)}", file=sys.stderr, flush=True)
