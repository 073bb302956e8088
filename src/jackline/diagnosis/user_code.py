"""Whose file is it: the person's own, or Python's, a package's or ours?

Told from the path alone, so that it also works on a run copied from another machine.
"""

from __future__ import annotations

import re

_INSTALLED = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]"
    r"|[/\\]bin[/\\][^/\\.]+$"  # torchrun, accelerate and other launchers
    r"|[/\\]lib(?:64)?[/\\](?:python|pypy)\d?[\d.t]*(?:\.zip)?[/\\]"
)
_OURS = re.compile(r"[/\\]jackline[/\\](?:checkpoint|cli|data|memory|session|supervisor|trainer)[/\\]")
_TYPED = ("<string>", "<stdin>", "<ipython-input")


def is_user_file(path: str) -> bool:
    """True for code a person would look at first when something goes wrong."""
    if path.startswith("<"):
        return path.startswith(_TYPED)
    return not _INSTALLED.search(path) and not _OURS.search(path)
