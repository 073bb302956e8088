"""`jackline sample`: text from the model of a run."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from jackline.cli.commands.plan import run_child
from jackline.cli.options import runs_dir_option
from jackline.extras import TRAINING, require


@click.command(short_help="Text from the model that a run has trained.")
@click.argument("run")
@click.argument("prompt", default="")
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(1), default=200, show_default=True, help="How many new ones."
)
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.8, show_default=True, help="0: the likeliest."
)
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="Of the likeliest."
)
@click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="At most so many; 0: all.")
@click.option("--seed", type=int, help="The same text each time; default: another one.")
@click.option("--count", type=click.IntRange(1, 100), default=1, show_default=True, help="How many texts.")
@click.option("--checkpoint", default="best", show_default=True, help="best, latest, or a step.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True, help="To compute in."
)
@click.option("--no-prompt", is_flag=True, help="Print only what is new.")
@runs_dir_option
def command(run: str, prompt: str, no_prompt: bool, **given: Any) -> None:
    """Continue PROMPT with the model of RUN, as it is made. Works while the run trains and after it ended.

    \b
    jackline sample demo-3f2a91 "def main("
    jackline sample runs/demo-3f2a91/checkpoints/step-00001000 "import " --temperature 0
    """
    sampling = {name: given.pop(name) for name in ("num_tokens", "temperature", "top_p", "top_k", "seed")}
    what = {"act": "sample", "run": run, "prompt": prompt, "shows_prompt": not no_prompt}
    request = {**what, "sampling": sampling, **given}
    require("`jackline sample`", "train", TRAINING)
    sys.exit(run_child([sys.executable, "-m", "jackline.trainer.trained", json.dumps(request)]))
