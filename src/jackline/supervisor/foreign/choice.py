"""Which checkpoint of a stranger's script the next attempt resumes from, and what an ending says about the last one.

Pure: candidates and facts in, a choice, an outcome or words out. Finding the candidates is seen.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jackline.diagnosis.deaths.evidence import Cause
from jackline.errors import CannotResume
from jackline.rundir.records.foreign import ADVANCED, FAILED, OTHER, Fingerprint
from jackline.units import format_bytes, format_duration

# Loading takes minutes for the largest. What fails later than this did not fail by loading.
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


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that could be loaded. `original` is where the command wrote it: elsewhere for a kept copy.
    `problem` is why it must not be used, '' when it may."""

    path: Path
    original: Path
    fingerprint: Fingerprint
    order_ns: int
    number: int | None = None
    written_by: int | None = None
    problem: str = ""
    is_kept: bool = False
    is_suspect: bool = False  # whole, but an attempt failed to load it: a person may try again


@dataclass(frozen=True)
class Choice:
    """The newest that may be used, and the newer ones that may not, the newest first."""

    chosen: Candidate | None
    passed_over: tuple[Candidate, ...] = ()

    @property
    def is_refused(self) -> bool:
        """There is something to lose and nothing to resume from: only a person may begin anew."""
        return self.chosen is None and bool(self.passed_over)


@dataclass(frozen=True)
class EndingOfLoad:
    """How an attempt that had loaded a checkpoint ended."""

    cause: Cause
    is_stop: bool  # somebody asked for the end
    made_progress: bool  # a newer checkpoint
    has_trained: bool  # its output counted steps
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
    """A checkpoint is to blame only when the attempt failed while or right after loading it, by a cause that loading
    can have. In doubt it is not: the same error again ends the restarts, and nothing is lost."""
    if ending.made_progress or ending.has_trained or ending.cause == "finished":
        return ADVANCED
    if ending.is_stop or ending.duration_s > LOADED_AFTER_S:
        return OTHER
    if ending.cause in _CRASHES:
        return FAILED
    return FAILED if ending.cause in _ERRORS and tells_of_loading(ending.output_tail) else OTHER


def tells_of_loading(tail: Sequence[str]) -> bool:
    """Whether the last traceback, or else the last lines, speak of loading something. Paths do not count."""
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
    """Says what each candidate is, and what to type."""
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
