"""`jackline.load`: the model of a run, ready to use, with its settings and its tokenizer.

    trained = jackline.load("demo-3f2a91")
    print(trained.complete("def main", num_tokens=100, seed=1))
    trained.model(trained.encode("def main"))          # logits

Owns finding the checkpoint and building the module that its weights belong to. Every byte is verified first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.export import read_state
from jackline.checkpoint.format.manifest import TENSORS, Damage, Name, parse_name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.data.tokenise.tokenizer import Tokenizer, from_json, load_tokenizer
from jackline.errors import JacklineError, UsageError
from jackline.models.gpt import GPT
from jackline.models.nsa.model import NSAModel
from jackline.rundir.access.reading import read_text
from jackline.rundir.access.trust import judge
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import read_run_file
from jackline.trainer.config import TrainConfig, resolve
from jackline.trainer.network import make_model, shape_of
from jackline.trainer.own.recipe import Recipe
from jackline.trainer.own.task import make_own_model
from jackline.trainer.recipe import file_of, is_own_file
from jackline.trainer.trained.sample import Sampling, sample

MODEL, AVERAGE = "model", "average"  # with ema the average is what was validated
MAX_CONFIG_BYTES = 64 << 10  # the trainer writes 5 KiB; a megabyte of brackets takes PyYAML minutes


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, and what belongs to it. `checkpoint` is the folder it was loaded from."""

    model: nn.Module
    config: TrainConfig
    tokenizer: Tokenizer | None  # None: it is no language model of ours
    step: int
    checkpoint: Path

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def words(self) -> Tokenizer:
        """The tokenizer, where there is one."""
        if self.tokenizer is None:
            raise UsageError(f"recipe '{self.config.recipe}' has no tokenizer of ours", hint="use `.model` itself")
        return self.tokenizer

    def encode(self, text: str) -> Tensor:
        """The ids of a text, as a batch of one."""
        ids = self.words.reference.encode([text.encode("utf-8", "surrogateescape")]).ids
        return torch.from_numpy(np.asarray(ids, dtype=np.int64))[None].to(self.device)

    def decode(self, ids: Tensor | list[int]) -> str:
        """Ids outside the tokenizer's own vocabulary, which is rounded up in the model, are left out."""
        numbers = np.asarray(ids.flatten().tolist() if isinstance(ids, Tensor) else ids, dtype=np.int64)
        return self.words.decode(numbers[numbers < self.words.vocab_size])

    def stream(self, prompt: str, sampling: Sampling | None = None) -> Iterator[str]:
        """The continuation of `prompt`, piece by piece as it is made. A character is never cut in two.

        Of an own recipe: what its `sample` returns; `sampling` has only its seed there.
        """
        if isinstance(self.config, Recipe):
            yield from _own_sample(self.config, self.model, prompt, sampling)
            return
        assert isinstance(self.model, GPT | NSAModel)
        start = self.encode(prompt) if prompt else self._beginning()
        limits = (self.words.vocab_size, self.words.eos_id)
        made: list[int] = []
        said = ""
        for token in sample(self.model, start, sampling or Sampling(), vocab_size=limits[0], eos_id=limits[1]):
            made.append(token)
            text = self.decode(made)
            if text.endswith("\ufffd"):
                continue  # the bytes of a character that is not complete yet
            yield text[len(said) :]
            said = text
        rest = self.decode(made)[len(said) :]
        if rest:
            yield rest

    def complete(self, prompt: str, *, num_tokens: int = 200, seed: int | None = None, **choices: Any) -> str:
        """The continuation as one text. `choices`: temperature, top_p, top_k."""
        return "".join(self.stream(prompt, Sampling(num_tokens=num_tokens, seed=seed, **choices)))

    def _beginning(self) -> Tensor:
        """Without a prompt: the token between documents, after which every document of the training began."""
        eos = self.words.eos_id
        return torch.tensor([[eos if eos is not None else 0]], device=self.device)


