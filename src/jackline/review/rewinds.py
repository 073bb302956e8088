"""Where a run went back to an earlier checkpoint, and which batches were taken out of it: by a person, or by itself.

Two files say so, and one decision may have written both: `checkpoints/rewind-N-rR.json` (what was left behind) and
`skipped-batches.json` (which batches, and the loss that `on_spike=rewind` found). Owns which of them belong together.
Does not own what they mean for the next attempt (`checkpoint/rewind`, `session/strange`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jackline.checkpoint.format.catalogue import list_rewinds
from jackline.checkpoint.format.manifest import parse_name
from jackline.checkpoint.place import choose_place
from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import read_skipped

ONE_DECISION_S = 60.0  # between the two files of one
_BY_HAND = "by hand"


@immutable
class WentBack:
    """One decision. `to_step`: None where batches were taken out and the run stayed where it was."""

    at_s: float | None = None
    to_step: int | None = None
    left_behind: tuple[str, ...] = ()  # checkpoints
    batches: str = ""  # '25:31'
    why: str = ""  # what `on_spike` found; '' for a person's decision

    @property
    def origin(self) -> str:
        return f"on_spike: {self.why}" if self.why else _BY_HAND


def read_rewinds(run: RunDir) -> tuple[WentBack, ...]:
    """In the order of time; never raises."""
    folders = dict.fromkeys((run.checkpoints, choose_place(run).folder))  # not the same on a mount
    names = {str(name): (folder / str(name), name.step) for folder in folders for name in list_rewinds(folder)}
    backs = [_read_back(path, step) for path, step in names.values()]
    for skip in read_skipped(run).ranges:
        own = WentBack(skip.at_s, _step_of(skip.step), (), str(skip), skip.why or "")
        partner = _partner(own, backs)
        if partner is not None:
            backs.remove(partner)
            own = replace(own, to_step=partner.to_step, left_behind=partner.left_behind)
        backs.append(own)
    return tuple(sorted(backs, key=lambda one: one.at_s or 0.0))


def rewind_lines(rewinds: Sequence[WentBack], most: int) -> list[str]:
    """What a resume says of them. `most`: how often `on_spike` may go back."""
    backs = [one for one in rewinds if one.to_step is not None]
    num_by_itself = sum(bool(one.why) for one in backs)
    found = []
    for one in backs:
        batches = f", without the batches {one.batches}" if one.batches else ""
        found.append(f"  went back to step {one.to_step:,}{batches} ({one.origin})")
    if num_by_itself:
        found.append(f"  on_spike=rewind has gone back {num_by_itself} of at most {most} times")
    return found


def _read_back(path: Path, step: int) -> WentBack:
    body = atomic.read_json(path)
    told = body if isinstance(body, dict) else {}
    at_s, left = told.get("at_s"), told.get("left_behind")
    return WentBack(
        at_s=float(at_s) if isinstance(at_s, int | float) else None,
        to_step=step,
        left_behind=tuple(str(one) for one in left) if isinstance(left, list) else (),
    )


def _step_of(text: str | None) -> int | None:
    """'4' as it was typed, or 'step-00000004-r1' as the checkpoint is called."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return int(text)
    name = parse_name(text) or parse_name(f"step-{text}")
    return name.step if name is not None else None


def _partner(own: WentBack, backs: Sequence[WentBack]) -> WentBack | None:
    """The rewind file of the same decision: written just before the batches were."""
    return next(
        (
            one
            for one in backs
            if not one.batches and one.to_step == own.to_step
            if one.at_s is not None and own.at_s is not None and 0.0 <= own.at_s - one.at_s <= ONE_DECISION_S
        ),
        None,
    )
