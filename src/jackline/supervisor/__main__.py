"""The supervisor's own process; started by start.py, never by hand."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from jackline.errors import EXIT_FAILED, JacklineError
from jackline.rundir.layout import RunDir
from jackline.supervisor.request import StartAnswer, StartRequest
from jackline.supervisor.supervise import Supervisor


def main(words: list[str]) -> None:
    path, request_fd = words
    request = StartRequest.from_memory(int(request_fd))
    reporter = request.reporter

    def write(message: StartAnswer) -> None:
        if reporter >= 0:
            with contextlib.suppress(OSError):
                os.write(reporter, message.to_line())

    def answer(
        problem: str = "", hint: str | None = None, exit_code: int = EXIT_FAILED, detail: tuple[str, ...] = ()
    ) -> None:
        """Report once to the process that started us; it may have exited already."""
        nonlocal reporter
        write(StartAnswer(problem, hint, exit_code, detail))
        if reporter >= 0:
            os.close(reporter)
        reporter = -1

    if os.fork():
        os._exit(0)  # the process that started us reaps this one at once; the supervisor then has no parent
    try:
        supervisor = Supervisor(
            RunDir(Path(path)),
            request.options,
            on_started=answer,
            on_said=lambda text: write(StartAnswer(said=text)),
            lock_fd=request.lock,
        )
        code = supervisor.adopt() if request.adopts else supervisor.start()
    except JacklineError as error:
        answer(error.message, error.hint, error.exit_code, error.detail)
        sys.exit(error.exit_code)
    except BaseException as error:
        import traceback  # late: it takes 0.2 MB for the whole life of a supervisor that never needs it

        traceback.print_exc()
        answer(f"the supervisor failed: {type(error).__name__}: {error}", "see supervisor.log in the run directory")
        raise
    sys.exit(code)
