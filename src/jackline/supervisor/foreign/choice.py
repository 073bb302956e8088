"""Which of the user's own checkpoints the next attempt resumes from, and whether loading the last one failed.

Pure: takes candidates and facts, returns a choice, an outcome or a text. seen.py finds the candidates.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jackline.diagnosis.deaths.evidence import Cause
from jackline.errors import CannotResume
from jackline.immutable import immutable
from jackline.rundir.records.foreign import ADVANCED, FAILED, OTHER, Fingerprint
from jackline.units import format_bytes, format_duration

# Loading takes minutes for the largest checkpoints. A failure later than this was not caused by loading.
LOADED_AFTER_S = 600.0
_SHOWN = 6
_CRASHES: frozenset[Cause] = frozenset({"segfault", "abort", "bus_error"})
_ERRORS: frozenset[Cause] = frozenset({"own_exception", "exit_code"})
_FILE_OF_FRAME = re.compile(r'File "[^"]*"')
_LOADING = re.compile(
    r"(?<![a-z])(?:un|re)?load(?!er)|restor|resum|checkpoint|ckpt|pickl|deseriali|state_dict|safetensors|zip|hdf5|h5py",
    re.IGNORECASE,
)
_TAIL_LINES = 30


@immutable
class Candidate:
    """A checkpoint that could be loaded. `original` is where the command wrote it; a kept copy has another `path`.
    `problem` is why it must not be used; '' when it may be used."""

    path: Path
    original: Path
    fingerprint: Fingerprint
    order_ns: int
    number: int | None = None
    written_by: int | None = None
    problem: str = ""
    is_kept: bool = False
    is_suspect: bool = False  # complete, but an attempt failed to load it; only the user may try it again


@immutable
class Choice:
    """The newest candidate that may be used, and the newer ones that may not, the newest first."""

    chosen: Candidate | None
    passed_over: tuple[Candidate, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Checkpoints exist, but none can be resumed from: only the user may decide to start from scratch."""
        return self.chosen is None and bool(self.passed_over)


@immutable
class EndingOfLoad:
    """How an attempt that had loaded a checkpoint ended."""

    cause: Cause
    is_stop: bool  # it was stopped on request
    made_progress: bool  # it wrote a newer checkpoint
    has_trained: bool  # its output counted training steps
    duration_s: float
    output_tail: Sequence[str] = ()


def choose_from(candidates: Sequence[Candidate]) -> Choice:
    passed_over: list[Candidate] = []
    for candidate in sorted(candidates, key=_age_key, reverse=True):
        if not candidate.problem:
            return Choice(candidate, tuple(passed_over))
        passed_over.append(candidate)
    return Choice(None, tuple(passed_over))


def _age_key(candidate: Candidate) -> tuple[int, int, bool, str]:
    number = -1 if candidate.number is None else candidate.number
    return candidate.order_ns, number, not candidate.is_kept, str(candidate.path)


def outcome_of(ending: EndingOfLoad) -> str:
    """A checkpoint counts as bad only when the attempt failed while or right after loading it, for a reason that
    loading can cause. In doubt it counts as good: if the same error recurs, restarts stop and nothing is lost."""
    if ending.made_progress or ending.has_trained or ending.cause == "finished":
        return ADVANCED
    if ending.is_stop or ending.duration_s > LOADED_AFTER_S:
        return OTHER
    if ending.cause in _CRASHES:
        return FAILED
    return FAILED if ending.cause in _ERRORS and tells_of_loading(ending.output_tail) else OTHER


def tells_of_loading(tail: Sequence[str]) -> bool:
    """Whether the last traceback, or else the last lines, mention loading something. Paths do not count."""
    lines = [line for line in tail if not line.startswith("[jackline] ")][-200:]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback ")]
    text = "\n".join(lines[starts[-1] :] if starts else lines[-_TAIL_LINES:])
    return bool(_LOADING.search(_FILE_OF_FRAME.sub("File", text)))


# -- words -----------------------------------------------------------------------------------------------------------


def source_words(candidate: Candidate, now_s: float) -> str:
    """'out/last.pt, written 2 min ago by attempt 2, 1.2 GiB'."""
    age = format_duration(max(0.0, now_s - candidate.order_ns / 1e9))
    author = f" by attempt {candidate.written_by}" if candidate.written_by else ""
    copy = f"; the copy Jackline kept of {candidate.original}" if candidate.is_kept else ""
    return f"{candidate.path}, written {age} ago{author}, {format_bytes(candidate.fingerprint.size_bytes)}{copy}"


def passed_over_words(candidate: Candidate) -> str:
    return f"passed over {candidate.path}: {candidate.problem}"


def refusal(run_name: str, choice: Choice) -> CannotResume:
    """The error that says why each candidate was refused, and which command to type."""
    shown = choice.passed_over[:_SHOWN]
    detail = [f"{candidate.path}: {candidate.problem}" for candidate in shown]
    if len(choice.passed_over) > _SHOWN:
        detail.append(f"and {len(choice.passed_over) - _SHOWN} older ones, none of which can be used")
    suspect = next((candidate for candidate in choice.passed_over if candidate.is_suspect), None)
    resume = f"jackline resume {run_name}"
    named = (
        f"{resume} --from {shlex.quote(str(suspect.path))} tries that one again"
        if suspect
        else f"{resume} --from PATH resumes from a checkpoint you name"
    )
    return CannotResume(
        f"run '{run_name}' cannot resume: none of its checkpoints can be trusted",
        detail=tuple(detail),
        hint=f"{named}; {resume} --from-scratch begins at the start",
    )
