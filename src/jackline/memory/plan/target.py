"""The target of `jackline plan`: a recipe's module, or a function in a user's own file.

Owns finding it and turning what a user's own function returns into a Job. Recipes are found by name at run time; this
package knows none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import UsageError
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.hub import find_config, is_config_target
from jackline.memory.plan.model_settings import parse_model_settings
from jackline.memory.plan.own_file import load_file
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import meta_copy

_CONTRACT = "it returns (model, batch) or (model, batch, loss), or step(n), which does one whole step with n samples"
_OWN_BATCH = 8


@dataclass(frozen=True)
class Candidate:
    """One thing that could be trained, and the settings a person should see with it."""

    job: Job
    shown: Mapping[str, object]


def load_candidates(target: str, gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """'file.py:function' or 'package.module'; the latter has `candidates(gpu, words)`."""
    if is_config_target(target):
        return (_from_config(target, gpu, words),)
    path, colon, function = target.rpartition(":")
    if colon:
        return (_from_function(path, function, gpu, words),)
    found: Callable[[GpuModel, Sequence[str]], tuple[Candidate, ...]] = importlib.import_module(target).candidates
    return found(gpu, words)


def _from_config(target: str, gpu: GpuModel, words: Sequence[str]) -> Candidate:
    # Imports transformers, which only these targets need.
    from jackline.memory.plan.from_config import count_weights, job_from_config

    job, shown = job_from_config(find_config(target), parse_model_settings(words, target), gpu)
    total, trained = count_weights(job)
    parameters: dict[str, object] = {"parameters": total}
    if trained != total:
        parameters["trained"] = trained
    return Candidate(job, {**parameters, **shown})


def _from_function(path: str, name: str, gpu: GpuModel, words: Sequence[str]) -> Candidate:
    made = _called(path, name)
    if callable(made):
        return _from_step(path, name, words)
    model, batch, loss = made if len(made) == 3 else (*made, call_model)
    settings = parse_model_settings(words, f"{path}:{name}")
    precision = settings.precision or gpu.precision
    if settings.parallel == "tp":
        raise UsageError(
            f"parallel=tp needs a transformers config: {path}:{name} does not say which layers are divided",
            hint="--parallel fsdp or --parallel ddp",
        )
    size = _batch_size(batch, path, name)
    job = job_of(
        model,
        batch,
        loss,
        name=f"{Path(path).name}:{name}",
        global_batch=settings.batch_size or size,
        options=StepOptions(
            precision=precision,
            algorithm=settings.optimizer,
            parallel="fsdp" if settings.offload else settings.parallel,
            is_offloading=settings.offload,
        ),
    )
    count = sum(weight.numel() for weight in model.parameters())
    steps = {"steps": settings.steps} if settings.steps else {}
    return Candidate(job, {"parameters": count, "batch_size": job.global_batch, **steps})


def _from_step(path: str, name: str, words: Sequence[str]) -> Candidate:
    """A function that builds everything and returns step(n)."""
    settings = parse_model_settings(words, f"{path}:{name}")
    function = getattr(load_file(path, example="jackline plan train.py:make_step"), name)
    job = Job(
        name=f"{Path(path).name}:{name}",
        build=lambda _: nn.Module(),
        batch=lambda _: None,
        loss=call_model,
        global_batch=settings.batch_size or _OWN_BATCH,
        options=StepOptions(settings.precision or "fp32", algorithm=settings.optimizer),
        note="your own step: its precision, accumulation and optimizers are those of its code",
        own_step=function,
    )
    steps = {"steps": settings.steps} if settings.steps else {}
    return Candidate(job, {"batch_size": job.global_batch, **steps})


def _called(path: str, name: str) -> Any:
    function = getattr(load_file(path, example="jackline plan train.py:make_model"), name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function '{name}'", hint=_CONTRACT)
    try:
        # On the meta device tensors have no values, so that even a model of 70 GB can be built here.
        with torch.device("meta"):
            made = function()
    except (RuntimeError, NotImplementedError):
        made = function()
    if callable(made) and not isinstance(made, nn.Module):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(f"{path}:{name} returned {type(made).__name__}, which cannot be planned", hint=_CONTRACT)
    return made


def job_of(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    name: str = "model",
    global_batch: int | None = None,
    options: StepOptions | None = None,
) -> Job:
    """A Job from any module and an example batch whose tensors have the samples in their first dimension.

    The model's weights are neither changed nor copied. Without `loss`, `model(*batch)` (or `model(**batch)`) must
    return the scalar to differentiate.
    """
    return Job(
        name=name,
        build=lambda _: meta_copy(model) if _is_meta() else model,
        batch=lambda count: _resized(batch, count),
        loss=loss or call_model,
        global_batch=global_batch or _batch_size(batch, name, "batch"),
        options=options or StepOptions(),
    )


def call_model(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        result = model(**batch)
    else:
        result = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    if not isinstance(result, Tensor):
        result = result.loss if hasattr(result, "loss") else result[0]
    loss: Tensor = result
    return loss


def _is_meta() -> bool:
    return torch.get_default_device().type == "meta"


def _resized(value: Any, count: int) -> Any:
    """The same batch with `count` samples: without values on the meta device, elsewhere with the samples repeated."""
    if isinstance(value, Tensor):
        if _is_meta():
            return torch.empty((count, *value.shape[1:]) if value.dim() else (), dtype=value.dtype)
        if value.is_meta:
            return torch.zeros((count, *value.shape[1:]) if value.dim() else (), dtype=value.dtype)
        wanted = torch.arange(count, device=value.device) % max(1, value.shape[0]) if value.dim() else None
        return (value if wanted is None else value[wanted]).to(torch.get_default_device())
    if isinstance(value, Mapping):
        return {key: _resized(item, count) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_resized(item, count) for item in value)
    return value


def _batch_size(batch: Any, path: str, name: str) -> int:
    tensors = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, Mapping) else batch)
    sizes = [tensor.shape[0] for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim()]
    if not sizes:
        raise UsageError(f"the batch of {path}:{name} has no tensor with a first dimension", hint=_CONTRACT)
    return int(sizes[0])
