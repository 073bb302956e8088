"""What `jackline doctor RECIPE` really does: opens the data, builds the model, takes a step, saves and loads.

Owns the doing, with the same functions the training uses, and the cleaning up: nothing stays but the data cache,
which the training needs anyway. Judges nothing (findings.py).
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jackline.checkpoint.engine import CheckpointEngine
from jackline.data.build.supply import Data, open_data
from jackline.data.command_line import first_text
from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Batch, Loader
from jackline.data.progress import Progress, describe
from jackline.data.sources.bytefile import SourceUnavailable
from jackline.memory.guard.safe_step import SafeStep
from jackline.memory.plan.cards import Card, Precision
from jackline.memory.predict.step import CannotTrace, predict
from jackline.rundir.layout import RunDir
from jackline.session.saving.proof import prove
from jackline.session.stopping import NoMoreWaiting
from jackline.trainer.build import Parts, device_name
from jackline.trainer.chunks import ChunkSource, open_chunks
from jackline.trainer.config import TrainConfig
from jackline.trainer.corpus import Corpus, cache_settings, make_loader, spec_of
from jackline.trainer.doctor.findings import StepTaken
from jackline.trainer.network import make_model, shape_of, use_kernels
from jackline.trainer.optim.optimizer import make_optimizer
from jackline.trainer.optim.schedule import lr_at, schedule_of
from jackline.trainer.planning.plan import choose_micro_batch, job_of
from jackline.trainer.report.console import Console
from jackline.trainer.sentinels.floor import Floor, entropy_floor
from jackline.trainer.sentinels.tensors import weights_without_gradient
from jackline.trainer.startup.precision import choose_attention, make_scaler
from jackline.trainer.task import Method, find_method

# A training waits a quarter of an hour for a source that does not answer; whoever asks a doctor waits no longer.
GIVE_UP_AFTER_S = 20.0
_FLOOR_TOKENS = 1 << 16
_MAX_STEPS = 6
_TIMED_S = 3.0


@dataclass(frozen=True)
class Opened:
    """The training data, its first text and its first batch."""

    data: Data | ChunkSource
    loader: Loader
    first_text: str
    first: Batch
    floor: Floor | None
    took_s: float

    @property
    def vocab_size(self) -> int:
        return Corpus(self.data, None).vocab_size


@contextlib.contextmanager
def opened(config: TrainConfig, device: torch.device, console: Console) -> Iterator[Opened]:
    """Reads as far as the first batches. Raises what a training would raise."""
    began_s = time.monotonic()
    with _source(config, console) as data, make_loader(config, data, device=device) as loader:
        listen: Any = getattr(loader, "stop_when", None)
        if listen is not None:  # a stream may give a document a minute: that is no reason to wait for an hour
            listen(lambda: time.monotonic() - began_s > GIVE_UP_AFTER_S)
        try:
            first = next(loader)
        except NoMoreWaiting:
            raise SourceUnavailable(
                f"{config.data} gave less than a chunk within {GIVE_UP_AFTER_S:.0f} s",
                hint="a training would wait for more; tokens_per_chunk is how much a step needs",
            ) from None
        took_s = time.monotonic() - began_s
        floor = entropy_floor(_sample(loader, first), Corpus(data, None).vocab_size)
        yield Opened(data, loader, _first_text(data, first), first, floor, took_s)


def _sample(loader: Loader, first: Batch) -> NDArray[Any]:
    """Some ten thousand tokens, or what there is in time."""
    sample = [first.tokens.reshape(-1)]
    with contextlib.suppress(NoMoreWaiting):
        while sum(part.size for part in sample) < _FLOOR_TOKENS and loader.waited_s < GIVE_UP_AFTER_S:
            more = next(loader, None)
            if more is None:
                break
            sample.append(more.tokens.reshape(-1))
    return np.concatenate(sample)


@contextlib.contextmanager
def _source(config: TrainConfig, console: Console) -> Iterator[Data | ChunkSource]:
    if config.IS_STREAMED:
        yield open_chunks(spec_of(config, "train"), console)
        return

    def report(progress: Progress) -> None:
        console.now(f"data: {describe(progress)}")

    settings = replace(cache_settings(config), give_up_after_s=GIVE_UP_AFTER_S)
    with open_data(spec_of(config, "train"), settings, report) as data:
        yield data


def _first_text(data: Data | ChunkSource, first: Batch) -> str:
    if isinstance(data, Data):
        return first_text(data.cache.folder)
    return data.live.tokenizer.decode(first.tokens[0])


def make_parts(config: TrainConfig, device: torch.device, precision: Precision, found: Opened) -> Parts:
    """As build.py does, without validation data (a whole pass over the corpus) and without compiling."""
    shape = shape_of(config, found.vocab_size)
    torch.manual_seed(config.seed)
    made = make_model(shape, is_recomputing=config.recompute, loss_chunk_rows=config.loss_chunk_rows)
    model = made.to(device)
    method: Method = find_method(config).make_method(model, config)
    optimizer = make_optimizer(
        model, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay, precision=precision
    )
    use_kernels(model, precision)
    total_steps = count_steps(config, found.loader)
    parts = Parts(
        config=config,
        device=device,
        device_name=device_name(device),
        corpus=Corpus(found.data, None),
        loader=found.loader,
        shape=shape,
        model=model,
        optimizer=optimizer,
        precision=precision,
        attention=choose_attention(config.attention, device),
        scaler=make_scaler(precision, device),
        chosen=choose_micro_batch(config, shape, precision, is_on_card=device.type == "cuda"),
        schedule=schedule_of(config, total_steps),
        total_steps=total_steps,
        method=method,
    )
    method.bind(parts)
    return parts


def predict_host_bytes(config: TrainConfig, vocab_size: int, precision: Precision) -> int:
    """Of a step on the CPU, by tracing it without values, before anything is built; 0 where it cannot be traced."""
    job = job_of(config, shape_of(config, vocab_size), precision, is_on_card=False)
    host = Card("this CPU", 1 << 40, compute_capability=80, context_bytes=0)
    micro_batch = config.micro_batch or config.cpu_micro_batch
    try:
        found = predict(job, micro_batch, host, is_accumulating=micro_batch < config.batch_size)
    except CannotTrace:
        return 0
    return found.peak_allocated_bytes


def count_steps(config: TrainConfig, loader: Loader) -> int:
    """In epochs they are known when the corpus is whole; until then max_steps stands for them."""
    windows = loader.num_windows() if config.epochs else None
    return config.max_steps if windows is None else max(1, config.epochs * (windows // config.batch_size))


def take_step(parts: Parts, batch: Any) -> StepTaken:
    """A real step on real data, and a few more for the time: the first one allocates and is not counted."""
    given = parts.on_device(batch, ToDevice(parts.device))
    safe_step = SafeStep(parts.model, micro_batch=parts.chosen.micro_batch, scaler=parts.scaler)
    untouched: list[str] = []
    losses: list[float] = []
    norms: list[float] = []
    took_s: list[float] = []
    parts.model.train()
    with parts.kernels():
        while len(took_s) < 2 or (len(took_s) < _MAX_STEPS and sum(took_s) < _TIMED_S):
            number = len(took_s)
            began_s = time.perf_counter()
            parts.set_rate(lr_at(number, parts.schedule))
            result = safe_step(parts.loss_sum, given, count=float(parts.count_of(batch)))
            if number == 0:
                untouched = weights_without_gradient(parts.model)
            norms.append(float(parts.update()))
            losses.append(float(result.loss))
            took_s.append(time.perf_counter() - began_s)
    return StepTaken(
        loss=losses[0],
        guessing_loss=math.log(parts.vocab_size) if parts.vocab_size else 0.0,
        grad_norm=norms[0],
        untouched=tuple(untouched),
        num_weights=sum(1 for _ in parts.model.parameters()),
        step_s=median(took_s[1:]),
    )


def state_bytes(parts: Parts) -> int:
    """What a checkpoint holds: weights, buffers and the optimizer's state, which exists after a step."""
    tensors = [*parts.model.parameters(), *parts.model.buffers()]
    tensors += [value for state in parts.optimizer.state.values() for value in state.values() if _is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@dataclass(frozen=True)
class Proved:
    checkpoint_bytes: int
    took_s: float


def prove_save(parts: Parts, runs: Path) -> Proved:
    """Save, load, compare every bit, on the disk the run will be on; then remove it. Raises Unproved."""
    made = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=runs))
    try:
        began_s = time.monotonic()
        engine = CheckpointEngine(RunDir(folder))
        try:
            state = {"model": parts.model, "optimizer": parts.optimizer}
            prove(engine, {**state, **({"scaler": parts.scaler} if parts.scaler is not None else {})}, step=0)
            took_s = time.monotonic() - began_s
        finally:
            engine.close()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Proved(size, took_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for empty in made:
            with contextlib.suppress(OSError):
                empty.rmdir()
