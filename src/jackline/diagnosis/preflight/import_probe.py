"""Inspects a script from inside the interpreter that will run it, without running any of it.

Started by `check` as `PYTHON -c <this text> <questions as JSON>`, in the user's own environment. So it must work
alone, on every Python from 3.7 on. It prints one line of JSON. Files are parsed and modules are looked up, but none
of the user's code is imported. Owns only facts; `check` decides what they mean.
"""

# ruff: noqa: N815, PTH100, PTH109, PTH208 - names that `ast` asks for; os is loaded, pathlib is not

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path and sys.path[0] == "":
    # Before anything else is imported, because a user's own json.py beside the script must not run here.
    del sys.path[0]

import ast
import importlib.machinery
import importlib.util
import json
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `dict[...]` at run time needs Python 3.9
    Facts = dict[str, Any]
    Waiting = list[tuple[bytes, str, bool]]

MARK = "::jackline-probe "
MOST_FILES = 100
CATCHES = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
PARSERS = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
DECORATORS = (("click", "command"), ("click", "group"), ("typer", "Typer"), ("typer", "run"))


class Reader(ast.NodeVisitor):
    """Collects the imports of one file, with how certain each is to be executed, and the calls `check` asks for."""

    def __init__(self) -> None:
        self.imports: list[Facts] = []
        self.calls: list[Facts] = []
        self.workers: list[Facts] = []
        self.has_parser = False
        self._optional = 0
        self._late = 0

    def _add(self, name: str, level: int, line: int) -> None:
        entry: Facts = {"name": name, "level": level, "line": line}
        entry.update(optional=self._optional > 0, late=self._late > 0)
        self.imports.append(entry)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, 0, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add(node.module or "", node.level, node.lineno)

    def _later(self, node: ast.AST) -> None:
        self._late += 1
        self.generic_visit(node)
        self._late -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _later

    def visit_If(self, node: ast.If) -> None:
        test = node.test
        name = test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")
        if name == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
        elif _is_main_guard(test):
            self.generic_visit(node)
        else:
            self._later(node)

    def visit_Try(self, node: ast.Try) -> None:
        caught = [name for handler in node.handlers for name in _names(handler.type)]
        is_caught = any(name in CATCHES for name in caught)
        self._optional += is_caught
        for child in node.body + node.handlers:
            self.visit(child)
        self._optional -= is_caught
        for child in node.orelse + node.finalbody:
            self.visit(child)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
        if name in ("input", "breakpoint", "set_trace") and not (name == "input" and hasattr(node.func, "attr")):
            self.calls.append({"name": name, "line": node.lineno})
        owner = getattr(getattr(node.func, "value", None), "id", "")
        self.has_parser = self.has_parser or name in PARSERS or (owner, name) in DECORATORS
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", getattr(keyword.value, "n", None))
            if keyword.arg == "num_workers" and type(value) is int:
                self.workers.append({"count": value, "line": node.lineno})
        self.generic_visit(node)


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and getattr(test.left, "id", "") == "__name__"


def _names(node: ast.expr | None) -> list[str]:
    """Names in an except clause; a bare `except:` catches everything."""
    if node is None:
        return ["BaseException"]
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return [getattr(part, "id", getattr(part, "attr", "")) for part in parts]


def read_source(source: bytes, path: str) -> tuple[Reader | None, Facts | None]:
    """(reader, None), or (None, what is wrong)."""
    try:
        tree = ast.parse(source, path)
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 0
        text = (getattr(error, "text", None) or "").strip()
        message = getattr(error, "msg", None) or str(error)
        return None, {"file": path, "line": line, "message": message, "text": text}
    reader = Reader()
    reader.visit(tree)
    return reader, None


def find_module(name: str) -> tuple[bool, str | None]:
    """Return (is found, file or folder). Python's own finders look up only the first part of the name, because
    looking up the rest would import the parent packages."""
    head, _, rest = name.partition(".")
    if head in sys.builtin_module_names:
        return True, None
    try:
        spec = importlib.util.find_spec(head)
    except Exception:  # a finder installed by a package may raise anything
        return False, None
    if spec is None:
        return False, None
    done = head
    for part in rest.split(".") if rest else []:
        if spec.submodule_search_locations is None:
            break
        done = done + "." + part
        below = importlib.machinery.PathFinder.find_spec(done, list(spec.submodule_search_locations))
        if below is None:
            # Packages may create modules at run time, so a missing file is certain only in a user's own folder.
            home = spec.origin or next(iter(spec.submodule_search_locations), "")
            return not is_own(home), home
        spec = below
    return True, spec.origin


