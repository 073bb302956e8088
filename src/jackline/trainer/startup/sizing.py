"""`model=auto`: which of a recipe's sizes this machine can train, decided once for a run.

Owns the choice and that it stays: an attempt on another GPU continues with the size of the first one, because a
checkpoint has no other. An explicit size never comes here. What fits is memory/plan/choose's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jackline import accelerator
from jackline.errors import JacklineError
from jackline.memory.plan.choose import MAX_ACCUMULATION, Plan, room_of
from jackline.memory.plan.gpus import GpuModel, Precision, match_gpu
from jackline.rundir.layout import RunDir
from jackline.trainer.config import Resolved, TrainConfig, resolve
from jackline.trainer.network import shape_of
from jackline.trainer.planning.plan import TOKENIZER_SIZES, plan_on
from jackline.trainer.report.console import Console
from jackline.units import format_bytes

AUTO = "auto"


def settle_size(resolved: Resolved, run: RunDir | None, device: torch.device, console: Console) -> Resolved:
    """The same with a size in place of 'auto'; what comes with the size comes too, unless a person set it."""
    if resolved.config.model != AUTO or not _sizes(resolved.config):
        return resolved
    if before := _size_before(resolved.config, run):
        console.say(f"model=auto: {before}, as in the attempt before", "plan")
        return _with_size(resolved, before)
    if not accelerator.is_gpu(device):
        smallest = _sizes(resolved.config)[-1]
        console.say(f"model=auto: {smallest}, the smallest, because there is no GPU here", "plan")
        return _with_size(resolved, smallest)
    gpu = match_gpu(accelerator.name(device), accelerator.total_bytes(device))
    free_bytes = accelerator.memory_info(device)[0] + gpu.context_bytes
    with console.phase("plan", f"model=auto: which size fits on {gpu.name}"):
        return choose_size(resolved, gpu, free_bytes, console)


def choose_size(resolved: Resolved, gpu: GpuModel, free_bytes: int, console: Console) -> Resolved:
    """The largest that fits without being cut into many slices; the smallest when none does."""
    sizes = _sizes(resolved.config)
    for size in sizes:
        tried = _with_size(resolved, size)
        made = _plan(tried.config, gpu, free_bytes)
        is_comfortable = made.fit == "fits" and made.accumulation <= MAX_ACCUMULATION
        if is_comfortable or size == sizes[-1]:
            console.say(f"model=auto: {size}, {_words(tried.config, made)}")
            return tried
        console.say(f"{size} is too large: {made.fit}, {_words(tried.config, made)}")
    raise AssertionError("a recipe with model=auto has sizes")


def _plan(config: TrainConfig, gpu: GpuModel, free_bytes: int) -> Plan:
    wanted: Precision = "bf16-weights" if gpu.has_bf16 else "fp16"
    precision = wanted if config.precision == "auto" else config.precision
    shape = shape_of(config, TOKENIZER_SIZES.get(config.tokenizer, TOKENIZER_SIZES["gpt2"]))
    most_bytes = min(free_bytes, config.max_gpu_bytes) if config.max_gpu_bytes else free_bytes
    return plan_on(config, shape, precision, gpu=gpu, room=room_of(gpu, free_bytes=most_bytes))


def _words(config: TrainConfig, made: Plan) -> str:
    examples = getattr(config, "max_train_examples", None)
    data = f", {examples:,} training examples" if examples else ""
    return (
        f"batch {config.batch_size} in {made.accumulation} slices{data}, "
        f"{format_bytes(made.device_bytes)} of {format_bytes(made.gpu.usable_bytes)}"
    )


def _sizes(config: TrainConfig) -> tuple[str, ...]:
    return tuple(getattr(config, "AUTO_SIZES", ()))


def _with_size(resolved: Resolved, size: str) -> Resolved:
    fixed: Any = replace(resolved.config, model=size)  # type: ignore[arg-type]
    return Resolved(fixed.settle(resolved.origins), {**resolved.origins, "model": f"{AUTO} on this machine"})


def _size_before(config: TrainConfig, run: RunDir | None) -> str:
    """Of the run's saved config; empty when there is none yet, or none that can be read."""
    if run is None or not run.config_file.exists():
        return ""
    try:
        found = str(resolve(config.recipe, (), [run.config_file]).config.model)
    except JacklineError:
        return ""
    return found if found in _sizes(config) else ""
