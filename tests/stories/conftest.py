"""The programs of the zoo, run several at once and each only once; and a person at a shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell import Shell
from tests.zoo import Program, Zoo


@pytest.fixture(scope="session")
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    wanted: dict[str, Program] = {}
    for item in request.session.items:
        program = getattr(item, "callspec", None) and item.callspec.params.get("program")
        if isinstance(program, Program):
            wanted[str(program.path)] = program
    # Shared by all test workers of this session, so that each program runs once and about eight run at a time.
    base = tmp_path_factory.getbasetemp()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "zoo"
    runner = Zoo(list(wanted.values()), folder, at_once=max(1, 8 // workers))
    yield runner
    runner.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A person at a shell, whose processes all end with the test."""
    person = Shell(tmp_path / "person")
    yield person
    person.close()
