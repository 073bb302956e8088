"""Torch and its compiler, loaded in as little time as Python allows.

Owns where the bytecode of 2,400 modules is kept when nobody else keeps it, and that the collector does not walk
through them again and again while they load. What is imported, and when, is __main__ and ahead.py. Standard library
only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def keep_bytecode(package: str = "torch") -> Path | None:
    """Makes Python keep compiled sources in a folder of ours, where it would compile them at every start.

    That is so when a package came without them (uv installs so) or with those of other sources (an image that set all
    times anew), and Python must not write beside the sources: their folder is read-only, or containers set
    PYTHONDONTWRITEBYTECODE to keep those folders clean, and they stay clean. Torch and its compiler then cost 17 s of
    CPU at every start instead of 5.5; in a restart on an H200 half of the main thread's samples were such compiling.
    Children inherit it.
    None: not needed, or not possible.
    """
    if sys.pycache_prefix is not None or _is_kept_elsewhere(package):
        return None
    folder = bytecode_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    # Nobody else may put code there that is run as ours.
    if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return folder


def bytecode_folder() -> Path:
    """One for all runs of a person: 70 MB that depend on nothing but the sources. Python checks their age itself."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container that runs as a number without an entry in passwd
        return Path("/tmp") / f"jackline-bytecode-{os.getuid()}"
    return home / "jackline" / "bytecode"


def _is_kept_elsewhere(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.has_location or spec.origin is None:
        return True
    if _is_of(importlib.util.cache_from_source(spec.origin), spec.origin):
        return True
    return not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK)


def _is_of(bytecode: str, source: str) -> bool:
    """Whether Python would take it: of this Python, and of the source as it is now (PEP 552)."""
    try:
        with open(bytecode, "rb") as file:
            header = file.read(16)
        status = Path(source).stat()
    except OSError:
        return False
    flags, time_s, size = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
    is_same = (time_s, size) == (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return header[:4] == importlib.util.MAGIC_NUMBER and (flags != 0 or is_same)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """For imports: what they make stays, so looking for garbage in it is a fifth of their time.

    Afterwards all of it is out of the collector's sight, so that no later collection walks through 600,000 objects
    that never die (0.3 s each, in the middle of a step). The 8 MB of garbage among them are the price.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
