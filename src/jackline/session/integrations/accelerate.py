"""A user's own loop over objects that Accelerate has prepared.

    from jackline.session.integrations import accelerate as jackline_accelerate

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with jackline_accelerate.attach(accelerator, model=model, optimizer=optimizer, scheduler=scheduler,
                                    loader=loader) as run:
        for batch in run.steps(total=1000):
            with accelerator.accumulate(model): ...

Owns the unwrapping. The objects inside are attached; the loop keeps using the prepared ones.
"""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast_object_list

import jackline.session.attach as plain
from jackline.errors import UsageError
from jackline.session.feeds.choose import choose_seed, feed_of_prepared
from jackline.session.feeds.feed import MapFeed
from jackline.session.feeds.seekable import SeekableBatches
from jackline.session.off import OffRun, is_off
from jackline.session.run import Run
from jackline.session.settings import Settings


def attach(accelerator: Any, *, loader: Any = None, **given: Any) -> Run | OffRun:
    """Like `jackline.attach`. The loader keeps accelerate's behaviour (device, gradient state)."""
    _refuse_divided(accelerator)
    state = {word: unwrap(accelerator, value) for word, value in given.items()}
    if getattr(accelerator, "scaler", None) is not None:
        state.setdefault("scaler", accelerator.scaler)
    if is_off():
        return plain.attach(loader=loader, **state)
    wishes = {word: given[word] for word in ("seed", "seekable", "keyed_random") if word in given}
    if accelerator.num_processes > 1 and "seed" not in wishes and loader is not None:
        wishes["seed"] = _common_seed(loader)
    wrapped = None if loader is None else PreparedLoader(accelerator, loader, Settings(**wishes))
    return plain.attach(loader=wrapped, **state)


def _refuse_divided(accelerator: Any) -> None:
    """Several ranks must hold whole replicas (DDP): raises UsageError for other ways of accelerate's, by name."""
    way = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 and way not in ("MULTI_CPU", "MULTI_GPU"):
        raise UsageError(
            f"Jackline does not know how to save {accelerator.num_processes} ranks that accelerate runs as {way}",
            hint="use accelerate's MULTI_GPU or MULTI_CPU (DDP), or fully_shard(model) with jackline.attach",
        )


def _common_seed(loader: Any) -> int:
    """Rank 0's: the ranks divide one order of the data, also where each of them was seeded differently."""
    sampler = getattr(getattr(loader.batch_sampler, "batch_sampler", None), "sampler", None)
    told = [choose_seed(loader, Settings(), sampler)]
    broadcast_object_list(told, from_process=0)
    return int(told[0])


def unwrap(accelerator: Any, value: Any) -> Any:
    """The object inside a prepared one. DDP stays: `attach` takes it off, and `safe_step` needs it."""
    kind = type(value).__name__
    if kind == "DistributedDataParallel":
        return value
    if kind == "AcceleratedOptimizer":
        return value.optimizer
    if kind == "AcceleratedScheduler":
        return value.scheduler
    if isinstance(value, list | tuple):
        return type(value)(unwrap(accelerator, one) for one in value)
    return accelerator.unwrap_model(value) if hasattr(value, "state_dict") and hasattr(value, "forward") else value


class PreparedLoader:
    """A prepared loader whose position can be restored; `attach` asks it for its feed."""

    def __init__(self, accelerator: Any, loader: Any, settings: Settings) -> None:
        feed = feed_of_prepared(loader, settings)
        if feed is None:
            raise UsageError(
                f"the loader of {type(loader.dataset).__name__} cannot be positioned once Accelerate has prepared it",
                hint="give the unprepared loader to jackline.attach, and move its batches to accelerator.device",
            )
        self.dataset = loader.dataset
        self.batch_sampler = feed.batches
        self._feed = feed
        if accelerator.num_processes == 1:
            feed.use(accelerator.prepare_data_loader(feed.loader))
            return
        if not isinstance(feed.batches, SeekableBatches) or not hasattr(loader.batch_sampler, "split_batches"):
            raise UsageError(
                f"{type(loader).__name__} of {type(loader.dataset).__name__} cannot be divided among "
                f"{accelerator.num_processes} ranks by Jackline",
                hint="a DataLoader over map-style data with batch_size=, shuffle= and no sampler of its own",
            )
        self.is_per_rank = not loader.batch_sampler.split_batches
        device, is_put = accelerator.device, bool(accelerator.device_placement)
        # As for one process: the feed gives this rank its share already.
        feed.use(prepare_data_loader(feed.loader, device, num_processes=1, process_index=0, put_on_device=is_put))

    def __iter__(self) -> Any:
        return iter(self._feed.loader)

    def make_feed(self) -> MapFeed:
        return self._feed
