"""The end of an attempt: gathers the evidence, has it diagnosed and writes exit.json.

Owns the contents of exit.json and findings.json, and telling a leak of GPU memory from one large allocation. The
diagnosis itself is made by `diagnosis`.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jackline.diagnosis.deaths.collect import dumped_pids, last_output, oom_delta, read_fault_text
from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, Finding, GpuGrowth, SentSignal
from jackline.diagnosis.deaths.left.last_words import find_bindings, find_raise, measure_rights, read_last_words
from jackline.diagnosis.deaths.report import death_text, summary_line
from jackline.diagnosis.deaths.signal import fault_place
from jackline.diagnosis.deaths.traceback_text import fatal_chain, traceback_hash
from jackline.diagnosis.frames import Frame
from jackline.diagnosis.logs.clues import within
from jackline.errors import EXIT_FAILED, EXIT_STOPPED
from jackline.immutable import immutable
from jackline.machine.disk import explain_refusal, read_disk
from jackline.machine.kernel_log import read_kernel_kills
from jackline.machine.memory import read_oom_counters, shm_free_bytes
from jackline.machine.proc import read_command
from jackline.rundir.intent import Intent, read_intent
from jackline.rundir.records.exit import ExitRecord, write_exit
from jackline.rundir.records.fields import decode
from jackline.rundir.records.rescue import loading_command, newest_rescue
from jackline.rundir.records.session import read_session
from jackline.rundir.records.supervisor import ProgressRecord
from jackline.supervisor.attempt.watching import AttemptWatch
from jackline.supervisor.attempt.written import LastLog
from jackline.supervisor.child.process import Ending
from jackline.supervisor.events import Events
from jackline.supervisor.foreign.choice import EndingOfLoad
from jackline.supervisor.policy import AttemptSummary
from jackline.supervisor.state_record import progress_record

TAIL_LINES = 200
SURVIVORS_NAMED_AFTER_S = 2.5
_PACKAGE = Path(__file__).parents[2]
DEBRIS_PATIENCE_S = 15.0
CLOCK_JUMP_S = 5.0
RECENT_END_S = 60.0
_PATIENCE_S = 1.0  # a network disk may hang
STOPPED_CAUSES = ("stopped", "time_limit")


@immutable
class Autopsy:
    """What is known about an attempt after it has ended."""

    exit_code: int
    evidence: Evidence
    findings: tuple[Finding, ...]
    text: str
    summary: str
    checkpoint_after: str | None
    made_progress: bool
    is_given_up: bool = False  # training was done, and its last state could not be saved

    def summarise(self, watch: AttemptWatch) -> AttemptSummary:
        """What the restart policy needs to know."""
        return AttemptSummary(
            number=watch.command.attempt.number,
            duration_s=self.evidence.duration_s,
            cause=self.findings[0].cause,
            is_retryable=self.findings[0].is_retryable,
            made_progress=self.made_progress,
            traceback_hash=traceback_hash(self.evidence.output_tail),
        )

    def as_ending_of_load(self, watch: AttemptWatch) -> EndingOfLoad:
        """What the ending says about the checkpoint that the attempt was started from."""
        return EndingOfLoad(
            cause=self.findings[0].cause,
            is_stop=bool(self.evidence.stop_requested_by),
            made_progress=self.made_progress,
            has_trained=watch.has_trained,
            duration_s=self.evidence.duration_s,
            output_tail=self.evidence.output_tail,
        )

    @property
    def cause(self) -> str:
        return self.findings[0].cause


def is_over(watch: AttemptWatch, ending: Ending, events: Events) -> bool:
    """The main process has ended. Processes that it left behind are either leftovers, which the keeper ends, or
    background work that a script started, which we continue to watch."""
    if watch.command.is_settled():
        return True
    ended_for_s = time.time() - ending.ended_at_s
    if ending.exit_code != 0:
        return ended_for_s > DEBRIS_PATIENCE_S
    # Our own writer and mirror end by themselves when what they hold is safe.
    count = sum(not _is_helper(process.pid) for process in watch.tree.processes)
    if count and ended_for_s > SURVIVORS_NAMED_AFTER_S and not watch.are_survivors_named:
        watch.are_survivors_named = True
        noun = "1 process it started continues" if count == 1 else f"{count} processes it started continue"
        events.emit("note", f"the command itself ended well, but {noun}; watching on, `jackline stop` ends it")
    return False


def _is_helper(pid: int) -> bool:
    command = read_command(pid)
    return f"{_PACKAGE}/" in command or " -m jackline." in command


def examine(
    watch: AttemptWatch,
    ending: Ending,
    *,
    sent: tuple[SentSignal, ...],
    stop_requested_by: str,
    checkpoint_after: str | None,
    made_progress: bool,
) -> Autopsy:
    """Gather the evidence, diagnose, write the files. Called after the last output was read."""
    try:
        evidence = gather(watch, ending, sent=sent, stop_requested_by=stop_requested_by)
        findings = diagnose(evidence)
    except Exception as error:  # a fault of ours must not hide how a training ended
        traceback.print_exc()  # to supervisor.log
        watch.events.emit("note", f"not all evidence of its end could be read: {type(error).__name__}: {error}")
        evidence = _bare_evidence(watch, ending, sent=sent, stop_requested_by=stop_requested_by)
        findings = diagnose(evidence)
    code = exit_code_of(ending, findings[0].cause, has_checkpoint=checkpoint_after is not None)
    autopsy = Autopsy(
        exit_code=code,
        evidence=evidence,
        findings=findings,
        text=death_text(findings, evidence),
        summary=summary_line(findings),
        checkpoint_after=checkpoint_after,
        made_progress=made_progress,
        is_given_up=is_given_up(evidence, read_intent(watch.command.attempt)),
    )
    try:
        write_exit(watch.command.attempt, describe_end(watch, ending, autopsy))
    except OSError as error:  # read-only: the lines below are all that is left to say how it ended
        why = explain_refusal(error, watch.run.path)
        watch.events.emit("note", f"how it ended cannot be written down: {why}; exit code {code}")
    return autopsy


def _bare_evidence(
    watch: AttemptWatch, ending: Ending, *, sent: tuple[SentSignal, ...], stop_requested_by: str
) -> Evidence:
    """What needs nothing but the end itself and the files of the run."""
    attempt = watch.command.attempt
    return Evidence(
        exit_code=ending.exit_code,
        signal=ending.signal,
        duration_s=duration_of(watch, ending),
        ended_at_s=ending.ended_at_s,
        output_tail=last_output(watch.run.out_log, (attempt.raw_out, attempt.raw_err), TAIL_LINES),
        sent_signals=sent,
        stop_requested_by=stop_requested_by,
        peak_memory_bytes=max(watch.memory.peak_bytes, ending.max_rss_bytes),
        command=watch.written.command,
    )


def gather(watch: AttemptWatch, ending: Ending, *, sent: tuple[SentSignal, ...], stop_requested_by: str) -> Evidence:
    attempt, started_at_s = watch.command.attempt, watch.command.started_at_s
    in_cgroup, on_machine = oom_delta(watch.oom_before, read_oom_counters(cgroup=watch.oom_before.cgroup))
    pids = tuple(sorted(watch.pids_seen))
    kills = [kill for kill in read_kernel_kills(started_at_s - 1.0) if kill.pid in watch.pids_seen]
    disk = read_disk(watch.run.path)
    memory = watch.memory.reading
    intent = read_intent(attempt)
    watch.growth_places.bury((), time.monotonic())
    tail = last_output(watch.run.out_log, (attempt.raw_out, attempt.raw_err), TAIL_LINES)
    log = watch.written.last_log(since_s=started_at_s, count=TAIL_LINES) if ending.exit_code else LastLog()
    stuck = watch.hang.stuck
    return Evidence(
        exit_code=ending.exit_code,
        signal=ending.signal,
        duration_s=duration_of(watch, ending),
        ended_at_s=ending.ended_at_s,
        output_tail=tail,
        sent_signals=sent,
        stop_requested_by=stop_requested_by,
        oom_kills_in_cgroup=in_cgroup,
        oom_kills_on_machine=on_machine,
        kernel_log=tuple(kill.text for kill in kills),
        tree_pids=pids[:200],
        peak_memory_bytes=max(watch.memory.peak_bytes, ending.max_rss_bytes),
        last_memory_bytes=memory.used_bytes if memory else 0,
        memory_limit_bytes=watch.memory.limit.limit_bytes,
        memory_limit_source=watch.memory.limit.source,
        memory_growth_bytes_per_s=watch.memory.growth_bytes_per_s(),
        growing_frame=_growing_frame(watch),
        is_jump=watch.memory.growth_bytes_per_s() < 1 and watch.growth_places.lost is None,
        last_frame=watch.last_frame(),
        disk_free_bytes=disk.free_bytes if disk else None,
        disk_path=disk.path if disk else "",
        shm_free_bytes=shm_free_bytes(),
        restart_wish=intent.why if intent is not None and intent.restart else "",
        is_incomplete=is_incomplete(progress_record(watch.progress)),
        unsaved_why=intent.why if intent is not None and intent.is_unsaved else "",
        is_adopted=watch.command.is_adopted,
        rescued=loading_command(watch.run.name) if newest_rescue([attempt]) is not None else "",
        command=watch.written.command,
        disks=watch.written.disks(tail) if ending.exit_code or ending.signal else (),
        log_path=log.path,
        log_tail=log.lines,
        is_log_its_own=log.is_open,
        gpu_growth=steady_growth(watch.gpu_points),
        keeping_frames=lines_that_keep(tail),
        ranks=watch.ranks.endings(),
        stuck_text=stuck.text if stuck is not None and stuck.label == "STUCK_RANKS" else "",
        stuck_frame=stuck.frame if stuck is not None else None,
        **_last_words(watch, ending, tail),
    )


def _last_words(watch: AttemptWatch, ending: Ending, tail: Sequence[str]) -> dict[str, Any]:
    """What its processes left in the folder of stacks, and what that names."""
    stacks, written = watch.command.attempt.stacks, watch.written
    fault = read_fault_text(stacks, dumped_pids(stacks))
    code, pid = ending.exit_code, watch.command.child.pid
    words = rights = None
    if code:
        words = within(_PATIENCE_S, lambda: read_last_words(stacks, pid, code))
        if words is None and fatal_chain(tail) is None:
            argv = shlex.split(written.command)
            words = within(_PATIENCE_S, lambda: find_raise(argv, written.cwd, code))
        rights = within(_PATIENCE_S, lambda: measure_rights(tail, words, written.cwd))
    bindings = within(_PATIENCE_S, lambda: find_bindings(fault_place(fault))) if fault else ()
    return {"fault_text": fault, "last_words": words, "rights": rights, "bindings": bindings or ()}


def is_incomplete(progress: ProgressRecord) -> bool | None:
    """Whether it printed that there was more to do; None where that cannot be told, as of a bar that is full."""
    if progress.done is None or progress.total is None:
        return None
    if progress.done < progress.total:
        return True
    return None if progress.is_part else False


def duration_of(watch: AttemptWatch, ending: Ending) -> float:
    """How long it ran. An end that nobody saw counts up to when it was last seen alive. Where the clock was set
    meanwhile, the kernel's own count since the start of the process is right."""
    is_seen = ending.exit_code is not None or ending.signal is not None
    ended_at_s = ending.ended_at_s if is_seen else min(ending.ended_at_s, watch.alive_at_s or ending.ended_at_s)
    by_clock_s = ended_at_s - watch.command.started_at_s
    ticks = watch.command.child.start_ticks / os.sysconf("SC_CLK_TCK")
    since_end_s = time.time() - ended_at_s
    by_kernel_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks - since_end_s
    is_jump = abs(by_clock_s - by_kernel_s) > CLOCK_JUMP_S and 0 <= since_end_s < RECENT_END_S
    return max(0.0, by_kernel_s if is_jump and by_kernel_s >= 0 else by_clock_s)


