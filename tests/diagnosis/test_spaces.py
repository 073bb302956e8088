"""Full disks by any library, memory that leaks or jumps, exit codes, log files: what the evidence says."""

from __future__ import annotations

import signal
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import DiskSpace, Evidence, GpuGrowth
from jackline.diagnosis.deaths.report import death_text
from jackline.diagnosis.frames import Frame
from tests.diagnosis.deaths import GIB, best, evidence, run_script, said

FULL = DiskSpace("/data/out", 0, 10 * GIB)
ROOMY = DiskSpace("/data/out", 100 * GIB, 200 * GIB)
GROWING = Frame("load", "/home/me/data.py", 42, "rows.append(parse(line))", True)


def traceback(error: str) -> str:
    return f"""
    Traceback (most recent call last):
      File "/home/me/train.py", line 90, in <module>
        save(model)
      File "/home/me/train.py", line 41, in save
        write(state, path)
    {error}
    """


# What libraries print on a disk without space: torch (three ways), numpy, HDF5, safetensors, Arrow, SQLite, a quota.
SAID_BY_NAME = [
    "OSError: [Errno 28] No space left on device",
    "OSError: [Errno 122] Disk quota exceeded: '/data/out/last.pt'",
    "safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
    "OSError: [Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device",
    "OSError: Can't synchronously write data (file write failed: time = Mon, filename = 'x.h5', file descriptor = 3, "
    "errno = 28, error message = 'No space left on device')",
    "sqlite3.OperationalError: database or disk is full",
]
SHORT_WRITES = [
    "RuntimeError: [enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data/7",
    "RuntimeError: basic_ios::clear: iostream error",
    "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0",
    "OSError: 1000000 requested and 524272 written",
    "sqlite3.OperationalError: disk I/O error",
]


@pytest.mark.parametrize("error", SAID_BY_NAME)
def test_a_full_disk_that_the_error_names_is_certain(error: str) -> None:
    found = best(said(traceback(error)))
    assert (found.cause, found.confidence) == ("disk_full", "certain")
    assert found.place is not None
    assert found.place.line == 41


@pytest.mark.parametrize("error", SHORT_WRITES)
def test_a_short_write_is_a_full_disk_where_the_disk_it_wrote_to_is_full(error: str) -> None:
    on_full = best(said(traceback(error), disks=(FULL,), disk_free_bytes=500 * GIB, disk_path="/runs"))
    assert (on_full.cause, on_full.confidence) == ("disk_full", "certain")
    assert "the disk of /data/out has 0 B of 10.0 GiB free now" in "\n".join(on_full.detail)
    unmeasured = best(said(traceback(error)))
    assert (unmeasured.cause, unmeasured.confidence) == ("disk_full", "not sure")
    assert best(said(traceback(error), disks=(ROOMY,))).cause == "own_exception"


def test_the_disk_that_was_written_to_counts_and_not_the_run_folders() -> None:
    found = best(said(traceback(SHORT_WRITES[0]), disks=(ROOMY,), disk_free_bytes=0, disk_path="/runs"))
    assert found.cause == "own_exception"
    assert "a full disk, a used-up quota" in found.hint


def test_a_real_database_on_a_full_disk_says_what_the_rule_reads() -> None:
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection = sqlite3.connect(":memory:")
        connection.execute("pragma max_page_count = 2")
        connection.execute("create table t (x)")
        connection.execute("insert into t values (zeroblob(100000))")
    assert str(caught.value) in SAID_BY_NAME[-1]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_where_a_growing_line_is_known_the_advice_points_there() -> None:
    found = best(evidence(signal=9, oom_kills_in_cgroup=1, peak_memory_bytes=8 * GIB, growing_frame=GROWING))
    assert found.cause == "kernel_oom"
    assert found.hint.startswith("host RAM, not GPU memory, grew at data.py:42")
    assert "batch" not in found.hint.partition(";")[0]


def test_without_one_the_advice_still_says_which_memory_it_was() -> None:
    found = best(evidence(signal=9, oom_kills_in_cgroup=1, peak_memory_bytes=8 * GIB))
    assert found.hint.startswith("this is host RAM, not GPU memory")


def test_a_sum_over_processes_never_passes_the_limit() -> None:
    text = death_text(diagnose(evidence(signal=9, peak_memory_bytes=9 * GIB)), evidence(signal=9))
    assert "peak memory 8.0 GiB of 8.0 GiB RAM" in text


CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of "
    "139.80 GiB of which 131.00 GiB is free. {cap}Of the allocated memory 8.11 GiB is allocated by PyTorch, and "
    "12.00 MiB is reserved by PyTorch but unallocated."
)


def test_a_cap_of_the_process_is_the_limit_and_not_the_free_memory() -> None:
    found = best(said(traceback(CUDA.format(cap="8.39 GiB allowed; "))))
    assert found.title == (
        "ran out of GPU memory at train.py:41: needed 128 MiB, and this process may use only 8.4 GiB"
    )
    assert "set_per_process_memory_fraction" in found.hint


def test_a_steady_growth_of_gpu_memory_is_a_leak_and_names_lines_that_may_keep_it() -> None:
    keeps = Frame("", "/home/me/train.py", 44, "losses.append(loss)", True)
    growth = GpuGrowth(7 * GIB, 60.0, 7 * GIB / 60)
    found = best(said(traceback(CUDA.format(cap="")), gpu_growth=growth, keeping_frames=(keeps,)))
    assert "grew steadily until the end, by 7.0 GiB in 1 min" in "\n".join(found.detail)
    assert "/home/me/train.py:44: losses.append(loss)" in "\n".join(found.detail)
    assert "loss.item()" in found.hint
    assert "only delay it" in found.hint


