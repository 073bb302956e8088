"""Going back to an earlier checkpoint: `jackline resume RUN --step N`.

Nothing is deleted. Later checkpoints stay where they are and are *left behind*: no attempt resumes from them, no
mirror brings them back, retention does not touch them, and a step that is saved again gets a name of its own
(`step-00000006-r1`). Only a person deletes them, on this machine, and the mirror follows. All of this rests on one
small file, `checkpoints/rewind-NNNNNNNN-rR.json`, here and in the mirror: later steps with a retry number below R are
left behind. It is written atomically, after the chosen checkpoint was read and found whole. So a crash at any instant
leaves the run either as it was or completely rewound.
Owns the choice and the creation of that file. manifest.py defines what a rewind means; catalogue.py applies it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import Damage, Name, Rewind, is_left_behind, parse_name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.mirror import fetch
from jackline.checkpoint.mirror.store import Store, open_store
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.writer.commit import free_place
from jackline.checkpoint.writer.disk import Disk
from jackline.checkpoint.writer.lock import AnotherWriter, WriterLock
from jackline.errors import CannotResume, UsageError
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_text
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import host_name, identify
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.registry import entry_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """The checkpoint a user asked for: by its step, or by its name."""

    step: int
    name: Name | None = None

    def means(self, name: Name) -> bool:
        return name == self.name if self.name is not None else name.step == self.step

    def __str__(self) -> str:
        return f"of step {self.step}" if self.name is None else f"named {self.name}"


@dataclass(frozen=True)
class Mirrored:
    """The run in its mirror. `there` is None when the mirror did not answer."""

    place: str
    store: Store
    there: fetch.There | None


def parse_choice(text: str) -> Choice:
    """Parse '1200', or a name as `jackline checkpoints` prints it: '00001200-r1', 'step-00001200'."""
    if text.isdecimal() and text.isascii():
        return Choice(int(text))
    name = parse_name(text) or parse_name(f"step-{text}")
    if name is None:
        raise UsageError(f"--step {text!r} is no step", hint="a number, or a name out of `jackline checkpoints`")
    return Choice(name.step, name)


def rewind_for(step: int, known: Collection[Name], rewinds: Collection[Rewind]) -> Rewind:
    """The rewind that leaves behind every known name of a later step.

    It also covers every name that is not known here yet, unless that step was saved more often than any known one.
    """
    seen = [name.retry for name in known if name.step > step]
    return Rewind(step, 1 + max([*seen, *(rewind.retry for rewind in rewinds)], default=0))


def go_back(run: RunDir, text: str, *, mirror: str | None, say: Say) -> Name:
    """Make the run's next attempt resume from the chosen checkpoint.

    If that is impossible, raise and change nothing.
    """
    choice = parse_choice(text)
    folder = choose_place(run).folder
    folder.mkdir(parents=True, exist_ok=True)
    with _held(run, folder, say):
        mirrored = _look_into_mirror(mirror or mirror_of(run), run.name, say)
        if mirrored is not None and mirrored.there is not None:
            fetch.learn_rewinds(mirrored.there, folder)
        chosen = _find(choice, run, folder, mirrored, say)
        chosen = _make_newest_of_step(chosen, folder)
        _leave_behind(chosen, run, folder, mirrored, say)
    return chosen


def go_back_before(run: RunDir, step: int, *, say: Say) -> Name | None:
    """Go back to the newest whole checkpoint before `step`; None when there is none.

    For an attempt of the run itself, on its way out: the supervisor keeps its lock, and the writer has ended or ends.
    """
    folder = choose_place(run).folder
    with _held(run, folder, say, is_inside=True):
        mirrored = _look_into_mirror(mirror_of(run), run.name, say)
        for name in sorted((name for name in catalogue.list_names(folder) if name.step < step), reverse=True):
            try:
                verify_checkpoint(folder / str(name))
            except Damage:
                continue
            chosen = _make_newest_of_step(name, folder)
            _leave_behind(chosen, run, folder, mirrored, say)
            return chosen
    return None


def mirror_of(run: RunDir) -> str | None:
    """Where the run's checkpoints are copied to, as the mirror noted at its first upload."""
    place = choose_place(run)
    known = read_mirror(place.folder / catalogue.MIRROR).store or place.mirror
    told = (entry_of(run).options or {}).get("mirror")  # the same address, with its password
    return told if isinstance(told, str) and without_secrets(told) == known else known