def _growing_frame(watch: AttemptWatch) -> Frame | None:
    """The line where memory grew. Where it did not grow, but jumped, the line seen before explains nothing."""
    seen = watch.growth_places.likely() if watch.memory.has_grown_steadily() else watch.growth_places.lost
    return seen or _frame_seen_inside(watch)


def _frame_seen_inside(watch: AttemptWatch) -> Frame | None:
    """The line where memory grew, as the memory guard inside the training process recorded it."""
    session = read_session(watch.run)
    frame = decode(Frame, session.memory.host.growing_frame)
    return frame if frame.file and session.attempt == watch.command.attempt.number else None


def is_given_up(evidence: Evidence, intent: Intent | None) -> bool:
    """intent.json says so. Where even that could not be written, exit code 75 without a request to stop says it."""
    if intent is not None:
        return intent.is_unsaved
    return evidence.exit_code == EXIT_STOPPED and not evidence.stop_requested_by


def exit_code_of(ending: Ending, cause: str, *, has_checkpoint: bool) -> int:
    """The child's own exit code; 128+n for signal n; 75 for a stop that can be resumed."""
    own = ending.exit_code
    if cause in STOPPED_CAUSES and (own in (0, EXIT_STOPPED) or has_checkpoint):
        return EXIT_STOPPED
    if own is not None:
        return own
    return 128 + ending.signal if ending.signal else EXIT_FAILED


