"""The incident file: everything known at the moment of a SUSPECT or STUCK verdict, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jackline.diagnosis.frames import ProcessStack
from jackline.machine.readings import TreeReading
from jackline.supervisor.verdict import Verdict


def write_incident(
    path: Path,
    *,
    verdict: Verdict,
    stacks: Sequence[ProcessStack],
    tree: TreeReading,
    now_s: float,
    native_text: str = "",
) -> None:
    """`now_s` is time.time()."""
    path.write_text(verdict.text + "\n")