def tell_rewinds(store: Store, run: str, folder: Path, told: Collection[Rewind] = ()) -> set[Rewind]:
    """Copy the rewinds that the mirror lacks; return all it has afterwards. Makes no call when nothing is new."""
    new = set(catalogue.list_rewinds(folder)) - set(told)
    if not new:
        return set()
    for rewind in sorted(new - set(fetch.look_into(store, run).rewinds)):
        store.put_bytes((folder / str(rewind)).read_bytes(), f"{run}/checkpoints/{rewind}")
    return new


def deleted_since(folder: Path) -> set[Name]:
    """The checkpoints that were here when they were left behind and are not here any more.

    Only a person deletes such checkpoints. One that was never here, or that was found damaged and set aside, is not
    included: a mirror may have the only copy.
    """
    found: set[Name] = set()
    for rewind in catalogue.list_rewinds(folder):
        body = atomic.read_json(folder / str(rewind))
        noted = body.get("here") if isinstance(body, dict) else None
        texts = noted if isinstance(noted, list) else []
        found |= {name for name in map(parse_name, map(str, texts)) if name is not None}
    aside = [path.name for path in catalogue.list_set_aside(folder)]
    return {
        name
        for name in found
        if not os.path.lexists(folder / str(name)) and not any(f"-{name}-" in text for text in aside)
    }


@contextlib.contextmanager
def _held(run: RunDir, folder: Path, say: Say, *, is_inside: bool = False) -> Iterator[None]:
    """Hold the run's locks: neither a supervisor nor a writer may be at work. `is_inside`: the supervisor is our own.

    A writer that outlived its trainer is waited for: the checkpoint it commits is one of those to leave behind.
    """
    supervising = RunLock(run.lock)
    if not is_inside and not supervising.try_acquire():
        raise UsageError(f"run '{run.name}' is alive", hint=f"jackline stop {run.name}")
    writing = WriterLock(folder / catalogue.LOCK, identify(os.getpid()))
    said: list[str] = []

    def tell_once(holder: object) -> None:
        if not said:
            said.append("")
            say("waiting for the last save to be written")

    try:
        writing.acquire(tell_once)
        yield
    except AnotherWriter as problem:
        raise UsageError(f"run '{run.name}' is alive: {problem}", hint=f"jackline stop {run.name}") from None
    finally:
        writing.release()
        supervising.release()


def _look_into_mirror(place: str | None, run: str, say: Say) -> Mirrored | None:
    if place is None:
        return None
    store = open_store(place)
    try:
        return Mirrored(place, store, fetch.within(fetch.LIST_TIMEOUT_S, lambda: fetch.look_into(store, run)))
    except Exception as problem:  # a store may raise any exception
        say(f"the mirror cannot be read: {problem}; going by what is here")
        return Mirrored(place, store, None)


