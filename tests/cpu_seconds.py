"""How much CPU time each test takes, with all processes that it starts: `scripts/test -p tests.cpu_seconds`.

A plugin for pytest. Where cgroups can be made (version 1, as root), every worker is moved into one of its own, and
nothing escapes: not a supervisor in its own session, nor a script of the nursery. Elsewhere the time of the worker
and of the children that it has waited for is counted. What is left running after a test is counted for the next one;
the programs of the zoo, which run beside all tests, are not counted.
`--record-longest` writes the seconds of the longest tests, waiting included, into tests/longest.txt: they begin.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
_SHOWN = 60
_LONGEST = Path(__file__).with_name("longest.txt")
_LONG_S = 3.0


class Meter:
    """CPU seconds of this process and of those that it has started."""

    def __init__(self) -> None:
        self._account: Path | None = _ACCOUNTS / f"jackline-tests-{os.getpid()}"
        try:
            self._account.mkdir()
            (self._account / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._account = None

    def read_s(self) -> float:
        if self._account is not None:
            return int((self._account / "cpuacct.usage").read_text()) / 1e9
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in used)

    def close(self) -> None:
        """The group stays as long as a process is in it."""
        if self._account is not None:
            with contextlib.suppress(OSError):
                (_ACCOUNTS / "cgroup.procs").write_text(str(os.getpid()))
                self._account.rmdir()


_spent_s: Counter[str] = Counter()
_took_s: Counter[str] = Counter()
_meters: list[Meter] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-longest", action="store_true", help="rewrite tests/longest.txt for the tests of this run"
    )


def pytest_configure(config: pytest.Config) -> None:
    _meters.append(Meter())


def pytest_unconfigure(config: pytest.Config) -> None:
    _meters.pop().close()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    before_s = _meters[-1].read_s()
    try:
        return (yield)
    finally:
        _spent_s["(collection)"] += _meters[-1].read_s() - before_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGAN] = _meters[-1].read_s()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", _meters[-1].read_s() - item.stash[_BEGAN]))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took_s[report.nodeid] += report.duration
    if report.when == "teardown":
        _spent_s[report.nodeid] += dict(report.user_properties).get("cpu_s", 0.0)


def _record_longest() -> None:
    """One line for all cases of a test, with the longest of them. Tests that were not run now keep theirs."""
    lines = (line.split() for line in _LONGEST.read_text().splitlines())
    ran = {name.partition("[")[0] for name in _took_s}
    known = {name: float(seconds) for seconds, name in lines if name not in ran}
    for name, seconds in _took_s.items():
        plain = name.partition("[")[0]
        known[plain] = max(seconds, known.get(plain, 0.0))
    found = sorted(((seconds, name) for name, seconds in known.items() if seconds >= _LONG_S), reverse=True)
    _LONGEST.write_text("".join(f"{seconds:.0f} {name}\n" for seconds, name in found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("--record-longest"):
        _record_longest()
    files: Counter[str] = Counter()
    for name, seconds in _spent_s.items():
        files[name.partition("::")[0]] += seconds
    for title, found in (("file", files), ("test", _spent_s)):
        terminalreporter.section(f"CPU seconds by {title}, {sum(found.values()):.0f} in all")
        for name, seconds in found.most_common(_SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")


_BEGAN = pytest.StashKey[float]()
