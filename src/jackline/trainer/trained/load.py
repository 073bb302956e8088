"""`jackline.load`: the model of a run, ready to use, with its settings and its tokenizer.

    trained = jackline.load("demo-3f2a91")
    print(trained.complete("def main", num_tokens=100, seed=1))
    trained.model(trained.encode("def main"))          # logits

Owns building the module that the weights belong to. Finding and reading them is stored.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jackline.checkpoint.format.manifest import parse_name
from jackline.data.tokenise.tokenizer import Tokenizer
from jackline.errors import JacklineError, UsageError
from jackline.models.gpt import GPT
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSAShape
from jackline.rundir.layout import RunDir
from jackline.trainer.config import TrainConfig
from jackline.trainer.network import make_model, shape_of
from jackline.trainer.own.recipe import Recipe
from jackline.trainer.own.task import make_own_model
from jackline.trainer.startup.attention_kind import is_dense_model
from jackline.trainer.trained.sample import Sampling, sample
from jackline.trainer.trained.stored import find_checkpoint, read_config, read_tokenizer, read_weights


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
    if isinstance(shape, NSAShape):  # with attention=auto the settings do not tell
        shape = replace(shape, is_dense=is_dense_model(state))
    return make_model(shape, is_recomputing=False, loss_chunk_rows=0)


def _own_sample(config: Recipe, model: nn.Module, prompt: str, sampling: Sampling | None) -> Iterator[str]:
    if sampling is not None and sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        made = config.sample(model, prompt)
        yield from [made] if isinstance(made, str) else made
