"""A run that became slower than it was, with its cause, on readings and a clock of the test's own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.readings import GpuProcess, GpuReading, ProcessReading, Wait
from jackline.supervisor.attempt.around import Around, Surroundings, busiest, read_cpu_times, read_throttled_s
from jackline.supervisor.attempt.slowness import Look, Rhythm, Seen, Slowness, find_cause

GPU = GpuReading(0, "H200", 140 << 30, 10 << 30, 90, 40, 600.0, is_ours=True, clock_share=0.98)
LOADS = Frame("_next_data", "/x/torch/utils/data/dataloader.py", 700, "self._get_data()", is_user=False)
TRAINS = Frame("main", "train.py", 10, "loss.backward()", is_user=True)


class Heard:
    def __init__(self) -> None:
        self.told: list[str] = []

    def emit(self, event: str, text: str, **facts: Any) -> None:
        assert event == "slow"
        self.told.append(text)


def process(waited_s: float = 0.0) -> ProcessReading:
    wait = Wait("running")
    return ProcessReading(2**22 - 2, 1, 1, "python", "R", 1.0, 1.0 + waited_s, 1, 1, 0, 0, wait, is_python=True)


def stack(frame: Frame) -> ProcessStack:
    return ProcessStack(1, "python", (ThreadStack(1, "MainThread", (frame, TRAINS), is_main=True, wait="running"),))


def follow(
    step_s: tuple[float, float], then: GpuReading = GPU, frames: tuple[Frame, Frame] = (TRAINS, TRAINS)
) -> Heard:
    """A run with steps of one length for two minutes and of another for two more, looked at once a second."""
    heard = Heard()
    slowness = Slowness(heard)  # type: ignore[arg-type]
    ended_s, step = 0.0, 0
    for second in range(240):
        is_late = second >= 120
        while ended_s + step_s[is_late] <= second:
            ended_s, step = ended_s + step_s[is_late], step + 1
        wants = slowness.look(float(second), (ended_s, step), (then if is_late else GPU,), (process(),))
        if wants or second % 30 == 0:  # as the watch over hangs looks in usual times
            slowness.note_stack(stack(frames[is_late]))
    return heard


@pytest.mark.parametrize(
    ("then", "frames", "cause"),
    [
        (
            replace(GPU, clock_share=0.5, slowdown="too hot"),
            (TRAINS, TRAINS),
            "the GPU slowed itself down: too hot (clock",
        ),
        (replace(GPU, clock_share=0.6), (TRAINS, TRAINS), "the GPU slowed itself down: lower clock (clock at 60 %"),
        (
            replace(GPU, processes=(GpuProcess(os.getpid(), 1 << 30),)),
            (TRAINS, TRAINS),
            f"others work on the same GPU since then: pid {os.getpid()} (",
        ),
        (GPU, (TRAINS, LOADS), "it waits for data in 100 % of the looks at it"),
        (GPU, (TRAINS, TRAINS), "the cause was not found"),
        (GPU, (LOADS, LOADS), "the cause was not found"),
    ],
    ids=["too hot", "lower clock", "others", "data", "nothing", "data as before"],  # without a worker's own pid
)
def test_a_drop_is_told_once_with_what_has_changed_since(
    then: GpuReading, frames: tuple[Frame, Frame], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_pressure", "parse_stolen"):  # of this machine, which is busy
        monkeypatch.setattr(f"jackline.supervisor.attempt.around.{name}", lambda *_: None)
    heard = follow((0.5, 1.5), then, frames)
    assert len(heard.told) == 1 and cause in heard.told[0], heard.told
    assert heard.told[0].startswith("slower than before: a step takes 1.5 s, it was 0.5 s: ")


def test_a_steady_run_and_one_that_gets_faster_are_not_told() -> None:
    assert not follow((0.5, 0.5)).told and not follow((0.5, 0.2)).told and not follow((2.0, 2.6)).told


def test_pauses_for_validation_are_no_drop() -> None:
    rhythm, at_s = Rhythm(), 0.0
    for step in range(600):
        at_s += 60.0 if step % 20 == 19 else 1.5
        assert rhythm.add(at_s, at_s, step) is None
    assert rhythm.usual_s == pytest.approx(1.5)


CALM = Around(clock_share=0.9, swapped_bytes=0, io_pressure=0.02, on_disk=0.0, queued=0.05, stolen=0.0, throttled=0.0)


def cause(others: str = "", **now: float) -> str:
    return find_cause(Seen((CALM,) * 5), Seen((replace(CALM, **now),) * 5), others)[0]  # type: ignore[arg-type]


def test_swap_and_a_slower_disk_are_named() -> None:
    assert cause(swapped_bytes=1 << 30) == "1.0 GiB of it were swapped to disk since then"
    assert cause(io_pressure=0.6) == "slower disk: something waits for a disk 60 % of the time, 2 % before"
    own = "slower disk: it waits for a disk in 80 % of the looks, 0 % before"
    assert cause(on_disk=0.8) == own
    assert cause(on_disk=0.8, io_pressure=0.6).startswith(f"{own}, and something waits for a disk 60 %")
    assert find_cause(Seen(), Seen())[0].startswith("the cause was not found")


def test_what_keeps_it_from_a_cpu_is_told_apart() -> None:
    waits = "its main process waits 0.5 s a second for a CPU, 0.1 before"
    assert cause(queued=0.5) == waits
    assert cause("pid 7 (stress, 1.9 CPUs)", queued=0.5) == f"{waits}; most of it is used by pid 7 (stress, 1.9 CPUs)"
    limit = "the CPU limit of its cgroup holds it 0.4 s a second, 0.0 before"
    assert cause(throttled=0.4) == limit and cause(throttled=0.4, queued=0.5) == f"{limit}; {waits}"
    assert cause(stolen=0.3) == "the hypervisor gives 30 % of the CPU time to other machines, 0 % before"
    assert cause("pid 7 (stress, 1.9 CPUs)").startswith("the cause was not found")


def test_looks_do_not_beat_with_the_steps() -> None:
    """Looks every 2 s meet the same line in each step of 0.4 s, if they do not wait by turns."""
    slowness = Slowness(Heard())  # type: ignore[arg-type]
    slowness.rhythm.now_s, slowness.rhythm._slow_since_s = 0.4, 0.0
    met = [
        (second + slowness.delay_s) % 0.4 < 0.12  # where the step sleeps
        for second in range(40)
        if slowness.look(float(second), (float(second), 1.0), (), (process(),))
    ]
    assert len(met) == 20 and 4 <= sum(met) <= 8


def test_few_looks_that_met_the_same_line_by_chance_name_no_cause() -> None:
    """A real run: a quarter of each step slept at that line, and three of four looks met it."""
    usual = Seen(looks=[Look(float(at), False, "train.py:8 `step()`") for at in (0, 30, 60)])
    places = ["train.py:13 `sleep(0.1)`"] * 3 + ["train.py:8 `step()`"]
    for count, is_named in ((1, False), (2, True)):
        slow = Seen(looks=[Look(90.0, False, place) for place in places * count])
        assert ("train.py:13" in find_cause(usual, slow)[0]) == is_named


def test_without_another_cause_the_line_at_which_it_now_stands_is_named() -> None:
    slow = Frame("get_batch", "train.py", 42, "x = download(i)", is_user=True)
    told = follow((0.5, 1.5), frames=(TRAINS, slow)).told[0]
    assert "it is at train.py:42 `x = download(i)` in 100 % of the looks at it, 0 % before" in told, told


def test_counters_of_the_machine_and_of_a_cpu_limit_become_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files as two kernels write them; between two readings 10 s pass."""
    stat = iter(("cpu  100 0 50 800 5 0 5 40 0 0\ncpu0 1 2\n", "cpu  400 0 150 1000 5 0 5 440 90 0\n"))
    usage = iter(("nr_throttled 3\nthrottled_usec 1000000\n", "nr_throttled 90\nthrottled_usec 5000000\n"))
    monkeypatch.setattr("jackline.machine.procfs.read_text", lambda path: next(stat) if path == "/proc/stat" else "")
    monkeypatch.setattr("jackline.supervisor.attempt.around.cgroup_folders", lambda *_: [(str(tmp_path), 2)])
    around = Surroundings()
    for at_s, waited_s, expected in ((100.0, 1.0, (None, None, None)), (110.0, 6.0, (0.4, 0.4, 0.5))):
        (tmp_path / "cpu.stat").write_text(next(usage))
        found = around.read(at_s, (), (process(waited_s),))
        assert (found.stolen, found.throttled, found.queued) == expected
    (tmp_path / "cpu.stat").write_text("nr_periods 5\nthrottled_time 2500000000\n")  # cgroup version 1
    assert read_throttled_s(1) == 2.5


def test_who_uses_the_cpus_is_named_and_the_run_itself_is_not() -> None:
    before = read_cpu_times(())
    while read_cpu_times(())[os.getpid()] - before[os.getpid()] < 0.03:
        sum(range(10_000))
    told = busiest({os.getpid(): before[os.getpid()]}, {os.getpid(): read_cpu_times(())[os.getpid()]}, 0.1)
    assert told.startswith(f"pid {os.getpid()} (") and told.endswith(" CPUs)")
    assert os.getpid() not in read_cpu_times((os.getpid(),)) and busiest(before, before, 1.0) == ""
