"""What every test may count on: no setting of the person who runs it reaches Jackline; nothing leaves tmp_path.

Also the order of the tests: the longest first, so that no worker ends with one while the others have nothing to do.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports torch. Some virtual machines advertise AMX and trap its instructions: every bf16 product on
# the CPU would then end the test process with SIGILL. Nothing that is tested here needs AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# For the tests and for every process that they start. Several processes with a thread for each core spend most of
# their CPU time on waiting for each other; sums over one thread also have the same last bits everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Until all tests are collected: what is imported and collected stays, and looking for garbage in it takes a tenth of
# the time. Workers of xdist import this file before they import anything heavy.
gc.disable()

from tests.left_over import LeftOver  # noqa: E402
from tests.session.nursery import Nursery  # noqa: E402

# The same examples every time, so that a change is judged by itself; HYPOTHESIS_SEARCH=1 looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("search" if os.environ.get("HYPOTHESIS_SEARCH") else "steady")


# Folders whose tests take long, in the order in which they begin; the others' are short.
LONGEST_FIRST = ("trainer", "recipes", "checkpoint", "session", "notebook", "stories", "cli", "supervisor")
# "SECONDS NAME" of every test that was long when it was measured (tests.cpu_seconds writes it). An old entry does no
# harm: it only changes the order.
LONGEST = Path(__file__).with_name("longest.txt")


def hear_signals() -> None:
    """What nohup or a script's `&` lets this process ignore, every child would ignore too: also Ctrl-C from a test.
    A handler, unlike being ignored, is not inherited through exec."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


hear_signals()


def pytest_configure(config: pytest.Config) -> None:
    """Mark what the tests start; rewrite the asserts of all test files once, on all cores, before the workers start.

    In a fresh clone every worker would do it for itself, which takes 9 s of CPU each.
    """
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(LeftOver())
    if getattr(config.option, "numprocesses", None):
        files = sorted(Path(__file__).parent.rglob("*.py"))
        cores = len(os.sched_getaffinity(0))
        for pid in [_fork_rewriting(config, files[share::cores]) for share in range(cores)]:
            os.waitpid(pid, 0)


def _fork_rewriting(config: pytest.Config, files: list[Path]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # pytest has no public name for it. Without it the workers take longer, and nothing else changes.
    try:
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for file in files:
            kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
            is_rewritten = file.name.startswith(("test_", "conftest"))
            if is_rewritten and not sys.dont_write_bytecode and rewrite._read_pyc(file, kept) is None:
                kept.parent.mkdir(exist_ok=True)
                digest, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, digest, kept)
    finally:
        os._exit(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests begin, a group of tests for one worker as if it were one long test."""
    root = Path(__file__).parent
    long_s = {name: float(seconds) for seconds, name in map(str.split, LONGEST.read_text().splitlines())}
    groups_s: Counter[str] = Counter()
    for item in items:
        groups_s[_group_of(item)] += long_s.get(item.nodeid.partition("[")[0], 0.0)

    def place_in_line(item: pytest.Item) -> tuple[float, int]:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        place = LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
        return -groups_s[_group_of(item)], place

    items.sort(key=place_in_line)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one `xdist_group` go to one worker.

    xdist adds the group to the id of a test, and with pytest 9.2 that is lost without a word: every worker then
    starts a forking server with all frameworks. The mark is read from the file instead, from its `pytestmark`.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_in(config.rootpath / nodeid.partition("::")[0]) or nodeid

    return Grouped(config, log) if config.getvalue("dist") == "loadgroup" else None


@cache
def _group_in(file: Path) -> str:
    found = re.search(r"^(?:pytestmark = |    )pytest\.mark\.xdist_group\(\"(\w+)\"\)", file.read_text(), re.M)
    return found[1] if found else ""


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection of garbage in a test, or in a process that it forks, need not
    look at them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else item.nodeid


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One forking server for all tests of a worker: importing torch takes seconds, forking milliseconds."""
    # Half a second of CPU for every training that starts in it.
    found = Nursery("jackline.trainer.loop", "tensorboard.summary")
    yield found
    found.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text/*.txt`, for all tests of a worker; caches of it go into `data` and are built once."""
    from tests.data.corpora import make_texts

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number, text in enumerate(make_texts(300)):
        (folder / "text" / f"{number:03d}.txt").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs and the registry live under tmp_path; JACKLINE_* of the outside is gone. Returns the runs folder."""
    for name in list(os.environ):
        if name.startswith("JACKLINE"):
            monkeypatch.delenv(name)
    runs = tmp_path / "runs"
    monkeypatch.setenv("JACKLINE_RUNS", str(runs))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Colours and widths of the terminal that happens to run the tests must not decide what they see.
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return runs
