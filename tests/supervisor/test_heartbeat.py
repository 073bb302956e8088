"""When a silent run is spoken for, and in which words."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from jackline.rundir.records.supervisor import SupervisorRecord
from jackline.supervisor.attempt.heartbeat import HeartbeatNotes, heartbeat_is_due, heartbeat_line
from jackline.supervisor.output.reader import LogWriter

STATE: dict[str, Any] = {
    "at_s": 1072.0,
    "started_at_s": 1000.0,
    "silent_s": 30.0,
    "cpu_cores": 1.02,
    "disk_bytes_per_s": 3 << 20,
    "net_bytes_per_s": 100,
    "memory": {"tree_rss_bytes": 1288490188, "limit_bytes": 16106127360},
    "now": {"what": "importing torch", "file": "/home/a/model.py", "line": 3, "source": "import torch"},
    "verdict": {"kind": "PROGRESS", "for_s": 2.0},
}


def line(state: dict[str, Any], width: int | None = None) -> str:
    return heartbeat_line(SupervisorRecord.from_json(state), width=width)


def spoken_at(silence_s: float) -> list[float]:
    """The seconds of one silence at which a line is printed, looked at ten times a second."""
    times: list[float] = []
    for tenth in range(int(silence_s * 10) + 1):
        silent_s = tenth / 10
        if heartbeat_is_due(silent_s, times[-1] if times else None, first_after_s=2.0):
            times.append(silent_s)
    return times


def test_the_first_line_comes_after_two_seconds_then_less_than_ten_apart() -> None:
    assert spoken_at(45.0) == [2.0, 11.0, 20.0, 29.0, 38.0]


def test_after_ten_minutes_a_line_a_minute_is_enough() -> None:
    times = spoken_at(900.0)
    gaps = {round(after - before, 1) for before, after in pairwise(times)}
    assert gaps == {9.0, 58.0}
    assert max(times) > 840.0


def test_the_line_says_what_where_and_how_much() -> None:
    assert line(STATE) == (
        "1 min 12 s  importing torch  model.py:3 `import torch`  cpu 1.0  ram 1.2 GiB of 15.0 GiB  disk 3.0 MiB/s"
    )


def test_an_alarm_and_progress_come_first() -> None:
    state = {
        **STATE,
        "verdict": {"kind": "STUCK", "for_s": 61.0},
        "progress": {"phase": "epoch 1", "done": 45, "total": 100, "eta_s": 70.0},
    }
    assert line(state).startswith("1 min 12 s  STUCK for 1 min 1 s  epoch 1 45 %, 1 min 10 s left  importing")


def test_a_line_is_cut_to_the_screen() -> None:
    assert line(STATE, width=20) == "1 min 12 s  importi…"


def test_a_state_with_nothing_in_it_still_makes_a_line() -> None:
    assert line({}) == "0.0 s  running  cpu 0.0"


def test_the_log_gets_a_line_again_after_each_silence(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "out.log")
    notes = HeartbeatNotes(log, quiet_after_s=2.0)
    for silent_s in (0.0, 1.0, 2.0, 3.0, 0.5, 1.0, 2.5):
        notes.poll(SupervisorRecord.from_json({**STATE, "silent_s": silent_s}), 0.0)
    log.close()
    assert len((tmp_path / "out.log").read_text().splitlines()) == 2


def test_pages_that_workers_share_are_counted_once_as_in_status_and_at_the_end() -> None:
    memory = {"tree_rss_bytes": 14 << 30, "own_bytes": 3 << 30, "limit_bytes": 15 << 30}
    assert "ram 3.0 GiB of 15.0 GiB" in line({**STATE, "memory": memory})
