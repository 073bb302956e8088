"""Hand-made process trees that live second by second, for the tests of the verdict: no clock, no /proc."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.readings import GpuReading, ProcessReading, RankPlace, TreeReading, Wait
from jackline.supervisor.hang.sample import FarRank
from jackline.supervisor.hang.verdict import Judge, Sample, Thresholds, Verdict


@dataclass
class Proc:
    """One process. Rates are per second; `bursts` are (every_s, cpu_s) of the main thread."""

    pid: int
    ppid: int = 0
    comm: str = "python"
    state: str = "S"
    wait: Wait = field(default_factory=lambda: Wait("lock"))
    line: int = 10
    source: str = "with lock:"
    is_python: bool = True
    main_cores: float = 0.0
    other_cores: float = 0.0
    main_writes: int = 0
    main_sleeps: float | None = None  # how often the main thread goes to sleep; None: the kernel does not say
    queued_cores: float = 0.0  # wanted, but others had the CPU
    disk: int = 0
    method: str = "py-spy"
    has_main_counters: bool = True
    num_threads: int = 4
    threads: tuple[ThreadStack, ...] = ()
    inside: tuple[Frame, ...] = ()  # library frames called by the person's line
    outside: tuple[Frame, ...] = ()  # and those that called it
    main_cpu_s: float = 1.0
    other_cpu_s: float = 1.0
    disk_bytes: int = 0
    wchar: int = 0
    num_sleeps: float = 0.0
    queued_s: float = 0.0
    rank: RankPlace | None = None
    file: str = ""

    def live(self, seconds: float) -> None:
        self.main_cpu_s += self.main_cores * seconds
        self.other_cpu_s += self.other_cores * seconds
        self.num_sleeps += (self.main_sleeps or 0.0) * seconds
        self.queued_s += self.queued_cores * seconds
        self.disk_bytes += int(self.disk * seconds)
        self.wchar += int(self.main_writes * seconds)

    def reading(self) -> ProcessReading:
        total_s = self.main_cpu_s + self.other_cpu_s
        return ProcessReading(
            pid=self.pid,
            ppid=self.ppid,
            start_ticks=self.pid,
            comm=self.comm,
            state=self.state,
            cpu_s=total_s,
            wants_cpu_s=total_s + self.queued_s,
            rss_bytes=1 << 20,
            num_threads=self.num_threads,
            read_bytes=0,
            write_bytes=self.disk_bytes,
            wait=self.wait,
            is_python=self.is_python,
            main_cpu_s=self.main_cpu_s if self.has_main_counters else None,
            main_wchar_bytes=self.wchar if self.has_main_counters else None,
            main_sleeps=None if self.main_sleeps is None else int(self.num_sleeps),
            rank=self.rank,
        )

    def stack(self) -> ProcessStack:
        if not self.is_python:
            return ProcessStack(self.pid, self.comm, (ThreadStack(self.pid, self.comm, (), True),), "proc")
        frame = Frame("work", self.file or f"/me/p{self.pid}.py", self.line, self.source, is_user=True)
        main = ThreadStack(self.pid, "MainThread", (*self.inside, frame, *self.outside), True, self.wait.kind)
        return ProcessStack(self.pid, "python train.py", (main, *self.threads), self.method)


@dataclass
class World:
    """A tree, its output and a GPU. `step` is what happens each second, called with the second."""

    processes: list[Proc]
    gpus: tuple[GpuReading, ...] = ()
    tcp: int | None = 0  # bytes a second
    at_s: float = 1000.0
    output_bytes: int = 0
    marks: int = 0
    late_s: float = 0.0
    stacks_every_s: int = 5
    tcp_bytes: int = 0
    elsewhere: tuple[FarRank, ...] | None = None  # ranks of other machines
    silent: tuple[str, ...] = ()  # addresses that acknowledge nothing

    def sample(self, second: int) -> Sample:
        tcp = None if self.tcp is None else {1: self.tcp_bytes}
        tree = TreeReading(self.at_s, tuple(process.reading() for process in self.processes), tcp, self.silent)
        is_due = self.stacks_every_s and second % self.stacks_every_s == 2
        stacks = tuple(process.stack() for process in self.processes) if is_due else None
        found = Sample(self.at_s, self.late_s, tree, self.gpus, self.output_bytes, self.marks, stacks)
        return replace(found, elsewhere=self.elsewhere)

    def live(self, seconds: float = 1.0) -> None:
        self.at_s += seconds
        self.tcp_bytes += int((self.tcp or 0) * seconds)
        for process in self.processes:
            process.live(seconds)


def play(world: World, seconds: int, *, step: object = None, thresholds: Thresholds | None = None) -> list[Verdict]:
    """A verdict for every second. `step(second)` may change the world before it lives on."""
    judge = Judge(thresholds)
    verdicts = []
    for second in range(seconds):
        if step is not None:
            step(second)  # type: ignore[operator]
        verdicts.append(judge.add(world.sample(second)))
        world.live()
    return verdicts


def alarms(verdicts: list[Verdict]) -> list[str]:
    """Kinds and labels of the alarms in the order they first sounded."""
    told: list[str] = []
    for verdict in verdicts:
        word = f"{verdict.kind} {verdict.label}"
        if verdict.kind in ("STUCK", "SUSPECT") and word not in told:
            told.append(word)
    return told


def first(verdicts: list[Verdict], kind: str) -> int:
    """The second at which a kind was first said; -1 for never."""
    return next((second for second, verdict in enumerate(verdicts) if verdict.kind == kind), -1)


def gpu(**changes: object) -> GpuReading:
    gpu = GpuReading(0, "H200", 140 << 30, 10 << 30, 0, 0, 124.0)
    return replace(gpu, **changes)  # type: ignore[arg-type]
