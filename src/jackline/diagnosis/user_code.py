"""Tells the user's own files from those of Python, of packages and of Jackline.

Uses only the path, so that it also works on a run copied from another machine.
"""

from __future__ import annotations

import re

_INSTALLED = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]"
    r"|[/\\]bin[/\\][^/\\.]+$"  # torchrun, accelerate and other launchers
    r"|[/\\]torchinductor_[^/\\]+[/\\]|[/\\][a-z0-9]{2}[/\\]c[a-z2-7]{51}\.py$"  # code that torch.compile generated
    r"|[/\\]lib(?:64)?[/\\](?:python|pypy)\d?[\d.t]*(?:\.zip)?[/\\]"
)
_OURS = re.compile(r"[/\\]jackline[/\\](?:checkpoint|cli|data|memory|session|supervisor|trainer)[/\\]")
_TYPED = ("<string>", "<stdin>", "<ipython-input")


def is_user_file(path: str) -> bool:
    """True for code that the user would look at first when something goes wrong."""
    if path.startswith("<"):
        return path.startswith(_TYPED)
    return not _INSTALLED.search(path) and not _OURS.search(path)
