"""No process outlives the tests: `scripts/test` fails, and names the test, when one does.

What the tests start inherits a mark in its environment, wherever it goes: into a session of its own, to another
parent. After the last test all that carry the mark are waited for, and what does not end by itself is ended here.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import pytest

from tests.marked import command_line, end_marked, marked_pids, wait_until_gone

MARK = "TESTS_OF_RUN"
# Supervisors, writers and uploads that a test has ended are still finishing; only what nobody has ended meets this.
PATIENCE_S = 120.0


class LeftOver:
    """A plugin of the process that started the workers."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self.mark = uuid.uuid4().hex
        self.found: list[str] = []
        os.environ[MARK] = self.mark

    @pytest.hookimpl(trylast=True)  # after xdist has ended its workers
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if wait_until_gone(self.mark, self.patience_s, MARK):
            self.found = [f"{pid} {command_line(pid)} ({_test_of(pid)})" for pid in marked_pids(self.mark, MARK)]
        if self.found:
            end_marked(self.mark, MARK)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("processes that outlived the tests", red=True)
            for each in self.found:
                terminalreporter.line(each)


def _test_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"PYTEST_CURRENT_TEST="):
                return entry.partition(b"=")[2].decode("utf-8", "replace")
    return "started outside of a test"