OWN: list[str] = []


def is_own(path: str | None) -> bool:
    """Whether it is the user's own: under the script's folder or the current one, and not installed there."""
    if not path or "site-packages" in path or "dist-packages" in path:
        return False
    if os.path.abspath(path).startswith(os.path.dirname(os.path.abspath(os.__file__)) + os.sep):
        return False  # a Python installed in the home folder, which is the current folder
    return any(os.path.abspath(path).startswith(folder + os.sep) for folder in OWN)


def walk(questions: Facts) -> Facts:
    """Read the script and every file of the user's own code that it imports."""
    waiting: Waiting = [(questions["source"], questions["path"], True)]
    seen = {os.path.abspath(questions["path"])}
    facts: Facts = {"files": [], "syntax": [], "missing": [], "calls": [], "workers": [], "has_parser": False}
    while waiting and len(seen) <= MOST_FILES:
        source, path, is_script = waiting.pop(0)
        reader, problem = read_source(source, path)
        if reader is None:
            facts["syntax"].append(problem)
            continue
        facts["files"].append(path)
        facts["calls"] += [dict(call, file=path) for call in reader.calls]
        facts["workers"] += [dict(entry, file=path) for entry in reader.workers]
        facts["has_parser"] = facts["has_parser"] or (is_script and reader.has_parser)
        for entry in reader.imports:
            follow(dict(entry, file=path), is_script and questions["is_script"], facts, waiting, seen)
    return facts


def follow(entry: Facts, is_script: bool, facts: Facts, waiting: Waiting, seen: set[str]) -> None:
    if entry["level"]:
        if is_script and not entry["optional"]:
            facts["missing"].append(dict(entry, relative=True))
        return
    is_found, origin = find_module(entry["name"])
    if not is_found:
        name = entry["name"] if origin else entry["name"].partition(".")[0]
        facts["missing"].append(dict(entry, name=name, relative=False))
    elif origin and origin.endswith(".py") and is_own(origin) and os.path.abspath(origin) not in seen:
        seen.add(os.path.abspath(origin))
        try:
            with open(origin, "rb") as file:
                waiting.append((file.read(), origin, False))
        except OSError:
            pass


def versions(names: list[str]) -> dict[str, str]:
    """Installed versions, from package metadata; nothing is imported."""
    try:
        from importlib import metadata
    except ImportError:
        return {}
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except Exception:  # not installed, or its metadata is damaged
            continue
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    questions = json.loads(sys.argv[1])
    answer: Facts = {"version": list(sys.version_info[:3]), "executable": sys.executable, "prefix": sys.prefix}
    answer["versions"] = versions(questions["packages"])
    folder = os.path.abspath(questions["folder"])
    OWN[:] = sorted({folder, os.getcwd()})
    sys.path.insert(0, folder)
    if questions.get("module"):
        is_found, origin = find_main(questions["module"])
        answer["module"] = {"found": is_found, "file": origin}
        questions["path"] = origin if origin and is_own(origin) and origin.endswith(".py") else None
    if questions.get("path"):
        if questions.get("source") is None:
            with open(questions["path"], "rb") as file:
                questions["source"] = file.read()
        else:
            questions["source"] = questions["source"].encode()
        answer.update(walk(questions))
        standard = getattr(sys, "stdlib_module_names", ())
        own = [name[:-3] for name in os.listdir(folder) if name.endswith(".py")]
        answer["hiding"] = sorted(name for name in own if name in standard and name != "__main__")
    print(MARK + json.dumps(answer))


def find_main(name: str) -> tuple[bool, str | None]:
    """The file that `python -m name` runs; for a package that is __main__."""
    is_found, origin = find_module(name)
    if is_found and (origin is None or os.path.basename(origin) == "__init__.py"):
        is_main_found, main_origin = find_module(name + ".__main__")
        return (is_main_found, main_origin) if main_origin != origin else (is_found, origin)
    return is_found, origin


if __name__ == "__main__":
    main()
