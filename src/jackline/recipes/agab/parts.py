"""From the affinity recipe's config to everything the loop needs: pairs, head, optimizer, schedule.

Owns the order of these, what a person is told about each, and a step's loss. Reading and embedding is
data.affinity's, the loop that of every recipe (loop.py), the judgement of a model affinity_validation's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from jackline.checkpoint.place import choose_place
from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Loader
from jackline.errors import JacklineError, UsageError
from jackline.memory.plan.cards import Precision
from jackline.recipes.agab.batches import PairBatch, PairLoader, Pairs, PairSettings
from jackline.recipes.agab.data import sample
from jackline.recipes.agab.data.prepared import AffinityData, AffinitySettings, cache_keys, prepare_affinity
from jackline.recipes.agab.head import AffinityHead, count_parameters, focal_loss
from jackline.recipes.agab.mirror import EmbeddingMirror
from jackline.rundir.layout import RunDir
from jackline.session.phase import phase
from jackline.session.saving.exactness import make_exact
from jackline.trainer.build import Parts, choose_device, device_name
from jackline.trainer.corpus import Corpus
from jackline.trainer.optim.optimizer import make_optimizer
from jackline.trainer.optim.schedule import Schedule, describe_schedule, schedule_of
from jackline.trainer.planning.plan import Chosen
from jackline.trainer.report.console import Console
from jackline.trainer.startup.precision import autocast, choose_precision, make_scaler
from jackline.trainer.task import Method
from jackline.units import format_bytes

if TYPE_CHECKING:
    from jackline.recipes.agab.recipe import AgabConfig
    from jackline.recipes.agab.validation import AffinityValidation

FEW_STEPS = 50  # in an epoch: a smaller batch would learn more of the same pairs


@dataclass(frozen=True)
class AffinityParts(Parts):
    """`tokens` are pairs here: one row of features each, one number to be guessed."""

    pairs: Pairs = None  # type: ignore[assignment]
    UNIT: ClassVar[str] = "pairs"

    @property
    def agab(self) -> AgabConfig:
        return cast("AgabConfig", self.config)

    @property
    def pair_loader(self) -> PairLoader:
        return cast(PairLoader, self.loader)

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size

    def tokens_between(self, first_step: int, step: int) -> int:
        return self.pair_loader.pairs_until(step) - self.pair_loader.pairs_until(first_step)

    @property
    def vocab_size(self) -> int:
        return 0

    @property
    def flops_each(self) -> float:
        return 6.0 * count_parameters(self.pairs.num_inputs)

    def on_device(self, batch: PairBatch, to_device: ToDevice) -> Tensor:
        return batch.rows

    def count_of(self, batch: PairBatch) -> int:
        return len(batch.windows)  # the last of an epoch may be short

    def place_text(self) -> str:
        place = self.pair_loader.place()
        of = f"/{place['epochs']}" if place.get("epochs") else ""
        return f"(epoch {place['epoch']}{of}, batch {place['batch']:,}/{place['num_batches']:,})"

    def blank_batch(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def loss_sum(self, rows: Tensor) -> tuple[Tensor, int]:
        features, wanted = self.pairs.gather(rows)
        with autocast(self.precision, self.device):
            made = self.model(features)
        return focal_loss(made, wanted, self.agab.focal_gamma).sum(), len(rows)

    def eval_sum(self, rows: Tensor) -> tuple[Tensor, int]:
        return self.loss_sum(rows)

    def predict(self, rows: Tensor) -> Tensor:
        """pKd of these pairs by the head as it stands; the caller sees to its mode."""
        with autocast(self.precision, self.device):
            made: Tensor = self.model(self.pairs.gather(rows)[0])
        return made


@dataclass
class Best:
    """The best head so far by the full validation, and what it said of the quick pairs. Kept in the checkpoint, so
    that after a resume a model is compared with the same one."""

    predicted: Tensor
    num_stale: int = 0  # full validations at the ends of epochs since `reference` was reached
    reference: float | None = None  # the last Spearman that was a gain; the best may have crept a little above it

    def count(self, now: float | None, min_delta: float, *, is_epoch_end: bool) -> None:
        """One more full validation. Small gains add up to one; those in between two ends of epochs (more come where
        the validation pairs are few, or somebody asks) never bring the end nearer."""
        if now is not None and (self.reference is None or now > self.reference + min_delta):
            self.reference, self.num_stale = now, 0
        elif is_epoch_end:
            self.num_stale += 1

    def state_dict(self) -> dict[str, Any]:
        return {"predicted": self.predicted, "num_stale": self.num_stale, "reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.predicted, self.num_stale = state["predicted"].clone(), int(state["num_stale"])
        self.reference = state.get("reference")


class AffinityMethod(Method):
    """The plain step; what is added is remembered between validations."""

    def __init__(self, mirror: EmbeddingMirror | None = None) -> None:
        self.mirror = mirror
        self.best = Best(torch.empty(0))
        self.rows: dict[str, str] = {}  # of the statistics at the end

    def state(self) -> dict[str, Any]:
        return {"best_head": self.best}

    def totals(self) -> dict[str, str]:
        return self.rows


def make_validation(parts: AffinityParts, console: Console, window_s: float) -> AffinityValidation:
    from jackline.recipes.agab.validation import AffinityValidation

    return AffinityValidation(parts, console)


def build_parts(config: AgabConfig, console: Console, folder: Path) -> AffinityParts:
    device = choose_device(config)
    if config.exact:
        make_exact()
    name = device_name(device)
    console.say(f"device {name}, torch {torch.__version__}", "start")
    precision = choose_precision(config.precision, device) if config.precision != "auto" else "fp32"
    settings = config.affinity_settings(str(device))
    mirror = EmbeddingMirror(config.mirror or choose_place(RunDir(folder)).mirror or "", settings, console)
    data = open_pairs(config, settings, mirror, console)
    train = data.parts["train"]
    with console.phase("data", "gathering the embeddings"):
        pairs = Pairs(data, device)
        console.say(_where(pairs), "data")
    order = PairSettings(config.batch_size, config.seed, config.stratified, config.epochs)
    loader = PairLoader(data, order, device, lambda text: console.say(text, "data"))
    with console.phase("model", _head_text(pairs.num_inputs)):
        torch.manual_seed(config.seed)
        # On the CPU first, whatever the device: the same seed gives the same weights everywhere.
        head = AffinityHead(pairs.num_inputs, dropout=config.dropout)
        head.guess(float(np.mean(data.pkd[train], dtype=np.float64)))
        model = head.to(device)
        optimizer = _optimizer(model, config, precision)
    total_steps = min(config.epochs * loader.steps_per_epoch or config.max_steps, config.max_steps)
    schedule = _schedule(config, loader, total_steps)
    micro_batch = config.micro_batch or config.batch_size
    why = "as asked" if config.micro_batch else "the whole batch: a head is small"
    chosen = Chosen(micro_batch, -(-config.batch_size // micro_batch), why)
    with console.phase("plan", "how many steps"):
        console.say(_plan_text(loader, total_steps, precision))
        console.say(describe_schedule(schedule))
        if loader.steps_per_epoch < FEW_STEPS and config.batch_size > 8 and not config.quick:
            console.say(
                f"{loader.steps_per_epoch} steps an epoch are few: a smaller --batch_size learns more of them"
            )
    method = AffinityMethod(mirror)
    parts = AffinityParts(
        config=config,
        device=device,
        device_name=name,
        corpus=cast(Corpus, NoCorpus()),
        loader=cast(Loader, loader),  # the same face: batches, state, seek, waited_s, close
        shape=None,  # type: ignore[arg-type]
        model=model,
        optimizer=optimizer,
        precision=precision,
        attention="plain",
        scaler=make_scaler(precision, device),
        chosen=chosen,
        schedule=schedule,
        total_steps=total_steps,
        method=method,
        pairs=pairs,
    )
    method.bind(parts)
    return parts


class NoCorpus:
    """Pairs are no text: there are no windows to validate on and no floor to hold a loss against."""

    validation = None
    vocab_size = 0

    def close(self) -> None:
        """Nothing is open."""


def open_pairs(
    config: AgabConfig, settings: AffinitySettings, mirror: EmbeddingMirror, console: Console
) -> AffinityData:
    """The pairs with their embeddings. What is wrong is said with the table's name; nothing takes its place."""
    if config.data == sample.NAME:
        console.say(
            f"'{sample.NAME}': {sample.NUM_ROWS:,} made-up pairs with a rule in them; no such protein exists", "data"
        )
    with console.phase("data", f"pairs of {config.data}"), phase("data: pairs and embeddings"):
        cache_keys(settings)  # an encoder or a cache that cannot be had is no fault of the table
        try:
            mirror.fetch()
            mirror.begin()
            data = prepare_affinity(settings, lambda text: console.say(text, "data"))
        except JacklineError as error:
            made = type(error)(
                f"the data of recipe '{config.recipe}' cannot be had: {config.data}",
                detail=(error.message, *error.detail),
                hint=error.hint or "--data FILE: CSV or parquet with antibody_sequence, antigen_sequence, pKd",
            )
            raise made from error
        finally:
            mirror.encoded()
    empty = [name for name in ("train", "validation", "test") if not len(data.parts[name])]
    if empty:
        raise UsageError(
            f"{len(data.pkd):,} pairs leave none for {' and '.join(empty)}",
            hint="give a table with more pairs, and of more antigens",
        )
    return data


