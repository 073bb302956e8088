"""Before an attempt starts: decides what it resumes from, keeps a copy of that checkpoint, and reports it.

Acts only; choice.py makes the choice. Raises CannotResume instead of starting from scratch over existing checkpoints
of the run: only the user may ask for that.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jackline.errors import CannotResume, UsageError
from jackline.immutable import immutable
from jackline.rundir.layout import RunDir
from jackline.rundir.records.exit import read_exit
from jackline.supervisor.foreign.choice import Candidate, Choice, passed_over_words, refusal, source_words
from jackline.supervisor.foreign.find import PLACEHOLDER, resume_argv
from jackline.supervisor.foreign.kept import NotKept, drop_old, keep_copy, put_back
from jackline.supervisor.foreign.seen import CheckpointsSeen, own_newest
from jackline.supervisor.options import SuperviseOptions
from jackline.units import format_bytes, format_duration

_PASSED_OVER_SHOWN = 3
# The command of an attempt that only waits for the mirror: the supervisor waits after any command that has finished.
_ONLY_UPLOAD = "print('[jackline] the command has finished before; only its upload is completed')"

# arguments: event, text, and the checkpoint's path if there is one
Say = Callable[[str, str, str | None], None]


@immutable
class Start:
    """How the next attempt starts. `resumed_from` is None when it starts from scratch."""

    argv: list[str]
    resumed_from: str | None


class Resuming:
    """Prepares the attempts of one run."""

    def __init__(self, run: RunDir, options: SuperviseOptions, seen: CheckpointsSeen, say: Say) -> None:
        self._run = run
        self._options = options
        self._seen = seen
        self._say = say

    def prepare(self, argv: Sequence[str], attempt: int, *, is_first: bool) -> Start:
        """Do everything that comes before the command is started. Raises CannotResume when the user must decide."""
        if is_first:
            self._mention_older()
            return Start(list(argv), None)
        if not self._options.from_scratch and self._options.start_from is None:
            left = read_exit(self._run.attempt(attempt - 1)).upload_left
            if left is not None:
                self._say("resumes", f"attempt {attempt} only uploads what the mirror lacks: {left}", None)
                return Start([sys.executable, "-I", "-c", _ONLY_UPLOAD], None)
        if self._options.checkpoints is None:
            own = own_newest(self._run)
            self._say("resumes", own_words(self._run, attempt, own, time.time()), own)
            return Start(list(argv), own)
        self._seen.note_found()
        choice = self._choose()
        for candidate in choice.passed_over[:_PASSED_OVER_SHOWN]:
            self._say("passed_over", passed_over_words(candidate), str(candidate.path))
        if choice.chosen is None:
            self._say("resumes", f"attempt {attempt} starts from the beginning: {self._why_nothing()}", None)
            return Start(list(argv), None)
        used = self._made_ready(choice.chosen)
        words = source_words(used, time.time())
        by_itself = "" if self._options.resume_arg else " (no --resume-arg: the command must find it itself)"
        self._say("resumes", f"attempt {attempt} resumes from {words}{by_itself}", str(used.path))
        self._seen.note_load(used, attempt)
        resume_arg = self._options.resume_arg
        return Start(resume_argv(argv, resume_arg, used.path) if resume_arg else list(argv), str(used.path))

    def refusal(self) -> CannotResume | None:
        """The error that a restart would raise now; None when a restart is possible."""
        if self._options.checkpoints is None:
            return None
        choice = self._seen.survey()
        return refusal(self._run.name, choice) if choice.is_refused else None

    # -- the choice --------------------------------------------------------------------------------------------------

    def _choose(self) -> Choice:
        if self._options.start_from is not None:
            return Choice(self._named(Path(self._options.start_from)))
        choice = self._seen.survey()
        if self._options.from_scratch:
            suspect = next((candidate for candidate in choice.passed_over if candidate.is_suspect), None)
            if (newest := choice.chosen or suspect) is not None and not newest.is_kept:
                self._keep(newest)
            self._seen.leave_behind(None)
            return Choice(None)
        if choice.is_refused:
            raise refusal(self._run.name, choice)
        return choice

    def _named(self, path: Path) -> Candidate:
        """The checkpoint that the user named. It is used even if it has a known problem; the problem is reported."""
        try:
            found = self._seen.candidate_at(path)
        except OSError as error:
            raise UsageError(f"--from {path} cannot be read: {error.strerror or error}") from None
        if found is None:
            raise UsageError(f"--from {path}: there is no such file or folder", hint="see: jackline status")
        if not found.is_kept and not self._is_told_the_path and str(found.path) not in self._paths():
            raise UsageError(
                f"--from {path}: the command of run '{self._run.name}' looks for its checkpoint itself",
                hint=f"--resume-arg has no {PLACEHOLDER}; copy the file to where the command looks",
            )
        if found.problem:
            self._say("note", f"you named {path}; it is used although {found.problem}", str(path))
        self._seen.leave_behind(found)
        return found

    def _paths(self) -> set[str]:
        return {str(candidate.path) for candidate in self._seen.list_candidates()}

    @property
    def _is_told_the_path(self) -> bool:
        return PLACEHOLDER in (self._options.resume_arg or "")

    def _why_nothing(self) -> str:
        if self._options.from_scratch:
            return "as you asked; its former checkpoints are left alone until it overwrites them"
        return f"this run has no checkpoint that matches {shlex.quote(self._options.checkpoints or '')} yet"

    # -- copies ------------------------------------------------------------------------------------------------------

    def _made_ready(self, chosen: Candidate) -> Candidate:
        """Keep a copy of `chosen`. If it is itself a kept copy and the command finds its file alone, put it back."""
        if not chosen.is_kept:
            self._keep(chosen)
            return chosen
        if self._is_told_the_path:
            return chosen
        try:
            aside = put_back(chosen.path, chosen.original)
        except OSError as error:
            raise CannotResume(
                f"{chosen.path} could not be put back to {chosen.original}: {error.strerror or error}",
                hint=f"copy it there yourself, then: jackline resume {self._run.name}",
            ) from None
        moved = f"; what was there is now {aside}" if aside else ""
        self._say("note", f"put back the kept copy of {chosen.original}{moved}", str(chosen.original))
        return self._seen.candidate_at(chosen.original) or chosen

    def _keep(self, candidate: Candidate) -> None:
        is_torn = bool(candidate.problem) and not candidate.is_suspect
        if is_torn or self._seen.is_kept(candidate.fingerprint):
            return
        number = self._seen.record.num_kept + 1
        try:
            made = keep_copy(
                self._run,
                candidate.path,
                candidate.fingerprint,
                number,
                tell=lambda text: self._say("note", text, None),
            )
        except NotKept as reason:
            self._say("not_kept", f"no copy is kept of the checkpoint: {reason}", str(candidate.path))
            return
        self._seen.note_kept(candidate, made.path)
        drop_old(self._run, made.path)
        how = "sharing its blocks" if made.is_shared else format_bytes(candidate.fingerprint.size_bytes)
        self._say("kept", f"kept a copy of {candidate.path} in {made.path.parent} ({how})", str(made.path))

    def _mention_older(self) -> None:
        older = self._seen.list_older()
        if not older:
            return
        newest = max(older, key=lambda checkpoint: checkpoint.mtime_s)
        age = format_duration(max(0.0, time.time() - newest.mtime_s))
        others = f" and {len(older) - 1} more" if len(older) > 1 else ""
        self._say(
            "note",
            f"{newest.path} ({age} old){others} is from before this run: it is not resumed from, and the command may "
            "overwrite it",
            str(newest.path),
        )


def own_words(run: RunDir, attempt: int, own: str | None, now_s: float) -> str:
    """The text for a command without --checkpoints: its session's newest checkpoint, or that none is known."""
    if own is not None:
        age = format_duration(max(0.0, now_s - Path(own).stat().st_mtime)) if Path(own).exists() else "unknown time"
        return f"attempt {attempt} resumes from {own}, saved {age} ago"
    if run.session_files():
        return f"attempt {attempt} starts from the beginning: it has no checkpoint yet"
    return f"attempt {attempt} is the same command again; Jackline knows no checkpoints of it"
