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

import jackline.session.attach as plain
from jackline.errors import UsageError
from jackline.session.feeds.choose import feed_of_prepared
from jackline.session.feeds.feed import MapFeed
from jackline.session.off import OffRun, is_off
from jackline.session.run import Run
from jackline.session.settings import Settings


def attach(accelerator: Any, *, loader: Any = None, **given: Any) -> Run | OffRun:
    """Like `jackline.attach`. The loader keeps accelerate's behaviour (device, gradient state)."""
    if accelerator.num_processes > 1:
        raise UsageError(
            f"attach() does not know how to save {accelerator.num_processes} ranks yet", hint="run it in one process"
        )
    state = {word: unwrap(accelerator, value) for word, value in given.items()}
    if getattr(accelerator, "scaler", None) is not None:
        state.setdefault("scaler", accelerator.scaler)
    if is_off():
        return plain.attach(loader=loader, **state)
    wishes = {word: given[word] for word in ("seed", "seekable", "keyed_random") if word in given}
    wrapped = None if loader is None else PreparedLoader(accelerator, loader, Settings(**wishes))
    return plain.attach(loader=wrapped, **state)


def unwrap(accelerator: Any, value: Any) -> Any:
    """The object inside a prepared one."""
    kind = type(value).__name__
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
        feed.use(accelerator.prepare_data_loader(feed.loader))

    def __iter__(self) -> Any:
        return iter(self._feed.loader)

    def make_feed(self) -> MapFeed:
        return self._feed
