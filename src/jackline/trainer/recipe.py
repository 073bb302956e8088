"""Which recipes there are, where each lives, and a person's own. No torch here: a wrong name costs a millisecond.

`RecipeHooks` are the methods by which a recipe's settings build what it trains, each with a default that every
language model has. A recipe's own method imports what it needs inside.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from jackline.errors import UsageError
from jackline.memory.plan.own_file import load_file

if TYPE_CHECKING:
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
        hint=f"did you mean '{near[0]}'?" if near else "a recipe of your own: path/to/file.py:function",
    )


def is_own_file(target: str) -> bool:
    """'path/to/file.py:function' and not the name of a recipe."""
    return ":" in target or target.endswith(".py")


def load_recipe(target: str, settings: type[Settings]) -> Settings:
    """What a recipe's function returns, which must be of that type."""
    if is_own_file(target):
        path, _, name = target.rpartition(":")
        if not path:
            raise UsageError(f"which function of {target} is meant?", hint=f"jackline train {target}:recipe")
        module = load_file(str(Path(path)), example="jackline train path/to/file.py:function")
        origin = path
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


class RecipeHooks(Protocol):
    """None means: as for every language model (build.py)."""

    def make_task(self, console: Console, folder: Path) -> Task | None:
        """All of the training, for what is no language model."""
        return None

    def make_additions(self, model: nn.Module) -> Additions | None:
        """What is added to the plain step of a language model; before the optimizer is made."""
        return None

    def open_text(self, console: Console) -> TrainText | None:
        """The text to train on, where it is not windows of a cache. There is no validation on it then."""
        return None

    def memory_job(self, shape: Shape, precision: Precision) -> Job | None:
        """What a step needs, for the memory plan, where it is more than the plain step of a language model."""
        return None
