"""What the tests of the supervisor count on: a stack reader that is only slow is waited for, as every state is."""

from __future__ import annotations

import pytest

from jackline.supervisor.stacks import take
from tests.deadline import HANGS_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy needs 40 ms of CPU, which take seconds where five test workers share two cores."""
    monkeypatch.setattr(take, "DEADLINE_S", HANGS_S)
