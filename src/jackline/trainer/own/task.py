"""A recipe of one's own as the loop's task (`trainer.task.Task`): how it is built, and what a step of it is.

Owns the order in which data, model and optimizer of a `jackline.Recipe` are made, and what its methods may return.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.data.loader.batches import ToDevice
from jackline.errors import UsageError
from jackline.memory.guard.batches import count_samples
from jackline.memory.guard.step_state import seeded
from jackline.memory.plan.choose import Plan, Room, plan, room_of
from jackline.memory.plan.gpus import GpuModel, Precision
from jackline.memory.plan.target import Candidate, job_of
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import CannotTrace
from jackline.session.saving.exactness import make_exact
from jackline.trainer.config import resolve_words
from jackline.trainer.optim.learner import Learner, make_learner
from jackline.trainer.optim.schedule import Schedule, describe_schedule, schedule_of
from jackline.trainer.own.samples import (
    Order,
    SampleBatch,
    SampleLoader,
    Samples,
    SampleSet,
    Stream,
    StreamLoader,
    move,
)
from jackline.trainer.planning.plan import Chosen, gpu_here, predicted_text, rehearsed, room_on
from jackline.trainer.report.console import Console
from jackline.trainer.startup.device import choose_device, device_name
from jackline.trainer.startup.precision import choose_precision
from jackline.trainer.task import Counting, PlainStep, Sums, check_patience
from jackline.trainer.trained.begin import begin_with, freeze
from jackline.trainer.validate.validation import Validation
from jackline.units import count_of

if TYPE_CHECKING:
    from jackline.trainer.own.recipe import Recipe

_DATA_SEED = 0


@dataclass(frozen=True)
class OwnTask(PlainStep):
    """A sample is whatever the recipe's data holds."""

    config: Recipe
    learner: Learner
    loader: SampleLoader | StreamLoader
    samples: Samples | Stream
    validation: SampleSet | None
    schedule: Schedule
    total_steps: int
    chosen: Chosen

    @property
    def counting(self) -> Counting:
        """How much arithmetic a sample costs is not known, so no share of the GPU's peak is shown."""
        return Counting(unit="samples", per_step=self.config.batch_size, flops_each=0.0, is_any_loss=True)

    def with_micro_batch(self, micro_batch: int) -> Self:
        return replace(self, chosen=rehearsed(self.config, micro_batch))

    def close(self) -> None:
        self.loader.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def on_device(self, batch: SampleBatch, to_device: ToDevice) -> Any:
        return move(batch.given, self.learner.device)

    def count_of(self, batch: SampleBatch) -> None:
        """Known when the recipe's loss has counted."""

    def loss_sum(self, given: Any) -> tuple[Tensor, int]:
        with self.learner.autocast():
            return summed(self.config.loss(self.learner.model, given), given, "loss()")

    def update(self) -> Tensor:
        return self.learner.update()

    # -- around the steps --------------------------------------------------------------------------------------------

    def make_validation(self, console: Console, window_s: float) -> Validation:
        return Validation(self, self.validation, console, window_s)

    def blank_batch(self, count: int) -> Any:
        """The first samples of the data: what is blank may be no sample at all for a person's model."""
        return move(self.samples.first(count), self.learner.device)

    def eval_sum(self, given: Any) -> Sums:
        with self.learner.autocast():
            made = measured(self.config, self.learner.model, given)
        self._check_metric(made.more)
        return made

    def tokens_between(self, first_step: int, step: int) -> int:
        return self.loader.samples_until(step) - self.loader.samples_until(first_step)

    def place_text(self) -> str:
        return self.loader.place_text()

    def _check_metric(self, more: Mapping[str, Any]) -> None:
        known = ["val_loss", *(f"val_{name}" for name in more)]
        if self.config.metric not in known:
            raise UsageError(
                f"metric={self.config.metric} is not measured",
                hint=f"measured: {', '.join(known)}; measure(self, model, batch) returns them",
            )


