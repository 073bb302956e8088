"""From a config to everything a loop needs: device, data, model, optimizer, micro-batch, compiled or not.

Owns the order of these and what a person is told about each. Which precision, optimizer or micro-batch is right is
decided in modules of their own; training is loop.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jackline.checkpoint.format.catalogue import list_names
from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Loader
from jackline.errors import UsageError
from jackline.memory.plan.cards import Precision
from jackline.memory.plan.rehearse import load_correction
from jackline.rundir.layout import RunDir
from jackline.session.saving.exactness import make_exact
from jackline.trainer.config import TrainConfig
from jackline.trainer.corpus import Corpus, count_steps, make_loader, open_corpus
from jackline.trainer.network import Shape, describe_shape, make_model, shape_of, use_kernels
from jackline.trainer.optim.optimizer import clip_gradients, make_optimizer
from jackline.trainer.optim.schedule import Schedule, describe_schedule, schedule_of
from jackline.trainer.planning.plan import Chosen, choose_micro_batch
from jackline.trainer.report.console import Console
from jackline.trainer.report.flops import flops_per_token, peak_flops
from jackline.trainer.startup import ahead, compiling
from jackline.trainer.startup.precision import (
    Attention,
    attention_kernels,
    autocast,
    choose_attention,
    choose_precision,
    make_scaler,
)
from jackline.trainer.task import Method, find_method

_EAGER_MFU = 0.3  # of the peak, to guess a step's time before there was one


@dataclass(frozen=True)
class Parts:
    """Everything of one training. `loss_sum` and `update` are the two halves of a step."""

    config: TrainConfig
    device: torch.device
    device_name: str
    corpus: Corpus
    loader: Loader
    shape: Shape
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    attention: Attention
    scaler: Any
    chosen: Chosen
    schedule: Schedule
    total_steps: int
    method: Method = field(default_factory=Method)

    UNIT: ClassVar[str] = "tokens"  # what a step is counted in

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.seq_len

    def tokens_between(self, first_step: int, step: int) -> int:
        """What the steps from one to another have learnt from, in this unit."""
        return (step - first_step) * self.tokens_per_step

    @property
    def vocab_size(self) -> int:
        """0: nothing is guessed out of a vocabulary."""
        return self.shape.vocab_size

    @property
    def flops_each(self) -> float:
        """Of a training step, for each token of it."""
        return flops_per_token(self.shape, self.config.seq_len)

    def on_device(self, batch: Any, to_device: ToDevice) -> Tensor:
        """What slices are taken of."""
        return to_device(batch.tokens)

    def count_of(self, batch: Any) -> int:
        """What the summed loss of a batch is divided by."""
        return self.tokens_per_step

    def place_text(self) -> str:
        """Which epoch it is, where steps alone do not tell what a person counts in."""
        return ""

    def blank_batch(self, count: int) -> Tensor:
        """As large as `count` samples are, for a rehearsal."""
        return torch.zeros((count, self.config.seq_len + 1), dtype=torch.long, device=self.device)

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Of a slice of windows of seq_len + 1 tokens: the summed loss, and over how many targets."""
        targets = tokens[:, 1:]
        with autocast(self.precision, self.device):
            return self.method.loss_sum(self.model, tokens[:, :-1], targets)

    def eval_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """The same, never compiled: another shape and another mode would be compiled anew, for half a minute."""
        targets = tokens[:, 1:]
        with autocast(self.precision, self.device):
            return self.model.forward(tokens[:, :-1], targets), targets.numel()

    def update(self, before_change: Callable[[], None] = lambda: None) -> Tensor:
        """The optimizer's step from the gradients there are; returns their norm before it was cut.

        `before_change` ends the copy of a save. The optimizer's own hook would be too late: a scaler that skips the
        step never calls it, and the method changes its averages all the same.
        """
        before_change()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.method.before_update()
        norm = self.move_weights()
        self.method.after_update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def move_weights(self) -> Tensor:
        """The update alone, without what the recipe's method adds; gradients stay."""
        norm = clip_gradients(self.optimizer, self.config.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # not at all when a gradient is infinite
            self.scaler.update()
        return norm

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def kernels(self) -> Any:
        """The attention kernels, for as long as the block runs."""
        return attention_kernels(self.attention)


def build(config: TrainConfig, console: Console, folder: Path) -> Parts:
    """`folder` is the run's: compiled code is kept there. What is no language model builds its own parts."""
    build_parts = getattr(find_method(config), "build_parts", None)
    if build_parts:
        return build_parts(config, console, folder)  # type: ignore[no-any-return]
    with contextlib.ExitStack() as opened:
        parts = _build_language(config, console, folder, opened)
        opened.pop_all()  # the loop closes them
    return parts


def _build_language(config: TrainConfig, console: Console, folder: Path, opened: contextlib.ExitStack) -> Parts:
    """`opened` closes what is open when something is refused: by then a process tokenises."""
    device = choose_device(config)
    if config.exact:
        make_exact()
    name = device_name(device)
    console.say(f"device {name}, torch {torch.__version__}", "start")
    precision = choose_precision(config.precision, device)
    attention = choose_attention(config.attention, device)
    card = ahead.open_card(device)
    if _may_compile(config, device):
        _load_compiler(device, compiling.cache_folder(folder, attention), console)
    corpus = open_corpus(config, console)
    opened.callback(corpus.close)
    loader = make_loader(config, corpus.train, device=device)
    opened.callback(loader.close)
    _check_vocabulary(config, corpus)
    shape = shape_of(config, corpus.vocab_size)
    with console.phase("model", describe_shape(config.model, shape)):
        ahead.wait_for(card)  # before the seed: one that is set while a card opens may miss the card's generator
        torch.manual_seed(config.seed)
        # On the CPU first, whatever the device: the same seed gives the same weights everywhere.
        made = make_model(shape, is_recomputing=config.recompute, loss_chunk_rows=config.loss_chunk_rows)
        model = made.to(device)
        method: Method = find_method(config).make_method(model, config)
        betas = (config.beta1, config.beta2)
        optimizer = make_optimizer(
            model, lr=config.lr, betas=betas, weight_decay=config.weight_decay, precision=precision
        )
        console.now("comparing our kernels with plain torch on this device")
        if words := use_kernels(model, precision):
            console.say(words)
    total_steps = count_steps(config, loader, console)
    schedule = schedule_of(config, total_steps)
    with console.phase("plan", "which micro-batch fits"):
        # What an earlier attempt's rehearsal measured, so that this one need not plan twice.
        correction = load_correction(RunDir(folder))
        chosen = choose_micro_batch(config, shape, precision, is_on_card=device.type == "cuda", correction=correction)
        console.say(plan_text(config, chosen, precision, total_steps))
        console.say(describe_schedule(schedule))
    parts = Parts(
        config=config,
        device=device,
        device_name=name,
        corpus=corpus,
        loader=loader,
        shape=shape,
        model=model,
        optimizer=optimizer,
        precision=precision,
        attention=attention,
        scaler=make_scaler(precision, device),
        chosen=chosen,
        schedule=schedule,
        total_steps=total_steps,
        method=method,
    )
    method.bind(parts)
    compile_if_it_pays(parts, console, folder)
    return parts


def _may_compile(config: TrainConfig, device: torch.device) -> bool:
    """Before anything is built; `compile_if_it_pays` may still say no, and then an import was in vain."""
    is_wanted = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
    return is_wanted and not compiling.why_not(device)


def _load_compiler(device: torch.device, cache: Path, console: Console) -> None:
    """Torch's compiler chooses a folder when it is imported, so it is told before."""
    compiling.use_cache(cache)
    what = "opening the card and loading" if device.type == "cuda" else "loading"
    with console.phase("start", f"{what} torch's compiler, usually 2 to 10 s"):
        ahead.import_compiler()


def _check_vocabulary(config: TrainConfig, corpus: Corpus) -> None:
    if 0 < config.vocab_size < corpus.vocab_size:
        raise UsageError(
            f"vocab_size={config.vocab_size} is too small for tokenizer '{config.tokenizer}' with its"
            f" {corpus.vocab_size:,} tokens",
            hint="vocab_size=0 takes the tokenizer's own, rounded up",
        )


def choose_device(config: TrainConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def plan_text(config: TrainConfig, chosen: Chosen, precision: str, total_steps: int) -> str:
    tokens = config.batch_size * config.seq_len
    return (
        f"batch {config.batch_size} = {chosen.accumulation} x micro-batch {chosen.micro_batch} ({chosen.text}), "
        f"{config.num_threads} loader threads, {precision}; "
        + (
            f"{total_steps:,} steps of {tokens:,} tokens, {total_steps * tokens:,} in all"
            if config.has_known_end
            else f"steps of {tokens:,} tokens, until the data ends"
        )
    )


def compile_if_it_pays(parts: Parts, console: Console, folder: Path) -> None:
    config, device = parts.config, parts.device
    cache = compiling.cache_folder(folder, parts.attention)
    decision = compiling.decide(
        config.compile,
        has_card=device.type == "cuda",
        can_compile=compiling.why_not(device) if config.compile != "off" else "",
        steps_left=parts.total_steps - steps_done(folder),
        eager_step_s=guess_step_s(parts),
        is_warm=compiling.is_warm(cache),
    )
    console.say(decision.reason, "plan")
    if decision.is_compiled:
        compiling.compile_in_place(parts.model)


def steps_done(folder: Path) -> int:
    """By the newest checkpoint's name; whether it is whole is found out when it is restored."""
    names = list_names(RunDir(folder).checkpoints)
    return names[0].step if names else 0


def guess_step_s(parts: Parts) -> float:
    """By arithmetic alone; 0 where the device's peak is not known."""
    peak = peak_flops(parts.device_name, parts.precision)
    flops = parts.flops_each * parts.tokens_per_step
    return flops / (peak * _EAGER_MFU) if peak else 0.0
