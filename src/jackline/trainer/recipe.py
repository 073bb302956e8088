"""Which recipes there are, where each lives, and a person's own. No torch here: a wrong name costs a millisecond."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from jackline.errors import UsageError
from jackline.memory.plan.own_file import load_file

Settings = TypeVar("Settings")

# name -> (module, one line of help). The module has `candidates(card, words)` for the memory plan and, when it can
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
