"""Which checkpoint to resume from, the newest that is whole, and the receipt of what was restored.

No pointer file is trusted. The newest is tried first; a damaged one is reported, remembered and skipped. If no whole
one is left, that is an error and never a silent start from scratch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.checkpoint.format.catalogue import list_names, list_set_aside
from jackline.checkpoint.format.manifest import Damage, Name
from jackline.checkpoint.state.environment import compare_environment, describe_environment
from jackline.checkpoint.state.frozen import HashTensor
from jackline.checkpoint.state.restore import Restored, restore_checkpoint
from jackline.errors import CannotResume, UsageError
from jackline.units import format_bytes, format_duration


@dataclass(frozen=True)
class Refusal:
    """A checkpoint that was not used, and why."""

    name: Name
    why: str


@dataclass(frozen=True)
class Receipt:
    """What a run resumes from: printed in full, kept in the events."""

    name: Name
    path: Path
    restored: Restored
    refused: tuple[Refusal, ...]
    changes: tuple[str, ...]  # of the machine and the versions since the save
    took_s: float

    @property
    def step(self) -> int:
        return self.name.step

    @property
    def metrics(self) -> dict[str, float]:
        return self.restored.manifest.metrics

    def lines(self) -> list[str]:
        """The receipt as lines for people."""
        manifest = self.restored.manifest
        lines = [
            f"resuming from {self.name}: {', '.join(self.restored.keys)}; "
            f"{format_bytes(manifest.size_bytes)}, checksums verified, in {format_duration(self.took_s)}"
        ]
        lines += [f"  {refusal.name} is not whole and was passed over: {refusal.why}" for refusal in self.refused]
        lines += [f"  not restored: {what}" for what in self.restored.not_restored]
        lines += [f"  {note}" for note in self.restored.notes]
        lines += [f"  changed since it was saved: {change}" for change in self.changes]
        return lines


def load_newest(
    folder: Path,
    into: MutableMapping[str, Any],
    *,
    hash_frozen: HashTensor,
    step: int | None = None,
    only: Name | None = None,
    on_refusal: Callable[[Refusal], None] = lambda refusal: None,
) -> Receipt | None:
    """Fill `into` from the newest whole checkpoint (of `step`, if given). None when there is none at all.

    `only`: this one, which another rank has verified; files from which nothing is needed here are not read.

    When every one is damaged the objects in `into` may have been changed: CannotResume ends the attempt.
    """
    step = only.step if only is not None else step
    names = [name for name in list_names(folder) if step is None or name.step == step]
    names = [name for name in names if only in (None, name)]
    if step is not None and not names:
        known = ", ".join(str(name.step) for name in list_names(folder)[:5]) or "none"
        raise UsageError(f"there is no checkpoint of step {step} in {folder}", hint=f"there are: {known}")
    aside = [path.name for path in list_set_aside(folder)]  # listed before the writer sets aside the ones refused now
    refused: list[Refusal] = []
    for name in names:
        began_s = time.monotonic()
        path = folder / str(name)
        try:
            restored = restore_checkpoint(path, into, hash_frozen=hash_frozen, is_picky=only is not None)
        except Damage as damage:
            refused.append(Refusal(name, str(damage)))
            on_refusal(refused[-1])
            continue
        changes = compare_environment(restored.manifest.facts.get("environment"), describe_environment())
        return Receipt(name, path, restored, tuple(refused), changes, time.monotonic() - began_s)
    if refused or aside:
        detail = [f"{refusal.name}: {refusal.why}" for refusal in refused]
        raise CannotResume(
            f"none of the {len(refused) + len(aside)} checkpoints in {folder} is whole",
            detail=(*detail, *(f"{name}: found damaged earlier and set aside" for name in aside)),
            hint="resume from a mirror (jackline resume URL), or start over: --new",
        )
    return None
