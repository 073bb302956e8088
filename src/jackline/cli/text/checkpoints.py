"""The texts of `jackline checkpoints`: rows, columns, sentences. Reads notes and headers, never a tensor."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.catalogue import Listed
from jackline.checkpoint.format.manifest import TENSORS, Name
from jackline.cli.text.paint import stdout_columns, stdout_has_color
from jackline.cli.text.safety import safe_text
from jackline.cli.text.table import Cell, Column, draw_table
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_text
from jackline.rundir.records.fields import moment
from jackline.rundir.records.fields import text as text_field
from jackline.units import format_bytes, format_duration

if TYPE_CHECKING:
    from jackline.checkpoint.format.export import Exported

MAX_LINE = 400
_SET_ASIDE_SHOWN = 5


@immutable
class Row:
    """One checkpoint in the list. `read_back_at_s`: when it was last read from the disk and verified."""

    name: str
    step: int
    saved_at_s: float | None
    size_bytes: int | None
    problem: str | None
    read_back_at_s: float | None
    mirror: str
    is_latest: bool
    is_best: bool
    is_left_behind: bool
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_rows(folder: Path) -> list[Row]:
    """Newest first, then those left behind. Notes are only hints; the folders on disk decide what is listed."""
    notes = catalogue.read_notes(folder, catalogue.STATUS)
    read = catalogue.read_notes(folder, catalogue.VERIFIED)
    mirrored = catalogue.read_uploads(folder)
    left = catalogue.list_left_behind(folder)
    listed = [_with_damage(entry, read) for entry in catalogue.list_checkpoints(folder)]
    latest = next((entry.name for entry in listed if entry.is_plausible), None)
    best = _read_pointer(folder, catalogue.BEST)
    return [
        Row(
            name=str(entry.name),
            step=entry.name.step,
            saved_at_s=entry.manifest.created_at_s if entry.manifest else None,
            size_bytes=entry.manifest.size_bytes if entry.manifest else None,
            problem=entry.problem,
            read_back_at_s=_newest(notes.get(entry.name, {}), read.get(entry.name, {})),
            mirror=mirrored[entry.name].state or "local" if entry.name in mirrored else "local",
            is_latest=entry.name == latest,
            is_best=str(entry.name) == best,
            is_left_behind=entry.name in left,
            metrics=entry.manifest.metrics if entry.manifest else {},
        )
        for entry in (*listed, *(_with_damage(catalogue.look_at(folder, name), read) for name in left))
    ]


def _with_damage(entry: Listed, read: dict[Name, dict[str, Any]]) -> Listed:
    """A quick look reads no data, so add the damage that `checkpoints verify` has found."""
    why = text_field(read.get(entry.name, {}).get("why"))
    return replace(entry, problem=entry.problem or why)


def _newest(*notes: dict[str, Any]) -> float | None:
    return max((at_s for note in notes if (at_s := moment(note.get("verified_at_s"))) is not None), default=None)


def list_lines(folder: Path, rows: list[Row], now_s: float | None = None) -> list[str]:
    now = time.time() if now_s is None else now_s
    aside = set_aside_lines(folder)
    if not rows:
        words = "there is no whole checkpoint" if aside else "there is no checkpoint"
        return [safe_text(line, MAX_LINE) for line in (f"{words} in {folder}", *aside)]
    table: list[list[Cell | str]] = []
    for row in rows:
        marks = [word for word, is_so in (("latest", row.is_latest), ("best", row.is_best)) if is_so]
        marks += [f"{name} {value:.4g}" for name, value in sorted(row.metrics.items())]
        age = "?" if row.saved_at_s is None else format_duration(max(0.0, now - row.saved_at_s))
        size = "?" if row.size_bytes is None else format_bytes(row.size_bytes)
        state = Cell(safe_text(_state(row, now), MAX_LINE), "bad" if row.problem else "")
        step = safe_text(row.name.removeprefix("step-"), 40)
        table.append([step, age, size, state, safe_text(row.mirror, 20), safe_text("  ".join(marks), MAX_LINE)])
    # On a narrow terminal the mirror is left out where there is none.
    mirror = Column("MIRROR", rank=2 if all(row.mirror == "local" for row in rows) else 0)
    columns = (Column("STEP"), Column("AGE"), Column("SIZE"), Column("STATE", floor=34), mirror, Column("", floor=8))
    lines = draw_table(columns, table, width=stdout_columns(), use_color=stdout_has_color()).split("\n")
    num_rows = len(lines)
    left = [row for row in rows if row.is_left_behind]
    if left:
        lines.append(f"left behind by `jackline resume --step`: {len(left)}; no attempt resumes from them by itself")
        lines.append(f"  take one up again: jackline resume --step {left[0].name}")
        lines.append("  delete them: jackline checkpoints prune --left-behind")
    lines += aside
    lines.append(f"in {folder}")
    return lines[:num_rows] + [safe_text(line, MAX_LINE) for line in lines[num_rows:]]


def set_aside_lines(folder: Path) -> tuple[str, ...]:
    """Which damaged checkpoints were set aside, and where they are."""
    aside = catalogue.list_set_aside(folder)
    if not aside:
        return ()
    shown = aside[-_SET_ASIDE_SHOWN:]
    more = (f"  and {len(aside) - len(shown)} more",) if len(aside) > len(shown) else ()
    return (f"{len(aside)} damaged, set aside:", *(f"  {path}" for path in reversed(shown)), *more)


def verify_line(result: dict[str, Any]) -> str:
    if result["is_whole"]:
        return f"{result['name']}  whole  {format_bytes(result['size_bytes'])}"
    return safe_text(f"{result['name']}  damaged: {result['why']}", MAX_LINE)


def prune_summary(count: int, freed: int, *, num_good: int, dry_run: bool, num_asked: int = 2) -> str:
    if num_good < num_asked:
        must = "two good ones" if num_asked == 2 else "one good one"
        return f"nothing deleted: {num_good} could be verified whole, and {must} must stay"
    if not count:
        return "nothing to delete"
    verb = "would free" if dry_run else "freed"
    return f"{verb} {format_bytes(freed)}; {num_good} newest read and whole"


def read_contents(path: Path, *, with_tensors: bool) -> dict[str, Any]:
    """The contents of a checkpoint: its manifest, the headers of its files and its plain values."""
    from jackline.checkpoint.format.export import read_state
    from jackline.checkpoint.format.verify import check_sizes, read_header, read_manifest

    manifest = read_manifest(path)
    check_sizes(path, manifest)
    files = []
    for entry in manifest.files:
        file: dict[str, Any] = {"name": entry.name, "size_bytes": entry.size_bytes}
        if entry.name.endswith(TENSORS):
            tensors = read_header(path / entry.name, entry.size_bytes).tensors
            file["num_tensors"] = len(tensors)
            if with_tensors:
                file["tensors"] = [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]
        files.append(file)
    return {
        "name": path.name,
        "path": str(path),
        "step": manifest.step,
        "saved_at_s": manifest.created_at_s,
        "parent_step": manifest.parent_step,
        "metrics": manifest.metrics,
        "facts": manifest.facts,
        "checksums": manifest.algorithm,
        "files": files,
        "state": {key: _kind(node) for key, node in read_state(path, manifest).items()},
    }


def show_lines(contents: dict[str, Any], now_s: float | None = None) -> list[str]:
    now = time.time() if now_s is None else now_s
    age = format_duration(max(0.0, now - contents["saved_at_s"]))
    lines = [f"{contents['name']}: step {contents['step']}, saved {age} ago", f"  in {contents['path']}"]
    if contents["parent_step"] is not None:
        lines.append(f"  the checkpoint before it: step {contents['parent_step']}")
    lines += [f"  {name} = {value:.6g}" for name, value in sorted(contents["metrics"].items())]
    lines += [f"  {key}: {kind}" for key, kind in contents["state"].items()]
    for file in contents["files"]:
        count = f", {file['num_tensors']} tensors" if "num_tensors" in file else ""
        lines.append(f"  {file['name']}: {format_bytes(file['size_bytes'])}{count}")
        lines += [f"    {t['name']}  {t['dtype']} {t['shape']}" for t in file.get("tensors", ())]
    lines += [f"  {name}: {value}" for name, value in contents["facts"].items() if name != "environment"]
    environment = contents["facts"].get("environment")
    if isinstance(environment, dict):
        lines.append("  " + ", ".join(f"{name} {value}" for name, value in environment.items()))
    lines.append(
        f"  lengths and manifest are right; `jackline checkpoints verify --step {contents['step']}` reads every byte"
    )
    return [safe_text(line, MAX_LINE) for line in lines]


def export_lines(name: str, part: Exported) -> list[str]:
    lines = [f"# {name}, {part.num_tensors} tensors, {format_bytes(part.size_bytes)}", *part.lines]
    if part.left_out:
        lines.append(f"# {len(part.left_out)} frozen parameters were left out of the checkpoint; load them first")
    return lines


def size_text(size: int) -> str:
    return format_bytes(size)


def _state(row: Row, now_s: float) -> str:
    if row.problem:
        return f"DAMAGED: {row.problem}"
    if row.is_left_behind:
        return "left behind"
    if row.read_back_at_s is None:
        return "saved"
    return f"saved, read back {format_duration(max(0.0, now_s - row.read_back_at_s))} ago"


def _read_pointer(folder: Path, pointer: str) -> str:
    try:
        return read_text(folder / pointer, 200).strip()
    except OSError:
        return ""


def _kind(node: Any) -> str:
    """A short description of one part of the state."""
    if isinstance(node, dict) and "$" in node:
        name = str(node.get("class", ""))
        counts = {"module": "tensors", "optimizer": "state"}
        count = f", {len(node[counts[node['$']]])} entries" if node["$"] in counts else ""
        return f"{node['$']} {name}".strip() + count
    if isinstance(node, dict):
        return f"dict of {len(node)}: {', '.join(list(node)[:6])}"
    if isinstance(node, list):
        return f"list of {len(node)}"
    return repr(node)[:80]
