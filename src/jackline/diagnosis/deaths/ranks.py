"""Which rank of a distributed job failed first, and what the others and the launcher only repeat.

When one rank ends, the others lose their connection to it a moment later, and the launcher adds a report of its own.
Owns telling these apart. What the first error means is decided by the same rules as for a single process, which get
that rank's own lines and its own exit code. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from jackline.diagnosis.deaths.evidence import Evidence, Finding, RankEnd
from jackline.diagnosis.deaths.launcher import HEADER, LauncherNoise
from jackline.diagnosis.deaths.sentences import at_place, ran_line
from jackline.diagnosis.deaths.signal import fault_place
from jackline.diagnosis.deaths.traceback_text import WRAPPERS, Chain, ErrorText, find_chains
from jackline.diagnosis.frames import Frame
from jackline.immutable import immutable
from jackline.units import rank_words

# What the remaining ranks say when one has gone.
_ECHO = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused|aborted|likely closed)|Socket closed|Broken pipe|recv, 0 bytes"
    r"|[Ff]ailed to (?:recv|send|wait|get)|pair closure|ncclRemoteError|remote process exited|SignalException"
    r"|communicator was aborted|got signal: 15|gloo/transport"
)
# What they say when one never comes.
_TIMED_OUT = re.compile(
    r"Timed out waiting (?:(\d+)ms )?|collective operation timeout|timed out (?:after|in)|wait timeout|Timeout\(ms\)"
)
_REPORTED = re.compile(
    r"^\s*rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+)\s+\(pid: (\d+)\)", re.MULTILINE
)
_ROOT_CAUSE = "Root Cause (first observed failure)"
_SPAWNED = re.compile(
    r"(?:-- P|p)rocess (\d+) terminated with (?:the following error|exit code (\d+)|signal (SIG\w+))"
)
_SRUN = re.compile(
    r"srun: error: \S+: tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(Killed|Segmentation fault))"
)
_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "SIGKILL": 9, "SIGSEGV": 11, "SIGABRT": 6, "SIGTERM": 15}
_PORT = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_OTHER_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_PORT_NUMBER = re.compile(r"port: (\d+)|:(\d{4,5})\b")
_PREFIX = re.compile(r"\[rank(\d+)\]:\s?")
_SIGTERM = 15
_MOST_SHOWN = 40


@immutable
class Reported:
    """A rank that the launcher saw fail; `code` is negative for a signal, None when it was not told."""

    rank: int
    code: int | None = None
    pid: int | None = None


@immutable
class First:
    """The rank that failed first. `evidence` is about this rank alone, for the rules of a single process."""

    rank: int
    world_size: int
    evidence: Evidence
    same: tuple[int, ...] = ()  # ranks with the same error
    has_file: bool = False  # its output is not on the screen
    finding: Finding | None = None  # where no rule of a single process could say it

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.world_size}" if self.world_size else f"rank {self.rank}"

    def name_in(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings about this rank, as findings about the job."""
        best = findings[0]
        if best.cause == "stopped":
            return findings  # they have agreed on it
        others = self.world_size - len(self.same)
        if len(self.same) > 1:
            said = f"the same error on {rank_words(self.same)}; the first of them is shown"
        elif others == 1:
            said = "the other rank ended because of it"
        else:
            said = f"the other {others} ranks ended because of it"
        detail = (*best.detail[:1], said, *best.detail[1:]) if self.world_size > 1 else best.detail
        hint = (
            best.hint.replace("`jackline logs`", f"`jackline logs --rank {self.rank}`")
            if self.has_file
            else best.hint
        )
        return (replace(best, title=f"{self.name}: {best.title}", detail=detail, hint=hint), *findings[1:])


def first_failed(evidence: Evidence) -> First | None:
    """None for a job of one process, and where nothing tells which rank it was."""
    reported = read_reports(evidence.output_tail)
    # mp.spawn raises the error of its process again, on the screen: it is in no rank's own file.
    if not evidence.ranks or any(_SPAWNED.search(line) for line in evidence.output_tail):
        return _spawned(evidence, reported)
    chains = {end.rank: chain for end in evidence.ranks if (chain := _chain_of(end, evidence)) is not None}
    real = [rank for rank, chain in chains.items() if not is_echo(chain) and not _timed_out(chain)]
    told = {one.rank: one for one in reported}
    if real:
        rank = next((one.rank for one in reported if one.rank in real), min(real))
        same = tuple(other for other in real if _signature(chains[other]) == _signature(chains[rank]))
        return _first(evidence, min(same), told.get(rank, Reported(rank, 1)), same)
    silent = [one for one in reported if one.rank not in chains and one.code not in (None, 0, -_SIGTERM)]
    silent.sort(key=lambda one: (one.code or 0) > 0)  # signals first: an exit code may be an answer to one
    if silent:
        return _first(evidence, silent[0].rank, silent[0], tuple(one.rank for one in silent if one == silent[0]))
    return _never_arrived(evidence, chains) or _left_early(evidence, chains, told)


