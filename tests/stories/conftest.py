"""The programs of the zoo, run several at once and each only once; and a person at a shell."""

from __future__ import annotations

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
    runner = Zoo(list(wanted.values()), tmp_path_factory.mktemp("zoo"))
    yield runner
    runner.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A person at a shell, whose processes all end with the test."""
    person = Shell(tmp_path / "person")
    yield person
    person.close()
