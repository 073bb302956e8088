"""The lines that load a rescued state, as a patch of the script that it was taken from.

Plain PyTorch and safetensors only: nothing of Jackline is needed to load it. Owns where the lines go (before the loop
that trains) and what they are for each type of object. What cannot be loaded by a few lines is said in a comment.
"""

from __future__ import annotations

import ast
import difflib
import os
from pathlib import Path
from typing import Any

from jackline.checkpoint.format.export import read_state
from jackline.checkpoint.format.manifest import Damage, Manifest, is_safe_file_name
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.errors import JacklineError
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


def loading_text(record: RescueRecord, folder: Path, *, is_ours: bool = True) -> str:
    """A patch of the script where it can be read, else the lines alone; after it, what is not restored. Of a run that
    is not `is_ours` no file is read that it names."""
    try:
        manifest = verify_checkpoint(folder)
        state = read_state(folder, manifest)
    except Damage as damage:
        raise JacklineError(f"{folder.name} is not whole: {damage}", hint="choose an earlier one") from None
    # A comment is one line, whatever the record holds: what comes after it is code that somebody pastes.
    lines = [" ".join(line.splitlines()) for line in loading_lines(record, folder, state, manifest)]
    source = _read_source(record.file) if is_ours else None
    patch = make_patch(record, source, lines) if source is not None else None
    body = patch or "\n".join(lines)
    return f"{body.rstrip()}\n{_notes(record, is_patch=patch is not None)}"


def loading_lines(record: RescueRecord, folder: Path, state: dict[str, Any], manifest: Manifest) -> list[str]:
    """The lines, without indentation."""
    lines = [
        f"# the state of step {record.step}, rescued by Jackline",
        "from safetensors.torch import load_file",
        f"rescued = {str(folder.absolute())!r}",
    ]
    parts = [part for part in record.parts if isinstance(part.get("key"), str)]
    if any(part.get("kind") == "optimizer" and _reaches(record, part) for part in parts):
        lines += _OPTIMIZER.splitlines()
    files = {file.name for file in manifest.files}
    for part in parts:
        lines += _lines_of(record, part, state.get(str(part["key"])), files)
    return lines


def _reaches(record: RescueRecord, part: dict[str, Any]) -> bool:
    """Whether the place of the patch knows the object by this name."""
    is_here = part.get("file") == record.file and part.get("function") in (record.function, "<module>")
    return bool(part.get("expression")) and is_here


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


def _lines_of(record: RescueRecord, part: dict[str, Any], node: Any, files: set[str]) -> list[str]:
    key, name, made = str(part["key"]), str(part.get("expression") or ""), part.get("class")
    if not is_safe_file_name(f"{key}.safetensors") or (name and not _is_name(name)):
        return [f"# {key!r} ({made!r}) is in the rescued state too, but its names are no names of Python: {name!r}"]
    if not _reaches(record, part):
        where = f"'{name}' of {part.get('function')}() in {part.get('file')}" if name else "no variable names it"
        return [f"# {key} ({made}) is in the rescued state too, but not known here: {where}"]
    file = f"{key}.safetensors"
    kind = node.get(KIND) if isinstance(node, dict) else None
    if kind == "module" and file in files:
        tensors = node.get("tensors", {})
        is_tied = len({str(value) for value in tensors.values()}) < len(tensors)
        target = (
            f"getattr({name}, '_orig_mod', getattr({name}, 'module', {name}))" if part.get("is_wrapped") else name
        )
        strict = ", strict=False" if is_tied else ""
        return [f"{target}.load_state_dict(load_file(f'{{rescued}}/{file}'){strict})"]
    if kind == "optimizer":
        return _optimizer_lines(name, file, node, files)
    if kind == "stateful" and (literal := _literal(node.get("state"))) is not None:
        return [f"{name}.load_state_dict({literal})"]
    if part.get("kind") == "tensors" and file in files:
        index = "name" if isinstance(node, dict) else "int(name)"
        return [
            f"for name, value in load_file(f'{{rescued}}/{file}').items():",
            f"    {name}[{index}].data.copy_(value)",
        ]
    return [f"# {name} ({made}) needs more than a few lines: see state.json there, or attach (below)"]