def measured(config: Recipe, model: nn.Module, given: Any) -> Sums:
    """What a person's `measure` says of a batch."""
    found = config.measure(model, given)
    if not isinstance(found, Mapping) or "loss" not in found:
        raise UsageError(
            "measure() must return a dict of numbers with 'loss' among them", hint="{'loss': ..., 'accuracy': ...}"
        )
    total, count = summed(found["loss"], given, "measure()['loss']")
    size = count_samples(given)
    more = {name: torch.as_tensor(value).detach() * size for name, value in found.items() if name != "loss"}
    return Sums(total, count, more)


def summed(made: Any, given: Any, what: str) -> tuple[Tensor, int]:
    """What a person's loss returned, as (sum, count)."""
    if isinstance(made, Tensor):
        if made.dim():
            shape = "x".join(map(str, made.shape))
            raise UsageError(
                f"{what} returned a tensor of {shape}, not one number",
                hint="return its mean, or (its sum, how many there are)",
            )
        size = count_samples(given)
        return made * size, size
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor):
        return made[0], int(made[1])
    raise UsageError(
        f"{what} returned {type(made).__name__}, not a tensor", hint="return the mean loss, or (summed loss, count)"
    )


def build_own(config: Recipe, console: Console) -> OwnTask:
    """Says what it does as it does it; a person's own functions may take long."""
    device = choose_device(config)
    if config.exact:
        make_exact()
    console.say(f"device {device_name(device)}, torch {torch.__version__}", "start")
    precision = precision_of(config, choose_precision(config.precision, device))
    with console.phase("data", "calling train_data() and val_data()"):
        samples, validation = open_samples(config)
        console.say(_data_text(samples, validation), "data")
    if config.patience:
        check_patience(has_validation=validation is not None)
    with console.phase("model", "calling make_model()"):
        learner = _make_learner(config, precision, device, console)
        console.say(_model_text(learner.model), "model")
    loader = _make_loader(config, samples, device)
    total_steps = config.epochs * loader.steps_per_epoch or config.max_steps
    schedule = schedule_of(config, total_steps)
    with console.phase("plan", "choosing a micro-batch"):
        chosen = _choose_micro_batch(config, samples, precision, device)
        console.say(
            f"batch {config.batch_size} = {chosen.accumulation} x micro-batch {chosen.micro_batch} ({chosen.text}), "
            f"{precision}; {total_steps:,} steps"
            + (f", {loader.steps_per_epoch:,} to an epoch" if loader.steps_per_epoch else "")
        )
        console.say(describe_schedule(schedule))
    return OwnTask(config, learner, loader, samples, validation, schedule, total_steps, chosen)


def _make_loader(config: Recipe, samples: Samples | Stream, device: torch.device) -> SampleLoader | StreamLoader:
    order = Order(config.batch_size, config.seed, config.num_workers, config.epochs)
    if isinstance(samples, Samples):
        return SampleLoader(samples, order, pin_memory=accelerator.is_gpu(device))
    for name in ("epochs", "num_workers"):
        if getattr(config, name):
            raise UsageError(
                f"{name}={getattr(config, name)} needs data with a length, and train_data() is a generator",
                hint=f"{name}=0; max_steps says when a training ends",
            )
    return StreamLoader(samples, order)


def precision_of(config: Recipe, chosen: Precision) -> Precision:
    """bf16 weights would need inputs in bf16 too, and those a person's own code makes: autocast instead."""
    return "bf16" if config.precision == "auto" and chosen == "bf16-weights" else chosen


def open_samples(config: Recipe) -> tuple[Samples | Stream, SampleSet | None]:
    with seeded(_DATA_SEED):
        data = config.train_data()
    train: Samples | Stream
    if inspect.isgenerator(data):
        train = Stream(config.train_data, config.collate, seed=config.seed)
    else:
        with seeded(_DATA_SEED):
            train = Samples(data, config.collate, name="train_data()", seed=config.seed)
    with seeded(_DATA_SEED):
        held = config.val_data()
        return train, None if held is None else SampleSet(Samples(held, config.collate, name="val_data()"))


