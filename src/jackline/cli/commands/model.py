"""Commands about the model that a run trains: `jackline validate`, `sample`, `eval`, `predict` and `export`.

`validate` asks the training itself. The others start a process that may import torch.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any

import click

from jackline.cli.commands.plan import run_child
from jackline.cli.options import json_option, runs_dir_option
from jackline.errors import UsageError
from jackline.extras import TRAINING, require
from jackline.rundir.access.writing import open_own
from jackline.rundir.find import find_only_live, find_run, runs_folder
from jackline.rundir.status import read_status

VALIDATE_SCHEMA = "jackline.validate/1"


@click.command(short_help="Ask a training for a validation on all its validation data, now.")
@click.argument("run", required=False)
@json_option
@runs_dir_option
def validate(run: str | None, as_json: bool, runs_dir: str | None) -> None:
    """Ask a run of `jackline train` to validate on all its validation data after the step at work.

    Training continues afterwards as if nothing had been. The result is printed, logged as METRIC_full and shown by
    `jackline status`. Without RUN it must be clear which one is meant.
    """
    folder = runs_folder(runs_dir)
    found = find_run(run, folder) if run else find_only_live(folder)
    status = read_status(found)
    if status.state not in ("alive", "unwatched"):
        again = f"`jackline resume {found.name}` continues it; " if status.state != "finished" else ""
        raise UsageError(
            f"run '{found.name}' is not running: it {status.end_words}",
            hint=f"{again}`jackline eval {found.name}` evaluates what it has saved",
        )
    if not found.config_file.exists():
        raise UsageError(
            f"run '{found.name}' is not a training of ours, or has not come to its first step yet",
            hint="`jackline train` validates; a script under `jackline run` does so itself",
        )
    os.close(open_own(found.validation_request, os.O_WRONLY | os.O_CREAT))
    if as_json:
        answer = {
            "schema": VALIDATE_SCHEMA,
            "run": found.name,
            "path": str(found.path),
            "state": status.state,
            "attempt": status.attempt,
            "next": f"jackline events {shlex.quote(found.name)} --json -f",
        }
        click.echo(json.dumps(answer, separators=(",", ":")))
        return
    click.echo(f"asked run '{found.name}' for a full validation; `jackline logs {found.name}` shows it")


@click.command(short_help="Text from the model that a run has trained.")
@click.argument("run")
@click.argument("prompt", default="")
@click.option(
    "--tokens", "num_tokens", type=click.IntRange(1), default=200, show_default=True, help="How many new tokens."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.8,
    show_default=True,
    help="0: always the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.95,
    show_default=True,
    help="Sample from the likeliest tokens that have this share together.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Sample from this many of the likeliest tokens; 0: all.",
)
@click.option("--seed", type=int, help="The same text each time; default: another one.")
@click.option("--count", type=click.IntRange(1, 100), default=1, show_default=True, help="How many texts.")
@click.option("--checkpoint", default="best", show_default=True, help="best, latest, or a step.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True, help="To compute in."
)
@click.option("--no-prompt", is_flag=True, help="Print only what is new.")
@runs_dir_option
def sample(run: str, prompt: str, no_prompt: bool, **given: Any) -> None:
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


@click.command(short_help="The loss of a trained model on a text or other data.")
@click.argument("run")
@click.option("--data", default="", help="A file, folder, glob or address; default: what the run is validated on.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Sequences at a time.")
@click.option("--checkpoint", default="best", show_default=True, help="best, latest, or a step.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True, help="To compute in."
)
@json_option
@runs_dir_option
def eval(run: str, as_json: bool, **given: Any) -> None:  # noqa: A001 - the name of the command
    """Loss, perplexity and tokens of the model of RUN over all of the data. Nothing of the run is changed.

    \b
    jackline eval demo-3f2a91 --data notes.txt
    jackline eval demo-3f2a91 --data 'books/*.txt' --checkpoint latest --json
    """
    request = {"act": "eval", "run": run, "as_json": as_json, **given}
    require("`jackline eval`", "train", TRAINING)
    sys.exit(run_child([sys.executable, "-m", "jackline.trainer.trained", json.dumps(request)]))


@click.command(short_help="How strongly antibodies bind: a table of pairs by a run of agab.")
@click.argument("run")
@click.argument("pairs", type=click.Path())
@click.option("--out", type=click.Path(), help="The CSV to write; default: the standard output.")
@click.option("--checkpoint", default="best", show_default=True, help="best, latest, or a step.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda.")
@json_option
@runs_dir_option
def predict(run: str, pairs: str, out: str | None, as_json: bool, **given: Any) -> None:
    """The pKd of every pair of a CSV, by the head of RUN, a run of the recipe agab.

    PAIRS has the columns antibody_sequence (heavy|light) and antigen_sequence. Every row comes back in its order,
    with all its columns and two more: predicted_pKd, and the problem of a row that cannot be predicted.
    """
    if as_json and not out:
        raise UsageError("--json needs --out: the table itself would be on the standard output", hint="--out pKd.csv")
    request = {"run": run, "pairs": pairs, "out": out, "as_json": as_json, **given}
    require("`jackline predict`", "train", TRAINING)
    sys.exit(run_child([sys.executable, "-m", "jackline.recipes.agab.predict", json.dumps(request)]))


@click.command(short_help="The trained model for transformers, llama.cpp, ONNX, or as plain safetensors.")
@click.argument("run")
@click.option(
    "--to",
    "target",
    type=click.Choice(["hf", "safetensors", "gguf-ready", "onnx"]),
    default="hf",
    show_default=True,
    help="The format.",
)
@click.option("--out", type=click.Path(), help="The folder to write; default: NAME-hf, NAME-gguf, NAME-onnx, export.")
@click.option("--checkpoint", default="best", show_default=True, help="best, latest, or a step.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True, help="Of the weights."
)
@json_option
@runs_dir_option
def export(run: str, target: str, out: str | None, as_json: bool, **given: str | None) -> None:
    """Write the model of RUN with its tokenizer into a folder, and print the lines that load it.

    hf: AutoModelForCausalLM.from_pretrained(FOLDER) gives the same logits. safetensors: the weights as they are, for
    plain PyTorch; the same as `jackline checkpoints export`. gguf-ready: the folder of hf, once it is certain that
    llama.cpp's convert_hf_to_gguf.py takes it. onnx: one file with ids in and logits out (needs onnx, onnxscript).
    """
    if target == "safetensors":
        _export_plain(run, out or "export", as_json=as_json, **given)
        return
    request = {
        "act": "export",
        "run": run,
        "target": target,
        "out": out or f"{run.rstrip('/').rsplit('/', 1)[-1]}-{target.removesuffix('-ready')}",
        "device": "cpu",
        "as_json": as_json,
        **given,
    }
    require("`jackline export`", "train", TRAINING)
    sys.exit(run_child([sys.executable, "-m", "jackline.trainer.trained", json.dumps(request)]))


def _export_plain(run: str, out: str, *, as_json: bool, **given: str | None) -> None:
    """The weights as they are stored, without torch."""
    from jackline.checkpoint.format.catalogue import choose_name
    from jackline.checkpoint.place import choose_place
    from jackline.cli.commands.checkpoints import export as export_plain

    if given["dtype"] != "fp32":
        raise UsageError(
            f"--to safetensors writes the weights as they are stored, not as {given['dtype']}", hint="--to hf"
        )
    found = find_run(run, runs_folder(given["runs_dir"]))
    name = choose_name(choose_place(found).folder, given["checkpoint"] or "best", found.name)
    place = ["--runs-dir", given["runs_dir"]] if given["runs_dir"] else []
    words = [run, "--step", str(name.step), "--out", out, *(["--json"] if as_json else []), *place]
    export_plain.main(words, standalone_mode=False)
    if not as_json and found.config_file.exists():
        click.echo(f"# the model, built and filled: jackline.load({found.name!r}, {name.step}).model")
