"""`jackline plan`: whether a training fits, with which micro-batch, and where the memory goes.

Owns the command's arguments. The work needs torch and is done by `python -m jackline.memory`, because the command
line must not import torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from jackline.errors import UsageError
from jackline.extras import TRAINING, require
from jackline.memory.plan.gpus import GPU_MODELS, detect_gpu, find_gpu, find_gpu_and_time
from jackline.memory.plan.hub import is_config_target
from jackline.trainer.recipe import RECIPES, find_recipe
from jackline.units import parse_price

_OWN_RECIPE = "jackline.trainer.own.task"  # its first word is the recipe's file
_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}


@click.command(context_settings=_SETTINGS, short_help="Will it fit, with which micro-batch; where the memory goes.")
@click.argument("target", required=False)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpu", metavar="GPU", help="T4, L4, A100-40, H100 ... or GiB; default: the GPU of this machine.")
@click.option("--table", "is_table", is_flag=True, help="Sizes and batches against all GPUs, or the one of --gpu.")
@click.option("--explain", "is_explaining", is_flag=True, help="Where each byte goes, and what would save some.")
@click.option(
    "--fit",
    is_flag=False,
    flag_value="",
    metavar="[GPUS, TIME]",
    help='Alone: the smallest change that fits. "A100-80 x2, 24 h": what those GPUs can train, and how far.',
)
@click.option("--measure", "is_measuring", is_flag=True, help="On the GPU of this machine: run three steps of it.")
@click.option("--price", metavar="PRICE/h", help="Money for an hour of one GPU: prints what the steps cost.")
@click.option("--json", "is_json", is_flag=True, help="The plan as JSON.")
def command(target: str | None, settings: tuple[str, ...], gpu: str | None, price: str | None, **flags: Any) -> None:
    """Plan memory and time for a RECIPE (also your own: my_recipe.py), a file.py:function, or a transformers model
    by its config, without a GPU and without starting anything.

    \b
    jackline plan sparsae --gpu T4
    jackline plan sparsae --gpu L4 --model_size auto --explain
    jackline plan sparsae --table
    jackline plan hf:Qwen/Qwen2.5-7B --gpu L4 --fit
    jackline plan hf:Qwen/Qwen2.5-7B --fit "A100-80 x2, 24 h"
    jackline plan --fit "RTX4090, 24 h"
    jackline plan train.py:make_model --gpu A100-40 batch_size=256
    jackline plan hf:Qwen/Qwen2.5-7B --gpu a100 --seq-len 2048 --lora r=16,targets=q_proj,v_proj --quantize nf4
    jackline plan ./config.json --gpu "H100 x8" --gradient-checkpointing --optimizer adamw8bit

    \b
    For a config: --seq-len --batch-size --precision --lora --quantize --freeze --gradient-checkpointing
    --optimizer --attention --parallel --offload --steps. The function returns (model, batch[, loss]) or step(n).
    Exit code 1: it does not fit.
    """
    is_table, is_explaining, is_json = (flags[name] for name in ("is_table", "is_explaining", "is_json"))
    _check_together(flags, gpu)
    target, words, asked = _sorted(target, list(settings), flags["fit"])
    gpu, seconds = _gpus_and_time(asked, gpu)
    output = "table" if is_table else "json" if is_json else "explain" if is_explaining else "text"
    request = plan_request(target, words, output=output)
    model = find_gpu(gpu) if gpu else detect_gpu()
    if model is None and not is_table:
        raise UsageError(
            "there is no NVIDIA GPU here, so say which one is meant",
            detail=("known GPUs: " + ", ".join(GPU_MODELS),),
            hint="jackline plan ... --gpu T4",
        )
    request |= {"is_fitting": flags["fit"] is not None, "is_reaching": bool(asked), "seconds": seconds}
    request |= {"is_measuring": flags["is_measuring"], "gpu": gpu, "price": parse_price(price) if price else 0.0}
    require("`jackline plan`", "train", TRAINING)
    sys.exit(run_child([sys.executable, "-m", "jackline.memory", json.dumps(request)]))


def _check_together(flags: dict[str, Any], gpu: str | None) -> None:
    if flags["is_table"] and (flags["is_json"] or flags["is_explaining"] or flags["fit"] is not None):
        raise UsageError("--table goes alone: it cannot be joined with --json, --explain or --fit")
    if flags["is_measuring"] and (gpu or flags["is_table"] or flags["fit"] is not None):
        raise UsageError(
            "--measure runs steps on the GPU of this machine", hint="leave out --gpu, --table and --fit with it"
        )


def _gpus_and_time(asked: str, gpu: str | None) -> tuple[str | None, float]:
    if not asked:
        return gpu, 0.0
    named, seconds = find_gpu_and_time(asked)
    if named and gpu:
        raise UsageError(f"--gpu {gpu} and --fit '{asked}' name a GPU each", hint="leave one of them out")
    return named or gpu, seconds


def plan_request(target: str, settings: Sequence[str], *, output: str, is_recipe: bool = False) -> dict[str, Any]:
    """What `python -m jackline.memory` is given: a recipe or what else can be planned, on this machine's GPU.

    `is_recipe`: file.py:NAME is a recipe of one's own, not a function. Without a target: any model.
    """
    words = list(settings)
    if target.endswith(".py") or is_recipe:
        reference, words = _OWN_RECIPE, [target, *words]
    else:
        is_named = bool(target) and ":" not in target and not is_config_target(target)
        reference = find_recipe(target) if is_named else target
    return {"target": reference, "typed_target": target, "gpu": None, "words": words, "price": 0.0, "output": output}


def _sorted(target: str | None, words: list[str], fit: str | None) -> tuple[str, list[str], str]:
    """(target, settings, what --fit asks). `--fit` takes a value or none, so a word behind it may be a setting or the
    target."""
    if fit and ("=" in fit or fit.startswith("-")):
        words, fit = [*words, fit], ""
    elif target is not None and (target.startswith("-") or (fit and "=" in target)):
        # A setting: the target stands elsewhere, or there is none.
        words, target = [target, *words], None
    if fit and target is None and _is_target(fit):
        target, fit = fit, ""
    if target is None and not fit:
        raise UsageError(
            "a plan needs a target: a recipe, file.py:function, hf:ORG/NAME or a config.json",
            hint='jackline plan sparsae --gpu T4, or without one: jackline plan --fit "A100-80 x2, 24 h"',
        )
    return target or "", words, fit or ""


def _is_target(text: str) -> bool:
    return ":" in text or text.endswith(".py") or is_config_target(text) or text in RECIPES


def run_child(argv: list[str]) -> int:
    """Run to its end with our own streams. Ctrl-C reaches the child too and ends it."""
    with subprocess.Popen(argv) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
