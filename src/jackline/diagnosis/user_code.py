"""Tells the user's own files from those of Python, of packages and of Jackline.

`is_user_file` uses only the path, so that it also works on a run copied from another machine. `came_with_pip`
recognises a folder that pip filled under a name of the user's choice (`pip install --target`).
"""

from __future__ import annotations

import functools
import os
import re

from jackline.rundir.access.reading import read_text

_INSTALLED = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]"
    r"|[/\\]bin[/\\][^/\\.]+$"  # torchrun, accelerate and other launchers
    r"|[/\\]torchinductor_[^/\\]+[/\\]|[/\\][a-z0-9]{2}[/\\]c[a-z2-7]{51}\.py$"  # code that torch.compile generated
    r"|[/\\]lib(?:64)?[/\\](?:python|pypy)\d?[\d.t]*(?:\.zip)?[/\\]"
    # Cython of a package: its compiler writes paths as they were where it was built ('pyarrow/error.pxi').
    r"|^[^/\\][^/\\]*[/\\].*\.(?:pyx|pxi|pxd)$"
)
_OURS = re.compile(r"[/\\]jackline[/\\](?:checkpoint|cli|data|memory|session|supervisor|trainer)[/\\]")
_TYPED = ("<string>", "<stdin>", "<ipython-input")
_MAX_ABOVE = 6
_RECORD_BYTES = 1 << 20


def is_user_file(path: str) -> bool:
    """True for code that the user would look at first when something goes wrong."""
    if path.startswith("<"):
        return path.startswith(_TYPED)
    return not _INSTALLED.search(path) and not _OURS.search(path)


@functools.lru_cache(maxsize=1024)
def came_with_pip(folder: str) -> bool:
    """Whether a folder above lists this one among those that pip installed there. It reads folders, which may take
    long on a network disk."""
    if not os.path.isabs(folder):
        return False
    below: list[str] = []
    for _ in range(_MAX_ABOVE):
        folder, name = os.path.split(folder)
        if not name:
            return False
        below.insert(0, name)
        if any("/".join(below) in packages for packages in _pip_records(folder)):
            return True
    return False


@functools.lru_cache(maxsize=256)
def _pip_records(folder: str) -> tuple[frozenset[str], ...]:
    """The folders of each package that pip installed into this one."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".dist-info")]  # noqa: PTH208
    except OSError:
        return ()
    return tuple(_folders_in(os.path.join(folder, name, "RECORD")) for name in names[:1000])


def _folders_in(record: str) -> frozenset[str]:
    try:
        lines = read_text(record, _RECORD_BYTES).splitlines()
    except OSError:
        return frozenset()
    return frozenset(os.path.dirname(line.partition(",")[0]) for line in lines)
