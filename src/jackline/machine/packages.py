"""Which Python packages a running process uses, read from outside: what is installed in the folders it has mapped.

Nothing of the process is imported or executed. A process without compiled packages maps none of their files; then
the result is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jackline.machine.procfs import read_bytes

_FOLDER = re.compile(rb"(/[^\0\n]*?/(?:site|dist)-packages)/")
_INSTALLED = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*?)-(?P<version>\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info"
)


def package_folders(pids: Iterable[int]) -> list[str]:
    """The site-packages of which these processes have mapped a file."""
    found: dict[str, None] = {}
    for pid in pids:
        for folder in _FOLDER.findall(read_bytes(f"/proc/{pid}/maps") or b""):
            found[folder.decode("utf-8", "replace")] = None
    return list(found)


def list_packages(folders: Iterable[str]) -> dict[str, str]:
    """Name and version of what is installed; in the first folder where a name is found, as Python would import it."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = sorted(path.name for path in Path(folder).iterdir())
        except OSError:
            continue
        for name in names:
            match = _INSTALLED.fullmatch(name)
            if match is not None:
                found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return dict(sorted(found.items()))
