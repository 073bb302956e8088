"""What a live process tree is doing: current stacks, a verdict, memory, GPU, files. Data first, then text or JSON.

Owns the sampling (a few seconds, with the same Judge as the supervisor) and its wording. A watched run already has a
verdict; then only the stacks are taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from jackline.cli.text.ranks import rank_lines
from jackline.diagnosis.doing import Doing, describe
from jackline.diagnosis.frames import ProcessStack
from jackline.diagnosis.frames import to_json as stack_json
from jackline.diagnosis.logs.clues import LastWritten, LogFile, explain_output, find_last_written, find_logs, to_json
from jackline.diagnosis.waiting import effective_wait
from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.machine.gpu.watch import GpuUse, read_gpus
from jackline.machine.proc import read_tree
from jackline.machine.procfs import read_bytes
from jackline.machine.readings import GpuReading, ProcessReading, TreeReading, rates_between
from jackline.rundir.records.fields import encode
from jackline.supervisor.attempt.rank_watch import look_at_ranks, rank_record
from jackline.supervisor.hang.deadlock import find_deadlock
from jackline.supervisor.hang.evidence import evidence_lines
from jackline.supervisor.hang.incident import advice, process_line, stack_lines
from jackline.supervisor.hang.text import place_text
from jackline.supervisor.hang.verdict import Judge, Sample, Thresholds, Verdict
from jackline.supervisor.stacks.standing import read_standing
from jackline.supervisor.stacks.take import sample_stacks, with_reports
from jackline.supervisor.state_record import around_of
from jackline.units import format_bytes, format_duration

SAMPLE_EVERY_S = 1.0
_LEAST_SAMPLES = 6  # a loop of naps is between two of them in one sample, not in six
_MOST_PROCESS_LINES = 12


@immutable
class Look:
    """Everything seen in one process tree."""

    pid: int
    elapsed_s: float
    looked_s: float
    tree: TreeReading
    stacks: tuple[ProcessStack, ...]
    doing: Doing
    verdict: Verdict | None
    cpu_cores: float | None
    gpus: tuple[GpuReading, ...] = ()
    logs: tuple[LogFile, ...] = ()
    last_written: LastWritten | None = None
    output_clue: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] | None = None

    @property
    def leader(self) -> ProcessReading:
        processes = self.tree.processes
        return next((process for process in processes if process.is_python), processes[0])


def check_pid(pid: int) -> None:
    """Raise a usage error unless this process can be inspected."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        raise UsageError(f"there is no process {pid}", hint="`ps -u $USER -o pid,etime,args` lists yours") from None
    me = os.geteuid()
    if me not in (0, owner):
        raise UsageError(
            f"process {pid} belongs to {_user_name(owner)}: only its owner and root may look into it",
            hint=f"sudo jackline why --pid {pid}",
        )
    stat = read_bytes(f"/proc/{pid}/stat") or b""
    if stat[stat.rfind(b")") + 2 :][:1] in (b"Z", b"X", b""):
        raise UsageError(
            f"process {pid} has ended already; its parent has not asked how",
            hint="its log and the kernel log (dmesg) may tell why",
        )


def look_at(pid: int, *, stacks_folder: Path | None, look_s: float) -> Look:
    """Sample the tree for `look_s` seconds (0: stacks only) and give a verdict."""
    after_s = max(1.0, look_s - 1.0)
    judge = Judge(Thresholds(max(1.0, look_s - 0.5), after_s, waiting_after_s=after_s, proved_after_s=after_s))
    began_s, use = time.monotonic(), GpuUse()
    first = tree = read_tree(pid, with_network=True)
    stacks = _stacks_of(tree, stacks_folder)
    verdict: Verdict | None = None
    while look_s > 0:
        now_s = time.monotonic()
        tree = read_tree(pid, with_network=True)
        if not tree.processes:
            break
        is_last = now_s - began_s >= look_s
        if is_last:
            stacks = _stacks_of(tree, stacks_folder)
        gpus = use.mark(read_gpus(), [process.pid for process in tree.processes], now_s)
        sample = Sample(now_s, 0.0, tree, gpus, _output_bytes(pid), 0, stacks if is_last else None)
        if verdict is None:
            sample = replace(sample, stacks=stacks)
        elif is_last and verdict.kind != "PROGRESS" and stacks_folder is not None:
            sample = _asked(sample, stacks_folder)
        verdict = judge.add(sample)
        if is_last:
            break
        time.sleep(min(SAMPLE_EVERY_S, look_s / _LEAST_SAMPLES))
    if not tree.processes:
        raise UsageError(f"process {pid} ended while it was looked at", hint="its log may tell why")
    look = _gather(pid, first, tree, stacks, verdict, time.monotonic() - began_s)
    return replace(look, evidence=judge.evidence(), case=judge.case(verdict) if verdict else None)