def test_one_large_allocation_is_not_a_leak() -> None:
    found = best(said(traceback(CUDA.format(cap=""))))
    assert "leak" not in "\n".join(found.detail)
    assert "batch" in found.hint


# -- exit codes, logs, recursion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        (247, "killed_by_someone", "exit code 247 = 256 - 9: a launcher passed on"),
        (245, "segfault", "exit code 245 = 256 - 11"),
        (137, "killed_by_someone", "exit code 137 = 128 + 9"),
        (143, "preempted", "exit code 143 = 128 + 15"),
        (255, "exit_code", "exited with -1"),
        (3, "exit_code", "exit code 3; its output names no known error"),
    ],
)
def test_an_exit_code_that_stands_for_something_is_explained(code: int, cause: str, words: str) -> None:
    found = said("step 5", exit_code=code)
    assert best(found).cause == cause
    assert words in death_text(diagnose(found), found)
    assert best(found).confidence != "certain"


def test_a_launcher_that_passes_a_returncode_on_is_understood(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import subprocess, sys
        child = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        sys.exit(child.returncode)
        """,
    )
    assert found.exit_code == 247
    assert best(found).cause == "killed_by_someone"


def test_the_command_timeout_is_recognised() -> None:
    seen = best(said("step 5", exit_code=124, command="timeout 10 python train.py"))
    assert (seen.cause, seen.confidence) == ("timed_out", "likely")
    assert seen.title == "`timeout` ended it after 41 s: its time limit was over"
    assert best(said("step 5", exit_code=124)).confidence == "not sure"


def test_an_error_that_is_only_in_the_log_file_is_found() -> None:
    log = tuple(traceback("ValueError: bad shape (3, 4)").strip("\n").splitlines())
    log = tuple(line.removeprefix("    ") for line in log)
    found = said("starting", log_path="/home/me/logs/train.log", log_tail=log, is_log_its_own=True)
    assert best(found).title == "ValueError: bad shape (3, 4) (train.py:41)"
    assert best(found).confidence == "likely"
    assert "its log does: /home/me/logs/train.log" in best(found).detail[0]
    logged = said(
        "starting", log_path="/x/run.log", log_tail=("10:00 INFO hello", "10:01 ERROR no such table: users")
    )
    assert "no such table: users" in best(logged).title
    assert best(logged).confidence == "not sure"


def test_the_output_comes_before_the_log_file() -> None:
    found = said(traceback("KeyError: 'x'"), log_path="/x/run.log", log_tail=("ERROR something else",))
    assert best(found).title.startswith("KeyError: 'x'")


ENDLESS = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n" + "\n".join(
    ['  File "/home/me/train.py", line 12 in walk'] * 100 + ["  ..."]
)


def test_a_crash_of_endless_calls_is_not_blamed_on_a_package() -> None:
    found = best(evidence(signal=signal.SIGSEGV, fault_text=ENDLESS))
    assert found.title == "it ran out of stack: walk calls itself without end at train.py:12"
    assert "recursion" in found.hint
    assert not found.is_retryable


def test_endless_calls_that_python_stops_get_the_same_advice(tmp_path: Path) -> None:
    found = run_script(tmp_path, "def f(n):\n    return f(n + 1)\nf(0)")
    assert best(found).title.startswith("RecursionError")
    assert "the condition that ends the recursion" in best(found).hint


def test_evidence_of_a_newer_kind_survives_the_file() -> None:
    whole = evidence(disks=(FULL,), gpu_growth=GpuGrowth(5, 1.0, 5.0), keeping_frames=(GROWING,), log_tail=("a",))
    import json

    assert Evidence.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_a_copy_names_where_it_was_written_to() -> None:
    found = best(said(traceback("OSError: [Errno 28] No space left on device: '/data/in.bin' -> 'copy.bin'")))
    assert found.title.endswith("it could not write copy.bin")


def test_a_bus_error_on_a_full_disk_that_it_wrote_to_says_so() -> None:
    disks = (ROOMY, replace(FULL, path="/mnt/out"))
    found = best(evidence(signal=7, shm_free_bytes=GIB, disks=disks, disk_free_bytes=500 * GIB, disk_path="/runs"))
    assert (found.cause, "/mnt/out" in found.title) == ("bus_error", True)


def test_why_a_command_of_the_script_failed_is_read_from_what_it_printed() -> None:
    error = traceback("subprocess.CalledProcessError: Command 'head' returned non-zero exit status 1.")
    found = best(said(f"    head: error writing 'standard output': No space left on device{error}"))
    assert (found.cause, found.confidence, found.place is not None) == ("disk_full", "likely", True)


def test_a_traceback_of_which_only_the_end_is_known_is_read() -> None:
    """Two functions that call each other print 2,000 lines."""
    frame = '  File "/me/a.py", line 3, in odd\n    return even(n - 1)\n'
    text = f"    return odd(n - 1)\n{99 * frame}RecursionError: maximum recursion depth exceeded\n"
    found = best(evidence(exit_code=1, output_tail=tuple(text.splitlines())))
    assert (found.cause, found.confidence) == ("own_exception", "certain")
    assert "recursion" in found.hint
