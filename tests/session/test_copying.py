"""The end of a machine's copier, when the machine before it has gone and its exchange never ends."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from jackline.checkpoint.machines.holding import Machine
from jackline.session.machines import copying
from tests.deadline import HANGS_S


def test_a_machine_that_has_gone_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's end and the process's end both wait for the copy."""
    is_copying, may_end, waited, now = threading.Event(), threading.Event(), [], [1000.0]

    def exchange(*asked: object) -> None:
        is_copying.set()
        may_end.wait(HANGS_S)

    class Joined:
        def join(self, timeout: float) -> None:
            waited.append(timeout)
            now[0] += timeout

    monkeypatch.setattr(copying.Copier, "_exchange", exchange)
    machine = Machine(0, (("A", (0,)), ("B", (1,))))
    copier = copying.Copier(machine, tmp_path, None, lambda text: None)
    copier.copy("key", None)
    assert is_copying.wait(HANGS_S)
    thread, copier._thread = copier._thread, Joined()  # type: ignore[assignment]
    monkeypatch.setattr(copying, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None))
    copier.close()
    copier.close()
    may_end.set()
    thread.join(HANGS_S)
    assert waited == [60.0, 0.0]
