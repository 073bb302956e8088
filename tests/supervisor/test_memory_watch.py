"""Which line is blamed for growing memory."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.readings import MemoryLimit, MemoryReading, ProcessReading, Wait
from jackline.supervisor.attempt.memory_watch import GrowthPlaces, MemoryWatch, is_last_moment, warning_text

GROWS = Frame("load", "data.py", 10, "rows.append(row)", is_user=True)
SLEEPS = Frame("main", "data.py", 20, "time.sleep(0.05)", is_user=True)


def stack(frame: Frame, wait: str) -> ProcessStack:
    return ProcessStack(1, "python", (ThreadStack(1, "MainThread", (frame,), is_main=True, wait=wait),))


def test_a_line_that_worked_once_is_blamed_before_one_that_slept_often() -> None:
    places = GrowthPlaces()
    for _ in range(5):
        places.add(stack(SLEEPS, "sleep"))
    places.add(stack(GROWS, "running"))
    assert places.likely() == GROWS


def test_a_line_that_sleeps_is_not_blamed_though_its_thread_waits_for_a_core() -> None:
    places = GrowthPlaces()
    for _ in range(5):
        places.add(stack(SLEEPS, "running"))
    places.add(stack(GROWS, "running"))
    assert places.likely() == GROWS


@pytest.mark.parametrize(
    ("source", "expected"),
    [("time.sleep(0.05)", True), ("  sleep(1)", True), ("await asyncio.sleep(0)", True),
     ("rows.append(row); time.sleep(1)", False), ("oversleep(rows)", False), ("", False)],
)  # fmt: skip
def test_a_sleeping_line_is_told_by_its_text(source: str, expected: bool) -> None:
    assert Frame("main", "data.py", 1, source).sleeps is expected


def test_a_line_that_only_called_jackline_is_not_blamed_before_the_one_that_worked() -> None:
    calls = Frame("<module>", "data.py", 30, "for batch in run.steps():", is_user=True)
    ours = Frame("save", "/lib/site-packages/jackline/session/saving.py", 9)
    waiting = ThreadStack(1, "MainThread", (ours, calls), is_main=True, wait="running")
    places = GrowthPlaces()
    for _ in range(5):
        places.add(ProcessStack(1, "python", (waiting,)))
    places.add(stack(GROWS, "running"))
    assert places.likely() == GROWS


def test_with_nothing_better_the_line_seen_most_often_is_named() -> None:
    places = GrowthPlaces()
    places.add(stack(SLEEPS, "sleep"))
    assert places.likely() == SLEEPS
    places.clear(10.0)
    places.bury((1,), 11.0)
    assert places.likely() is None


def test_a_worker_that_was_killed_keeps_the_line_that_grew() -> None:
    places = GrowthPlaces()
    places.add(stack(GROWS, "running"))
    places.clear(10.0)  # memory is free again, because process 1 is being killed; it may still be listed
    places.bury((1, 2, 3), 10.5)
    places.bury((2, 3), 11.5)
    assert places.likely() == GROWS


def test_a_process_that_ends_long_after_it_freed_its_memory_is_not_blamed() -> None:
    places = GrowthPlaces()
    places.add(stack(GROWS, "running"))
    places.clear(10.0)
    places.bury((), 60.0)
    assert places.likely() is None


def test_an_import_is_never_blamed_for_growth() -> None:
    machinery = Frame("_find_and_load", "<frozen importlib._bootstrap>", 1176)
    torch = Frame("<module>", "/v/lib/python3.11/site-packages/torch/__init__.py", 9)
    own = Frame("<module>", "/me/train.py", 3, "import torch", is_user=True)
    imports = ThreadStack(1, "MainThread", (torch, machinery, own), is_main=True, wait="running")
    places = GrowthPlaces()
    places.add(ProcessStack(1, "python", (imports,)))
    assert places.likely() is None


def test_the_process_that_grows_is_looked_at_and_not_the_largest() -> None:
    def process(pid: int, rss: int) -> ProcessReading:
        return ProcessReading(pid, 1, 1, "python", "R", 0.0, 0.0, rss, 1, 0, 0, Wait("running"))

    places = GrowthPlaces()
    places.grower([process(1, 5 << 30), process(2, 1 << 30)])
    assert places.grower([process(1, 5 << 30), process(2, 2 << 30)]) == 2


def test_under_a_limit_of_the_process_memory_is_refused_and_nothing_is_killed() -> None:
    reading = MemoryReading(0.0, 3 << 30, MemoryLimit(4 << 30, "RLIMIT_AS"), 3 << 30)
    assert "an allocation will fail (MemoryError) in about 5.1 s" in warning_text(reading, 200 << 20, 5.1, None)


def test_the_warning_names_limit_pace_time_and_line() -> None:
    reading = MemoryReading(0.0, 3 << 30, MemoryLimit(4 << 30, "cgroup /pod"), 3 << 30)
    assert warning_text(reading, 200 << 20, 5.1, GROWS) == (
        "host RAM: 3.0 GiB of 4.0 GiB (cgroup /pod), growing 200 MiB/s: the kernel will kill this run in about 5.1 s"
        "; it grows at data.py:10 `rows.append(row)`"
    )


def test_a_neighbour_that_fills_the_memory_is_named_and_the_run_is_neither_blamed_nor_ended() -> None:
    def watch_growing(own_share: float) -> tuple[MemoryWatch, str]:
        watch = MemoryWatch(os.getpid())
        watch.limit = MemoryLimit(1000 << 20, "MemTotal")
        for tenth in range(120):
            used, at_s = (8 << 20) * tenth, tenth / 10
            watch._points.append((at_s, used))
            watch._own_points.append((at_s, int(used * own_share)))
            watch.reading = MemoryReading(at_s, used, watch.limit, int(used * own_share))
            watch.must_end()
        return watch, watch.warning(12.0, GROWS) or ""

    watch, text = watch_growing(own_share=1.0)
    assert watch.must_end()
    assert "it grows at data.py:10" in text
    watch, text = watch_growing(own_share=0.01)
    assert not watch.must_end()
    assert "data.py" not in text and "kill this run" not in text
    assert "This run does not grow (its processes have 9.5 MiB); the largest other process is " in text


def test_a_process_that_has_ended_does_not_overwrite_what_was_known() -> None:
    watch = MemoryWatch(os.getpid())
    assert watch.poll(0.0, [os.getpid()])
    before = watch.reading
    assert not watch.poll(100.0, [2**22 + 7])
    assert watch.reading is before


def test_only_a_nearly_full_memory_that_still_grows_is_a_reason_to_end_a_command() -> None:
    assert is_last_moment(0.9, 0.95, foreseen_s=2)
    assert is_last_moment(0.2, 0.7, foreseen_s=2)
    assert not is_last_moment(0.9, 0.7, foreseen_s=2)  # it may be filling what it needs, and stay there
    assert not is_last_moment(1.5, 0.97, foreseen_s=2)


def test_a_session_has_half_a_second_to_reach_a_boundary_when_the_end_is_foreseen_late() -> None:
    """Growth with a pause in it is believed only when little is left, by the session in the same moment: on a busy
    machine the supervisor was the first to look, and ended a loop that would have saved at its next boundary."""
    watch = MemoryWatch(os.getpid())
    watch.limit = MemoryLimit(1000, "cgroup /pod")
    grown = [*((t / 10, 300 + 8 * t) for t in range(50)), *((t / 10, 700) for t in range(50, 90))]
    grown += [(t / 10, 700 + 12 * (t - 90)) for t in range(90, 115)]
    foreseen: list[tuple[float, bool]] = []
    for at_s, used in grown:
        watch._points.append((at_s, used))
        watch.reading = MemoryReading(at_s, used, watch.limit, used)
        ends = watch.must_end()
        left_s = watch.seconds_left()
        if left_s is not None:
            foreseen.append((left_s, ends))
    first_s, is_first_ended = foreseen[0]
    assert first_s < 1.0 and not is_first_ended
    ended = [number for number, (_, ends) in enumerate(foreseen) if ends]
    assert ended and (ended[0] >= 5 or foreseen[ended[0]][0] < 0.3), foreseen
    assert foreseen[-1][1]


def test_what_was_used_of_another_limit_says_nothing_about_the_present_one() -> None:
    watch = MemoryWatch(os.getpid())
    assert watch.poll(0.0, [os.getpid()]) and watch.poll(2.0, [os.getpid()])
    assert len(watch._points) == 2
    watch.limit = MemoryLimit(1 << 30, "cgroup /before")
    assert watch.poll(15.0, [os.getpid()])
    assert len(watch._points) == 1


def test_a_process_that_limits_itself_has_the_new_limit_at_the_next_reading() -> None:
    """The limit is read anew only from time to time, unless the process shows that it is another one."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        watch = MemoryWatch(child)
        assert watch.poll(0.0, [child])
        before = watch.limit
        resource.prlimit(child, resource.RLIMIT_AS, (3 << 40, 3 << 40))
        assert watch.poll(1.0, [child])
        assert watch.limit == before, "it is not the smallest"
        resource.prlimit(child, resource.RLIMIT_DATA, (1 << 20, 1 << 20))
        assert watch.poll(2.0, [child])
        assert watch.limit == MemoryLimit(1 << 20, "RLIMIT_DATA")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_pages_that_workers_share_with_their_parent_are_counted_once() -> None:
    held = bytearray(b"x") * (64 << 20)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        watch = MemoryWatch(os.getpid())
        assert watch.poll(0.0, [os.getpid(), child])
        assert watch.reading is not None
        if watch.reading.tree_pss_bytes is None:
            pytest.skip("smaps_rollup cannot be read here")
        assert watch.own_bytes <= watch.reading.tree_rss_bytes - len(held) // 2
        assert watch.peak_bytes == watch.own_bytes
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_task_that_awaits_has_no_frame_and_is_blamed_after_any_line_that_worked() -> None:
    awaits = Frame("fetch", "data.py", 40, "await ready.wait()", is_user=True)
    loop = Frame("run", "/usr/lib/python3.11/asyncio/base_events.py", 600)
    main = ThreadStack(1, "MainThread", (loop,), is_main=True, wait="running", awaiting=awaits)
    places = GrowthPlaces()
    for _ in range(5):
        places.add(ProcessStack(1, "python", (main,)))
    assert places.likely() == awaits
    places.add(stack(GROWS, "running"))
    assert places.likely() == GROWS
