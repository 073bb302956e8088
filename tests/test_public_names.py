"""The public names. Whoever removes or renames one breaks other people's code: change these lists on purpose only.

Adding a name is a promise too. A change here needs a line in CHANGES.md.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import jackline
from jackline import notebook
from jackline.cli.main import COMMANDS
from jackline.session.settings import Settings
from tests.deadline import HANGS_S

PUBLIC = ["Loader", "Recipe", "Stopped", "__version__", "attach", "load", "notebook", "peek", "phase"]
NOTEBOOK = ["Run", "plan", "report", "run", "setup", "train", "watch", "why"]
RUN = [
    "at_risk",
    "batch",
    "before_change",
    "doing",
    "epoch",
    "epochs",
    "event",
    "log",
    "logged",
    "name",
    "newest_checkpoint",
    "phase",
    "safe_step",
    "save",
    "saving_s",
    "should_stop",
    "step",
    "steps",
    "values",
]
NOTEBOOK_RUN = ["name", "state", "status", "stop", "watch", "why"]
ATTACH_SETTINGS = [
    "accumulate",
    "disk_budget",
    "exact",
    "grace_s",
    "keep_best",
    "keep_every",
    "keep_last",
    "keyed_random",
    "leave_out_frozen",
    "memory_guard",
    "mirror",
    "mirror_patience_s",
    "name",
    "new",
    "on_change",
    "on_spike",
    "overlap",
    "replay_every",
    "runs_dir",
    "save_every_s",
    "save_every_steps",
    "seed",
    "seekable",
    "trial",
    "verify",
    "wait_for_disk_s",
]
INTEGRATIONS = {
    "accelerate": ["PreparedLoader", "attach", "unwrap"],
    "lightning": ["JacklineCallback", "JacklineIO"],
    "transformers": ["ExactResume", "Link", "exact"],
}
COMMAND_NAMES = [
    "checkpoints",
    "dash",
    "data",
    "demo",
    "diff",
    "doctor",
    "eval",
    "events",
    "export",
    "fork",
    "goodput",
    "init",
    "launch",
    "logs",
    "mcp",
    "plan",
    "plot",
    "predict",
    "report",
    "rescue",
    "resume",
    "run",
    "runs",
    "sample",
    "send",
    "status",
    "stop",
    "sweep",
    "train",
    "validate",
    "wait",
    "watch",
    "why",
]


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def functions_of(integration: str) -> list[str]:
    """From the source: importing three frameworks to read seven names would take ten seconds."""
    found = importlib.util.find_spec(f"jackline.session.integrations.{integration}")
    assert found is not None and found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return sorted(name for name in defined if not name.startswith("_"))


def test_jackline_has_these_names_and_no_other() -> None:
    assert sorted(jackline.__all__) == PUBLIC
    assert dir(jackline) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(jackline, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'jackline' has no attribute 'atach'$"):
        _ = jackline.atach


def test_import_star_brings_the_public_names_and_only_when_asked() -> None:
    code = (
        "import sys, jackline; before = {n for n in sys.modules if n.startswith('jackline')}\n"
        "assert before == {'jackline'}, before\n"
        "names = {}; exec('from jackline import *', names)\n"
        "print(sorted(n for n in names if n != '__builtins__'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.strip() == str(PUBLIC), done.stderr


def test_the_notebook_has_these_names() -> None:
    assert sorted(notebook.__all__) == NOTEBOOK
    assert public(notebook.Run) == NOTEBOOK_RUN


def test_attach_takes_these_settings_beside_the_state_it_saves() -> None:
    assert list(inspect.signature(jackline.attach).parameters) == ["loader", "given"]
    assert sorted(field.name for field in fields(Settings)) == ATTACH_SETTINGS


def test_a_run_has_these_names_switched_on_or_off() -> None:
    from jackline.session.off import OffRun  # with torch: not while tests are collected
    from jackline.session.run import Run

    assert public(Run) == RUN
    assert public(OffRun(Settings(), {}, {}, None)) == RUN, "JACKLINE=off would break a loop that uses the others"


def test_the_integrations_have_the_names_the_guide_shows() -> None:
    assert {name: functions_of(name) for name in INTEGRATIONS} == INTEGRATIONS


def test_the_command_line_has_these_commands() -> None:
    assert sorted(COMMANDS) == COMMAND_NAMES
