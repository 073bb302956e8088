"""Which recipes there are, where each lives, and a person's own. No torch here: a wrong name costs a millisecond.

`RecipeHooks` are the methods by which a recipe's settings build what it trains, each with a default that every
language model has. A recipe's own method imports what it needs inside.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

from jackline.errors import UsageError
from jackline.memory.plan.own_file import load_file
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_whole
from jackline.rundir.layout import RunDir

if TYPE_CHECKING:
    import torch
    from torch import nn

    from jackline.memory.plan.gpus import Precision
    from jackline.memory.predict.job import Job
    from jackline.trainer.corpus import TrainText
    from jackline.trainer.language import Additions
    from jackline.trainer.network import Shape
    from jackline.trainer.report.console import Console
    from jackline.trainer.task import Task

Settings = TypeVar("Settings")

# name -> (module, one line of help). The module has `candidates(gpu, words)` for the memory plan and, when it can
# be trained, `recipe()`.
RECIPES = {
    "demo": ("jackline.recipes.demo.recipe", "A small GPT on the Python standard library's own sources."),
    "sparsae": ("jackline.recipes.sparsae.recipe", "A sparse language model whose mask is found by evolution."),
    "agab": ("jackline.recipes.agab.recipe", "How strongly an antibody binds an antigen, from a table of pairs."),
    "slimpajama": ("jackline.recipes.slimpajama.recipe", "A GPT on a stream of jsonl.zst, chunk by chunk."),
    "m7c": ("jackline.recipes.m7c.recipe", "A language model with native sparse attention on FineWeb-Edu."),
}


def find_recipe(name: str) -> str:
    """The recipe's module by name."""
    if name in RECIPES:
        return RECIPES[name][0]
    near = get_close_matches(name, RECIPES, n=1)
    raise UsageError(
        f"there is no recipe '{name}'",
        detail=("known recipes: " + ", ".join(RECIPES),),
        hint=f"did you mean '{near[0]}'?" if near else "a recipe of your own: jackline train path/to/file.py",
    )


def is_own_file(target: str) -> bool:
    """'path/to/file.py', 'path/to/file.py:name', and not the name of a recipe."""
    return ":" in target or target.endswith(".py")


def file_of(target: str) -> tuple[str, str]:
    """The path of an own recipe's file, and the name behind the colon, if there is one."""
    path, _, name = target.rpartition(":")
    return (path, name) if path else (target, "")


def load_recipe(target: str, settings: type[Settings], file: Path | None = None) -> Settings:
    """What a recipe's class or function makes, which must be of that type. `file`: where an own one is now."""
    if is_own_file(target):
        path, name = file_of(target)
        module = load_file(str(file or Path(path)), example="jackline train path/to/file.py")
        name, origin = name or _only_recipe(module, path, settings), path
    else:
        module, name, origin = importlib.import_module(find_recipe(target)), "recipe", f"recipe '{target}'"
    function = getattr(module, name, None)
    kind = settings.__name__
    if not callable(function):
        raise UsageError(
            f"{origin} has no function '{name}' that could be trained",
            hint=f"it takes nothing and returns a {settings.__module__}.{kind}",
        )
    made = function()
    if not isinstance(made, settings):
        raise UsageError(
            f"{target} returned {type(made).__name__}, not a {kind}",
            hint=f"from {settings.__module__} import {kind}; return {kind}(data=..., lr=3e-4)",
        )
    return made


def _only_recipe(module: ModuleType, path: str, settings: type) -> str:
    """The name of the one recipe in a file: its class, or its function `recipe`."""
    made_here = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, settings)]
    names = [kind.__name__ for kind in made_here if kind.__module__ == module.__name__]
    if callable(getattr(module, "recipe", None)):
        return "recipe"
    if len(names) == 1:
        return names[0]
    if names:
        raise UsageError(f"{path} has {len(names)} recipes", hint=f"say which: jackline train {path}:{names[-1]}")
    raise UsageError(
        f"{path} has no recipe: no subclass of jackline.Recipe and no function recipe()",
        hint=f"your own script: jackline run -- python {path}; a recipe to start from: jackline init recipe",
    )


def keep_source(run: RunDir, target: str) -> str:
    """Keep a copy of an own recipe's file in the run's folder, as it was when the run was started, so that its model
    can be built later. Returns what to say where the file has changed since."""
    if not is_own_file(target) or not run.path.is_dir():
        return ""
    path = Path(file_of(target)[0])
    try:
        source = path.read_bytes()
        if run.recipe_file.exists():
            is_same = read_whole(run.recipe_file) == source
            return "" if is_same else f"{path} has changed since this run was started; as it was: {run.recipe_file}"
        atomic.write_whole(run.recipe_file, source)
    except OSError:
        return ""  # a disk that refuses stops no training
    return ""


class RecipeHooks(Protocol):
    """None means: as for every language model (build.py)."""

    def make_task(self, console: Console, folder: Path) -> Task | None:
        """All of the training, for what is no language model."""
        return None

    def make_additions(self, model: nn.Module) -> Additions | None:
        """What is added to the plain step of a language model; before the optimizer is made."""
        return None

    def check_ranks(self, size: int) -> None:
        """Raise where this training is not meant for so many ranks."""
        return

    def open_text(self, console: Console) -> TrainText | None:
        """The text to train on, where it is not windows of a cache. There is no validation on it then."""
        return None

    def settle_shape(self, shape: Shape, place: tuple[Precision, torch.device, Path], console: Console) -> Shape:
        """What of a language model's shape can only be decided on the device, for the run in this folder."""
        return shape

    def memory_job(self, shape: Shape, precision: Precision) -> Job | None:
        """What a step needs, for the memory plan, where it is more than the plain step of a language model."""
        return None
