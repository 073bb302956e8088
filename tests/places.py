"""Places with limits: a disk that is soon full, a memory cgroup that is soon full, a Python that lacks a tool.

Where this machine does not allow one, Unavailable is raised with the reason, for a test to skip with.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from jackline.units import parse_bytes
from tests.deadline import HANGS_S


class Unavailable(Exception):
    """This machine cannot do it; the text says why."""


@contextlib.contextmanager
def small_disk(path: Path, size: str, *, inodes: int = 0) -> Iterator[Path]:
    """A tmpfs of `size` ('16M') at the existing folder `path`, for at most `inodes` files (0: no limit)."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise Unavailable("mounting a small tmpfs needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={parse_bytes(size)},nr_inodes={inodes}", "jackline-test", str(path)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Unavailable(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        # Lazy, because a process that a failing test left behind may still stand in it.
        subprocess.run(["umount", "-l", str(path)], capture_output=True)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """The folder, which must be a mount of ours, refuses every new file; files that are open stay writable."""
    deadline_s = time.monotonic() + HANGS_S
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    try:
        # Refused when somebody opened a file for writing through the new mount before this: then another one.
        while subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], capture_output=True).returncode:
            assert time.monotonic() < deadline_s, f"{path} cannot be made read-only"
            subprocess.run(["umount", "-l", str(path)], check=True)
            subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True)


def fill_bytes(folder: Path) -> None:
    """Until nothing more fits."""
    with contextlib.suppress(OSError), open(folder / "ballast", "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def fill_inodes(folder: Path) -> None:
    """Until no further file can be created."""
    (folder / "many").mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        while True:
            (folder / "many" / uuid.uuid4().hex).touch()


@contextlib.contextmanager
def kept_full(folder: Path, fill: Callable[[Path], None]) -> Iterator[None]:
    """Somebody else takes whatever becomes free, within milliseconds, until the end of the block."""
    is_over = threading.Event()

    def keep_on() -> None:
        while not is_over.wait(0.005):
            fill(folder)

    fill(folder)
    thread = threading.Thread(target=keep_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def make_room(folder: Path) -> None:
    (folder / "ballast").unlink(missing_ok=True)
    shutil.rmtree(folder / "many", ignore_errors=True)


def quota_environment(folder: Path) -> dict[str, str]:
    """For processes under which used_up_quota(folder) shall work; empty where there is no C compiler."""
    library = _quota_library()
    flag = str(_quota_flag(folder))
    return {"LD_PRELOAD": library, "QUOTA_FOLDER": str(folder), "QUOTA_FLAG": flag} if library else {}


@contextlib.contextmanager
def used_up_quota(folder: Path) -> Iterator[None]:
    """Nothing in `folder` may grow (EDQUOT), for processes with quota_environment(folder)."""
    if not _quota_library():
        raise Unavailable("a quota is imitated by a library (tests/quota.c), which needs a C compiler")
    _quota_flag(folder).touch()
    try:
        yield
    finally:
        _quota_flag(folder).unlink()


def _quota_flag(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-quota-is-used-up")


@functools.cache
def _quota_library() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ""
    made = Path(tempfile.mkdtemp(prefix="jackline-quota-")) / "quota.so"
    atexit.register(shutil.rmtree, made.parent, ignore_errors=True)
    source = Path(__file__).with_name("quota.c")
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"]
    return str(made) if subprocess.run(words, capture_output=True).returncode == 0 else ""


@contextlib.contextmanager
def memory_cgroup(size: str) -> Iterator[Path]:
    """A memory cgroup limited to `size`; put a process in by writing its pid to cgroup.procs."""
    parent, limit_file = _memory_hierarchy()
    group = parent / f"jackline-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit_file).write_text(str(parse_bytes(size)))
        for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (group / swap).exists():
                with contextlib.suppress(OSError):
                    (group / swap).write_text("0" if swap == "memory.swap.max" else str(parse_bytes(size)))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise Unavailable(f"a memory cgroup cannot be made in {parent}: {error.strerror}") from None
    try:
        yield group
    finally:
        _remove(group)


def _memory_hierarchy() -> tuple[Path, str]:
    root = Path("/sys/fs/cgroup")
    own = {fields[1]: fields[2] for fields in (line.split(":", 2) for line in _own_cgroups())}
    for controllers, path in own.items():
        if "memory" in controllers.split(","):
            return root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    controllers_file = root / "cgroup.subtree_control"
    if controllers_file.exists() and "memory" in controllers_file.read_text().split():
        return root, "memory.max"
    raise Unavailable("there is no memory cgroup hierarchy here that groups can be made in")


def _own_cgroups() -> list[str]:
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def _remove(group: Path) -> None:
    """A group can be removed when its last process is reaped, which may take a moment after a kill."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)


def python_without_py_spy(folder: Path) -> str:
    """An interpreter with this one's packages but without py-spy beside it, as where tracing is forbidden."""
    if not (Path(sys.prefix) / "pyvenv.cfg").exists():
        raise Unavailable("this Python is in no virtual environment that could be copied without py-spy")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    return str(folder / "bin" / "python")


def path_without(tool: str, path: str) -> str:
    """A PATH on which `tool` is not found."""
    return ":".join(part for part in path.split(":") if not (Path(part) / tool).exists())
