"""From the affinity recipe's config to its task: pairs, head, optimizer, schedule.

Owns the order of these and what a person is told about each. Reading and embedding is data/prepared.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from jackline.checkpoint.place import choose_place
from jackline.errors import JacklineError, UsageError
from jackline.recipes.agab.batches import PairLoader, Pairs, PairSettings
from jackline.recipes.agab.data import sample
from jackline.recipes.agab.data.prepared import AffinityData, AffinitySettings, cache_keys, prepare_affinity
from jackline.recipes.agab.head import AffinityHead, count_parameters
from jackline.recipes.agab.mirror import EmbeddingMirror
from jackline.recipes.agab.parts import AffinityParts
from jackline.recipes.agab.task import AffinityTask
from jackline.rundir.layout import RunDir
from jackline.session.phase import phase
from jackline.session.saving.exactness import make_exact
from jackline.trainer.optim.learner import make_learner
from jackline.trainer.optim.schedule import Schedule, describe_schedule, schedule_of
from jackline.trainer.planning.plan import Chosen
from jackline.trainer.report.console import Console
from jackline.trainer.startup.device import choose_device, device_name
from jackline.trainer.startup.precision import choose_precision
from jackline.units import format_bytes

if TYPE_CHECKING:
    from jackline.recipes.agab.recipe import AgabConfig

FEW_STEPS = 50  # in an epoch: a smaller batch would learn more of the same pairs


def build_task(config: AgabConfig, console: Console, folder: Path) -> AffinityTask:
    device = choose_device(config)
    if config.exact:
        make_exact()
    console.say(f"device {device_name(device)}, torch {torch.__version__}", "start")
    precision = choose_precision(config.precision, device) if config.precision != "auto" else "fp32"
    settings = config.affinity_settings(str(device))
    mirror = EmbeddingMirror(config.mirror or choose_place(RunDir(folder)).mirror or "", settings, console)
    data = open_pairs(config, settings, mirror, console)
    with console.phase("data", "gathering the embeddings"):
        pairs = Pairs(data, device)
        console.say(_where(pairs), "data")
    order = PairSettings(config.batch_size, config.seed, config.stratified, config.epochs)
    loader = PairLoader(data, order, device, lambda text: console.say(text, "data"))
    with console.phase("model", _head_text(pairs.num_inputs)):
        torch.manual_seed(config.seed)
        # On the CPU first, whatever the device: the same seed gives the same weights everywhere.
        head = AffinityHead(pairs.num_inputs, dropout=config.dropout)
        head.guess(float(np.mean(data.pkd[data.parts["train"]], dtype=np.float64)))
        learner = make_learner(head.to(device), config, precision, device)
    total_steps = min(config.epochs * loader.steps_per_epoch or config.max_steps, config.max_steps)
    schedule = _schedule(config, loader, total_steps)
    with console.phase("plan", "how many steps"):
        console.say(_plan_text(loader, total_steps, precision))
        console.say(describe_schedule(schedule))
        if loader.steps_per_epoch < FEW_STEPS and config.batch_size > 8 and not config.quick:
            few = f"{loader.steps_per_epoch} steps an epoch are few"
            console.say(f"{few}: a smaller --batch_size learns more of them")
    parts = AffinityParts(config, learner, pairs, loader, total_steps, mirror)
    return AffinityTask(parts, schedule, _chosen(config))


def _chosen(config: AgabConfig) -> Chosen:
    micro_batch = config.micro_batch or config.batch_size
    why = "as asked" if config.micro_batch else "the whole batch: a head is small"
    return Chosen(micro_batch, -(-config.batch_size // micro_batch), why)


def open_pairs(
    config: AgabConfig, settings: AffinitySettings, mirror: EmbeddingMirror, console: Console
) -> AffinityData:
    """The pairs with their embeddings. What is wrong is said with the table's name; nothing takes its place."""
    if config.data == sample.NAME:
        console.say(
            f"'{sample.NAME}': {sample.NUM_ROWS:,} made-up pairs with a rule in them; no such protein exists", "data"
        )
    with console.phase("data", f"pairs of {config.data}"), phase("data: pairs and embeddings"):
        cache_keys(settings)  # an encoder or a cache that cannot be loaded is no fault of the table
        try:
            mirror.fetch()
            mirror.begin()
            data = prepare_affinity(settings, lambda text: console.say(text, "data"))
        except JacklineError as error:
            made = type(error)(
                f"the data of recipe '{config.recipe}' cannot be loaded: {config.data}",
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


def _schedule(config: AgabConfig, loader: PairLoader, total_steps: int) -> Schedule:
    if not config.warmup_epochs:
        return schedule_of(config, total_steps)
    warmup = round(config.warmup_epochs * loader.steps_per_epoch)
    return schedule_of(replace(config, warmup_steps=warmup), total_steps)


def _where(pairs: Pairs) -> str:
    data = pairs.data
    size = format_bytes(data.antibody.nbytes + data.antigen.nbytes)
    kinds = f"{len(data.antibody):,} antibodies x {data.antibody.shape[1]:,} and {len(data.antigen):,} antigens x"
    place = "on the GPU" if pairs.is_resident else "mapped from the cache, gathered as needed"
    return f"embeddings of {kinds} {data.antigen.shape[1]:,}, {size}, {place}"


def _head_text(num_inputs: int) -> str:
    return f"head over {num_inputs:,} features, {count_parameters(num_inputs):,} parameters; encoders are frozen"


def _plan_text(loader: PairLoader, total_steps: int, precision: str) -> str:
    batch, each = loader.settings.batch_size, loader.steps_per_epoch
    return (
        f"batch {batch} of {loader.num_windows():,} training pairs, {precision}; {total_steps:,} steps, "
        f"{each:,} to an epoch"
    )
