"""A person's own Python file as a module, for `jackline plan file.py:function` and `jackline train`; no torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from jackline.errors import UsageError


def load_file(path: str, *, example: str) -> ModuleType:
    """Runs it. `example`: what a person could type instead, for when it is not there."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file '{path}'", hint=example)
    # Its own folder comes first, as when it is run.
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
