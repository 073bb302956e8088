"""The programs of the zoo, run several at once and each only once; and a person at a shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell import Shell
from tests.stories.keeper import Keeper, is_alive
from tests.zoo import Program, Zoo

KEEPER = pytest.StashKey[Keeper]()
# With other tests beside them, and alone.
AT_ONCE, AT_ONCE_ALONE = 4, 8
POLITENESS = 5


def _program_of(item: pytest.Item) -> Program | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("program") if callspec else None
    return found if isinstance(found, Program) else None


def _zoo_folder(config: pytest.Config) -> Path:
    """Shared by all test workers of this session, so that each program runs once."""
    base: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "zoo"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The zoo's tests come last: by then their programs have run, beside all others."""
    items.sort(key=lambda item: _program_of(item) is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    programs = [found for item in session.items if (found := _program_of(item)) is not None]
    if not programs or session.config.option.collectonly:
        return
    folder = _zoo_folder(session.config)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(folder / "keeper.claim", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        at_once = AT_ONCE if len(session.items) > 2 * len(programs) else AT_ONCE_ALONE
        session.config.stash[KEEPER] = Keeper(programs, folder, at_once)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Stuck and healthy are told apart by seconds: tests that compute leave those programs their share of a core.
        os.nice(POLITENESS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (keeper := session.config.stash.get(KEEPER, None)) is not None:
        keeper.close()


@pytest.fixture(scope="session")
def zoo(pytestconfig: pytest.Config) -> Zoo:
    folder = _zoo_folder(pytestconfig)
    return Zoo([], folder, is_alive=lambda: is_alive(folder))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A person at a shell, whose processes all end with the test."""
    person = Shell(tmp_path / "person")
    yield person
    person.close()
