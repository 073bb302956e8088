"""The lines that load a rescued state, as a patch of the script that it was taken from.

Plain PyTorch and safetensors only: nothing of Jackline is needed to load it. Owns where the lines go (before the loop
that trains) and what they are for each type of object. What cannot be loaded by a few lines is said in a comment.
"""

from __future__ import annotations

import ast
import difflib
import os
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from jackline.checkpoint.format.export import read_state
from jackline.checkpoint.format.manifest import Damage, is_safe_file_name
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.cli.rescue.spots import Spot, bound_in, carried, continued, find_spot
from jackline.errors import JacklineError
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_whole
from jackline.rundir.records.rescue import RescueRecord

MAX_SOURCE_BYTES = 4 << 20
MAX_LITERAL = 2000
_OPTIMIZER = """\
def load_optimizer(optimizer, file, settings):
    saved = optimizer.state_dict()
    for name, value in load_file(file).items():
        _, number, word = name.split(".", 2)
        saved["state"].setdefault(int(number), {})[word] = value
    for group, values in zip(saved["param_groups"], settings):
        group.update(values)
    optimizer.load_state_dict(saved)
"""
# For states that hold lists and numbers too, such as that of LBFGS.
_MIXED = """\
def load_mixed_optimizer(optimizer, folder, key, settings):
    import json
    tensors = load_file(f"{folder}/{key}.safetensors")
    def value_of(node):
        if isinstance(node, list):
            return [value_of(one) for one in node]
        return tensors[node["name"]] if isinstance(node, dict) else node
    with open(f"{folder}/state.json") as file:
        state = json.load(file)[key]["state"]
    saved = optimizer.state_dict()
    saved["state"] = {int(n): {word: value_of(one) for word, one in each.items()} for n, each in state.items()}
    for group, values in zip(saved["param_groups"], settings):
        group.update(values)
    optimizer.load_state_dict(saved)
"""


def loading_text(record: RescueRecord, folder: Path, *, is_ours: bool = True, command: str = "") -> str:
    """A patch of the script where it can be read, else the lines alone; after it, what is not restored. Of a run that
    is not `is_ours` no file is read that it names. `command` printed this."""
    try:
        manifest = verify_checkpoint(folder)
        state = read_state(folder, manifest)
    except Damage as damage:
        raise JacklineError(f"{folder.name} is not whole: {damage}", hint="choose an earlier one") from None
    place = choose_place(record) if is_ours else _blind_place(record)
    lines = loading_lines(record, place, Stored(folder, state, {file.name for file in manifest.files}))
    # A comment is one line, whatever the record holds: what comes after it is code that somebody pastes.
    lines = [" ".join(line.splitlines()) for line in lines]
    patch = make_patch(place, lines) if place.spot is not None else None
    body = patch or "\n".join(lines)
    notes = [*_notes(record, place), *(_applying(command) if patch else ["# Put them before the loop that trains."])]
    return "\n".join((body.rstrip(), "", *notes, OFFER))


def loading_lines(record: RescueRecord, place: Place, stored: Stored) -> list[str]:
    """The lines, without indentation."""
    parts = [part for part in record.parts if isinstance(part.get("key"), str)]
    body = [line for part in parts for line in _lines_of(place, part, stored)]
    lines = [
        f"# the state{f' of step {record.step}' if record.step is not None else ''}, rescued by Jackline",
        "from safetensors.torch import load_file",
        f"rescued = {str(stored.folder.absolute())!r}",
    ]
    for word, source in (("load_optimizer(", _OPTIMIZER), ("load_mixed_optimizer(", _MIXED)):
        if any(line.startswith(word) for line in body):
            lines += source.splitlines()
    return lines + body + [f"{name} = {value!r}" for name, value in place.carried.items()]


def _is_name(text: str) -> bool:
    """'model', 'self.nets[0].body', "parts['optim']": a variable, its attributes and entries. Nothing is called."""
    try:
        node: ast.AST = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name) and "\n" not in text and "#" not in text


def _lines_of(place: Place, part: dict[str, Any], stored: Stored) -> list[str]:
    key, made = str(part["key"]), part.get("class")
    name = place.names.get(key, "")
    spelled = name or str(part.get("expression") or "")
    if not is_safe_file_name(f"{key}.safetensors") or (spelled and not _is_name(spelled)):
        return [
            f"# {key!r} ({made!r}) is in the rescued state too, but its names are no names of Python: {spelled!r}"
        ]
    if not name:
        where = (
            f"'{spelled}' of {part.get('function')}() in {part.get('file')}" if spelled else "no variable names it"
        )
        return [f"# {key} ({made}) is in the rescued state too, but not known here: {where}"]
    node: Any = stored.state.get(key)
    kind = node.get(KIND) if isinstance(node, dict) else None
    if "." in name and kind != "module" and place.spot is not None and not place.spot.is_loop:
        return [
            f"# {name} ({made}) is not loaded: it may be made by the call below. Its state is in {key}.safetensors"
        ]
    if kind == "module" and f"{key}.safetensors" in stored.files:
        return [_module_line(place, key, name, node)]
    if kind == "optimizer":
        return _optimizer_lines(name, key, node, stored.files)
    if kind == "stateful" and (literal := _literal(node.get("state"))) is not None:
        return [f"{name}.load_state_dict({literal})"]
    if part.get("kind") == "tensors" and f"{key}.safetensors" in stored.files:
        index = "name" if isinstance(node, dict) else "int(name)"
        return [
            f"for name, value in load_file(f'{{rescued}}/{key}.safetensors').items():",
            f"    {name}[{index}].data.copy_(value)",
        ]
    return [f"# {name} ({made}) needs more than a few lines: see state.json there, or attach (below)"]


