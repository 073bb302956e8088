"""The reference of the site (reference/cli.md, python.md, files.md), made from the code whenever the site is built.

The command line comes from its own declarations, Python names and records from their source: torch is not imported.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from jackline.cli.main import COMMANDS, cli
from jackline.session.settings import Settings
from jackline.settings import settings_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "jackline"
MADE = "*Made from the code by `scripts/docs`.*"
# Public name -> its file and its name there. Compared with the public names by a test.
PYTHON = {
    "attach": ("session/attach.py", "attach"),
    "phase": ("session/phase.py", "phase"),
    "peek": ("session/peek.py", "peek"),
    "load": ("trainer/trained/load.py", "load"),
    "Loader": ("session/feeds/loader.py", "Loader"),
    "Recipe": ("trainer/own/recipe.py", "Recipe"),
    "Stopped": ("session/stopping.py", "Stopped"),
}
NOTEBOOK = {
    "setup": ("notebook/place.py", "setup"),
    "plan": ("notebook/start.py", "plan"),
    "train": ("notebook/start.py", "train"),
    "run": ("notebook/start.py", "run"),
    "watch": ("notebook/look.py", "watch"),
    "why": ("notebook/look.py", "why"),
    "report": ("notebook/look.py", "report"),
    "Run": ("notebook/look.py", "Run"),
}
# File of a run -> where its record is declared.
FILES = {
    "run.json": ("rundir/run_file.py", "RunFile"),
    "supervisor.json": ("rundir/records/supervisor.py", "SupervisorRecord"),
    "session-RANK.json": ("rundir/records/session.py", "SessionRecord"),
    "timeline.jsonl": ("rundir/records/timeline.py", "TimelineRecord"),
    "attempts/NNN/start.json": ("rundir/records/start.py", "StartRecord"),
    "attempts/NNN/exit.json": ("rundir/records/exit.py", "ExitRecord"),
    "attempts/NNN/surroundings.json": ("rundir/records/surroundings.py", "SurroundingsRecord"),
    "memory.json": ("rundir/records/memory.py", "MemoryRecord"),
    "mirror.json": ("rundir/records/mirror.py", "MirrorRecord"),
    "stop-request.json": ("rundir/records/stop_request.py", "StopRequest"),
    "exports/NAME.json": ("exporters/reader.py", "ExportRecord"),
}


# -- the command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    lines = ["# Command line", "", MADE, ""]
    lines += ["`jackline COMMAND --help` prints the same. `--flag_name` and `--flag-name` are the same.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#jackline-{name}) | {_cell(text)} |" for name, (_, text) in COMMANDS.items()]
    with cli.make_context("jackline", [], resilient_parsing=True) as context:
        for name in COMMANDS:
            command = cli.get_command(context, name)
            assert command is not None
            lines += ["", f"## jackline {name}", "", *_command(f"jackline {name}", command)]
            if isinstance(command, click.Group):
                for inner, part in sorted(command.commands.items()):
                    lines += ["", f"### jackline {name} {inner}", "", *_command(f"jackline {name} {inner}", part)]
    return "\n".join(lines) + "\n"


def _command(words: str, command: click.Command) -> Iterator[str]:
    pieces = [_usage(part) for part in command.params if isinstance(part, click.Argument)]
    yield f"`{' '.join([words, '[OPTIONS]', *pieces])}`"
    yield from _paragraphs(command.help or command.short_help or "")
    options = [part for part in command.params if isinstance(part, click.Option) and not part.hidden]
    if options:
        yield from ("", "| option | meaning |", "|---|---|")
        yield from (f"| {_option(part)} | {_cell(_meaning(part))} |" for part in options)


def _usage(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    name += "..." if argument.nargs == -1 and not argument.metavar else ""
    return name if argument.required or argument.metavar else f"[{name}]"


def _option(option: click.Option) -> str:
    value = ""
    if not option.is_flag and not option.count:
        choices = getattr(option.type, "choices", None)
        value = " " + (option.metavar or ("|".join(map(str, choices)) if choices else option.type.name.upper()))
    return _cell(", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts)))


def _meaning(option: click.Option) -> str:
    text = option.help or ""
    return f"{text} Default: {option.default}." if option.show_default and option.default is not None else text


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs after a line with \\b are printed as they are."""
    for paragraph in textwrap.dedent(text.replace("\f", "")).strip().split("\n\n"):
        yield ""
        if paragraph.lstrip().startswith("\b"):
            yield from ("```", textwrap.dedent(paragraph.lstrip().removeprefix("\b").strip("\n")), "```")
        else:
            yield " ".join(line.strip() for line in paragraph.splitlines())


