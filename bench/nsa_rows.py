"""The rows of bench/nsa.py about attention alone: ours, dense, other packages, and ours with other tiles."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from jackline.models.nsa import reference
from jackline.models.nsa.attention import SparseAttention
from jackline.models.nsa.reference import Memory
from jackline.models.nsa.shape import NSAShape

PEERS = ("fla", "native_sparse_attention_pytorch")
Inputs = tuple[Tensor, Tensor, Tensor]  # queries, the six parts of the memory, gates
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # forward alone; forward and backward


def attention_inputs(clock: Any, shape: NSAShape, length: int, tokens: int) -> Inputs:
    torch.manual_seed(0)
    batch = max(1, tokens // length)
    kind = torch.bfloat16 if clock.device.type == "cuda" else torch.float32

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=clock.device, dtype=kind).requires_grad_()

    query = draw(batch, length, shape.num_heads, shape.head_width)
    memory = draw(6, batch, length, shape.num_groups, shape.head_width)
    gates = torch.softmax(draw(batch, length, shape.num_groups, 3).detach(), dim=-1).requires_grad_()
    return query, memory, gates


def _both(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Pair:
    gradient = torch.randn_like(forward())

    def forward_and_back() -> None:
        torch.autograd.grad(forward(), inputs, gradient, allow_unused=True)

    def alone() -> None:
        with torch.no_grad():
            forward()

    return alone, forward_and_back


def sparse_call(clock: Any, shape: NSAShape, inputs: Inputs, *, has_window: bool = True) -> Pair:
    query, memory, gates = inputs
    shape = shape if has_window else replace(shape, window=1)  # a single token: as good as none
    attend: Any = reference.attend
    if clock.device.type == "cuda":
        from jackline.models.nsa import fast

        attend = fast.attend

    def forward() -> Tensor:
        parts = attend(query, Memory(*memory.unbind()), shape)[:3]
        spread = gates.repeat_interleave(shape.heads_per_group, dim=2)
        total: Any = sum(spread[..., number, None] * part for number, part in enumerate(parts))
        return total  # type: ignore[no-any-return]

    # As the model runs it: what stands between the kernels is fused.
    road = torch.compile(forward, dynamic=False) if clock.device.type == "cuda" else forward
    return _both(road, [query, memory, gates])


def dense_call(shape: NSAShape, inputs: Inputs, backend: SDPBackend, *, is_grouped: bool) -> Pair:
    query, memory, _ = inputs
    heads = query.detach().transpose(1, 2).requires_grad_()
    parts = [part.detach().transpose(1, 2) for part in memory[:2]]
    if not is_grouped:  # spread before the clock runs
        parts = [part.repeat_interleave(shape.heads_per_group, dim=1) for part in parts]
    keys, values = (part.contiguous().requires_grad_() for part in parts)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=is_grouped)

    return _both(forward, [heads, keys, values])


def _row(clock: Any, what: str, length: int, make: Callable[[], Pair]) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "length": length}
    if clock.is_over():
        return row | {"error": "not measured: no time left"}
    try:
        forward, both = make()
        row["forward_ms"] = round(clock.time_ms(forward), 3)
        if clock.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row["both_ms"] = round(clock.time_ms(both), 3)
        if clock.device.type == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {str(problem).strip()[:160]}"
    print(f"   {json.dumps(row)}", file=sys.stderr, flush=True)
    return row


def attention_rows(clock: Any, shape: NSAShape, lengths: list[int], tokens: int) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]  # eight shapes, and it compiles no more
        inputs = attention_inputs(clock, shape, length, tokens)
        rows.append(_row(clock, "sparse", length, lambda inputs=inputs: sparse_call(clock, shape, inputs)))
        if clock.device.type != "cuda":
            backends = [("dense math", SDPBackend.MATH, False)]
        else:
            backends = [
                ("dense cuDNN", SDPBackend.CUDNN_ATTENTION, False),
                ("dense flash", SDPBackend.FLASH_ATTENTION, False),
                ("dense flash grouped", SDPBackend.FLASH_ATTENTION, True),
            ]
        for name, backend, is_grouped in backends:
            rows.append(
                _row(
                    clock,
                    name,
                    length,
                    lambda inputs=inputs, backend=backend, is_grouped=is_grouped: dense_call(
                        shape, inputs, backend, is_grouped=is_grouped
                    ),
                )
            )
    return rows


def peer_rows(clock: Any, shape: NSAShape, lengths: list[int], tokens: int) -> list[dict[str, Any]]:
    """Other packages, each beside ours at a shape that it can do."""
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    rows: list[dict[str, Any]] = [{"what": name, "length": 0, "error": "not installed here"} for name in missing]
    wide = replace(shape, num_heads=16 * shape.num_groups, width=16 * shape.num_groups * shape.head_width)
    for length in lengths:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        if PEERS[0] not in missing:
            inputs = attention_inputs(clock, wide, length, tokens // 2)
            calls: dict[str, Callable[[], Pair]] = {
                "sparse, 32 heads": functools.partial(sparse_call, clock, wide, inputs),
                "sparse, 32 heads, no window": functools.partial(sparse_call, clock, wide, inputs, has_window=False),
                "fla, 32 heads": functools.partial(_fla_call, wide, inputs),
                "fla, 32 heads, no window": functools.partial(_fla_call, wide, inputs, has_window=False),
            }
            rows += [_row(clock, what, length, make) for what, make in calls.items()]
        if PEERS[1] not in missing:
            calls = {
                "sparse module": functools.partial(_our_module, clock, shape, length, tokens // 2),
                "native-sparse-attention-pytorch module": functools.partial(
                    _other_module, clock, shape, length, tokens // 2, has_kernel=True
                ),
                "native-sparse-attention-pytorch module, plain": functools.partial(
                    _other_module, clock, shape, length, tokens // 2, has_kernel=False
                ),
            }
            rows += [_row(clock, what, length, make) for what, make in calls.items()]
    return rows


def _fla_call(shape: NSAShape, inputs: Inputs, *, has_window: bool = True) -> Pair:
    """One pair of keys and values for all branches, blocks averaged without overlap: less work than ours. Its window
    is another package's (flash-attn), so it is also timed without."""
    parallel_nsa = importlib.import_module("fla.ops.nsa").parallel_nsa
    query, memory, gates = inputs
    spread = gates.detach().repeat_interleave(shape.heads_per_group, dim=2)
    gate = [part.contiguous().requires_grad_() for part in spread.unbind(-1)]

    def forward() -> Tensor:
        found: Tensor = parallel_nsa(
            q=query, k=memory[0], v=memory[1], g_cmp=gate[0], g_slc=gate[1], g_swa=gate[2],
            block_counts=shape.num_blocks, block_size=shape.block_length,
            window_size=shape.window if has_window else 0,
        )  # fmt: skip
        return found

    return _both(forward, [query, memory])