def _optimizer(model: nn.Module, config: AgabConfig, precision: Precision) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return make_optimizer(model, lr=config.lr, betas=betas, weight_decay=config.weight_decay, precision=precision)


def _schedule(config: AgabConfig, loader: PairLoader, total_steps: int) -> Schedule:
    if not config.warmup_epochs:
        return schedule_of(config, total_steps)
    warmup = round(config.warmup_epochs * loader.steps_per_epoch)
    return schedule_of(replace(config, warmup_steps=warmup), total_steps)


def _where(pairs: Pairs) -> str:
    data = pairs.data
    size = format_bytes(data.antibody.nbytes + data.antigen.nbytes)
    kinds = f"{len(data.antibody):,} antibodies x {data.antibody.shape[1]:,} and {len(data.antigen):,} antigens x"
    place = "on the card" if pairs.is_resident else "mapped from the cache, gathered as needed"
    return f"embeddings of {kinds} {data.antigen.shape[1]:,}, {size}, {place}"


def _head_text(num_inputs: int) -> str:
    return f"head over {num_inputs:,} features, {count_parameters(num_inputs):,} parameters; encoders are frozen"


def _plan_text(loader: PairLoader, total_steps: int, precision: str) -> str:
    batch, each = loader.settings.batch_size, loader.steps_per_epoch
    return (
        f"batch {batch} of {loader.num_windows():,} training pairs, {precision}; {total_steps:,} steps, "
        f"{each:,} to an epoch"
    )
