"""`plan`, the cell before a run: `jackline doctor` and `jackline plan`. Owns when no trial step is run."""

from __future__ import annotations

from typing import Any

from jackline.cli.view.run_view import LIVE
from jackline.errors import JacklineError
from jackline.notebook.command import Ended, as_words, call, say, without_traceback
from jackline.notebook.start import meant_by_recipe
from jackline.rundir.status import read_status


@without_traceback
def plan(target: str, *words: str, name: str | None = None, gpu: str | None = None, **settings: Any) -> None:
    """Check whether a run will fit and finish: `jackline doctor`, and with a GPU `jackline plan --explain`.

    gpu="T4" asks about another GPU, model_size="auto" asks which size suits this one; both only compute and run
    nothing. Raises when there is a problem, so that the cells below do not run. While the same run (`name`, if it was
    given one) is alive, nothing is run beside it.
    """
    from jackline.memory.plan.gpus import detect_gpu
    from jackline.trainer.recipe import is_own_file

    asked = [*words, *as_words(settings)]
    is_question = gpu is not None or not {"--table", "--explain", "--json"}.isdisjoint(words)
    is_question = is_question or "auto" in (settings.get("model_size"), settings.get("model"))
    if is_question or is_own_file(target) or ":" in target:
        call(["plan", target, *asked, *as_words({"gpu": gpu})])
        return
    if (alive := living(target, asked, name)) is not None:
        say(f"run '{alive}' is alive: nothing is tried beside it, run.watch() shows it")
        return
    try:
        call(["doctor", target, *asked])
    except Ended:
        raise JacklineError(
            "this would not go well: the problem is named above", hint="put it right here and in the cell that trains"
        ) from None
    if detect_gpu() is not None:
        call(["plan", target, *asked, "--explain"])


def living(recipe: str, asked: list[str], name: str | None) -> str | None:
    found = meant_by_recipe(recipe, asked, name=name)[0].run
    return found.name if read_status(found).state in LIVE else None