# -- Python ----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    lines = ["# Python", "", MADE, ""]
    lines += [
        "`import jackline` costs nothing and never imports torch; names are loaded when they are first used.",
        "",
    ]
    for name, (file, inside) in PYTHON.items():
        lines += [f"## jackline.{name}", "", *_python(name, _find(file, inside))]
    lines += ["## What attach returns", "", *_python("run", _find("session/run.py", "Run"))]
    lines += ["## Settings of attach", "", "| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for one in settings_of(Settings).values():
        meaning = _cell(one.declared.meaning)
        lines.append(f"| `{one.name}` | `{one.default!r}` | {_cell(one.values_text)} | {meaning} |")
    lines += ["", "## jackline.notebook", "", "In a cell or in plain Python. [Guide](../guides/colab.md).", ""]
    for name, (file, inside) in NOTEBOOK.items():
        lines += [f"### notebook.{name}", "", *_python(f"notebook.{name}", _find(file, inside))]
    return "\n".join(lines).rstrip() + "\n"


def _find(file: str, name: str) -> Any:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next(node for node in tree.body if isinstance(node, kinds) and node.name == name)


def _python(name: str, node: Any) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield from ("```python", f"{name}({ast.unparse(node.args)})", "```", "", *_doc(node), "")
        return
    yield from (*_doc(node), "", "| name | what it is |", "|---|---|")
    for part in node.body:
        if not isinstance(part, ast.FunctionDef) or part.name.startswith("_"):
            continue
        marks = {ast.unparse(mark) for mark in part.decorator_list}
        words = ast.unparse(part.args).removeprefix("self").lstrip(", ").removeprefix("/, ")
        shown = part.name if "property" in marks else f"{part.name}({words})"
        first = (ast.get_docstring(part) or "").split("\n\n")[0].replace("\n", " ")
        yield f"| `{_cell(shown)}` | {_cell(first)} |"
    yield ""


def _doc(node: Any) -> Iterator[str]:
    """A docstring as Markdown: indented parts are code."""
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        if paragraph.startswith("    "):
            yield from ("```python", textwrap.dedent(paragraph), "```", "")
        else:
            yield from (" ".join(paragraph.splitlines()), "")


# -- files -----------------------------------------------------------------------------------------------------------


def files_page() -> str:
    lines = ["# Records of a run", "", MADE, ""]
    lines += [
        "What is in which file, and who writes it: [run format](../RUN_FORMAT.md). A value of the wrong type counts "
        "as absent. Times end in `at_s` (seconds since 1970), durations in `_s`, sizes in `_bytes`.",
        "",
    ]
    for name, (file, record) in FILES.items():
        lines += [f"## {name}", "", *_record(file, record, set())]
    return "\n".join(lines).rstrip() + "\n"


def _record(file: str, name: str, shown: set[str]) -> Iterator[str]:
    """A record's fields, then those of the records inside it."""
    node = _find(file, name)
    shown.add(name)
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
    yield from (" ".join((ast.get_docstring(node) or "").split()), "", "| field | type |", "|---|---|")
    inside = []
    for part in fields:
        kind = ast.unparse(part.annotation)
        yield f"| `{part.target.id}` | `{_cell(kind)}` |"  # type: ignore[union-attr]
        inside += re.findall(r"\b(\w+Record)\b", kind)
    yield ""
    known = {part.name for part in ast.parse((SOURCE / file).read_text()).body if isinstance(part, ast.ClassDef)}
    for other in inside:
        if other in known and other not in shown:
            yield from (f"**{other}**: ", "")
            yield from _record(file, other, shown)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"cli.md": cli_page, "python.md": python_page, "files.md": files_page}
