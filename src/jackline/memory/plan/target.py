"""The target of `jackline plan`: a recipe's module, or a function in a user's own file.

Owns finding it and turning what a user's own function returns into a Job. Recipes are found by name at run time; this
package knows none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import UsageError
from jackline.memory.imagined.gpu import imagined_gpu
from jackline.memory.plan.example import batch_size, kept_sizes, resized
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.hub import find_config, is_config_target
from jackline.memory.plan.model_settings import parse_model_settings
from jackline.memory.plan.own_file import load_file
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.questions import Questions
from jackline.memory.predict.shortcuts import Unfilled
from jackline.memory.predict.step import explained_trace, failed_in, meta_copy, to_meta
from jackline.memory.predict.values import Values

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
    made = _called(path, name, gpu)
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
    size = batch_size(batch)
    if not size:
        raise UsageError(f"the batch of {path}:{name} has no tensor with a first dimension", hint=_CONTRACT)
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
    kept = kept_sizes(batch, size)
    if kept:
        note = (
            f"of the batch {' and '.join(kept[:3])} keeps its size: only what begins with {size} grows with the batch"
        )
        job = replace(job, note=note)
    count = sum(weight.numel() for weight in _whole(model, job, gpu).parameters())
    steps = {"steps": settings.steps} if settings.steps else {}
    return Candidate(job, {"parameters": count, "batch_size": job.global_batch, **steps})


def _whole(model: nn.Module, job: Job, gpu: GpuModel) -> nn.Module:
    """The model after one forward pass if it has lazy layers, which get their shapes from the first batch."""
    if not any(nn.parameter.is_lazy(weight) for weight in model.parameters()):
        return model
    with explained_trace(job.name), torch.device("meta"), torch.no_grad(), imagined_gpu(gpu):
        to_meta(model)
        job.loss(model, job.batch(1))
    return model


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
        asks_for_gpu=True,
        own_step=function,
    )
    steps = {"steps": settings.steps} if settings.steps else {}
    return Candidate(job, {"batch_size": job.global_batch, **steps})


def _called(path: str, name: str, gpu: GpuModel) -> Any:
    function = getattr(load_file(path, example="jackline plan train.py:make_model"), name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function '{name}'", hint=_CONTRACT)
    values = Values()
    try:
        # On the meta device tensors have no memory, so that even a model of 70 GB can be built here.
        with torch.device("meta"), Unfilled(values), Questions(values), imagined_gpu(gpu):
            made = function()
    except (RuntimeError, NotImplementedError):
        made = _called_again(function, f"{path}:{name}", gpu)
    except Exception as error:  # of any kind: it is a person's own code
        raise failed_in(f"{path}:{name}", error) from error
    if callable(made) and not isinstance(made, nn.Module):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(f"{path}:{name} returned {type(made).__name__}, which cannot be planned", hint=_CONTRACT)
    return made


def _called_again(function: Callable[[], Any], name: str, gpu: GpuModel) -> Any:
    """With real tensors, for code that does with them what the meta device cannot."""
    try:
        with imagined_gpu(gpu):
            return function()
    except Exception as error:
        raise failed_in(name, error) from error


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
    size = batch_size(batch)
    if not size:
        raise UsageError(f"the batch of {name} has no tensor with a first dimension", hint=_CONTRACT)
    return Job(
        name=name,
        build=lambda _: meta_copy(model) if _is_meta() else model,
        batch=lambda count: resized(batch, size, count),
        loss=loss or call_model,
        global_batch=global_batch or size,
        options=options or StepOptions(),
        asks_for_gpu=True,
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
