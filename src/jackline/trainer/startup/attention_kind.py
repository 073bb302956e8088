"""Sparse or dense attention: which of the two a model gets that has both, and why.

A sparse model is slower than a dense one while its sequences are short: at 1,024 tokens every block is read anyway.
With attention=auto both are measured on the GPU that trains, at the length that is trained. The measurement is kept
in the person's cache, by shape, length, GPU and versions. The two are different models, so a run keeps what it began
with: its newest checkpoint decides before any measurement.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from jackline import accelerator
from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.export import read_state
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import read_manifest
from jackline.models.nsa.dense import Timing, time_both
from jackline.models.nsa.model import why_no_kernels
from jackline.models.nsa.shape import NSAShape
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.trainer.startup.parallel import rank
from jackline.trainer.startup.precision import attention_kernels, choose_attention
from jackline.trainer.startup.process import own_cache
from jackline.trainer.startup.shared_code import key_of

LEAST_GAIN = 0.95  # the recipe's own kind is kept where it is at most so much slower
_ONLY_SPARSE = "attention.gate_in.weight"
_MAX_BYTES = 1 << 10


@dataclass(frozen=True)
class Kind:
    """What was chosen, and the sentence a person reads."""

    is_dense: bool
    reason: str

    @property
    def text(self) -> str:
        return f"{'dense' if self.is_dense else 'sparse'} attention: {self.reason}"


def decide(asked: str, *, kept: bool | None, timing: Timing | None, length: int) -> Kind:
    """`kept`: whether the run's checkpoints are dense; `timing`: None where there is nothing to measure. Pure."""
    if asked != "auto":
        return Kind(asked == "dense", f"attention={asked}")
    if kept is not None:
        return Kind(kept, "as this run began (attention=auto)")
    if timing is None:
        return Kind(False, "attention=auto compares it with dense attention on a GPU only")
    is_dense = is_dense_faster(timing)
    took = f"a layer takes {_ms(timing.sparse_ms)} sparse and {_ms(timing.dense_ms)} dense"
    other = "; attention=sparse trains the sparse one" if is_dense else ""
    return Kind(is_dense, f"at {length:,} tokens {took}, measured on this GPU{other}")


def is_dense_faster(timing: Timing) -> bool:
    return timing.dense_ms < LEAST_GAIN * timing.sparse_ms


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f} ms" if math.isfinite(milliseconds) else "more memory than there is"


def choose_kind(
    asked: str, shape: NSAShape, length: int, *, dtype: torch.dtype, device: torch.device, folder: Path
) -> tuple[NSAShape, str]:
    """The shape with the kind in it, and a line about it. All ranks do what rank 0 chose."""
    kept = kept_kind(folder) if asked == "auto" else None
    is_measured = asked == "auto" and kept is None and accelerator.is_gpu(device) and rank() == 0
    timing = measured(shape, length, dtype, device) if is_measured else None
    kind = decide(asked, kept=kept, timing=timing, length=length)
    if dist.is_initialized():
        chosen = torch.tensor([int(kind.is_dense)], device=device)
        dist.broadcast(chosen, 0)
        kind = replace(kind, is_dense=bool(chosen.item()))
    return replace(shape, is_dense=kind.is_dense), kind.text


def kept_kind(folder: Path) -> bool | None:
    """Whether the newest readable checkpoint of a run is of a dense model; None: there is none."""
    checkpoints = RunDir(folder).checkpoints
    for name in list_names(checkpoints):
        with contextlib.suppress(Damage, OSError, KeyError, TypeError):
            path = checkpoints / str(name)
            return is_dense_model(read_state(path, read_manifest(path))["model"]["tensors"])
    return None


def is_dense_model(names: Collection[str]) -> bool:
    """By the names of a model's tensors: only sparse attention has gates."""
    return not any(name.endswith(_ONLY_SPARSE) for name in names)


def measured(shape: NSAShape, length: int, dtype: torch.dtype, device: torch.device) -> Timing:
    """From the cache where the same was measured before. Without a cache the next start measures again."""
    facts = {"shape": shape, "length": length, "dtype": dtype, "what": "attention"}
    root = own_cache("attention")
    path = root / key_of(facts, device, {}) if root is not None else None
    if path is not None and (found := _read(path)) is not None:
        return found
    with attention_kernels(choose_attention("auto", device)):
        timing = time_both(shape, length, dtype, device, has_kernels=dtype != torch.float16)
        # Kernels that lose need no comparison with plain torch, which compiles them once more.
        if not is_dense_faster(timing) and why_no_kernels(shape, device, dtype):
            timing = time_both(shape, length, dtype, device, has_kernels=False)
    accelerator.empty_cache()
    if path is not None and all(map(math.isfinite, timing)):
        with contextlib.suppress(OSError):
            atomic.write_whole(path, json.dumps(timing._asdict()).encode())
    return timing


def _read(path: Path) -> Timing | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
        timing = Timing(float(found["sparse_ms"]), float(found["dense_ms"]))
        if all(math.isfinite(value) and value > 0 for value in timing):
            return timing
    return None
