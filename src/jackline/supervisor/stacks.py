"""Stacks of live processes: py-spy without stopping them, else the injected faulthandler, else /proc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jackline.diagnosis.frames import ProcessStack


def sample_stacks(
    pids: Sequence[int], *, stacks_folder: Path | None, deadline_s: float = 3.0, native: bool = False
) -> tuple[ProcessStack, ...]:
    return ()


def main_hash(stack: ProcessStack) -> str:
    return ""


def all_hash(stack: ProcessStack) -> str:
    return ""


def native_text(pids: Sequence[int], *, deadline_s: float = 10.0) -> str:
    """Native stacks as text for an incident file, once per incident: it stops the processes for a moment."""
    return ""


def read_fault(stacks_folder: Path) -> str:
    """What faulthandler wrote at a fatal signal in any process of the attempt; '' when nothing."""
    return ""


def forget_dead(stacks_folder: Path) -> None:
    """Delete empty dump files of processes that are gone."""
