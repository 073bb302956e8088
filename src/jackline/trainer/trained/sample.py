"""Samples tokens from a language model, one after another. Keys and values of earlier tokens are kept (GPT).

Owns the choice of a token and the cache. A model without a cache of ours (sparse attention) is run over the whole
text each time: right, and slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline import accelerator
from jackline.errors import UsageError
from jackline.models.gpt import GPT, Block
from jackline.models.nsa.model import NSAModel


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 always takes the likeliest token. `top_p`: of the likeliest ones that have this much together.

    `seed` None draws anew each time. With the same seed, device and torch the text is the same.
    """

    num_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise UsageError(f"num_tokens must be at least 1, not {self.num_tokens}")
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"temperature must be between 0 and 100, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (all) or more, not {self.top_k}")


@torch.inference_mode()
def sample(
    model: GPT | NSAModel, start: Tensor, sampling: Sampling, *, vocab_size: int, eos_id: int | None
) -> Iterator[int]:
    """New tokens after `start` (1 x length), until the token between documents comes or there are enough."""
    generator = torch.Generator(device=start.device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    reader = CachedReader(model) if isinstance(model, GPT) else WholeReader(model)
    logits = reader.read(start)
    for number in range(sampling.num_tokens):
        token = choose(logits[:vocab_size].float(), sampling, generator)
        if token == eos_id:
            return
        yield token
        if number + 1 < sampling.num_tokens:
            logits = reader.read(torch.tensor([[token]], device=start.device))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token of these logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    likely, ids = torch.sort(functional.softmax(logits / sampling.temperature, dim=-1), descending=True)
    if sampling.top_k:
        likely, ids = likely[: sampling.top_k], ids[: sampling.top_k]
    # The first one always stays: what is before it has nothing together.
    kept = likely.cumsum(dim=-1) - likely < sampling.top_p
    likely = likely * kept
    return int(ids[torch.multinomial(likely, 1, generator=generator)])


class CachedReader:
    """Reads tokens into a GPT and gives the logits after the last one. When its context is full, the older half of
    the text is forgotten, because its positions are learnt up to there only."""

    def __init__(self, model: GPT) -> None:
        self._model = model
        shape = model.shape
        weight = model.tokens.weight
        size = (1, shape.num_heads, shape.context, shape.width // shape.num_heads)
        self._keys = [torch.zeros(size, dtype=weight.dtype, device=weight.device) for _ in range(shape.num_layers)]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._ids: list[int] = []
        self._length = 0
        self._all_places = torch.arange(shape.context, device=weight.device)[None]
        self._token = torch.zeros((1, 1), dtype=torch.long, device=weight.device)
        self._place = torch.zeros(1, dtype=torch.long, device=weight.device)
        self._recorded: tuple[Callable[[], None], Tensor] | None = None

    def read(self, ids: Tensor) -> Tensor:
        self._ids += ids[0].tolist()
        context = self._model.shape.context
        if self._length + ids.shape[1] > context:
            kept = self._ids[-max(1, context // 2) :]
            ids, self._length = torch.tensor([kept], device=ids.device), 0
        if ids.shape[1] == 1 and self._length and accelerator.is_on_gpu(ids):
            logits = self._replay(ids)
        else:
            logits = self._run(ids, torch.arange(self._length, self._length + ids.shape[1], device=ids.device))
        self._length += ids.shape[1]
        return logits

    def _replay(self, ids: Tensor) -> Tensor:
        """One token on a GPU: the kernels are recorded once, because starting each costs more than running it."""
        self._token.copy_(ids)
        self._place.fill_(self._length)
        if self._recorded is None:
            self._recorded = accelerator.record(lambda: self._run(self._token, self._place, is_fixed=True))
        if self._recorded is None:
            return self._run(ids, self._place)
        repeat, logits = self._recorded
        repeat()
        return logits

    def _run(self, ids: Tensor, places: Tensor, *, is_fixed: bool = False) -> Tensor:
        """`is_fixed`: no shape depends on how long the text is."""
        model = self._model
        stream = model.tokens(ids) + model.positions(places)
        mask = (self._all_places <= places)[None, None] if is_fixed else None
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            stream = stream + self._attend(block, number, block.attention_norm(stream), places, mask)
            hidden = block.activation(apply_linear(block.up, block.mlp_norm(stream)))
            stream = stream + apply_linear(block.down, hidden)
        return apply_linear(model.head, model.norm(stream[:, -1]))[0]

    def _attend(self, block: Block, number: int, normed: Tensor, places: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = normed.shape
        heads = (batch, length, block.num_heads, width // block.num_heads)
        query, key, value = (
            part.view(heads).transpose(1, 2) for part in torch.chunk(apply_linear(block.qkv, normed), 3, dim=2)
        )
        keys = self._keys[number].index_copy_(2, places, key)
        values = self._values[number].index_copy_(2, places, value)
        if mask is None:
            end = self._length + length
            keys, values = keys[:, :, :end], values[:, :, :end]
        # More than one token at once comes only first, when the cache is empty: then each sees those before it.
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=length > 1)
        return apply_linear(block.projection, mixed.transpose(1, 2).reshape(batch, length, width))


def apply_linear(layer: nn.Module, inputs: Tensor) -> Tensor:
    """`layer(inputs)`. One token on a CPU only reads the weights, and torch does that with one thread: here each
    thread multiplies its own rows of them, twice as fast on two cores."""
    num_threads = torch.get_num_threads()
    is_one_token = inputs.device.type == "cpu" and inputs.numel() == inputs.shape[-1]
    if not is_one_token or not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        outputs: Tensor = layer(inputs)
        return outputs
    return layer(inputs) if layer.out_features < num_threads else _multiply_in_parts(layer, inputs, num_threads)


def _multiply_in_parts(layer: nn.Linear, inputs: Tensor, num_parts: int) -> Tensor:
    weight, row = layer.weight, inputs.reshape(1, 1, -1)
    size, width = layer.out_features // num_parts, layer.in_features
    parts = weight[: size * num_parts].view(num_parts, size, width).transpose(1, 2)
    outputs = torch.bmm(row.expand(num_parts, 1, width), parts).view(-1)
    if size * num_parts < layer.out_features:
        outputs = torch.cat((outputs, functional.linear(row[0, 0], weight[size * num_parts :])))
    if layer.bias is not None:
        outputs = outputs + layer.bias
    return outputs.view(*inputs.shape[:-1], -1)


class WholeReader:
    """Runs the model over the whole text for each token."""

    def __init__(self, model: NSAModel) -> None:
        self._model = model
        self._ids: Tensor | None = None

    def read(self, ids: Tensor) -> Tensor:
        self._ids = ids if self._ids is None else torch.cat((self._ids, ids), dim=1)
        logits: Tensor = self._model(self._ids)[0, -1]
        return logits
