"""The supervisor's own process; started by start.py, never by hand."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from jackline.errors import EXIT_FAILED, JacklineError
from jackline.rundir.layout import RunDir
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.supervise import Supervisor


def main(words: list[str]) -> None:
    path, reporter_text, mode, options_text = words
    reporter = int(reporter_text)
    options = SuperviseOptions.from_json(json.loads(options_text))

    def write(words: dict[str, Any]) -> None:
        if reporter >= 0:
            with contextlib.suppress(OSError):
                os.write(reporter, json.dumps(words).encode() + b"\n")

    def answer(
        problem: str = "", hint: str | None = None, exit_code: int = EXIT_FAILED, detail: tuple[str, ...] = ()
    ) -> None:
        """Tell whoever started us, once; they may have gone."""
        nonlocal reporter
        write({"problem": problem, "hint": hint, "exit_code": exit_code, "detail": detail})
        if reporter >= 0:
            os.close(reporter)
        reporter = -1

    if os.fork():
        os._exit(0)  # whoever started us reaps this at once; the supervisor belongs to nobody
    os.set_inheritable(reporter, False)
    try:
        supervisor = Supervisor(
            RunDir(Path(path)), options, on_started=answer, on_said=lambda text: write({"said": text})
        )
        code = supervisor.adopt() if mode == "adopt" else supervisor.start()
    except JacklineError as error:
        answer(error.message, error.hint, error.exit_code, error.detail)
        sys.exit(error.exit_code)
    except BaseException as error:
        traceback.print_exc()
        answer(f"the supervisor failed: {type(error).__name__}: {error}", "see supervisor.log in the run directory")
        raise
    sys.exit(code)
