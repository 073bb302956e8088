"""The programs of the zoo that this session's tests ask for, run several at once, each only once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
