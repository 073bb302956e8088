"""A run that became slower than it was, with its cause, on readings and a clock of the test's own."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.readings import GpuProcess, GpuReading, ProcessReading, Wait
from jackline.supervisor.attempt.slowness import Around, Rhythm, Slowness, find_cause

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
        slowness.look(float(second), (ended_s, step), (then if is_late else GPU,), (process(),))
        if second % 5 == 0:
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
    monkeypatch.setattr("jackline.supervisor.attempt.slowness._read_pressure", lambda: 0.0)  # this machine's is busy
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


def test_swap_a_slower_disk_and_a_busy_machine_are_named() -> None:
    calm = Around(clock_share=0.9, swapped_bytes=0, io_pressure=0.02, queued=0.05)

    def cause(now: Around) -> str:
        return find_cause((calm,) * 5, (now,) * 5, (0.1, 0.1))[0]

    assert cause(replace(calm, swapped_bytes=1 << 30)) == "1.0 GiB of it were swapped to disk since then"
    assert cause(replace(calm, io_pressure=0.6)).startswith(
        "slower disk: something waits for a disk 60 % of the time, 2 %"
    )
    assert cause(replace(calm, queued=0.5)) == "its main process waits 0.5 s a second for a CPU, 0.1 before"
    assert find_cause((), (), (None, None))[0].startswith("the cause was not found")
