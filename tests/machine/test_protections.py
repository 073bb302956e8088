"""What Jackline can do on a machine is tried, and what it cannot is said with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.machine import protections
from jackline.machine.protections import (
    find_libstdbuf,
    find_py_spy,
    has_capability,
    read_protections,
    try_reading_a_process,
)
from jackline.machine.readings import Protection
from tests.deadline import HANGS_S

NAMES = ["py-spy", "ptrace", "oom counters", "kernel log", "pss", "shared memory", "line buffering", "gpu"]


def test_every_protection_is_listed_and_one_that_is_off_says_why() -> None:
    found = read_protections()
    assert [protection.name for protection in found] == NAMES
    assert all(protection.why for protection in found)


def test_reading_somebody_elses_process_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    code = (
        "import os, sys\nfrom jackline.machine.protections import _TRY_READ\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "exec(_TRY_READ)"
    )
    tried = [sys.executable, "-c", code, str(os.getpid())]
    done = subprocess.run(tried, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("PermissionError: [Errno 13] Permission denied: '/proc/")


def test_where_py_spy_works_reading_a_process_works(tmp_path: Path) -> None:
    program = find_py_spy()
    if program is None:
        pytest.skip("py-spy is not installed")
    target = subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"],
                              stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert target.stdout is not None
        target.stdout.readline()
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(target.pid)], capture_output=True, timeout=HANGS_S
        )
    finally:
        target.kill()
        target.communicate()
    assert (done.returncode == 0) == (try_reading_a_process() is None)


def test_a_refusal_names_yama_when_it_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protections, "try_reading_a_process", lambda: "PermissionError: [Errno 13] Permission denied")
    monkeypatch.setattr(protections, "has_capability", lambda number: False)
    monkeypatch.setattr(protections, "read_int", lambda path: 1)
    assert protections._ptrace() == Protection(
        "ptrace",
        False,
        "kernel.yama.ptrace_scope is 1 and CAP_SYS_PTRACE is missing",
        "stacks come through a signal instead; in Docker `--cap-add=SYS_PTRACE` gives the right",
    )


def test_small_shared_memory_is_a_protection_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protections, "shm_free_bytes", lambda: 64 * 2**20)
    found = protections._shared_memory()
    assert not found.is_on
    assert found.why == "/dev/shm has 64.0 MiB free"
    assert found.hint == "in Docker `--shm-size=8g`; else num_workers=0"


def test_the_library_for_line_buffering_really_makes_c_programs_write_lines() -> None:
    library = find_libstdbuf()
    if library is None:
        pytest.skip("libstdbuf.so is not installed")
    # `tr` is a C program that writes whole buffers to a pipe; with the library its line comes while it still reads.
    program = subprocess.Popen(
        ["tr", "a", "b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "LD_PRELOAD": library, "_STDBUF_O": "L"},
    )
    try:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(b"aaa\n")
        program.stdin.flush()
        assert program.stdout.readline() == b"bbb\n"
    finally:
        program.kill()
        program.communicate()


def test_capabilities_are_read() -> None:
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    bits = int(effective.split()[1], 16)
    assert [has_capability(number) for number in range(5)] == [bool(bits >> number & 1) for number in range(5)]