def _optimizer_lines(name: str, file: str, node: dict[str, Any], files: set[str]) -> list[str]:
    states = [
        value for values in node.get("state", {}).values() if isinstance(values, dict) for value in values.values()
    ]
    if any(not isinstance(value, dict) or value.get(KIND) != "tensor" for value in states):
        return [f"# the state of {name} has more than tensors: see state.json there, or attach (below)"]
    groups = [group.get("settings", {}) for group in node.get("groups", ()) if isinstance(group, dict)]
    rates = [{word: group[word] for word in ("lr", "initial_lr") if word in group} for group in groups]
    if file not in files:
        return [f"# {name} has no state yet: nothing to load"]
    return [f"load_optimizer({name}, f'{{rescued}}/{file}', {_literal(rates) or [{} for _ in rates]})"]


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


def _read_source(file: str) -> str | None:
    try:
        return read_whole(Path(file), MAX_SOURCE_BYTES).decode() if file else None
    except (OSError, ValueError, Damage):
        return None


def make_patch(record: RescueRecord, source: str, lines: list[str]) -> str | None:
    """A unified diff; None when the place is not found, for example because the file was edited since."""
    try:
        statement = find_loop(ast.parse(source), record.function, record.line or 0)
    except (SyntaxError, RecursionError):
        return None
    if statement is None:
        return None
    before = source.splitlines(keepends=True)
    at = statement.lineno - 1
    indent = before[at][: len(before[at]) - len(before[at].lstrip())]
    added = [f"{indent}{line}\n" for line in lines]
    loop = _continued(statement, before[at], record.values or {})
    after = [*before[:at], *added, loop, *before[at + 1 :]]
    name = os.path.relpath(record.file) if Path(record.file).is_relative_to(Path.cwd()) else record.file
    return "".join(difflib.unified_diff(before, after, name, name))


def find_loop(tree: ast.Module, function: str, line: int) -> ast.stmt | None:
    """The outermost loop around `line` in `function`; without a loop, the statement itself."""
    body: list[ast.stmt] = tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            body = node.body if node.lineno <= line <= (node.end_lineno or 0) else body
    for statement in body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return _loop_in(statement, line) or statement
    return None


def _loop_in(statement: ast.stmt, line: int) -> ast.stmt | None:
    for node in ast.walk(statement):  # the outermost comes first
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or 0):
            return node
    return None


def _continued(statement: ast.stmt, text: str, values: dict[str, Any]) -> str:
    """`for epoch in range(90)` as `range(3, 90)`, where the rescue saw epoch = 3; any other line as it is."""
    if not isinstance(statement, ast.For) or not isinstance(statement.target, ast.Name):
        return text
    call, reached = statement.iter, values.get(statement.target.id)
    is_range = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"
    if not is_range or not isinstance(reached, int) or reached <= 0:
        return text
    assert isinstance(call, ast.Call)
    if len(call.args) != 1 or call.keywords:
        return text
    total = ast.unparse(call.args[0])
    return text.replace(f"range({total})", f"range({reached}, {total})")


def _notes(record: RescueRecord, *, is_patch: bool) -> str:
    values = {name: value for name, value in (record.values or {}).items() if isinstance(value, int | float)}
    known = ", ".join(f"{' '.join(name.splitlines())} = {value}" for name, value in list(values.items())[:8])
    notes = [
        "",
        "# Not restored by these lines: the position in the data (an interrupted epoch begins again) and RNG states,",
        "# which are in state.json.",
        *([f"# When it was taken: {known}."] if known else []),
        *([f"# {' '.join(text.splitlines())} is not in it." for text in record.missing]),
        *([] if is_patch else ["# Put them before the loop that trains."]),
        "# Four lines of `jackline.attach` make this script resume exactly, by itself: docs/guides/own-loop.md",
    ]
    return "\n".join(notes)
