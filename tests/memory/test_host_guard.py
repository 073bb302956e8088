"""The guard of host memory: decisions on paper, then a real process in a real memory cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.machine.readings import MemoryLimit, MemoryReading
from jackline.memory.guard import host as host_guard
from jackline.memory.guard.host import (
    Go,
    HostGuard,
    SaveAndExit,
    Trim,
    guard_action,
    smaller_settings,
    trim_host_memory,
)
from tests.deadline import HANGS_S
from tests.places import Unavailable, memory_cgroup

EATER = Path(__file__).with_name("eater.py")
ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.mark.parametrize(
    ("left_s", "step_s", "save_s", "expected"),
    [
        (None, 1.0, 1.0, Go()),
        (1e9, 1.0, 1.0, Go()),
        (60.0, 1.0, 1.0, Go()),
        (59.0, 1.0, 1.0, Trim(59.0)),
        (4.0, 1.0, 1.0, Trim(4.0)),
        (3.9, 1.0, 1.0, SaveAndExit(3.9)),
        (59.0, 20.0, 10.0, SaveAndExit(59.0)),
        (0.0, 0.0, 0.0, SaveAndExit(0.0)),
        (100.0, 30.0, 30.0, SaveAndExit(100.0)),
    ],
)
def test_it_leaves_when_two_more_steps_and_saves_would_be_too_many(
    left_s: float | None, step_s: float, save_s: float, expected: object
) -> None:
    assert guard_action(left_s, step_s, save_s) == expected


class Growing:
    """Readings of a process that grows steadily."""

    def __init__(self, bytes_per_s: float, *, limit: int = 4 * GIB, own_share: float = 1.0) -> None:
        self.at_s = 0.0
        self._rate, self._limit, self._own_share = bytes_per_s, limit, own_share

    def __call__(self) -> MemoryReading:
        self.at_s += 0.1
        used = int(self.at_s * self._rate)
        return MemoryReading(self.at_s, used, MemoryLimit(self._limit, "test"), int(used * self._own_share))


def test_steady_growth_is_seen_in_time_to_save() -> None:
    guard = HostGuard(read=Growing(200e6))
    for number in range(300):
        guard._sample()
        action = guard_action(guard.left_s(), 0.2, 1.0)
        if isinstance(action, SaveAndExit):
            break
    assert isinstance(action, SaveAndExit)
    assert 1.0 < action.left_s < 2.4
    assert 17.0 < number * 0.1 < 21.0
    assert guard.describe(action.left_s).startswith("host RAM: 3.")


@pytest.mark.parametrize(("own_share", "is_own"), [(1.0, True), (0.3, True), (0.02, False)])
def test_growth_of_another_program_is_not_taken_for_that_of_this_one(own_share: float, is_own: bool) -> None:
    guard = HostGuard(read=Growing(200e6, own_share=own_share))
    for _ in range(180):
        guard._sample()
    left_s = guard.left_s()
    assert left_s is not None
    assert guard.is_own_growth() is is_own
    text = guard.describe_neighbour(left_s)
    assert "full in about" in text
    assert "This run does not grow (its processes have " in text
    assert "; the largest other process is " in text


def test_fast_growth_is_watched_closely_before_half_of_the_limit_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_guard, "SLOW_EVERY_S", 3600.0)  # a slow look would not end while this test may run
    guard = HostGuard(read=Growing(4e9))
    guard._sample()
    guard._sample()
    assert guard.share() < 0.5
    assert guard._pause() is False


def test_while_memory_grows_there_are_more_looks_than_samples() -> None:
    looks: list[float] = []
    growing = Growing(3e9)
    growing.at_s = 1.0  # 3 GB of 4 GiB: armed
    guard = HostGuard(read=growing, on_growth=lambda: looks.append(growing.at_s))
    guard._sample()
    assert (guard._pause(), looks) == (False, [])  # nothing is known of growth yet
    guard._sample()
    assert (guard._pause(), len(looks)) == (False, 9)
    guard.stop()
    assert (guard._pause(), len(looks)) == (True, 9)


def test_a_process_that_stays_where_it_is_continues() -> None:
    guard = HostGuard(read=lambda: MemoryReading(0.0, 3 * GIB, MemoryLimit(4 * GIB, "test"), 0))
    for _ in range(50):
        guard._sample()
    assert guard.action(1.0, 1.0) == Go()


def test_a_guard_that_cannot_read_does_not_end_the_run() -> None:
    def broken() -> MemoryReading:
        raise OSError("no /proc here")

    assert HostGuard(read=broken).action(1.0, 1.0) == Go()


def test_the_thread_samples_by_itself_and_stops_when_told() -> None:
    guard = HostGuard().start()
    first = guard.reading
    assert first is not None and first.limit.limit_bytes > 0
    guard.stop()
    assert guard._thread is not None and not guard._thread.is_alive()


def test_the_next_attempt_is_asked_for_less() -> None:
    assert smaller_settings(num_workers=8, prefetch=4) == {"num_workers": 4, "prefetch": 2}
    assert smaller_settings(num_workers=1, prefetch=1) == {"num_workers": 0, "prefetch": 1}


def test_free_heap_goes_back_to_the_system() -> None:
    status = Path("/proc/self/statm")
    held = [bytes(2000) for _ in range(50_000)]
    before = int(status.read_text().split()[1])
    del held[::1]
    trim_host_memory()
    assert int(status.read_text().split()[1]) < before


def eat(tmp_path: Path, *, limit: str, save_mb: int) -> tuple[int, str]:
    """Exit code and output of one guarded eater under a limit."""
    (tmp_path / "attempts" / "001").mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "JACKLINE_RUN_DIR": str(tmp_path), "JACKLINE_ATTEMPT": "1", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(EATER), str(tmp_path / "checkpoint"), str(save_mb)]
    with memory_cgroup(limit) as group:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as eater:
            assert eater.stdin is not None and eater.stdout is not None
            assert eater.stdout.readline() == "ready\n"
            (group / "cgroup.procs").write_text(str(eater.pid))
            output, _ = eater.communicate("go\n", timeout=HANGS_S)
        return eater.returncode, output


def assert_saved(tmp_path: Path, code: int, output: str, save_mb: int) -> None:
    assert code == 75, output
    assert (tmp_path / "checkpoint").stat().st_size == save_mb * 2**20
    intent = json.loads((tmp_path / "attempts" / "001" / "intent.json").read_text())
    assert intent["restart"] is True
    assert intent["settings"] == {"num_workers": 2, "prefetch": 2}
    assert intent["why"] in output


def test_a_process_that_eats_its_memory_saves_and_leaves_before_the_kernel_kills_it(tmp_path: Path) -> None:
    try:
        code, output = eat(tmp_path, limit="1G", save_mb=16)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert_saved(tmp_path, code, output, 16)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_ten_of_ten_eaters_of_200_mb_a_second_under_4_gb_leave_with_75(tmp_path: Path, number: int) -> None:
    try:
        code, output = eat(tmp_path, limit="4G", save_mb=128)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert_saved(tmp_path, code, output, 128)