def read_reports(lines: Sequence[str]) -> list[Reported]:
    """What torchrun, mp.spawn or srun said about failed ranks, the first observed failure first."""
    text = "\n".join(lines)
    before, mark, after = text.rpartition(_ROOT_CAUSE)
    parts = (after, before) if mark else (text,)
    found = [Reported(int(m[1]), int(m[2]), int(m[3])) for part in parts for m in _REPORTED.finditer(part)]
    for pattern in (_SPAWNED, _SRUN):
        for match in pattern.finditer(text):
            code = int(match[2]) if match[2] else -_SIGNALS.get(match[3], 0) if match[3] else None
            found.append(Reported(int(match[1]), code))
    return list({one.rank: one for one in reversed(found)}.values())[::-1]


def is_echo(chain: Chain) -> bool:
    """Whether it only says that another rank has gone, or that the launcher ended this one."""
    is_lost = any(_ECHO.search(error.text) for error in chain.errors)
    return (is_lost and not _timed_out(chain)) or chain.root.name == "KeyboardInterrupt"


def _timed_out(chain: Chain) -> re.Match[str] | None:
    return next((found for error in chain.errors if (found := _TIMED_OUT.search(error.text))), None)


def _signature(chain: Chain) -> tuple[str, str, int]:
    place = chain.root.place
    return chain.root.name, place.file if place else "", place.line if place else 0


def _lines_of(end: RankEnd, evidence: Evidence) -> tuple[str, ...]:
    """A rank's own lines: its file, or its part of the common output."""
    if end.output_tail or end.has_file:
        return end.output_tail
    own = (line for line in evidence.output_tail if not (found := _PREFIX.match(line)) or int(found[1]) == end.rank)
    return tuple(own)


def _chain_of(end: RankEnd, evidence: Evidence) -> Chain | None:
    """The error that ended this rank. Of two, the one that is no echo: a clean-up after an error may fail too."""
    if not end.has_file and any(other.rank < end.rank and not other.has_file for other in evidence.ranks):
        prefixed = any(_PREFIX.match(line) for line in evidence.output_tail)
        if not prefixed:
            return None  # several ranks share the output, and nothing says whose line is whose
    chains = [chain for chain in find_chains(_lines_of(end, evidence)) if not chain.root.is_ignored]
    chains = [chain for chain in chains if chain.root.name not in WRAPPERS]
    real = [chain for chain in chains if not is_echo(chain)]
    found = real or chains
    return found[-1] if found else None


def _first(evidence: Evidence, rank: int, told: Reported, same: tuple[int, ...]) -> First:
    end = next((one for one in evidence.ranks if one.rank == rank), RankEnd(rank))
    code = told.code if told.code not in (None, 0) else 1
    assert code is not None
    own = replace(
        evidence,
        exit_code=code if code > 0 else None,
        signal=-code if code < 0 else None,
        output_tail=_without_launcher(_lines_of(end, evidence)),
        last_frame=end.last_frame or evidence.last_frame,
        ranks=(),
    )
    return First(rank, _world_size(evidence), own, same or (rank,), end.has_file)


def _spawned(evidence: Evidence, reported: list[Reported]) -> First | None:
    """mp.spawn and srun: the error itself is in the common output, so only the name is added."""
    if not reported or reported[0].code in (0, -_SIGTERM):
        return None
    told = reported[0]
    code = told.code
    end = next((one for one in evidence.ranks if one.rank == told.rank), RankEnd(told.rank))
    own = replace(evidence, ranks=(), last_frame=end.last_frame or evidence.last_frame)
    if code is not None and code < 0:
        own = replace(own, exit_code=None, signal=-code)
    elif code is not None:
        lines = _lines_of(end, evidence) if end.has_file else _before_last_error(evidence.output_tail)
        own = replace(own, exit_code=code, output_tail=lines)
    return First(told.rank, _world_size(evidence), own, (told.rank,), end.has_file)