def _module_line(place: Place, key: str, name: str, node: dict[str, Any]) -> str:
    tensors = node.get("tensors", {})
    is_tied = len({str(value) for value in tensors.values()}) < len(tensors)
    target = f"getattr({name}, '_orig_mod', getattr({name}, 'module', {name}))" if key in place.wrapped else name
    strict = ", strict=False" if is_tied else ""
    return f"{target}.load_state_dict(load_file(f'{{rescued}}/{key}.safetensors'){strict})"


def _optimizer_lines(name: str, key: str, node: dict[str, Any], files: set[str]) -> list[str]:
    if f"{key}.safetensors" not in files:
        return [f"# {name} has no state yet: nothing to load"]
    states = [
        value for values in node.get("state", {}).values() if isinstance(values, dict) for value in values.values()
    ]
    groups = [group.get("settings", {}) for group in node.get("groups", ()) if isinstance(group, dict)]
    rates = [{word: group[word] for word in ("lr", "initial_lr") if word in group} for group in groups]
    settings = _literal(rates) or repr([{} for _ in rates])
    if all(isinstance(value, dict) and value.get(KIND) == "tensor" for value in states):
        return [f"load_optimizer({name}, f'{{rescued}}/{key}.safetensors', {settings})"]
    if all(map(_is_mixed, states)):
        return [f"load_mixed_optimizer({name}, rescued, {key!r}, {settings})"]
    return [f"# the state of {name} has more than tensors and numbers: see state.json there, or attach (below)"]


def _is_mixed(node: Any) -> bool:
    """Tensors, lists and plain values."""
    if isinstance(node, list):
        return all(map(_is_mixed, node))
    return node.get(KIND) == "tensor" if isinstance(node, dict) else True


def _literal(value: Any) -> str | None:
    """Plain values as Python source; None where something else is in them."""
    found = repr(_plain(value)) if _is_plain(value) else None
    return found if found is not None and len(found) <= MAX_LITERAL else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        kind = value.get(KIND)
        if kind in ("dict", "ordered", "counter", "tuple"):
            return _is_plain(value.get("items"))
        return kind is None and all(_is_plain(entry) for entry in value.values())
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        if KIND not in value:
            return {key: _plain(entry) for key, entry in value.items()}
        items = _plain(value["items"])
        return tuple(items) if value[KIND] == "tuple" else dict(items)
    return value


# -- where the lines go ----------------------------------------------------------------------------------------------


@immutable
class Stored:
    """The checkpoint that is loaded."""

    folder: Path
    state: dict[str, Any]
    files: set[str]


@immutable
class Place:
    """A function of the script, what it calls each part (`names`, by key), and where in it the lines go."""

    file: str = ""
    function: str = ""
    line: int = 0
    names: dict[str, str] = field(default_factory=dict)
    wrapped: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    spot: Spot | None = None
    carried: dict[str, Any] = field(default_factory=dict)
    callers: tuple[str, ...] = ()  # loops in which it is called: the lines are run once


def choose_place(record: RescueRecord) -> Place:
    """The function that trains in a loop and knows most of the parts; of two such, the outer one."""
    trained = {part.get("key") for part in record.parts if part.get("kind") in ("module", "optimizer")}
    sources = {file: _read_source(file) for file in {str(one.get("file") or "") for one in record.places}}
    trees = {file: _parse(source) for file, source in sources.items() if source is not None}
    frames = [_place_of(one, record.places, sources, trees) for one in record.places]

    def worth(number: int) -> tuple[Any, ...]:
        one = frames[number]
        return (
            one.spot is not None and (one.spot.is_loop or bool(one.spot.outer)),
            one.spot is not None,
            len(trained & set(one.names)),
            len(one.names),
            number,
        )

    if not frames:
        return _blind_place(record)
    best = max(range(len(frames)), key=worth)
    if not frames[best].names:
        return _blind_place(record)
    outer = [one for one in frames[best + 1 :] if one.spot is not None and (one.spot.outer or _in_loop(one))]
    callers = tuple(f"{Path(one.file).name}:{one.line}" for one in outer)
    return replace(frames[best], callers=callers)


