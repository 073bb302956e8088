"""One forking server with the frameworks in it, for the tests of the group "integrations"."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.session.nursery import Nursery

# transformers imports its parts on use: each script would spend seconds on Trainer otherwise.
FRAMEWORKS = {
    "transformers": ("transformers.trainer", "jackline.session.integrations.transformers"),
    "lightning": ("lightning.pytorch", "jackline.session.integrations.lightning"),
    "accelerate": ("accelerate", "jackline.session.integrations.accelerate"),
}


@pytest.fixture(scope="session")
def framework_nursery() -> Iterator[Nursery]:
    """One process imports all three, which takes longer than the training; each script is a fork of it."""
    found = Nursery(*(part for name, parts in FRAMEWORKS.items() if importlib.util.find_spec(name) for part in parts))
    yield found
    found.close()