def load(
    run: str | os.PathLike[str] | None = None,
    checkpoint: str | int = "best",
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Trained:
    """The model of `run`: a name, a run's folder, or the folder of one of its checkpoints; None is the newest run.

    `checkpoint` is 'best' (the newest where none is best), 'latest', or a step. Raises JacklineError with a hint when
    the run is no recipe's, has no whole checkpoint, or its model cannot be built.
    """
    own, folder = find_checkpoint(run, checkpoint, runs_dir)
    config = read_config(own)
    state = read_weights(folder)
    model = _build(own, config, state)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).strip().splitlines()
        raise JacklineError(
            f"the weights of {folder.name} do not fit the model of '{own.name}': {' '.join(first[1:2]).strip()}",
            hint="were its settings or the recipe's file changed since? its weights as a plain file: jackline "
            "checkpoints export",
        ) from None
    model.to(device=torch.device(device), dtype=dtype).eval().requires_grad_(False)
    name = parse_name(folder.name)
    tokenizer = read_tokenizer(own, config) if config.is_language else None
    return Trained(model, config, tokenizer, name.step if name else -1, folder)


def _build(run: RunDir, config: TrainConfig, state: dict[str, Tensor]) -> nn.Module:
    """The module that the weights belong to."""
    if isinstance(config, Recipe):
        return make_own_model(config)
    tokens = state.get("tokens.weight")
    if tokens is None or not config.is_language:
        raise UsageError(
            f"'{run.name}' is not a language model: recipe '{config.recipe}'",
            hint="its weights as a plain file: jackline checkpoints export",
        )
    shape = shape_of(config, int(tokens.shape[0]))
    return make_model(shape, is_recomputing=False, loss_chunk_rows=0)


def _own_sample(config: Recipe, model: nn.Module, prompt: str, sampling: Sampling | None) -> Iterator[str]:
    if sampling is not None and sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        made = config.sample(model, prompt)
        yield from [made] if isinstance(made, str) else made


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
        return from_json(run.tokenizer_file.read_text(encoding="utf-8"), eos="auto", use_fast=False)
    if config.tokenizer == "train":
        raise UsageError(
            f"the tokenizer of '{run.name}' was trained with its data and is not in the run's folder",
            hint=f"copy tokenizer.json of its data cache to {run.tokenizer_file}",
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
    files: dict[str, dict[str, Tensor]] = {}
    found = {}
    for name, part in node["tensors"].items():
        file = str(part["file"]) + TENSORS
        if file not in files:
            files[file] = load_file(folder / file)
        found[name] = files[file][part["name"]]
    return found


def find_checkpoint(
    run: str | os.PathLike[str] | None, checkpoint: str | int, runs_dir: str | os.PathLike[str] | None
) -> tuple[RunDir, Path]:
    if run is not None and parse_name(Path(run).name) is not None and Path(run).is_dir():
        folder = Path(run).absolute()
        return RunDir(folder.parent.parent), folder
    own = find_run(None if run is None else os.fspath(run), runs_folder(runs_dir))
    names = catalogue.list_names(own.checkpoints)
    if not names:
        raise UsageError(f"run '{own.name}' has no checkpoint", hint="jackline checkpoints lists them")
    return own, own.checkpoints / str(_choose(own, names, checkpoint))


def _choose(run: RunDir, names: list[Name], checkpoint: str | int) -> Name:
    if checkpoint in ("best", "latest"):
        return (_read_best(run, names) if checkpoint == "best" else None) or names[0]
    wanted = int(checkpoint) if str(checkpoint).isdigit() else None
    found = next((name for name in names if name.step == wanted), None)
    if found is None:
        known = ", ".join(str(name.step) for name in names[:8])
        raise UsageError(
            f"run '{run.name}' has no checkpoint '{checkpoint}'", hint=f"best, latest, or a step: {known}"
        )
    return found


def _read_best(run: RunDir, names: list[Name]) -> Name | None:
    try:
        pointed = parse_name((run.checkpoints / catalogue.BEST).read_text()[:200].strip())
    except (OSError, UnicodeDecodeError):
        return None
    return pointed if pointed in names else None
