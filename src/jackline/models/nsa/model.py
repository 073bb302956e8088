"""The language model around sparse attention: RMSNorm, SiLU feed-forward, rotary positions, an untied head.

Owns the modules, their initialisation and the statistics of gates and selection. Called like `models.gpt.GPT`. Also
decides whether the kernels may be used: they must give the same results as plain torch, on this GPU, for this shape.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline import accelerator
from jackline.models.embedding import embed
from jackline.models.nsa import reference
from jackline.models.nsa.attention import BRANCHES, SparseAttention
from jackline.models.nsa.dense import DenseAttention
from jackline.models.nsa.reference import Branches, Memory
from jackline.models.nsa.shape import NSAShape
from jackline.models.stack import Stack

_INIT_STD = 0.02
_NORM_EPS = 1e-6
_COLLAPSED_GATE = 0.9


class SparseBlock(nn.Module):
    """Sparse (or dense) attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, shape: NSAShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.attention: nn.Module = DenseAttention(shape) if shape.is_dense else SparseAttention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.up = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        stream, added = self.split(stream)
        return stream + added

    def split(self, stream: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block of `stream + added`; its result before the last addition."""
        stream = stream if added is None else stream + added
        stream = stream + self.attention(self.attention_norm(stream))
        return stream, self.feed(stream)

    def feed(self, stream: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.silu(self.up(self.mlp_norm(stream))))
        return hidden


class NSAModel(Stack):
    """Called as every `Stack` is. Rows of different lengths are padded at their ends: no position reads what comes
    after it."""

    def __init__(self, shape: NSAShape, *, is_recomputing: bool = False, loss_chunk_rows: int = 0) -> None:
        super().__init__(is_recomputing=is_recomputing, loss_chunk_rows=loss_chunk_rows)
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(SparseBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """normal(0.02), less for weights that add to the residual stream; the gates have an initialisation of their
        own."""
        residual_std = _INIT_STD / math.sqrt(2 * self.shape.num_layers)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and "gate" not in name:
                is_residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(weight, std=residual_std if is_residual else _INIT_STD)

    def enter(self, ids: Tensor) -> tuple[Tensor, ...]:
        return (embed(self.tokens, ids),)

    def use_kernels(self, dtype: torch.dtype | None = None) -> str:
        """Use the kernels from now on, or return why they cannot be used. Call it once the model has its device and
        dtype (`dtype` is for autocast, which computes in another), and before compiling it. It takes some seconds on
        a GPU, which the first step would take otherwise. A dense model has none: torch's own are used."""
        if self.shape.is_dense:
            return ""
        weight = self.head.weight
        reason = why_no_kernels(self.shape, weight.device, dtype or weight.dtype)
        for block in self.blocks:
            attention = block.attention
            if isinstance(attention, SparseAttention):
                attention.has_kernels = not reason
        return reason

    @torch.no_grad()
    def statistics(self, ids: Tensor) -> dict[str, float]:
        """Means over all layers, and the worst layer, from a separate forward pass over `ids`: give it one row.

        It is separate from the training step, because returning these values from a compiled and recomputed step
        costs more than this pass. It takes one transfer from the device.
        """
        stream, facts = embed(self.tokens, ids), []
        for block in self.blocks:
            assert isinstance(block, SparseBlock)
            if not isinstance(block.attention, SparseAttention):
                return {}
            added, gates, found = block.attention.attend(block.attention_norm(stream))
            stream = stream + added
            stream = stream + block.feed(stream)
            facts.append(torch.cat((_gate_facts(gates.float()), _selection_facts(found.selection, self.shape))))
        table = torch.stack(facts)
        at = _FACTS.index
        entropy, number = table[:, at("gate_entropy")].min(dim=0)
        worst = (entropy, table[:, at("gate_max")].amax(), number + 1.0, table[:, -1].amax())
        values = torch.cat((table[:, :-1].mean(dim=0), torch.stack(worst))).tolist()
        return dict(zip(_FACTS, values, strict=True))


_FACTS = (
    *(f"gate_{name}" for name in BRANCHES),
    "gate_entropy",  # ln 3 = 1.099 where all branches have the same weight
    "gate_max",
    "gate_collapsed",  # share of gates that gave one branch more than 0.9
    "selected_blocks",
    "selected_coverage",  # share of selected tokens among all that a query could read
    "selected_far",  # share of the selected blocks that were not forced
    # The value of the worst layer: a mean over twelve layers hides one that has collapsed.
    "gate_entropy_least",
    "gate_max_most",
    "gate_worst_layer",  # the layer with the least entropy; the first layer is 1
    "selected_blocks_most",  # the most that any query selected
)


def _gate_facts(gates: Tensor) -> Tensor:
    largest = gates.amax(dim=-1)
    entropy = -torch.special.xlogy(gates, gates).sum(dim=-1)
    collapsed = (largest > _COLLAPSED_GATE).float()
    return torch.cat((gates.mean(dim=(0, 1, 2)), torch.stack([entropy.mean(), largest.mean(), collapsed.mean()])))


def _selection_facts(selection: Tensor, shape: NSAShape) -> Tensor:
    position = torch.arange(selection.shape[2], device=selection.device)[:, None]
    is_used = selection >= 0
    tokens = (position + 1 - selection * shape.block_length).clamp(max=shape.block_length) * is_used
    coverage = tokens.sum(dim=-1) / (position[:, 0] + 1)
    is_far = is_used & (selection > 0) & (selection <= position // shape.block_length - shape.num_local)
    counts = is_used.sum(dim=-1)
    far = is_far.sum(dim=-1) / counts
    return torch.stack([counts.float().mean(), coverage.mean(), far.mean(), counts.amax().float()])


_LIMIT = 0.03  # bf16 has 8 bits of precision; a wrong kernel is off by far more
_SAME_CHOICE = 0.97  # the remaining differences come from scores that rounding made equal


def why_no_kernels(shape: NSAShape, device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels cannot be used. Empty when they can: they were run and gave the right output, gradients and
    choice of blocks."""
    if not accelerator.is_gpu(device) or dtype not in (torch.bfloat16, torch.float32):
        return "they need bf16 or float32 on a GPU"
    widths = {"head_width": shape.head_width, "block_length": shape.block_length}
    for name, width in widths.items():
        if width not in (16, 32, 64, 128):
            return f"their tiles are made for a {name} of 16, 32, 64 or 128, not {width}"
    try:
        off, same = compare(shape, device, dtype)
    except Exception as problem:  # no Triton, no compiler, an unknown GPU
        words = str(problem).strip().splitlines()
        return f"{type(problem).__name__}: {words[0][:100] if words else ''}"
    if not off <= _LIMIT:
        return f"they are off by {off:.1%} from plain torch"
    return "" if same >= _SAME_CHOICE else f"they choose the same block in {same:.1%} of all cases only"


def compare(shape: NSAShape, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Compare the kernels with plain torch on a sequence where some blocks must be left out. Returns the largest
    relative difference of outputs and gradients, and the share of blocks that both chose."""
    from jackline.models.nsa import fast

    small = replace(shape, num_blocks=shape.num_local + 2, window=min(shape.window, 3 * shape.block_length))
    length = small.reads_everything_up_to + 3 * shape.block_length
    rng_state = torch.Generator(device).manual_seed(1)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, generator=rng_state, device=device, dtype=torch.float32)
        return drawn.to(dtype).requires_grad_()

    query = draw(1, length, shape.num_heads, shape.head_width)
    parts = draw(6, 1, length, shape.num_groups, shape.head_width)
    gradients = draw(3, *query.shape).detach()
    with torch.enable_grad():
        found = fast.attend(query, Memory(*parts), small)
        expected = reference.attend(query, Memory(*parts), small, found.selection)
        pairs = [*zip(found[:3], expected[:3], strict=True)]
        sums = [_sum_of(branches, gradients) for branches in (found, expected)]
        pairs += zip(*(torch.autograd.grad(total, [query, parts]) for total in sums), strict=True)
        chosen = reference.attend(query, Memory(*parts), small).selection
    is_same = found.selection.sort(dim=-1).values == chosen.sort(dim=-1).values
    # Not Python's max(): it would ignore a NaN.
    off = torch.stack([(left.float() - right.float()).norm() / right.float().norm() for left, right in pairs])
    return float(off.detach().max()), float(is_same.float().mean())


def _sum_of(branches: Branches, gradients: Tensor) -> Tensor:
    outputs = torch.stack([branches.compressed, branches.selected, branches.window])
    return (outputs.float() * gradients.float()).sum()
