"""What Jackline can and cannot do on this machine, found by trying.

Owns the list of protections and the text that says why one is off. Each is tried once, for `doctor` and for the
record of a run; nothing here is called in the supervisor's loop.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jackline.machine.gpu import watch as gpu
from jackline.machine.host import find_program
from jackline.machine.kernel_log import can_read_kernel_log
from jackline.machine.memory import read_oom_counters, read_pss, shm_free_bytes
from jackline.machine.procfs import read_int, read_text
from jackline.machine.readings import Protection
from jackline.units import format_bytes

_CAP_SYS_PTRACE = 19
# Docker's default. A DataLoader worker passes its batches through /dev/shm; a few 4K images do not fit.
_SMALL_SHM_BYTES = 64 * 2**20
_STDBUF_PLACES = (
    "/usr/libexec/coreutils/libstdbuf.so",
    "/usr/lib/coreutils/libstdbuf.so",
    "/usr/local/libexec/coreutils/libstdbuf.so",
    "/opt/homebrew/libexec/coreutils/libstdbuf.so",
)
_TRY_TIMEOUT_S = 5.0
# Opening another process's memory needs the same permission as py-spy. The reader is a sibling of the process that it
# reads, as py-spy is: with Yama a parent is allowed to read, but a sibling is not.
_TRY_READ = """
import sys
pid = sys.argv[1]
with open(f"/proc/{pid}/maps") as maps:
    start = int(maps.readline().split("-")[0], 16)
with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
    memory.seek(start)
    sys.exit(0 if memory.read(4) else 1)
"""


def read_protections() -> tuple[Protection, ...]:
    """Every protection, on or off. Takes about 0.1 s, because it starts two small processes."""
    return (
        _stacks(),
        _ptrace(),
        _oom_counters(),
        _kernel_log(),
        _pss(),
        _shared_memory(),
        _line_buffering(),
        _nvml(),
    )


def find_py_spy() -> str | None:
    """Look beside our own interpreter first, because that version was installed with Jackline."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else find_program("py-spy")


def find_libstdbuf() -> str | None:
    """The library that makes C programs write line by line (LD_PRELOAD with _STDBUF_O=L); None if not installed."""
    return next((path for path in _STDBUF_PLACES if os.path.isfile(path)), None)  # noqa: PTH113


def _stacks() -> Protection:
    program = find_py_spy()
    if program:
        return Protection("py-spy", True, program)
    return Protection("py-spy", False, "the program is not installed", "`pip install py-spy`")


def _ptrace() -> Protection:
    refusal = try_reading_a_process()
    if refusal is None:
        return Protection("ptrace", True, "memory of own processes can be read")
    return Protection(
        "ptrace",
        False,
        _why_no_ptrace(refusal),
        "stacks come through a signal instead; in Docker `--cap-add=SYS_PTRACE` gives the right",
    )


def try_reading_a_process() -> str | None:
    """Start a process and let a sibling read its memory. None when that works, else the error."""
    target = subprocess.Popen(
        [sys.executable, "-ISc", "input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = subprocess.run(
            [sys.executable, "-ISc", _TRY_READ, str(target.pid)],
            capture_output=True,
            text=True,
            timeout=_TRY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as problem:
        return str(problem)
    finally:
        target.kill()
        target.communicate()
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no answer"])[-1]


def _why_no_ptrace(refusal: str) -> str:
    scope = read_int("/proc/sys/kernel/yama/ptrace_scope")
    if has_capability(_CAP_SYS_PTRACE):
        return refusal
    if scope:
        return f"kernel.yama.ptrace_scope is {scope} and CAP_SYS_PTRACE is missing"
    return f"{refusal}; CAP_SYS_PTRACE is missing"


def has_capability(number: int) -> bool:
    for line in (read_text("/proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _oom_counters() -> Protection:
    counters = read_oom_counters()
    if counters.cgroup_kills is not None:
        return Protection("oom counters", True, f"of {counters.cgroup}")
    if counters.machine_kills is not None:
        return Protection("oom counters", True, "of the whole machine only (/proc/vmstat)")
    return Protection(
        "oom counters",
        False,
        "neither a memory cgroup nor /proc/vmstat counts kills",
        "an out-of-memory kill will be told as likely, not certain",
    )


def _kernel_log() -> Protection:
    if can_read_kernel_log():
        return Protection("kernel log", True, "out-of-memory kills can be read by pid")
    return Protection(
        "kernel log",
        False,
        "/dev/kmsg and dmesg are not ours to read",
        "out-of-memory kills are told from counters alone",
    )


def _pss() -> Protection:
    if read_pss(os.getpid()) is not None:
        return Protection("pss", True, "pages shared by workers are counted once")
    return Protection(
        "pss", False, "/proc/PID/smaps_rollup is not readable", "memory of workers is counted more than once"
    )


def _shared_memory() -> Protection:
    free = shm_free_bytes()
    if free is None:
        return Protection("shared memory", False, "there is no /dev/shm", "use num_workers=0")
    if free <= _SMALL_SHM_BYTES:
        return Protection(
            "shared memory",
            False,
            f"/dev/shm has {format_bytes(free)} free",
            "in Docker `--shm-size=8g`; else num_workers=0",
        )
    return Protection("shared memory", True, f"/dev/shm has {format_bytes(free)} free")


def _line_buffering() -> Protection:
    path = find_libstdbuf()
    if path:
        return Protection("line buffering", True, f"of C programs, by {path}")
    return Protection(
        "line buffering",
        False,
        "libstdbuf.so is not installed",
        "output of C programs may come late; `--tty` gives them a terminal",
    )


def _nvml() -> Protection:
    source = gpu.find_source()
    gpus = gpu.read_gpus(deadline_s=3.0) if source else ()
    if gpus:
        return Protection("gpu", True, f"{len(gpus)} by {source}")
    if source and gpu.is_hanging():
        return Protection(
            "gpu", False, "the driver does not answer", "`nvidia-smi` hangs too? The machine needs a restart"
        )
    if source:
        return Protection("gpu", False, f"{source} finds no GPU")
    if gpu.has_device_file():
        return Protection(
            "gpu", False, "neither nvidia-ml-py nor nvidia-smi is installed", "`pip install nvidia-ml-py`"
        )
    return Protection("gpu", False, "no NVIDIA driver on this machine")