def describe_end(watch: AttemptWatch, ending: Ending, autopsy: Autopsy) -> ExitRecord:
    return ExitRecord(
        exit_code=autopsy.exit_code,
        child_exit_code=ending.exit_code,
        signal=ending.signal,
        started_at_s=watch.command.started_at_s,
        ended_at_s=ending.ended_at_s,
        duration_s=autopsy.evidence.duration_s,
        is_stopped=autopsy.cause in STOPPED_CAUSES,
        cause=autopsy.cause,
        text=autopsy.text,
        resumed_from=watch.resumed_from,
        made_progress=autopsy.made_progress,
        checkpoint_after=autopsy.checkpoint_after,
        written_at_s=time.time(),
        evidence=autopsy.evidence.to_json(),
        findings=tuple(finding.to_json() for finding in autopsy.findings),
    )


_LEAST_POINTS = 5
_LEAST_S = 4.0
_LEAST_BYTES = 128 << 20
_LEAST_SHARE = 0.15  # of the memory at the end
_EACH_PART = 0.15  # of the whole growth: a warm-up grows only at the start, a spike only at the end
_NUM_PARTS = 3
_MAX_SOURCE_BYTES = 1 << 20
# A tensor that is added to a list or a sum without .item(), .detach() or a conversion keeps its graph.
_KEEPS = re.compile(
    r"\.append\(\s*\(?\s*(?P<kept>\w*(?:loss|out|output|logit|pred|hidden|feat|embed|score|grad|act)\w*)\s*[,)]"
    r"|(?:^|\s)\w+\s*\+=\s*(?P<sum>\w*loss\w*)\s*(?:#|$|\*|/)"
    r"|=\s*\w+\s*\+\s*(?P<added>\w*loss\w*)\s*(?:#|$)"
)


