"""The text of `jackline status` about mirrors: what is uploaded, how far an upload is, and what is missing. Pure."""

from __future__ import annotations

from pathlib import Path

from jackline.cli.text.safety import safe_text
from jackline.cli.view.run_view import RunView
from jackline.rundir.records.mirror import MirrorRecord
from jackline.units import format_bytes, format_duration


def mirror_lines(view: RunView) -> list[str]:
    """One line for each mirror of the run."""
    own = view.session.last_checkpoint.path
    lines = [_line(record, view.now_s, None) for record in view.mirrors[:1]]
    lines += [_line(record, view.now_s, Path(own).name if own else None) for record in view.mirrors[1:]]
    return [line for line in lines if line]


def _line(record: MirrorRecord, now_s: float, wanted: str | None) -> str:
    """`wanted`: the newest checkpoint of the run, if it is known."""
    if not record.store or not (record.checkpoints or record.trouble.why or record.uploading.name or wanted):
        return ""
    parts = [_newest(record, now_s)]
    name, uploading = record.uploading.name, record.uploading
    if name is not None:
        of = f"{format_bytes(uploading.done_bytes or 0)} of {format_bytes(uploading.total_bytes or 0)}"
        parts.append(f"uploading {safe_text(name, 80)}, {of}")
    elif wanted is not None and not record.has(wanted):
        parts.append(f"{safe_text(wanted, 80)} is not there yet")
    if record.trouble.why:
        parts.append(f"cannot be reached: {safe_text(record.trouble.why, 200)}")
    return f"{safe_text(record.store, 200)}: {'; '.join(parts)}"


def _newest(record: MirrorRecord, now_s: float) -> str:
    found = [(entry.saved_at_s or 0.0, name, entry) for name, entry in record.checkpoints.items() if entry.state]
    if not found:
        return "no checkpoint is there"
    _, name, entry = max(found, key=lambda item: item[:2])
    ago = f", {format_duration(max(0.0, now_s - entry.at_s))} ago" if entry.at_s is not None else ""
    return f"{safe_text(name, 80)} {safe_text(entry.state, 20)}{ago}"
