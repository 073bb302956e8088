"""Signs of life: rates and times from a fake clock, reports at most a second apart from a real one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from jackline.data.progress import Board, Progress, describe, ticking
from tests.deadline import HANGS_S


def test_a_rate_and_the_time_to_go_come_of_the_last_seconds() -> None:
    now_s = [0.0]
    board = Board(clock=lambda: now_s[0])
    board.set("tokenise", done=0, unit="B", detail="a.txt")
    board.set_total(4000)
    assert board.read() == Progress("tokenise", 0, 4000, "B", None, "a.txt")
    for at, done in [(1, 100), (2, 200), (20, 2000)]:
        now_s[0] = at
        board.set("tokenise", done=done)
        found = board.read()
    assert found.rate_per_s == 100
    assert found.eta_s == 20


def test_standing_still_is_said() -> None:
    now_s = [0.0]
    board = Board(clock=lambda: now_s[0])
    board.set("download", done=5, unit="B", detail="a.zst")
    now_s[0] = 4
    assert board.read().detail == "a.zst"
    now_s[0] = 12
    assert board.read().detail == "a.zst (no progress for 12 s)"
    board.set("download", done=6)
    assert board.read().detail == "a.zst"


def test_another_unit_starts_the_rate_anew() -> None:
    now_s = [0.0]
    board = Board(clock=lambda: now_s[0])
    board.set("list", done=5, unit="files")
    board.read()
    now_s[0] = 1
    board.set("tokenise", done=1 << 20, unit="B")
    assert board.read().rate_per_s is None


def test_a_report_reads_as_a_line() -> None:
    whole = Progress("tokenise", 12 << 20, 48 << 20, "B", 3 << 20, "os.py")
    assert describe(whole) == "tokenise 12.0 MiB of 48.0 MiB (25 %), 3.0 MiB/s, 12 s to go, os.py"
    assert describe(Progress("list", 0, None, "files")) == "list 0 files"
    assert describe(replace(whole, total=None)) == "tokenise 12.0 MiB, 3.0 MiB/s, os.py"


def test_a_report_survives_json() -> None:
    progress = Progress("wait", 3, 4, "B", 5.0, "the network")
    assert Progress.from_json(progress.to_json()) == progress


def test_a_long_call_does_not_silence_the_reports() -> None:
    seen: list[float] = []
    enough = threading.Event()

    def report(progress: Progress) -> None:
        seen.append(time.monotonic())
        if len(seen) >= 5:
            enough.set()

    with ticking(Board(report), every_s=0.02):
        assert enough.wait(HANGS_S)  # the main thread does nothing else all this time
    assert len(seen) >= 6