def _find(choice: Choice, run: RunDir, folder: Path, mirrored: Mirrored | None, say: Say) -> Name:
    """The chosen checkpoint, with every byte verified.

    Looks first in the current line of checkpoints, then among those left behind, then in the mirror.
    """
    live = [name for name in catalogue.list_names(folder) if choice.means(name)]
    found = live or [name for name in catalogue.list_left_behind(folder) if choice.means(name)]
    refused = []
    for name in found:
        try:
            verify_checkpoint(folder / str(name))
            return name
        except Damage as damage:
            refused.append(f"{name} is not whole: {damage}")
    there = mirrored.there if mirrored is not None else None
    if mirrored is not None and there is not None:
        rewinds = catalogue.list_rewinds(folder)
        wanted = [generation for generation in there.generations if choice.means(generation.name)]
        wanted.sort(key=lambda generation: is_left_behind(generation.name, rewinds))  # stable: newest first in both
        fetched, damaged = fetch.fetch_first(mirrored.store, run.name, folder, wanted)
        if fetched is not None:
            say(f"fetched {fetched.name} from the mirror {without_secrets(mirrored.place)}")
            name_here = parse_name(fetched.path.name)
            assert name_here is not None
            return name_here
        refused += damaged
    detail = (*refused, *_what_there_is(folder, there))
    if refused:
        raise CannotResume(
            f"the checkpoint {choice} is damaged", detail=detail, hint="choose another: --step N of those above"
        )
    raise UsageError(f"there is no checkpoint {choice} in {folder}", detail=detail, hint="--step N of those above")


def _what_there_is(folder: Path, there: fetch.There | None) -> list[str]:
    lines = [
        ("here", catalogue.list_names(folder)),
        ("left behind", catalogue.list_left_behind(folder)),
        ("in the mirror", [generation.name for generation in there.generations] if there else []),
    ]
    return [f"{where}: {_listed(names)}" for where, names in lines if names] or ["there is none at all"]


def _listed(names: Sequence[Name], most: int = 12) -> str:
    words = list(dict.fromkeys(str(name) for name in names))
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _make_newest_of_step(name: Name, folder: Path) -> Name:
    """Rename one that was left behind, or whose step was saved again since: an attempt takes the newest of a step."""
    same = [other for other in catalogue.list_names(folder) if other.step == name.step]
    if same and same[0] == name:
        return name
    disk = Disk()
    place = free_place(folder, Name(name.step, same[0].retry + 1 if same else 0))
    disk.rename(folder / str(name), place)
    disk.sync_folder(folder)
    found = parse_name(place.name)
    assert found is not None
    return found


def _leave_behind(chosen: Name, run: RunDir, folder: Path, mirrored: Mirrored | None, say: Say) -> None:
    rewinds = catalogue.list_rewinds(folder)
    there = mirrored.there if mirrored is not None else None
    far = [generation.name for generation in there.generations] if there else []
    noted = [*catalogue.read_notes(folder, catalogue.STATUS), *catalogue.read_uploads(folder)]
    here = [*catalogue.list_names(folder), *catalogue.list_left_behind(folder)]
    later = sorted({name for name in (*here, *far) if name.step > chosen.step and not is_left_behind(name, rewinds)})
    is_silent = mirrored is not None and there is None
    if later or is_silent:
        rewind = rewind_for(chosen.step, [*here, *far, *noted], rewinds)
        body = {
            "to": str(chosen),
            "left_behind": [str(name) for name in later],
            "here": [str(name) for name in later if name in here],
            "at_s": time.time(),
            "host": host_name(),
        }
        catalogue.write_rewind(folder, rewind, body)
    _point(chosen, folder)
    if later:
        say(f"going back to {chosen}; left behind, not deleted: {_listed(later)}")
        say(f"their numbers stay in {run.metrics().name}, the new ones follow them")
    if mirrored is not None:
        _tell(mirrored, run.name, folder, say)


def _point(chosen: Name, folder: Path) -> None:
    """Update the hints for people. They are not trusted, so an error here is ignored."""
    with contextlib.suppress(OSError):
        catalogue.point_at(folder, catalogue.LATEST, chosen)
        best = parse_name(read_text(folder / catalogue.BEST, 200).strip())
        if best is not None and best not in catalogue.list_names(folder):
            (folder / catalogue.BEST).unlink()


def _tell(mirrored: Mirrored, run: str, folder: Path, say: Say) -> None:
    try:
        fetch.within(fetch.LIST_TIMEOUT_S, lambda: tell_rewinds(mirrored.store, run, folder))
    except Exception as problem:  # a store may raise any exception
        say(f"the mirror does not know of it yet ({problem}); the run tells it before its next upload")
