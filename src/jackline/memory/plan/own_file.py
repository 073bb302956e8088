"""Loads a user's own Python file as a module, for `jackline plan file.py:function` and `jackline train`. No torch."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from jackline.errors import JacklineError, UsageError
from jackline.extras import explained


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
    try:
        with explained(f"'{path}'"):
            spec.loader.exec_module(module)
    except JacklineError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(_describe(path, error), hint=f"{sys.executable} {path} shows the whole traceback") from error
    return module


def _describe(path: str, error: BaseException) -> str:
    """What the file's own code did, without the frames of whoever loads it."""
    said = "".join(traceback.format_exception_only(error)).strip().replace("\n", "\n       ")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
    places = "".join(f"\n       {frame.filename}:{frame.lineno}: {frame.line}" for frame in (own[:1] + own[1:][-1:]))
    return f"'{path}' cannot be loaded{places}\n       {said}"
