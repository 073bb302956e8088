"""What is read from a run directory after a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.diagnosis.deaths.collect import oom_delta, read_fault_text, tail_lines
from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.machine.readings import OomCounters
from tests.deadline import HANGS_S
from tests.diagnosis.deaths import evidence


def test_the_tail_is_what_the_command_wrote_without_stamps_and_notes(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text(
        "2026-11-15T02:18:34Z epoch 1\n"
        "2026-11-15T02:18:35.250Z [jackline] silent for 2 s: importing torch\n"
        "2026-11-15T02:18:36Z   indented\n"
        "2026-11-15T02:18:36Z err| from stderr\n"
        "2026-11-15T02:18:37Z 2026-01-01 00:00:00 the script's own stamp stays\n"
        "2026-11-15T02:18:38Z \n"
    )
    assert tail_lines(log, 10) == (
        "epoch 1",
        "  indented",
        "from stderr",
        "2026-01-01 00:00:00 the script's own stamp stays",
        "",
    )
    assert tail_lines(log, 2) == ("2026-01-01 00:00:00 the script's own stamp stays", "")
    assert tail_lines(log, 0) == ()


def test_the_tail_begins_with_the_newest_attempt(tmp_path: Path) -> None:
    """A second attempt that ended without a word was explained by the traceback of the first."""
    log = tmp_path / "out.log"
    first = "2026-11-15T02:18:34.1Z [jackline] attempt 1: python train.py\n2026-11-15T02:18:34.2Z ValueError: old\n"
    second = "2026-11-15T02:18:39.1Z [jackline] attempt 2 has started\n"
    log.write_text(first + second)
    assert tail_lines(log, 10) == ()
    log.write_text(
        first + second + "2026-11-15T02:18:39.5Z new\n2026-11-15T02:18:39.5Z attempt 3: a line of its own\n"
    )
    assert tail_lines(log, 10) == ("new", "attempt 3: a line of its own")
    log.write_text(first)
    assert tail_lines(log, 10) == ("ValueError: old",)


def test_the_stamps_are_those_the_log_is_written_with(tmp_path: Path) -> None:
    from jackline.supervisor.output.log_writer import LogWriter

    log = LogWriter(tmp_path / "out.log")
    log.write(["Traceback (most recent call last):", "  x"], 1_800_000_000.5)
    log.note("a note", 1_800_000_001.0)
    log.close()
    assert tail_lines(tmp_path / "out.log", 10) == ("Traceback (most recent call last):", "  x")


def test_the_tail_of_a_huge_log_is_found_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("".join(f"2026-11-15T02:18:34Z line {number}\n" for number in range(50_000)))
    assert tail_lines(log, 3) == ("line 49997", "line 49998", "line 49999")
    assert len(tail_lines(log, 20_000)) == 20_000


def test_a_monstrous_line_is_cut_and_does_not_hide_the_others(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"2026-11-15T02:18:34Z first\n" + b"x" * 9_000_000 + b"\n2026-11-15T02:18:34Z last \xff\n")
    tail = tail_lines(log, 5)
    assert tail[-1] == "last \ufffd"
    assert all(len(line) <= 4000 for line in tail)


def test_without_a_log_there_is_no_tail(tmp_path: Path) -> None:
    assert tail_lines(tmp_path / "out.log", 5) == ()


def test_kills_are_counted_between_two_readings() -> None:
    before, after = OomCounters(1, "/job", 7), OomCounters(2, "/job", 9)
    assert oom_delta(before, after) == (1, 2)


def test_a_counter_that_could_not_be_read_is_not_zero() -> None:
    assert oom_delta(OomCounters(None, None, 7), OomCounters(None, None, None)) == (None, None)


def test_counters_of_two_different_cgroups_are_not_compared() -> None:
    assert oom_delta(OomCounters(5, "/a", 1), OomCounters(0, "/b", 2)) == (None, 1)


CRASH = """\
import faulthandler, os, signal, sys, threading

def crash():
    os.kill(os.getpid(), signal.{signal})  # HERE

file = open(sys.argv[1] + f"/fh.{{os.getpid()}}", "a")
faulthandler.enable(file)
faulthandler.dump_traceback(file)  # one that was asked for, while it lived
threading.Thread(target=threading.Event().wait, daemon=True).start()
crash()
"""


@pytest.mark.parametrize(("name", "cause"), [("SIGSEGV", "segfault"), ("SIGABRT", "abort"), ("SIGBUS", "bus_error")])
def test_a_real_crash_is_placed_by_what_faulthandler_wrote(tmp_path: Path, name: str, cause: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(CRASH.format(signal=name))
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.DEVNULL)
    assert process.wait(HANGS_S) == -getattr(signal, name)
    text = read_fault_text(tmp_path, [process.pid, 1])
    assert text.startswith("Fatal Python error: ")
    assert text.count("in crash") == 1  # not the dump that was asked for
    found = diagnose(evidence(signal=int(getattr(signal, name)), fault_text=text))[0]
    assert found.cause == cause
    assert found.place is not None
    assert (found.place.place, found.place.function) == (f"{script}:4", "crash")
    assert found.place.source.endswith("# HERE")


def test_dumps_that_were_asked_for_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "fh.7").write_text('Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n')
    assert read_fault_text(tmp_path, [7, 8]) == ""


def test_of_two_crashed_processes_the_later_one_is_told(tmp_path: Path) -> None:
    for pid, at_s in ((7, 1000), (8, 900)):
        path = tmp_path / f"fh.{pid}"
        path.write_text(f"Fatal Python error: Aborted\n\nCurrent thread 0x{pid} (most recent call first):\n")
        os.utime(path, (at_s, at_s))
    assert "0x7" in read_fault_text(tmp_path, [7, 8])