def _module_call(clock: Any, module: nn.Module, shape: NSAShape, length: int, tokens: int) -> Pair:
    kind = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    module = module.to(clock.device, kind)
    batch = max(1, tokens // length)
    normed = torch.randn(batch, length, shape.width, device=clock.device, dtype=kind, requires_grad=True)
    return _both(
        lambda: module(normed), [normed, *(weight for weight in module.parameters() if weight.requires_grad)]
    )


def _our_module(clock: Any, shape: NSAShape, length: int, tokens: int) -> Pair:
    module = SparseAttention(shape)
    module.has_kernels = clock.device.type == "cuda"
    return _module_call(clock, module, shape, length, tokens)


def _other_module(clock: Any, shape: NSAShape, length: int, tokens: int, *, has_kernel: bool) -> Pair:
    package = importlib.import_module("native_sparse_attention_pytorch")
    module = package.SparseAttention(
        dim=shape.width, dim_head=shape.head_width, heads=shape.num_heads, kv_heads=shape.num_groups, causal=True,
        sliding_window_size=shape.window, compress_block_size=shape.compressed_length,
        compress_block_sliding_stride=shape.compressed_stride, selection_block_size=shape.block_length,
        num_selected_blocks=shape.num_blocks, use_triton_kernel=has_kernel,
    )  # fmt: skip
    return _module_call(clock, module, shape, length, tokens)


# Rows, keys of a tile, warps, stages (for the selected kernels without the keys: a tile is a block).
_CANDIDATES: dict[tuple[str, str], list[tuple[int, ...]]] = {
    ("band", "forward"): [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("band", "queries"): [(64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 4, 3), (64, 128, 4, 2)],
    ("band", "keys"): [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 8, 2),
        (32, 64, 4, 3),
        (32, 128, 4, 3),
        (64, 128, 4, 2),
    ],
    ("choice", "score"): [(64, 64, 4, 2), (128, 64, 8, 2), (64, 128, 8, 2), (64, 32, 4, 2), (64, 64, 4, 3)],
    ("selected", "forward"): [(64, 4, 3), (64, 4, 2), (128, 4, 2), (128, 8, 2), (256, 8, 2)],
    ("selected", "backward"): [(64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2), (128, 8, 1)],
}


def tune_rows(clock: Any, shape: NSAShape, lengths: list[int]) -> list[dict[str, Any]]:
    """One kernel's tiles changed at a time; the whole attention is timed, since kernels share the caches."""
    from jackline.models.nsa import band_kernel, choice_kernel, selected_kernel

    modules: dict[str, Any] = {"band": band_kernel, "choice": choice_kernel, "selected": selected_kernel}
    rows = []
    for length in lengths:
        forward, both = sparse_call(clock, shape, attention_inputs(clock, shape, length, 1 << 16))
        for (module, kernel), candidates in _CANDIDATES.items():
            if module != "band" and length <= shape.reads_everything_up_to:
                continue  # nothing is chosen there
            usual = modules[module].TILES[kernel]
            call = forward if kernel in ("forward", "score") else both
            for tiles in candidates:
                modules[module].TILES[kernel] = tiles
                what = f"{module} {kernel} {tiles}{' (now)' if tiles == usual else ''}"
                rows.append(_tuned(clock, what, length, call))
            modules[module].TILES[kernel] = usual
        for module, spans in (("selected", (512, 1024, 2048)), ("band", (1024, 2048, 4096, 8192))):
            span = modules[module]._SPAN
            for other in spans if length > shape.reads_everything_up_to else ():
                modules[module]._SPAN = other
                what = f"{module} span {other}{' (now)' if other == span else ''}"
                rows.append(_tuned(clock, what, length, both))
            modules[module]._SPAN = span
    return rows


def _tuned(clock: Any, what: str, length: int, call: Callable[[], Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "length": length}
    if clock.is_over():
        return row | {"error": "not measured: no time left"}
    try:
        row["ms"] = round(clock.time_ms(call), 3)
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {str(problem).strip()[:160]}"
    print(f"   {json.dumps(row)}", file=sys.stderr, flush=True)
    return row