def _before_last_error(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines above what the launching process raised when it learned of the end."""
    starts = [number for number, line in enumerate(lines) if line.startswith(HEADER)]
    return tuple(lines[: starts[-1]] if starts else lines)


def _without_launcher(lines: Sequence[str]) -> tuple[str, ...]:
    noise = LauncherNoise()
    kept = [line for entry in lines for line in noise.feed(entry)]
    return (*kept, *noise.release())


def _world_size(evidence: Evidence) -> int:
    return max((end.world_size for end in evidence.ranks), default=0)


def _never_arrived(evidence: Evidence, chains: dict[int, Chain]) -> First | None:
    """Ranks waited in a collective until its timeout: the ones that did not wait are at fault."""
    waited = [rank for rank, chain in chains.items() if _timed_out(chain)]
    if not waited:
        return None
    chain = chains[min(waited)]
    found = _timed_out(chain)
    for_words = f" {int(found[1]) / 1000:g} s" if found and found[1] else ""
    absent = [end for end in evidence.ranks if end.rank not in chains]
    calls = chain.root.frames[-1].function if chain.root.frames else "a collective"
    who = rank_words(waited)
    if absent:
        title = f"{who} waited{for_words} in {calls} for {rank_words(end.rank for end in absent)}, which never came"
    else:
        title = f"{who} waited{for_words} in {calls}: the ranks did not make the same calls"
    detail = [f"rank {end.rank} was {end.doing or 'seen'}{at_place(end.last_frame)}" for end in absent[:3]]
    place: Frame | None = absent[0].last_frame if absent and absent[0].last_frame else chain.root.place
    detail.append(f"{rank_words(waited[:1])} waited{at_place(chain.root.place)}")
    hint = "every rank must make the same calls in the same order; look at what the missing rank does instead"
    finding = Finding(
        "nccl_timeout", "certain", title, (*detail, *ran_line(evidence)), hint, is_retryable=True, place=place
    )
    return First(min(waited), _world_size(evidence), evidence, tuple(waited), finding=finding)


def _left_early(evidence: Evidence, chains: dict[int, Chain], told: dict[int, Reported]) -> First | None:
    """Ranks lost their connection to one that nobody saw fail: it had ended by itself, with exit code 0."""
    lost = [rank for rank, chain in chains.items() if is_echo(chain)]
    left = [end for end in evidence.ranks if end.rank not in chains and end.rank not in told]
    if not lost or not left:
        return None
    names, place = rank_words(end.rank for end in left), chains[min(lost)].root.place
    finding = Finding(
        "own_exception",
        "likely",
        f"{names} ended without an error while {rank_words(lost)} still waited in a collective{at_place(place)}",
        (*(f"rank {end.rank} was last seen{at_place(end.last_frame)}" for end in left[:2]), *ran_line(evidence)),
        "every rank must make the same number of calls: look at the last, shorter epoch, and at an early return",
        place=place,
    )
    return First(min(lost), _world_size(evidence), evidence, tuple(lost), finding=finding)


def port_in_use(error: ErrorText, evidence: Evidence) -> Finding | None:
    """Two jobs on one machine chose the same port for their rendezvous."""
    if not _PORT.search(error.text):
        return None
    number = _PORT_NUMBER.search(error.text)
    port = f" {number[1] or number[2]}" if number else ""
    return Finding(
        "network",
        "certain",
        f"the port{port} is in use already: another job or server listens there{at_place(error.place)}",
        (error.first_line[:200], *ran_line(evidence)),
        "another port: torchrun --standalone (one machine) or --master-port N; `ss -ltnp` shows who holds it",
        place=error.place,
    )


def sizes_differ(error: ErrorText, evidence: Evidence) -> Finding | None:
    """gloo aborts a rank that receives another number of bytes than its own call expects."""
    found = _OTHER_SIZE.search(error.text)
    if found is None:
        return None
    place = error.place or fault_place(evidence.fault_text) or evidence.last_frame
    return Finding(
        "own_exception",
        "certain",
        f"the ranks called a collective with tensors of different sizes{at_place(place)}",
        (f"another rank sent {found[1]} bytes where {found[2]} were expected", *ran_line(evidence)),
        "print shape and dtype of the tensor on every rank before that line; often a last, smaller batch",
        place=place,
    )


def aborted_at_exit(evidence: Evidence) -> Finding:
    """The script was through, and threads of torch.distributed still ran when the interpreter ended."""
    return Finding(
        "abort",
        "likely",
        "it aborted while Python ended (SIGABRT), after its last line: threads of torch.distributed still ran",
        ran_line(evidence),
        "dist.destroy_process_group() as the last line of the script ends them first",
    )


def own_traceback(evidence: Evidence) -> list[str]:
    """The last words of the rank that failed first, where they are in a file and not in the common output."""
    first = first_failed(evidence)
    end = next((one for one in evidence.ranks if first is not None and one.rank == first.rank), None)
    if first is None or end is None or not end.has_file:
        return []
    lines = [_PREFIX.sub("", line) for line in end.output_tail]
    starts = [number for number, line in enumerate(lines) if HEADER in line]
    real = [number for number in starts if not _ECHO.search("\n".join(lines[number:]))] or starts
    shown = lines[(real or [max(0, len(lines) - 8)])[0] :]
    cut = ["..."] if len(shown) > _MOST_SHOWN else []
    return [*shown[: _MOST_SHOWN // 2], *cut, *shown[-_MOST_SHOWN // 2 :]] if cut else shown
