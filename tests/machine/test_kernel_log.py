"""The kernel's words about kills: real ones where a memory cgroup can be made, known texts of other kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from jackline.machine import kernel_log
from jackline.machine.kernel_log import can_read_kernel_log, find_kills, read_kernel_kills
from jackline.machine.readings import KernelKill
from tests.deadline import HANGS_S
from tests.machine.conftest import Start, TestCgroup, wait_until

SUMMARY = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,task_memcg=/job,"
    "task=python,pid=4242,uid=0"
)
KILLED = (
    "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1048576kB, anon-rss:819200kB, file-rss:4kB, "
    "shmem-rss:0kB, UID:0 pgtables:1700kB oom_score_adj:0"
)


def test_two_lines_about_one_victim_are_one_kill() -> None:
    assert find_kills(["usb 1-1: new device", SUMMARY, KILLED]) == (KernelKill(4242, KILLED, True),)


def test_a_kill_for_want_of_machine_memory_is_not_a_cgroups() -> None:
    text = "Out of memory: Killed process 77 (python3) total-vm:9kB, anon-rss:8kB"
    assert find_kills([text]) == (KernelKill(77, text, False),)
    with_words = "Out of memory (oom_kill_allocating_task): Killed process 78 (python3)"
    assert find_kills([with_words]) == (KernelKill(78, with_words, False),)


def test_an_old_kernels_words_are_understood() -> None:
    text = "Memory cgroup out of memory: Kill process 5 (python) score 990 or sacrifice child"
    assert find_kills([text]) == (KernelKill(5, text, True),)


def test_a_summary_alone_is_enough() -> None:
    assert find_kills([SUMMARY]) == (KernelKill(4242, SUMMARY, True),)


def test_other_lines_are_no_kills() -> None:
    assert find_kills(["python invoked oom-killer: gfp_mask=0xcc0", "Killed by me", ""]) == ()


def die_of_memory(start: Start, cgroup: TestCgroup) -> int:
    cgroup.set_limit(60 * 2**20)
    child = start(cgroup.join_code() + "print('ready'); block = bytearray(300 * 2**20)")
    assert child.wait(HANGS_S) == -signal.SIGKILL
    return child.pid


@pytest.mark.parametrize("road", ["device", "dmesg"])
def test_a_real_kill_is_found_by_its_pid(
    start: Start, cgroup: TestCgroup, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    if not can_read_kernel_log():
        pytest.skip("the kernel log is not ours to read")
    if road == "dmesg":
        if subprocess.run(["sh", "-c", "dmesg -r > /dev/null 2>&1"]).returncode:
            pytest.skip("dmesg is not installed or not allowed")
        monkeypatch.setattr(kernel_log, "_from_device", lambda: None)
    began_s = time.time()
    pid = die_of_memory(start, cgroup)
    kill = wait_until(
        lambda: next((k for k in read_kernel_kills(began_s) if k.pid == pid), None), "a line with the pid"
    )
    assert kill.is_cgroup
    assert f"Killed process {pid}" in kill.text
    assert not any(old.pid == pid for old in read_kernel_kills(time.time() + 3600))


def test_a_log_that_is_not_ours_to_read_gives_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    code = (
        "import os\nfrom jackline.machine.kernel_log import read_kernel_kills, can_read_kernel_log\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(isinstance(read_kernel_kills(0), tuple), can_read_kernel_log() in (True, False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout == "True True\n", done.stderr


def test_without_device_and_dmesg_there_are_no_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_from_device", lambda most=1: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert read_kernel_kills(0) == ()
    assert not can_read_kernel_log()
