"""Loads a user's own Python file as a module, for `jackline plan file.py:function` and `jackline train`. No torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from jackline.errors import UsageError


def load_file(path: str, *, example: str) -> ModuleType:
    """Run the file and return it as a module. `example` is a command to suggest when the file does not exist."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file '{path}'", hint=example)
    # The file's own folder comes first, as when Python runs the file as a script.
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