def _asked(sample: Sample, folder: Path) -> Sample:
    """The sample with the answers of the processes to who waits for whom."""
    standing = read_standing([process.pid for process in sample.tree.processes], folder)
    leader = next((process.pid for process in sample.tree.processes if process.is_python), 0)
    stacks = with_reports(sample.stacks or (), standing.reports)
    pids = frozenset(process.pid for process in sample.tree.processes)
    return replace(sample, stacks=stacks, disturbed=pids, was_asked=True, deadlock=find_deadlock(standing, leader))


def _gather(
    pid: int,
    first: TreeReading,
    tree: TreeReading,
    stacks: tuple[ProcessStack, ...],
    verdict: Verdict | None,
    looked_s: float,
) -> Look:
    pids = [process.pid for process in tree.processes]
    leader = next((process for process in tree.processes if process.is_python), tree.processes[0])
    stack = next((stack for stack in stacks if stack.pid == leader.pid), None)
    elapsed_s = _elapsed_s(tree.processes[0])
    # One reading tells no rate, however long it took: on a busy machine the stacks alone may need seconds.
    is_measured = tree is not first and looked_s >= 1
    rates = rates_between(first, tree) if is_measured else None
    gpus = read_gpus()
    return Look(
        pid=pid,
        elapsed_s=elapsed_s,
        looked_s=looked_s,
        tree=tree,
        stacks=stacks,
        doing=describe(stack, effective_wait(stack, leader.wait), leader.comm, around_of(leader, tree, rates, gpus)),
        verdict=verdict,
        cpu_cores=_cpu_cores(first, tree) if is_measured else None,
        gpus=tuple(gpu for gpu in gpus if any(user.pid in pids for user in gpu.processes)),
        logs=tuple(find_logs(pids[:16])),
        last_written=find_last_written(pids, started_at_s=time.time() - elapsed_s),
        output_clue=explain_output(leader.pid, is_python=leader.is_python),
    )


def _stacks_of(tree: TreeReading, folder: Path | None) -> tuple[ProcessStack, ...]:
    pythons = [process.pid for process in tree.processes if process.is_python]
    others = [process.pid for process in tree.processes if not process.is_python]
    return sample_stacks(pythons + others, stacks_folder=folder, deadline_s=5.0)


def _output_bytes(pid: int) -> int:
    """The length of the file that its output goes to; 0 if that is not a file."""
    try:
        return os.stat(f"/proc/{pid}/fd/1").st_size  # noqa: PTH116
    except OSError:
        return 0


def _cpu_cores(first: TreeReading, last: TreeReading) -> float:
    before = {process.pid: process.cpu_s for process in first.processes}
    spent_s = sum(max(0.0, process.cpu_s - before.get(process.pid, 0.0)) for process in last.processes)
    return spent_s / max(1e-3, last.at_s - first.at_s)


def _elapsed_s(process: ProcessReading) -> float:
    started_s = process.start_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _user_name(uid: int) -> str:
    import pwd

    try:
        return f"user '{pwd.getpwuid(uid).pw_name}'"
    except KeyError:
        return f"user {uid}"


# -- as text and as JSON --------------------------------------------------------------------------------------------