def _in_loop(place: Place) -> bool:
    spot = place.spot
    return spot is not None and spot.is_loop and not spot.is_over


def _place_of(
    raw: dict[str, Any],
    places: tuple[dict[str, Any], ...],
    sources: dict[str, str | None],
    trees: dict[str, ast.Module | None],
) -> Place:
    file, function = str(raw.get("file") or ""), str(raw.get("function") or "")
    line = raw.get("line") if isinstance(raw.get("line"), int) else 0
    module = [one for one in places if one.get("function") == "<module>" and one.get("file") == file]
    spelled = {**(_names(module[0]) if module else {}), **_names(raw)}
    names = {key: name for key, name in spelled.items() if _is_name(name)}
    wrapped = {key for one in (raw, *module) for key in one.get("wrapped") or () if isinstance(key, str)}
    values = raw.get("values") if isinstance(raw.get("values"), dict) else {}
    place = Place(file, function, line or 0, names, tuple(wrapped), values or {}, sources.get(file) or "")
    tree = trees.get(file)
    spot = find_spot(tree, function, place.line, names.values()) if tree is not None and place.line else None
    if tree is None or spot is None:
        return place
    return replace(place, spot=spot, carried=carried(tree, function, spot, place.values))


def _names(raw: dict[str, Any]) -> dict[str, str]:
    found = raw.get("names")
    return {key: name for key, name in found.items() if isinstance(name, str)} if isinstance(found, dict) else {}


def _blind_place(record: RescueRecord) -> Place:
    """Without a source: the frame that named most of the parts, as the record says."""
    known = [
        part
        for part in record.parts
        if part.get("file") == record.file and part.get("function") in (record.function, "<module>")
    ]
    names = {str(part.get("key")): str(part.get("expression")) for part in known if part.get("expression")}
    wrapped = tuple(str(part.get("key")) for part in known if part.get("is_wrapped"))
    return Place(record.file, record.function, record.line or 0, names, wrapped, record.values or {})


def _read_source(file: str) -> str | None:
    try:
        return read_whole(Path(file), MAX_SOURCE_BYTES).decode() if file else None
    except (OSError, ValueError, Damage):
        return None


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def make_patch(place: Place, lines: list[str]) -> str:
    """A unified diff of the script with the lines in it; its loops begin where the training was."""
    spot = place.spot
    assert spot is not None
    end = "\r\n" if "\r\n" in place.source else "\n"
    before = [f"{line}\n" for line in place.source.split("\n")]
    before[-1] = before[-1][:-1]  # a file ends with a line end or is shown without one
    before = before if before[-1] else before[:-1]
    at = spot.statement.lineno - 1
    indent = before[at][: len(before[at]) - len(before[at].lstrip())]
    if spot.outer or place.callers:
        again = "rescue_is_loaded"
        lines = [
            f'if "{again}" not in globals():',
            f'    globals()["{again}"] = True',
            *(f"    {one}" for one in lines),
        ]
    after = before.copy()
    for loop in (*spot.outer, spot.statement):
        is_over = spot.is_over and loop is spot.statement
        after[loop.lineno - 1] = continued(loop, before[loop.lineno - 1], place.values, is_over=is_over)
    after[at:at] = [f"{indent}{line}{end}" for line in lines]
    file = Path(place.file)
    name = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file).lstrip("/")
    found = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found)


def _applying(command: str) -> list[str]:
    return [f"# Apply it with: {command} | patch -p1"] if command else []


def _notes(record: RescueRecord, place: Place) -> list[str]:
    spot = place.spot
    counted = bound_in(spot.outer[0] if spot.outer else spot.statement) if spot is not None else set()
    every = {name: value for name, value in (record.values or {}).items() if isinstance(value, int | float)}
    values = {name: value for name, value in every.items() if name in counted} or every
    values = {name: value for name, value in values.items() if not _is_time_of_day(value)}
    ranked = sorted(values.items(), key=lambda item: isinstance(item[1], float))  # counters first
    known = ", ".join(f"{' '.join(name.splitlines())} = {value}" for name, value in ranked[:8])
    called = ", ".join(place.callers)
    return [
        "# Not restored by these lines: the position in the data (an interrupted epoch begins again) and RNG states,",
        "# which are in state.json.",
        *([f"# When it was taken: {known}."] if known else []),
        *(
            [f"# Called in a loop at {called}: the first call loads it, whichever call it was taken in."]
            if called
            else []
        ),
        *([f"# {' '.join(text.splitlines())} is not in it." for text in record.missing]),
    ]


def _is_time_of_day(value: float) -> bool:
    """What `time.time()` gives: said of the moment by the record already."""
    return isinstance(value, float) and 1e9 < value < 1e10


OFFER = "# Four lines of `jackline.attach` make this script resume exactly, by itself: docs/guides/own-loop.md"
