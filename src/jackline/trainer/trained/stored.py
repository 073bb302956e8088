"""What a run has stored of its model: the checkpoint that is meant, its weights, its settings and its tokenizer.

Owns finding and reading them; every byte is verified first. What is built of them is load.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.export import read_state
from jackline.checkpoint.format.manifest import TENSORS, Damage, parse_name
from jackline.checkpoint.format.regions import SHARDED, parse_parts, whole_of
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.data.tokenise.tokenizer import Tokenizer, from_json, load_tokenizer
from jackline.errors import JacklineError, UsageError
from jackline.rundir.access.reading import read_text, read_whole
from jackline.rundir.access.trust import judge
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import entry_of
from jackline.rundir.run_file import read_run_file
from jackline.trainer.config import TrainConfig, resolve
from jackline.trainer.recipe import file_of, is_own_file

MODEL, AVERAGE = "model", "average"  # with ema the average is what was validated
MAX_TOKENIZER_BYTES = 64 << 20
MAX_CONFIG_BYTES = 64 << 10  # the trainer writes 5 KiB; a megabyte of brackets takes PyYAML minutes


def read_config(run: RunDir) -> TrainConfig:
    """The settings the run was trained with."""
    if not run.config_file.exists():
        raise UsageError(
            f"run '{run.name}' is not of a recipe: it has no config.yaml",
            hint="build your model yourself and load its weights: jackline checkpoints export",
        )
    text = read_text(run.config_file, MAX_CONFIG_BYTES)
    found = yaml.load(text, Loader=yaml.BaseLoader)  # text only: no objects
    target = found.get("recipe") if isinstance(found, dict) else None
    if not isinstance(target, str):
        raise UsageError(f"{run.config_file} names no recipe", hint="was it written by `jackline train`?")
    if is_own_file(target) and not judge(run).is_ours:
        raise UsageError(
            f"run '{run.name}' was not made here by you, and its recipe is code that would be executed: {target}",
            hint="its weights as a plain file, without executing anything: jackline checkpoints export",
        )
    if is_own_file(target) and not entry_of(run).is_made and target not in read_run_file(run).argv:
        raise UsageError(
            f"{run.config_file} names another recipe than the command of '{run.name}': {target}",
            hint="what run.json names was typed by you; its weights without it: jackline checkpoints export",
        )
    return resolve(target, (), [run.config_file], _source(run, target)).config


def _source(run: RunDir, target: str) -> Path | None:
    """Where the file of an own recipe is: as it was typed, in the folder where the run was started, or its copy."""
    if not is_own_file(target):
        return None
    path = Path(file_of(target)[0])
    started_in = [Path(read_run_file(run).cwd)] if run.has_run_file else []
    places = [*(folder / path for folder in started_in), path, run.recipe_file]
    return next((place for place in places if place.is_file()), path)


def read_tokenizer(run: RunDir, config: TrainConfig) -> Tokenizer:
    """The run's own copy; a run from before there was one names its tokenizer."""
    if run.tokenizer_file.exists():
        text = read_whole(run.tokenizer_file, MAX_TOKENIZER_BYTES).decode("utf-8", "replace")
        return from_json(text, eos="auto", use_fast=False)
    if config.tokenizer == "train":
        raise UsageError(
            f"the tokenizer of '{run.name}' was trained with its data and is not in the run's folder",
            hint=f"copy tokenizer.json of its data cache to {run.tokenizer_file}",
        )
    if config.tokenizer not in ("bytes", "gpt2") and not judge(run).is_ours:
        raise UsageError(
            f"run '{run.name}' was not made here by you, and names a place for its tokenizer: {config.tokenizer}",
            hint=f"if you want that one, copy it to {run.tokenizer_file}",
        )
    return load_tokenizer(config.tokenizer, use_fast=False)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's tensors by their names in the module; tied ones have the same storage. Verified before."""
    try:
        manifest = verify_checkpoint(folder)
        state = read_state(folder, manifest)
        node = state.get(AVERAGE) or state.get(MODEL)
    except Damage as damage:
        raise JacklineError(
            f"{folder.name} is not whole: {damage}", hint="choose another: `jackline checkpoints verify` tells which"
        ) from None
    if not isinstance(node, dict) or not isinstance(node.get("tensors"), dict):
        raise UsageError(f"{folder.name} holds no model", hint="jackline checkpoints show tells what it holds")
    read = functools.lru_cache(maxsize=None)(lambda file: load_file(folder / (file + TENSORS)))
    found = {}
    for name, part in node["tensors"].items():
        found[name] = _join(part, read) if part.get(KIND) == SHARDED else read(str(part["file"]))[part["name"]]
    return found


def _join(node: dict[str, Any], read: Callable[[str], dict[str, Tensor]]) -> Tensor:
    """A tensor of which several ranks stored a part."""
    shape, parts = parse_parts(node)
    whole = torch.empty(shape, dtype=read(parts[0][0])[parts[0][1]].dtype)
    for file, name, region in parts:
        whole[region.inside(whole_of(shape))] = read(file)[name]
    return whole


def find_checkpoint(
    run: str | os.PathLike[str] | None, checkpoint: str | int, runs_dir: str | os.PathLike[str] | None
) -> tuple[RunDir, Path]:
    if run is not None and parse_name(Path(run).name) is not None and Path(run).is_dir():
        folder = Path(run).absolute()
        return RunDir(folder.parent.parent), folder
    own = find_run(None if run is None else os.fspath(run), runs_folder(runs_dir))
    return own, own.checkpoints / str(catalogue.choose_name(own.checkpoints, checkpoint, own.name))