def verdict_words(verdict: Verdict, looked_s: float) -> str:
    """A few seconds are too short for 'stuck', so it only says that nothing moved in that time."""
    span = format_duration(looked_s)
    if verdict.label == "SLEEPING" and verdict.kind in ("SUSPECT", "WAITING"):
        words = verdict.text.partition(": ")[2] if verdict.kind == "SUSPECT" else verdict.text.partition("; if ")[0]
        return f"asleep during the {span} it was looked at; that may be meant: {words or verdict.text}"
    if verdict.kind in ("STUCK", "SUSPECT"):
        return f"{verdict.kind}, as far as {span} can tell: {verdict.text}"
    return f"{verdict.kind}: {verdict.text}"


def look_lines(look: Look, *, show_all: bool) -> Iterator[str]:
    """Numbers, stacks and files; the caller has already printed which run or process it is."""
    place = place_text(look.doing.frame)
    yield f"doing: {look.doing.what}{f' at {place}' if place else ''}"
    yield resources_line(look)
    now_s = time.time()
    for log in look.logs:
        yield log.words(now_s)
    if look.last_written:
        yield look.last_written.words(now_s)
    if look.output_clue:
        yield f"note: {look.output_clue}"
    stacks = {stack.pid: stack for stack in look.stacks}
    yield from rank_lines(
        [encode(rank_record(one)) for one in look_at_ranks(look.tree.processes, stacks.get).values()]
    )
    yield ""
    processes = look.tree.processes if show_all else look.tree.processes[:_MOST_PROCESS_LINES]
    commands = {stack.pid: stack.command for stack in look.stacks}
    for process in processes:
        yield process_line(process, commands.get(process.pid, ""))
    if len(processes) < len(look.tree.processes):
        yield f"and {len(look.tree.processes) - len(processes)} more processes (--all shows them)"
    yield ""
    for stack in look.stacks:
        if show_all or stack.method != "proc":
            yield from stack_lines(stack, only_user=not show_all)
    if look.verdict is not None and look.verdict.kind in ("STUCK", "SUSPECT"):
        yield f"hint: {advice(look.verdict)[0]}"


def evidence_section(evidence: Mapping[str, Any]) -> list[str]:
    """For `why --evidence`."""
    return ["", "What the verdict rests on", *(f"  {line}" for line in evidence_lines(evidence))] if evidence else []


def resources_line(look: Look) -> str:
    total_cpu_s = sum(process.cpu_s for process in look.tree.processes)
    rss_bytes = sum(process.rss_bytes for process in look.tree.processes)
    parts = []
    if look.cpu_cores is not None:
        parts.append(f"{look.cpu_cores:.1f} cores now")
    parts.append(f"CPU {format_duration(total_cpu_s)} in {format_duration(look.elapsed_s)}")
    parts.append(f"{format_bytes(rss_bytes)} of memory")
    count = len(look.tree.processes)
    parts.append(f"{count} process{'es' if count != 1 else ''}")
    pids = {process.pid for process in look.tree.processes}
    for gpu in look.gpus:
        used = sum(user.used_bytes or 0 for user in gpu.processes if user.pid in pids)
        parts.append(f"GPU {gpu.index}: {format_bytes(used)} of {format_bytes(gpu.total_bytes)}")
    return ", ".join(parts)


def look_json(look: Look) -> dict[str, Any]:
    frame = look.doing.frame
    return {
        "pid": look.pid,
        "elapsed_s": round(look.elapsed_s, 1),
        "looked_s": round(look.looked_s, 1),
        "verdict": asdict(look.verdict) if look.verdict else None,
        "doing": {"what": look.doing.what, "frame": asdict(frame) if frame else None},
        "cpu_cores": look.cpu_cores,
        "processes": [asdict(process) for process in look.tree.processes],
        "stacks": [stack_json(stack) for stack in look.stacks],
        "gpus": [asdict(gpu) for gpu in look.gpus],
        "logs": [to_json(log) for log in look.logs],
        "last_written": to_json(look.last_written),
        "output_clue": look.output_clue,
        "evidence": look.evidence,
    }
