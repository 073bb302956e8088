"""Limits and use of host memory: real cgroups and rlimits where they can be made, files on disk for other kernels."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

from jackline.machine.cgroups import is_frozen
from jackline.machine.memory import effective_limit, read_memory, read_oom_counters, read_pss, shm_free_bytes
from jackline.machine.readings import MemoryLimit, OomCounters
from tests.deadline import HANGS_S
from tests.machine.conftest import Start, TestCgroup, wait_until

GIB = 2**30
MIB = 2**20
SLEEPS = "print('ready'); import time; time.sleep(600)"
NO_LIMIT_V1 = 9223372036854771712
MEMINFO = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   60536000 kB\nBuffers: 1 kB\n"
MEM_TOTAL = 65536000 * 1024
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max cpu time              unlimited            unlimited            seconds   \n"
    "Max data size             {data:<20} unlimited            bytes     \n"
    "Max address space         {space:<20} unlimited            bytes     \n"
)
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
HYBRID_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if not str(text).endswith("\n") else str(text))
    return root


def machine(root: Path, cgroup: str, mounts: str, files: dict[str, object]) -> Path:
    """A fake root with the process 7 in some cgroup."""
    proc = {
        f"proc/{pid}/{name}": text
        for pid in ("7", "self")
        for name, text in (
            ("cgroup", cgroup),
            ("mountinfo", mounts),
            ("limits", LIMITS.format(data="unlimited", space="unlimited")),
        )
    }
    return write(root, {"proc/meminfo": MEMINFO, **proc, **files})


def test_version_2_takes_the_smallest_of_all_ancestors(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/user.slice/job/step", V2_MOUNT, {
        "sys/fs/cgroup/memory.stat": "anon 1",
        "sys/fs/cgroup/user.slice/memory.max": 32 * GIB,
        "sys/fs/cgroup/user.slice/job/memory.max": 8 * GIB,
        "sys/fs/cgroup/user.slice/job/memory.current": 5 * GIB,
        "sys/fs/cgroup/user.slice/job/memory.stat": f"anon {GIB}\nfile {4 * GIB}\ninactive_file {3 * GIB}\n",
        "sys/fs/cgroup/user.slice/job/step/memory.max": "max",
        "sys/fs/cgroup/user.slice/job/step/memory.current": GIB,
    })  # fmt: skip
    limit = effective_limit(7, root=root)
    assert limit == MemoryLimit(8 * GIB, "cgroup /sys/fs/cgroup/user.slice/job")
    # Use is measured where the limit is, and cache that the kernel gives back at once is not used.
    assert read_memory([7], root=root).used_bytes == 2 * GIB


def test_a_frozen_cgroup_of_version_2_is_known(tmp_path: Path) -> None:
    events = "sys/fs/cgroup/box/cgroup.events"
    for at, number in enumerate((1, 0)):
        root = machine(tmp_path / str(at), "0::/box", V2_MOUNT, {events: f"populated 1\nfrozen {number}"})
        assert is_frozen(7, root) == (number == 1)


def test_version_2_without_a_number_is_bounded_by_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", V2_MOUNT, {"sys/fs/cgroup/memory.max": "max"})
    assert effective_limit(7, root=root) == MemoryLimit(MEM_TOTAL, "MemTotal")
    assert read_memory([7], root=root).used_bytes == 5000000 * 1024


def test_a_cgroup_limit_above_the_machine_does_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/big", V2_MOUNT, {"sys/fs/cgroup/big/memory.max": 999 * GIB})
    assert effective_limit(7, root=root).source == "MemTotal"


def test_a_limit_of_zero_bytes_is_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/shut", V2_MOUNT, {"sys/fs/cgroup/shut/memory.max": 0})
    assert effective_limit(7, root=root) == MemoryLimit(0, "cgroup /sys/fs/cgroup/shut")


def test_version_1_names_the_ancestor_that_holds_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/job/step\n0::/\n", V1_MOUNT.format(root="/"), {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 4 * GIB,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/job/step/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/job/step/memory.stat": f"hierarchical_memory_limit {4 * GIB}\n",
    })  # fmt: skip
    assert effective_limit(7, root=root) == MemoryLimit(4 * GIB, "cgroup /sys/fs/cgroup/memory/job")
    assert read_memory([7], root=root).used_bytes == 2 * GIB


def test_version_1_in_a_container_finds_its_own_folder_at_the_mount_point(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/docker/abc\n", V1_MOUNT.format(root="/docker/abc"), {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
    })  # fmt: skip
    assert effective_limit(7, root=root) == MemoryLimit(2 * GIB, "cgroup /sys/fs/cgroup/memory")


def test_version_1_knows_a_limit_of_an_ancestor_that_is_not_mounted(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/docker/abc\n", V1_MOUNT.format(root="/docker/abc"), {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {3 * GIB}\n",
    })  # fmt: skip
    assert effective_limit(7, root=root) == MemoryLimit(3 * GIB, "cgroup /sys/fs/cgroup/memory")


def test_version_1_without_hierarchy_leaves_the_parents_limit_out(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/job/step\n", V1_MOUNT.format(root="/"), {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": GIB,
        "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": 6 * GIB,
        "sys/fs/cgroup/memory/job/step/memory.stat": f"hierarchical_memory_limit {6 * GIB}\n",
    })  # fmt: skip
    assert effective_limit(7, root=root) == MemoryLimit(6 * GIB, "cgroup /sys/fs/cgroup/memory/job/step")


def test_a_hybrid_machine_has_its_memory_in_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, "2:cpu,cpuacct:/\n4:memory:/job\n0::/job\n", HYBRID_MOUNTS + V1_MOUNT.format(root="/"), {
        "sys/fs/cgroup/unified/job/cgroup.procs": "7",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 4 * GIB,
        "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        "proc/vmstat": "nr_free_pages 1\noom_kill 9\n",
    })  # fmt: skip
    assert effective_limit(7, root=root) == MemoryLimit(4 * GIB, "cgroup /sys/fs/cgroup/memory/job")
    assert read_oom_counters(7, root=root) == OomCounters(3, "/sys/fs/cgroup/memory/job", 9)


def test_a_cgroup_namespace_that_points_outside_falls_back_to_the_mount_point(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/../../other", V2_MOUNT, {"sys/fs/cgroup/memory.max": 5 * GIB})
    assert effective_limit(7, root=root) == MemoryLimit(5 * GIB, "cgroup /sys/fs/cgroup")


def test_the_nearest_cgroup_that_counts_kills_is_read(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a/b", V2_MOUNT, {
        "sys/fs/cgroup/a/memory.events": "low 0\nhigh 0\nmax 35\noom 1\noom_kill 2\noom_group_kill 0\n",
        "sys/fs/cgroup/a/b/cgroup.procs": "7",
    })  # fmt: skip
    found = read_oom_counters(7, root=root)
    assert found == OomCounters(2, "/sys/fs/cgroup/a", None)
    # A dead process has no cgroup: the second reading goes to the one known from the first.
    assert read_oom_counters(4711, cgroup=found.cgroup, root=root) == found


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert effective_limit(7, root=tmp_path).source == "none known"
    assert read_oom_counters(7, root=tmp_path) == OomCounters(None, None, None)
    assert read_memory([7], root=tmp_path).used_bytes == 0


def test_rlimits_of_the_process_count_and_its_own_size_is_the_use(start: Start) -> None:
    def limit_itself() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (700 * MIB, 700 * MIB))

    child = start(SLEEPS, preexec_fn=limit_itself)
    reading = read_memory([child.pid])
    assert reading.limit == MemoryLimit(700 * MIB, "RLIMIT_DATA")
    status = Path(f"/proc/{child.pid}/status").read_text()
    data_kib = int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])
    assert reading.used_bytes == data_kib * 1024


def test_this_machine_has_a_limit_and_use_below_it() -> None:
    reading = read_memory([os.getpid()], with_pss=True)
    assert 0 < reading.used_bytes < reading.limit.limit_bytes
    assert reading.tree_rss_bytes > 0
    assert reading.tree_pss_bytes is not None
    assert 0 < reading.tree_pss_bytes <= reading.tree_rss_bytes


def test_pages_shared_by_forked_workers_count_once_in_pss(start: Start) -> None:
    code = (
        "import os, signal\n"
        "block = bytearray(os.urandom(100)) * 800_000\n"  # 80 MB
        "pids = []\n"
        "for _ in range(3):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: signal.pause()\n"
        "    pids.append(pid)\n"
        "print('ready', flush=True); os.read(0, 1)\n"
        "for pid in pids: os.kill(pid, 9)"
    )
    child = start(code, stdin=subprocess.PIPE)
    listed = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    pids = [child.pid, *map(int, listed)]
    reading = read_memory(pids, with_pss=True)
    assert reading.tree_pss_bytes is not None
    assert reading.tree_rss_bytes > 4 * 75 * MIB
    assert reading.tree_pss_bytes < 2 * 75 * MIB
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)


def test_pss_of_a_process_that_is_gone_is_unknown() -> None:
    assert read_pss(2**22 - 1) is None


def test_a_real_cgroup_limits_a_process_and_its_cache_is_not_use(
    start: Start, cgroup: TestCgroup, tmp_path: Path
) -> None:
    cgroup.set_limit(400 * MIB)
    code = cgroup.join_code() + (
        "block = bytearray(64 * 2**20)\n"
        f"f = open({str(tmp_path / 'cache')!r}, 'wb')\n"
        "for _ in range(128): f.write(bytes(2**20))\n"
        "f.flush(); import os; os.fsync(f.fileno())\n"
    )
    child = start(code + SLEEPS)
    reading = read_memory([child.pid])
    assert reading.limit == MemoryLimit(400 * MIB, f"cgroup {cgroup.path}")
    assert 64 * MIB <= reading.used_bytes < 128 * MIB


def test_a_real_kill_by_the_kernel_is_counted_in_the_cgroup(start: Start, cgroup: TestCgroup) -> None:
    cgroup.set_limit(100 * MIB)
    child = start(
        cgroup.join_code() + "print('ready'); input(); block = bytearray(400 * 2**20)", stdin=subprocess.PIPE
    )
    before = read_oom_counters(child.pid)
    assert before.cgroup == str(cgroup.path)
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    assert child.wait(HANGS_S) == -signal.SIGKILL
    after = wait_until(
        lambda: (c := read_oom_counters(child.pid, cgroup=before.cgroup)).cgroup_kills != before.cgroup_kills and c,
        "a kill",
    )
    assert (after.cgroup_kills or 0) - (before.cgroup_kills or 0) == 1
    if before.machine_kills is not None:
        assert (after.machine_kills or 0) > before.machine_kills


def test_a_persons_kill_is_not_counted(start: Start, cgroup: TestCgroup) -> None:
    child = start(cgroup.join_code() + SLEEPS)
    before = read_oom_counters(child.pid)
    child.kill()
    child.wait()
    after = read_oom_counters(child.pid, cgroup=before.cgroup)
    assert after.cgroup_kills == before.cgroup_kills == 0


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert shm_free_bytes(str(tmp_path / "nowhere")) is None
    free = shm_free_bytes(str(tmp_path))
    assert free is not None
    assert free > 0
