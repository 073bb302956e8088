"""One forking server for all tests of a worker: importing torch takes seconds, forking milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.session.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()
