"""`jackline export`: the trained model for other libraries."""

from __future__ import annotations

import json
import sys

import click

from jackline.cli.commands.plan import run_child
from jackline.cli.options import json_option, runs_dir_option
from jackline.extras import TRAINING, require


@click.command(short_help="The trained model as a folder for transformers, or as plain safetensors.")
@click.argument("run")
@click.option(
    "--to", "target", type=click.Choice(["hf", "safetensors"]), default="hf", show_default=True, help="For whom."
)
@click.option("--out", type=click.Path(), help="The folder to write; default: NAME-hf or export.")
@click.option("--checkpoint", default="best", show_default=True, help="best, latest, or a step.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True, help="Of the weights."
)
@json_option
@runs_dir_option
def command(run: str, target: str, out: str | None, as_json: bool, **given: str | None) -> None:
    """Write the model of RUN with its tokenizer into a folder, and print the lines that load it.

    hf: AutoModelForCausalLM.from_pretrained(FOLDER) gives the same logits. safetensors: the weights as they are, for
    plain PyTorch; the same as `jackline checkpoints export`.
    """
    if target == "safetensors":
        from jackline.cli.commands.checkpoints import export

        words = [run, "--out", out or "export", *(["--json"] if as_json else [])]
        words += ["--runs-dir", given["runs_dir"]] if given["runs_dir"] else []
        words += ["--step", step] if (step := given["checkpoint"] or "").isdigit() else []
        export.main(words, standalone_mode=False)
        return
    request = {
        "act": "export",
        "run": run,
        "out": out or f"{run.rstrip('/').rsplit('/', 1)[-1]}-hf",
        "device": "cpu",
        "as_json": as_json,
        **given,
    }
    require("`jackline export`", "train", TRAINING)
    sys.exit(run_child([sys.executable, "-m", "jackline.trainer.trained", json.dumps(request)]))
