"""Turns what the supervisor has seen of an attempt into the parts of supervisor.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from jackline.diagnosis.doing import Around, Doing
from jackline.diagnosis.frames import Frame
from jackline.machine.proc import uses_gpu
from jackline.machine.readings import GpuReading, ProcessReading, Rates, TreeReading
from jackline.memory.guard.oom_report import other_users
from jackline.rundir.records import supervisor as records
from jackline.supervisor.attempt.memory_watch import MemoryWatch
from jackline.supervisor.hang.verdict import Verdict
from jackline.supervisor.output.progress import Progress


def around_of(leader: ProcessReading, tree: TreeReading, rates: Rates | None, gpus: tuple[GpuReading, ...]) -> Around:
    """What was measured beside the leader's stack. Without GPUs nothing is asked about them."""
    return Around(
        net_bytes_per_s=rates.net_bytes_per_s if rates is not None else None,
        children=tuple(process.comm for process in tree.processes if process.pid != leader.pid),
        has_gpu=bool(gpus) and uses_gpu(leader.pid),
    )


def verdict_record(verdict: Verdict | None, now_s: float) -> records.VerdictRecord:
    if verdict is None:
        return records.VerdictRecord()
    record = records.VerdictRecord(
        kind=verdict.kind,
        label=verdict.label,
        for_s=round(max(0.0, now_s - verdict.since_s), 1),
        text=verdict.text,
        pid=verdict.pid,
        frame=asdict(verdict.frame) if verdict.frame else None,
        next_kind=verdict.next_kind or None,
        next_in_s=round(verdict.next_in_s) if verdict.next_in_s is not None else None,
    )
    members = verdict.deadlock.members if verdict.deadlock else ()
    return replace(record, deadlock=tuple(asdict(member) for member in members)) if members else record


def now_record(doing: Doing | None, worker: str = "") -> records.NowRecord:
    if doing is None:
        return records.NowRecord()
    worker = worker if doing.what.startswith(("waiting", "sleeping")) else ""
    frame = doing.frame
    if frame is None:
        return records.NowRecord(doing.what, worker=worker or None)
    source = frame.source.strip()
    return records.NowRecord(doing.what, frame.file, frame.line, frame.function, source, worker or None)


def memory_record(memory: MemoryWatch, grows: Frame | None) -> records.HostMemoryRecord:
    reading = memory.reading
    if reading is None:
        return records.HostMemoryRecord()
    return records.HostMemoryRecord(
        used_bytes=reading.used_bytes,
        limit_bytes=reading.limit.limit_bytes,
        limit_source=reading.limit.source,
        tree_rss_bytes=reading.tree_rss_bytes,
        own_bytes=memory.own_bytes,
        peak_bytes=memory.peak_bytes,
        growth_bytes_per_s=round(memory.growth_bytes_per_s()),
        seconds_to_limit=memory.seconds_left(),
        grows_at=f"{grows.place} `{grows.source.strip()}`" if grows else None,
    )


def progress_record(progress: Progress | None) -> records.ProgressRecord:
    return records.ProgressRecord(**vars(progress)) if progress else records.ProgressRecord()


def gpu_records(gpus: Iterable[GpuReading]) -> tuple[records.GpuRecord, ...]:
    return tuple(records.GpuRecord(**{**asdict(gpu), "slowdown": gpu.slowdown or None}) for gpu in gpus)


def other_user_records(gpus: tuple[GpuReading, ...], own_pids: Iterable[int]) -> tuple[records.GpuUserRecord, ...]:
    return tuple(records.GpuUserRecord(**asdict(user)) for user in other_users(gpus, sorted(own_pids)))
