"""Which recipes there are and where each lives. No torch here: a wrong name costs a millisecond."""

from __future__ import annotations

from difflib import get_close_matches

from jackline.errors import UsageError

# name -> (module, one line of help). The module has `candidates(card, words)` for the memory plan.
RECIPES = {
    "sparsae": ("jackline.trainer.recipes.sparsae", "A sparse language model whose mask is found by evolution."),
}


def find_recipe(name: str) -> str:
    """The recipe's module by name."""
    if name in RECIPES:
        return RECIPES[name][0]
    near = get_close_matches(name, RECIPES, n=1)
    raise UsageError(
        f"there is no recipe '{name}'",
        detail=("known recipes: " + ", ".join(RECIPES),),
        hint=f"did you mean '{near[0]}'?" if near else "a model of your own: jackline plan file.py:function",
    )
