"""The training loader that Lightning iterates: batches of one of Jackline's feeds, and a call before each of them.

Owns that loader and nothing of the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from jackline.errors import UsageError
from jackline.session.driver import Driver
from jackline.session.feeds.feed import END
from jackline.session.feeds.place import HandedOut


def choose_batches(driver: Driver, loader: Any) -> HandedOut:
    """The feed for Lightning's training loader. Where its length is unknown, Lightning reads one batch ahead."""
    if isinstance(loader, CombinedLoader | dict | list | tuple):
        raise UsageError(
            "several training loaders together cannot be resumed exactly",
            hint="give Lightning one loader, over a dataset that combines them (torch.utils.data.ConcatDataset ...)",
        )
    feed = driver.choose(loader)
    return HandedOut(feed, num_ahead=1 if feed.num_batches is None else 0)


class FedLoader:
    """`on_ask` is called each time Lightning asks for a batch; `epoch` gives the number of the epoch."""

    def __init__(self, batches: HandedOut, loader: Any, on_ask: Callable[[], None], epoch: Callable[[], int]) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self._batches = batches
        self._on_ask = on_ask
        self._epoch = epoch

    def __len__(self) -> int:
        count = self._batches.feed.num_batches
        if count is None:
            raise TypeError("the number of batches is not known")
        return count

    def __iter__(self) -> Iterator[Any]:
        is_open = False
        while True:
            self._on_ask()
            if not is_open:
                self._batches.open(self._epoch())
                is_open = True
            batch = self._batches.take()
            if batch is END:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is in Jackline's part of the checkpoint. Lightning warns about loaders without it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
