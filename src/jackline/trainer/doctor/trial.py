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

from jackline import accelerator
from jackline.checkpoint.engine import CheckpointEngine
from jackline.data.build.supply import open_data
from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Batch
from jackline.data.progress import Progress, describe
from jackline.data.sources.bytefile import SourceUnavailable
from jackline.memory.guard.safe_step import SafeStep
from jackline.memory.plan.gpus import GpuModel, Precision
from jackline.memory.predict.step import CannotTrace, predict
from jackline.rundir.layout import RunDir
from jackline.session.saving.roundtrip import verify
from jackline.session.stopping import NoMoreWaiting
from jackline.trainer.build import make_network
from jackline.trainer.config import TrainConfig
from jackline.trainer.corpus import CachedText, Corpus, TrainText, cache_settings, spec_of
from jackline.trainer.doctor.findings import StepTaken
from jackline.trainer.language import LanguageTask, NoAdditions
from jackline.trainer.network import shape_of, use_kernels
from jackline.trainer.optim.learner import make_learner
from jackline.trainer.optim.schedule import lr_at, schedule_of
from jackline.trainer.planning.plan import choose_micro_batch, job_of
from jackline.trainer.report.console import Console
from jackline.trainer.sentinels.floor import Floor, entropy_floor
from jackline.trainer.sentinels.tensors import weights_without_gradient
from jackline.trainer.startup.precision import choose_attention
from jackline.trainer.task import BatchSource, Task

# A training waits a quarter of an hour for a source that does not answer; whoever asks a doctor waits no longer.
GIVE_UP_AFTER_S = 20.0
_FLOOR_TOKENS = 1 << 16
_MAX_STEPS = 6
_TIMED_S = 3.0


@dataclass(frozen=True)
class Opened:
    """The training data, its first text and its first batch."""

    text: TrainText
    loader: BatchSource
    first_text: str
    first: Batch
    floor: Floor | None
    took_s: float

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size


@contextlib.contextmanager
def opened(config: TrainConfig, device: torch.device, console: Console) -> Iterator[Opened]:
    """Reads as far as the first batches. Raises what a training would raise."""
    began_s = time.monotonic()
    with _text(config, console) as text, contextlib.closing(text.make_loader(config, device)) as loader:
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
        floor = entropy_floor(_sample(loader, first), text.vocab_size)
        yield Opened(text, loader, text.first_text(first), first, floor, took_s)


def _sample(loader: BatchSource, first: Batch) -> NDArray[Any]:
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
def _text(config: TrainConfig, console: Console) -> Iterator[TrainText]:
    if (own := config.open_text(console)) is not None:
        with contextlib.closing(own):
            yield own
        return

    def report(progress: Progress) -> None:
        console.now(f"data: {describe(progress)}")

    settings = replace(cache_settings(config), give_up_after_s=GIVE_UP_AFTER_S)
    with open_data(spec_of(config, "train"), settings, report) as data:
        yield CachedText(data)


def make_task(config: TrainConfig, device: torch.device, precision: Precision, found: Opened) -> LanguageTask:
    """As build.py does, without validation data (a whole pass over the corpus) and without compiling."""
    shape = shape_of(config, found.vocab_size)
    network = make_network(config, shape, device)
    additions = config.make_additions(network) or NoAdditions()
    learner = make_learner(network, config, precision, device)
    use_kernels(network, precision)
    total_steps = count_steps(config, found.loader)
    task = LanguageTask(
        config=config,
        learner=learner,
        corpus=Corpus(found.text, None),
        loader=found.loader,
        shape=shape,
        attention=choose_attention(config.attention, device),
        chosen=choose_micro_batch(config, shape, precision, is_on_gpu=accelerator.is_gpu(device)),
        schedule=schedule_of(config, total_steps),
        total_steps=total_steps,
        additions=additions,
    )
    additions.bind(task)
    return task


def predict_host_bytes(config: TrainConfig, vocab_size: int, precision: Precision) -> int:
    """Of a step on the CPU, by tracing it without values, before anything is built; 0 where it cannot be traced."""
    job = job_of(config, shape_of(config, vocab_size), precision, is_on_gpu=False)
    host = GpuModel("this CPU", 1 << 40, compute_capability=80, context_bytes=0)
    micro_batch = config.micro_batch or config.cpu_micro_batch
    try:
        found = predict(job, micro_batch, host, is_accumulating=micro_batch < config.batch_size)
    except CannotTrace:
        return 0
    return found.peak_allocated_bytes


def count_steps(config: TrainConfig, loader: BatchSource) -> int:
    """In epochs they are known when the corpus is whole; until then max_steps stands for them."""
    windows = loader.num_windows() if config.epochs else None
    return config.max_steps if windows is None else max(1, config.epochs * (windows // config.batch_size))


def take_step(task: Task, batch: Any) -> StepTaken:
    """A real step on real data, and a few more for the time: the first one allocates and is not counted."""
    learner, vocab_size = task.learner, task.counting.vocab_size
    given = task.on_device(batch, ToDevice(learner.device))
    safe_step = SafeStep(learner.model, micro_batch=task.chosen.micro_batch, scaler=learner.scaler)
    untouched: list[str] = []
    losses: list[float] = []
    norms: list[float] = []
    took_s: list[float] = []
    learner.model.train()
    with task.kernels():
        while len(took_s) < 2 or (len(took_s) < _MAX_STEPS and sum(took_s) < _TIMED_S):
            number = len(took_s)
            began_s = time.perf_counter()
            learner.set_rate(lr_at(number, task.schedule))
            result = safe_step(task.loss_sum, given, count=task.count_of(batch))
            if number == 0:
                untouched = weights_without_gradient(learner.model)
            norms.append(float(task.update()))
            losses.append(float(result.loss))
            took_s.append(time.perf_counter() - began_s)
    return StepTaken(
        loss=losses[0],
        guessing_loss=math.log(vocab_size) if vocab_size else 0.0,
        grad_norm=norms[0],
        untouched=tuple(untouched),
        num_weights=sum(1 for _ in learner.model.parameters()),
        step_s=median(took_s[1:]),
    )


def state_bytes(task: Task) -> int:
    """What a checkpoint holds: weights, buffers and the optimizer's state, which exists after a step."""
    learner = task.learner
    tensors = [*learner.model.parameters(), *learner.model.buffers()]
    tensors += [value for state in learner.optimizer.state.values() for value in state.values() if _is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@dataclass(frozen=True)
class VerifiedSave:
    checkpoint_bytes: int
    took_s: float


def verify_save(task: Task, runs: Path) -> VerifiedSave:
    """Save, load, compare every bit, on the disk the run will be on; then remove it. Raises Unverified."""
    made = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=runs))
    try:
        began_s = time.monotonic()
        engine = CheckpointEngine(RunDir(folder))
        try:
            learner = task.learner
            state = {"model": learner.model, "optimizer": learner.optimizer}
            verify(engine, {**state, **({"scaler": learner.scaler} if learner.scaler is not None else {})}, step=0)
            took_s = time.monotonic() - began_s
        finally:
            engine.close()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return VerifiedSave(size, took_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for empty in made:
            with contextlib.suppress(OSError):
                empty.rmdir()
