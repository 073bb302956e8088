"""What a resumed run prints first: what was restored, what not, and what changed.

Owns the text. The engine's own receipt (checkpoint/state/load.py) is a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jackline.checkpoint.format.catalogue import list_left_behind, list_rewinds
from jackline.checkpoint.state.load import Receipt
from jackline.errors import CannotResume
from jackline.session.feeds.feed import Feed
from jackline.session.saving.changes import Change, judge
from jackline.session.settings import Verdict
from jackline.units import format_bytes, format_duration

OURS = ("session", "random", "values")


def receipt_lines(receipt: Receipt, feed: Feed, session: dict[str, Any]) -> list[str]:
    """The whole receipt, first line first."""
    restored = receipt.restored
    keys = [key for key in restored.keys if key not in OURS]
    lines = [
        f"resuming from {receipt.name}: {', '.join([*keys, 'all random generators'])}; "
        f"{format_bytes(restored.manifest.size_bytes)}, checksums verified, in {format_duration(receipt.took_s)}"
    ]
    lines += [f"  {refusal.name} is not whole and was passed over: {refusal.why}" for refusal in receipt.refused]
    lines += _left_behind_lines(receipt)
    lines += [f"  not restored: {what}" for what in restored.not_restored if not what.startswith(OURS)]
    lines += [f"  {note}" for note in restored.notes if not note.startswith(OURS)]
    if feed.kind != "none":
        of = f" of {feed.num_batches}" if feed.num_batches is not None else ""
        lines.append(f"  data: epoch {session['epoch']}, batch {session['batch']}{of}; {'; '.join(feed.describe())}")
    return lines


def _left_behind_lines(receipt: Receipt) -> list[str]:
    """Printed only by an attempt that starts at the step a user went back to."""
    folder = receipt.path.parent
    if not any(rewind.step == receipt.step for rewind in list_rewinds(folder)):
        return []
    names = [str(name) for name in list_left_behind(folder) if name.step > receipt.step]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"  left behind: {names[0]}{more}; numbers of later steps stay in metrics-0.jsonl, the new ones follow"]


def start_lines(feed: Feed, how_often: str) -> list[str]:
    """What a new run prints."""
    data = f"; data: {'; '.join(feed.describe())}" if feed.kind != "none" else ""
    return [f"saving {how_often}{data}"]


def announce_changes(changes: list[Change], verdicts: dict[str, Verdict], tell: Callable[[str], None]) -> None:
    """Report changes since the checkpoint; raise CannotResume if one forbids resuming."""
    found = judge(changes, verdicts)
    for change in found["warn"]:
        tell(f"{change.kind} changed since it was saved: {change.text}")
    if found["refuse"]:
        kinds = sorted({change.kind for change in found["refuse"]})
        settings = ", ".join(f"'{kind}': 'warn'" for kind in kinds)
        raise CannotResume(
            f"{' and '.join(kinds)} changed since it was saved",
            detail=tuple(change.text for change in found["refuse"][:8]),
            hint=f"attach(new=True) starts another run, on_change={{{settings}}} continues this one",
        )