def steady_growth(points: Collection[tuple[float, int]]) -> GpuGrowth | None:
    """`points`: (time, bytes), oldest first. None for a spike, for a warm-up, or where too little was seen."""
    used = list(itertools.dropwhile(lambda point: point[1] <= 0, points))
    if len(used) < _LEAST_POINTS:
        return None
    grew, over_s = used[-1][1] - used[0][1], used[-1][0] - used[0][0]
    if grew < max(_LEAST_BYTES, _LEAST_SHARE * used[-1][1]) or over_s < _LEAST_S:
        return None
    cuts = [used[round(part * (len(used) - 1) / _NUM_PARTS)][1] for part in range(_NUM_PARTS + 1)]
    if any(after - before < _EACH_PART * grew for before, after in itertools.pairwise(cuts)):
        return None
    return GpuGrowth(grew, over_s, grew / over_s)


def lines_that_keep(output_tail: Sequence[str]) -> tuple[Frame, ...]:
    """Lines in the files of the error's traceback that add a tensor to a list or a sum; [] without an error."""
    chain = fatal_chain(output_tail)
    if chain is None or "memory" not in chain.last.text.lower():
        return ()
    files = dict.fromkeys(frame.file for error in chain.errors for frame in error.frames if frame.is_user)
    return tuple(frame for file in list(files)[:4] for frame in _scan(file))[:4]


def _scan(file: str) -> list[Frame]:
    try:
        with open(file, "rb") as source:
            text = source.read(_MAX_SOURCE_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines()
    if not any("torch" in line for line in lines[:200]):
        return []
    name = str(Path(file))
    return [Frame("", name, at, line.strip(), True) for at, line in enumerate(lines, 1) if _KEEPS.search(line)]
