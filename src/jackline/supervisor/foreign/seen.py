"""The user's own checkpoints across the attempts of one run: which exist, who wrote them, and how loading them went.

Owns foreign.json (its type is in rundir/records/foreign.py) and finding the candidates. find.py checks a file,
choice.py decides which candidate is used, kept.py makes copies.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from jackline.machine.proc import open_files
from jackline.machine.readings import TreeReading
from jackline.rundir.layout import RunDir
from jackline.rundir.records.foreign import (
    OPEN,
    Fingerprint,
    Known,
    Load,
    read_foreign_record,
    write_foreign_record,
)
from jackline.rundir.records.session import read_session
from jackline.supervisor.foreign.choice import Candidate, Choice, EndingOfLoad, choose_from, outcome_of
from jackline.supervisor.foreign.find import ForeignCheckpoint, describe, is_whole, list_checkpoints, newest_whole
from jackline.supervisor.foreign.fingerprint import fingerprint

LOOK_EVERY_S = 5.0
_GONE_SHOWN = 3


class CheckpointsSeen:
    """Live state across the attempts of one run. `survey` only reads, so `status` may call it too."""

    def __init__(self, run: RunDir, pattern: str | None, *, cwd: Path, since_s: float) -> None:
        self._run = run
        self._pattern = pattern
        self._cwd = cwd
        self._since_s = since_s - 1.0
        self._last_look_s = float("-inf")
        self.newest: ForeignCheckpoint | None = None
        self.record = read_foreign_record(run)

    # -- while an attempt runs ---------------------------------------------------------------------------------------

    def look(self, now_s: float, tree: TreeReading) -> bool:
        """True when a newer complete checkpoint has appeared since the last call. Compares only time and size."""
        if self._pattern is None or now_s - self._last_look_s < LOOK_EVERY_S:
            return False
        self._last_look_s = now_s
        found = newest_whole(self._matching(), _paths_open_in(tree))
        is_new = found is not None and found != self.newest
        self.newest = found
        return is_new

    def newest_path(self) -> str | None:
        """What the next attempt would resume from: the user's own checkpoint, else that of an attached session."""
        return str(self.newest.path) if self.newest is not None else own_newest(self._run)

    # -- between attempts --------------------------------------------------------------------------------------------

    def survey(self) -> Choice:
        """The choice between attempts, from the checkpoints on disk and the kept copies."""
        if self._pattern is None:
            return Choice(None)
        return choose_from(self.list_candidates())

    def list_candidates(self) -> list[Candidate]:
        on_disk = [found for checkpoint in self._matching() if (found := self._candidate(checkpoint)) is not None]
        usable = [candidate.fingerprint for candidate in on_disk if not candidate.problem]
        kept = [
            candidate
            for known in self.record.known
            if known.kept and not known.is_left_behind and not _holds(usable, known.fingerprint)
            if (candidate := self._kept_candidate(known)) is not None
        ]
        return on_disk + kept or self._gone()

    def note_found(self) -> None:
        """Before an attempt: record checkpoints that no watched attempt wrote. One with known content is a copy."""
        for candidate in self.list_candidates():
            if not candidate.is_kept and not candidate.problem and self.record.find(candidate.fingerprint) is None:
                former = self.record.find_content(candidate.fingerprint)
                self._remember(candidate, written_by=former.written_by if former else None)
        self._write()

    def note_load(self, candidate: Candidate, attempt: int) -> None:
        known = self._known(candidate)
        self._set(replace(known, loads=(*known.loads, Load(attempt)), is_left_behind=False))
        self._write()

    def note_kept(self, candidate: Candidate, copy: Path) -> None:
        known = replace(self._known(candidate), kept=copy.relative_to(self._run.path).as_posix())
        self._set(known)
        self.record = replace(self.record, num_kept=self.record.num_kept + 1)
        self._write()

    def leave_behind(self, chosen: Candidate | None) -> None:
        """The user went back: checkpoints newer than `chosen` (all, if None) are no longer chosen automatically."""
        for candidate in self.list_candidates():
            if chosen is None or candidate.order_ns > chosen.order_ns:
                self._set(replace(self._known(candidate), is_left_behind=True))
        self._write()

    def is_kept(self, content: Fingerprint) -> bool:
        found = [known for known in self.record.known if known.kept and known.fingerprint.has_content_of(content)]
        return any((self._run.path / known.kept).exists() for known in found)

    def end_attempt(self, attempt: int) -> tuple[str | None, bool]:
        """Record what `attempt` wrote. Return what the next would resume from, and whether this one made progress."""
        if self._pattern is None:
            return None, False
        earlier = [known.order_ns for known in self.record.known if known.written_by != attempt]
        floor_ns = max(earlier, default=0) + 1
        new = [
            candidate
            for candidate in self.list_candidates()
            if not candidate.is_kept and not candidate.problem and self.record.find(candidate.fingerprint) is None
        ]
        for number, candidate in enumerate(sorted(new, key=lambda candidate: candidate.fingerprint.mtime_ns)):
            # Checkpoints of this attempt are newer than those of earlier ones, even if the clock was set back.
            order_ns = max(candidate.fingerprint.mtime_ns, floor_ns + number)
            self._remember(replace(candidate, order_ns=order_ns), written_by=attempt)
        self._write()
        after, before = self.survey().chosen, self.record.loaded_by(attempt)
        if after is None:
            return None, False
        return str(after.path), before is None or not after.fingerprint.has_content_of(before.fingerprint)

    def judge_load(self, attempt: int, ending: EndingOfLoad) -> None:
        """Record how the attempt ended with the checkpoint that it was started from."""
        known = self.record.loaded_by(attempt)
        if known is None:
            return
        outcome = outcome_of(ending)
        loads = tuple(
            replace(load, outcome=outcome, cause=ending.cause)
            if load.attempt == attempt and load.outcome == OPEN
            else load
            for load in known.loads
        )
        self._set(replace(known, loads=loads))
        self._write()

    # -- candidates --------------------------------------------------------------------------------------------------

    def candidate_at(self, path: Path) -> Candidate | None:
        """The checkpoint at a path that the user names, even if it has a problem; None when nothing is there."""
        for candidate in [*self.list_candidates(), *self._left_behind_kept()]:
            if candidate.path == path:
                return candidate
        checkpoint = describe(path)
        if checkpoint is None:
            return None
        mark = fingerprint(path)
        known = self.record.find(mark)
        good, why = is_whole(checkpoint, set())
        return Candidate(
            path,
            path,
            mark,
            known.order_ns if known else mark.mtime_ns,
            checkpoint.number,
            known.written_by if known else None,
            "" if good else why,
        )

    def list_older(self) -> list[ForeignCheckpoint]:
        """Checkpoints that match the pattern and are older than this run."""
        found = list_checkpoints(self._pattern, self._cwd) if self._pattern else []
        return [checkpoint for checkpoint in found if checkpoint.mtime_s < self._since_s]

    def _matching(self) -> list[ForeignCheckpoint]:
        """Checkpoints of this run: written since it began, or known by path (a copy may have an older time)."""
        assert self._pattern is not None
        paths = {known.path for known in self.record.known}
        found = list_checkpoints(self._pattern, self._cwd)
        return [entry for entry in found if entry.mtime_s >= self._since_s or str(entry.path) in paths]

    def _candidate(self, checkpoint: ForeignCheckpoint) -> Candidate | None:
        """None for a checkpoint that is newer than the one the user went back to."""
        try:
            mark = fingerprint(checkpoint.path)
        except OSError as error:
            mark = Fingerprint(0, int(checkpoint.mtime_s * 1e9), checkpoint.size_bytes, "")
            why, is_suspect = f"it cannot be read: {error.strerror or error}", False
        else:
            why, is_suspect = self._problem(checkpoint, mark)
        known = self.record.find(mark)
        if known is not None and known.is_left_behind:
            return None
        alike = known or self.record.find_content(mark)
        is_known_copy = known is None and alike is not None and alike.written_by is not None
        return Candidate(
            checkpoint.path,
            checkpoint.path,
            mark,
            alike.order_ns if alike is not None and (known or is_known_copy) else mark.mtime_ns,
            checkpoint.number,
            alike.written_by if alike else None,
            why,
            is_suspect=is_suspect,
        )

    def _kept_candidate(self, known: Known) -> Candidate | None:
        path = self._run.path / known.kept
        checkpoint = describe(path)
        if checkpoint is None:
            return None
        why, is_suspect = self._problem(checkpoint, known.fingerprint)
        return Candidate(
            path,
            Path(known.path),
            known.fingerprint,
            known.order_ns,
            checkpoint.number,
            known.written_by,
            why,
            is_kept=True,
            is_suspect=is_suspect,
        )

    def _left_behind_kept(self) -> list[Candidate]:
        entries = [known for known in self.record.known if known.kept]
        return [found for known in entries if (found := self._kept_candidate(known)) is not None]

    def _problem(self, checkpoint: ForeignCheckpoint, mark: Fingerprint) -> tuple[str, bool]:
        """Why it must not be used, and whether it is complete nevertheless."""
        good, why = is_whole(checkpoint, set())
        if not good:
            return why, False
        attempt = self.record.failed_in(mark)
        return ("", False) if attempt is None else (f"attempt {attempt} failed while it loaded this one", True)

    def _gone(self) -> list[Candidate]:
        """Checkpoints that this run had and that no longer exist; a run that never had any returns none."""
        lost = [known for known in self.record.known if not known.is_left_behind][-_GONE_SHOWN:]
        return [
            Candidate(
                Path(known.path),
                Path(known.path),
                known.fingerprint,
                known.order_ns,
                written_by=known.written_by,
                problem="it is gone",
            )
            for known in lost
        ]

    # -- the record --------------------------------------------------------------------------------------------------

    def _known(self, candidate: Candidate) -> Known:
        found = self.record.find(candidate.fingerprint)
        return found or Known(
            str(candidate.original), candidate.fingerprint, candidate.order_ns, candidate.written_by
        )

    def _remember(self, candidate: Candidate, *, written_by: int | None) -> None:
        path = str(candidate.original)
        self._set(Known(path, candidate.fingerprint, candidate.order_ns, written_by))

    def _set(self, known: Known) -> None:
        self.record = self.record.with_known(known)

    def _write(self) -> None:
        if self._pattern is not None:
            with contextlib.suppress(OSError):  # a full disk: the run continues with the record in memory
                write_foreign_record(self._run, self.record)


def own_newest(run: RunDir) -> str | None:
    """The newest checkpoint of an attached session, by its own catalogue."""
    if not run.session_files():
        return None
    from jackline.checkpoint.format.catalogue import list_names  # 20 ms, only for an attached session
    from jackline.checkpoint.place import choose_place

    path = read_session(run).last_checkpoint.path
    # The session may have written its record on another machine, and the user may have gone back since then.
    for folder in (choose_place(run).folder, *([Path(path).parent] if path is not None else [])):
        live = [str(name) for name in list_names(folder)]
        if live:
            is_live = path is not None and Path(path).parent == folder and Path(path).name in live
            return path if is_live else str(folder / live[0])
    return path if path is not None and Path(path).is_dir() else None


def _holds(marks: list[Fingerprint], wanted: Fingerprint) -> bool:
    return any(mark.has_content_of(wanted) for mark in marks)


def _paths_open_in(tree: TreeReading | None) -> set[str]:
    if tree is None:
        return set()
    return {file.path for process in tree.processes for file in open_files(process.pid) if file.is_writing}
