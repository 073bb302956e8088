"""Models of Jackline that transformers has no class for. `jackline export` copies this file into the folder that it
writes; `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` runs it. It needs nothing
but torch and transformers.

JacklineGPT2 is GPT-2 with a bias in its head. JacklineNSA has native sparse attention, in plain torch: its memory
grows with the square of the sequence, and text is generated without a cache.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class JacklineGPT2(GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        self.post_init()


class JacklineNSAConfig(PretrainedConfig):
    model_type = "jackline-nsa"

    def __init__(self, shape: dict[str, Any] | None = None, **more: Any) -> None:
        self.shape = shape or {}
        self.vocab_size = self.shape.get("vocab_size", 0)
        self.hidden_size = self.shape.get("width", 0)
        self.num_hidden_layers = self.shape.get("num_layers", 0)
        self.num_attention_heads = self.shape.get("num_heads", 0)
        super().__init__(**{"tie_word_embeddings": False, "use_cache": False, **more})


class NSAAttention(nn.Module):
    """Each token reads averages of blocks, whole blocks chosen by these, and the last tokens; a gate mixes them."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape["width"], shape["head_width"]
        self.query = nn.Linear(width, shape["num_heads"] * head, bias=False)
        self.is_dense = shape.get("is_dense", False)
        self.memory = nn.Linear(width, (2 if self.is_dense else 6) * shape["num_groups"] * head, bias=False)
        if not self.is_dense:
            self.gate_in = nn.Linear(head, head // 2)
            self.gate_out = nn.Linear(head // 2, 3)
        self.projection = nn.Linear(shape["num_heads"] * head, width, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        shape = self.shape
        groups, head = shape["num_groups"], shape["head_width"]
        batch, length, _ = normed.shape
        query = self.query(normed).view(batch, length, shape["num_heads"], head)
        if self.is_dense:
            return self.projection(self._read_all(query, normed).flatten(2))
        mean = query.view(batch, length, groups, -1, head).mean(dim=3)
        gates = torch.softmax(self.gate_out(functional.silu(self.gate_in(mean))).float(), dim=-1).to(query.dtype)
        parts = self.memory(normed).view(batch, length, 6, groups, head).unbind(dim=2)
        turns = _turns(length, head, shape["rotary_base"], normed.device)
        memory = [part if number % 2 else _rotate(part, turns) for number, part in enumerate(parts)]
        branches = self._read(_rotate(query, turns), memory)
        spread = gates.repeat_interleave(shape["num_heads"] // groups, dim=2)
        mixed = sum(spread[..., number, None] * part for number, part in enumerate(branches))
        return self.projection(mixed.to(normed.dtype).flatten(2))

    def _read_all(self, query: Tensor, normed: Tensor) -> Tensor:
        groups, head = self.shape["num_groups"], self.shape["head_width"]
        keys, values = self.memory(normed).view(*query.shape[:2], 2, groups, head).unbind(dim=2)
        turns = _turns(query.shape[1], head, self.shape["rotary_base"], query.device)
        each = self.shape["num_heads"] // groups
        parts = [_rotate(query, turns)]
        parts += [part.repeat_interleave(each, dim=2) for part in (_rotate(keys, turns), values)]
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return mixed.transpose(1, 2).to(normed.dtype)

    def _read(self, query: Tensor, memory: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        shape, length = self.shape, query.shape[1]
        place = torch.arange(length, device=query.device)
        keys, values = (_compress(part, shape) for part in memory[:2])
        last = torch.arange(keys.shape[1], device=query.device) * shape["compressed_stride"]
        seen = last + (shape["compressed_length"] - 1) <= place[:, None]
        compressed, shares = _attend(query, keys, values, seen)
        chosen = _pick(_block_scores(shares.sum(dim=2), length, shape), shape)
        distance = place[:, None] - place
        blocks = chosen.repeat_interleave(shape["block_length"], dim=-1)[..., :length] & (distance >= 0)
        selected, _ = _attend(query, memory[2], memory[3], blocks[:, :, None])
        near = (distance >= 0) & (distance < shape["window"])
        window, _ = _attend(query, memory[4], memory[5], near)
        return compressed, selected, window


class NSABlock(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        width = shape["width"]
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = NSAAttention(shape)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        return stream + self.down(functional.silu(self.up(self.mlp_norm(stream))))


class JacklineNSA(PreTrainedModel, GenerationMixin):
    config_class = JacklineNSAConfig

    def __init__(self, config: JacklineNSAConfig) -> None:
        super().__init__(config)
        shape = config.shape
        self.tokens = nn.Embedding(shape["vocab_size"], shape["width"])
        self.blocks = nn.ModuleList(NSABlock(shape) for _ in range(shape["num_layers"]))
        self.norm = nn.RMSNorm(shape["width"], eps=1e-6)
        self.head = nn.Linear(shape["width"], shape["vocab_size"], bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **more: Any
    ) -> CausalLMOutput:
        """Rows of different lengths are padded at their ends: no token reads what comes after it."""
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ValueError("pad at the end of the rows: tokenizer.padding_side = 'right'")
        stream = self.tokens(input_ids)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **more: Any) -> dict[str, Tensor]:
        return {"input_ids": input_ids}


def _turns(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    speed = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speed
    return angle.cos()[:, None], angle.sin()[:, None]


def _rotate(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = turns
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(heads.dtype)


def _compress(tokens: Tensor, shape: dict[str, Any]) -> Tensor:
    """Averages of overlapping blocks; an incomplete last one is left out."""
    stride, size = shape["compressed_stride"], shape["compressed_length"]
    count = max(0, (tokens.shape[1] - size) // stride + 1)
    if not count:
        return tokens[:, :0]
    per_block = size // stride
    num_pieces = count + per_block - 1
    whole = tokens[:, : num_pieces * stride]
    pieces = whole.reshape(tokens.shape[0], num_pieces, stride, *tokens.shape[2:]).mean(dim=2)
    total = pieces[:, :count]
    for number in range(1, per_block):
        total = total + pieces[:, number : number + count]
    return total / per_block


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """A query that sees nothing gets zeros."""
    batch, length, heads, width = query.shape
    groups = keys.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, length, groups, heads // groups, width).to(wide)
    scores = torch.einsum("btghd,bngd->bghtn", grouped, keys.to(wide)) * width**-0.5
    shares = torch.softmax(scores.masked_fill(~visible, torch.finfo(wide).min), dim=-1) * visible
    mixed = torch.einsum("bghtn,bngd->btghd", shares, values.to(wide))
    return mixed.flatten(2, 3).to(query.dtype), shares


def _block_scores(shares: Tensor, length: int, shape: dict[str, Any]) -> Tensor:
    size, block_length = shape["compressed_length"], shape["block_length"]
    begin = (torch.arange(shares.shape[-1], device=shares.device) * shape["compressed_stride"])[:, None]
    block = torch.arange(-(-length // block_length), device=shares.device) * block_length
    common = torch.minimum(begin + size, block + block_length) - torch.maximum(begin, block)
    return shares @ (common.clamp(min=0) / size).to(shares.dtype)


def _pick(scores: Tensor, shape: dict[str, Any]) -> Tensor:
    """(..., length, blocks) true for the blocks that each query reads. As in training, the lowest bits of a score do
    not count, block 0 and the last ones are always read, and ties go to the earlier block."""
    length, num_blocks = scores.shape[-2:]
    lowest = (1 << (num_blocks - 1).bit_length()) - 1
    scores = (scores.float().contiguous().view(torch.int32) & ~lowest).view(torch.float32)
    own = (torch.arange(length, device=scores.device) // shape["block_length"])[:, None]
    block = torch.arange(num_blocks, device=scores.device)
    is_forced = (block == 0) | ((block <= own) & (block > own - shape["num_local"]))
    ranked = scores.masked_fill(is_forced, float("inf")).masked_fill(block > own, -float("inf"))
    best = ranked.sort(dim=-1, descending=True, stable=True)
    slots = min(shape["num_blocks"], num_blocks)
    is_picked = best.values[..., :slots] != -float("inf")
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best.indices[..., :slots], is_picked)