def make_own_model(config: Recipe) -> nn.Module:
    with seeded(config.seed):
        model = config.make_model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"make_model() returned {type(model).__name__}, not an nn.Module")
    return model


def _make_learner(config: Recipe, precision: Precision, device: torch.device, console: Console) -> Learner:
    made = make_own_model(config)
    if config.init_from:
        console.say(begin_with(made, config))
    freeze(made, config.frozen)
    # One that was loaded (transformers' from_pretrained) is in evaluation mode, and would be trained without dropout.
    model = made.to(device).train()
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UsageError(
            "make_model() returned a model without weights to train", hint="requires_grad is False in all"
        )
    own = config.make_optimizer(model)
    if own is not None and not isinstance(own, torch.optim.Optimizer):
        raise UsageError(
            f"make_optimizer() returned {type(own).__name__}, not one optimizer of torch",
            hint="groups of one optimizer may have learning rates of their own; optimizers that step by turns (a GAN)"
            " need a loop of your own: docs/guides/own-loop.md",
        )
    if own is not None and precision == "bf16-weights":
        raise UsageError("precision=bf16-weights has an optimizer of its own", hint="precision=bf16 uses yours")
    torch.manual_seed(config.seed)  # what follows (dropout, noise) does not depend on how the model was made
    return make_learner(model, config, precision, device, own)


def _choose_micro_batch(
    config: Recipe, samples: Samples | Stream, precision: Precision, device: torch.device
) -> Chosen:
    gpu = gpu_here() if accelerator.is_gpu(device) else None
    free_bytes = room_on(gpu, config.max_gpu_bytes) if gpu is not None else 0  # limits the allocator too
    if config.micro_batch:
        return _chosen(config, config.micro_batch, "as asked")
    if gpu is None:
        return _chosen(config, config.batch_size, "the whole batch: no micro-batching on a CPU")
    job = own_job(config, samples, precision)

    def plan_again(room: Room) -> Plan:
        return plan(job, gpu, room=room)

    try:
        made = plan_again(room_of(gpu, free_bytes=free_bytes))
    except CannotTrace as error:
        return _chosen(config, config.batch_size, f"not planned ({error.message}); the rehearsal decides")
    needs = f"{made.fit}, {predicted_text(made, config.max_gpu_bytes)}"
    return replace(_chosen(config, made.micro_batch, needs), made=made, plan_again=plan_again)


def _chosen(config: Recipe, micro_batch: int, why: str) -> Chosen:
    return Chosen(micro_batch, -(-config.batch_size // micro_batch), why)


def own_job(config: Recipe, samples: Samples | Stream, precision: Precision) -> Job:
    """A step, for the memory plan."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        total, count = summed(config.loss(model, batch), batch, "loss()")
        return total / count

    return job_of(
        make_own_model(config),
        samples.first(2),
        loss,
        name=config.recipe,
        global_batch=config.batch_size,
        options=StepOptions(precision=precision, algorithm=config.optimizer),
    )


def candidates(gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """For `jackline plan my_recipe.py`: the first word is the file."""
    config: Any = resolve_words(words[0], words[1:]).config
    if config.is_language:
        from jackline.trainer.planning.plan import candidate_of

        return (candidate_of(config, gpu),)
    wanted: Precision = ("bf16" if gpu.has_bf16 else "fp16") if config.precision == "auto" else config.precision
    model = make_own_model(config)
    count = sum(weight.numel() for weight in model.parameters())
    shown: dict[str, object] = {"parameters": count, "batch_size": config.batch_size, "precision": wanted}
    return (Candidate(own_job(config, open_samples(config)[0], wanted), shown),)


def _data_text(samples: Samples | Stream, validation: SampleSet | None) -> str:
    held = f"{validation.num_windows:,} to validate on" if validation is not None else "no validation: no val_data()"
    many = count_of(len(samples), "sample") if isinstance(samples, Samples) else "the samples of a generator"
    return f"{many} to train on, {held}"


def _model_text(model: nn.Module) -> str:
    total = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = f", {trained:,} of them trained" if trained != total else ""
    return f"{type(model).__name__}: {total:,} parameters{frozen}"
