"""A feed for a loop that a framework owns: which batches were handed out, and the position a checkpoint needs.

`Place` is that position, as it is saved. `HandedOut` counts: a framework that looks one batch ahead holds a batch it
has not trained on, and that one must come again. Owns the count; the feed owns the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jackline.session.feeds.feed import END, Feed


@dataclass(frozen=True)
class Place:
    """Batches `batch` and later of epoch `epoch` have not been trained on yet. `state` is the feed's own."""

    epoch: int = 0
    batch: int = 0
    kind: str = "none"
    state: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch, "feed": {"kind": self.kind, "state": self.state}}

    @staticmethod
    def of(session: Mapping[str, Any]) -> Place:
        feed = session.get("feed") or {}
        return Place(
            int(session.get("epoch", 0)),
            int(session.get("batch", 0)),
            str(feed.get("kind", "none")),
            dict(feed.get("state") or {}),
        )


class HandedOut:
    """Takes batches from `feed`, epoch by epoch. `num_ahead`: batches that the framework holds unused."""

    def __init__(self, feed: Feed, *, num_ahead: int = 0) -> None:
        self.feed = feed
        self.epoch = 0
        self.num_ahead = num_ahead
        self.is_closed = False  # hand out nothing more: training is over
        self._restored: Place | None = None
        self._batch = 0
        self._is_over = False  # this epoch's data have ended
        self._has_begun = False  # a pass was begun
        self._places: deque[Place] = deque(maxlen=num_ahead + 1)  # after the newest batches, when some are held ahead

    def restore(self, place: Place) -> None:
        """Make the next pass over `place.epoch` begin at `place.batch`."""
        forget = getattr(self.feed, "forget", None)
        if self._has_begun and forget is not None:
            forget()  # a framework may read ahead before the position is known; a stream would continue from there
        self.feed.restore(place.state)
        self._restored = place
        self.epoch = place.epoch

    def open(self, epoch: int) -> int:
        """Begin a pass over `epoch`; returns the number of its first batch."""
        restored, self._restored = self._restored, None
        self.epoch, self._is_over, self._has_begun = epoch, False, True
        self._batch = restored.batch if restored is not None and restored.epoch == epoch else 0
        self.feed.open(epoch, self._batch)
        self._places.clear()
        if self.num_ahead:
            self._places.append(restored if restored is not None and self._batch else self._read())
        return self._batch

    def take(self) -> Any:
        """The next batch, or END."""
        if self.is_closed:
            return END
        batch = self.feed.take()
        if batch is END:
            self._is_over = True
        else:
            self._batch += 1
            if self.num_ahead:
                self._places.append(self._read())
        return batch

    def leave_epoch(self) -> None:
        """The framework ends this epoch before its data do; the next one follows."""
        self._is_over = True

    @property
    def place(self) -> Place:
        """The position at a step's end: everything handed out was trained on, except what is held ahead."""
        if self._restored is not None:
            return self._restored  # no pass has begun
        return self._places[0] if self._places else self._read()

    @property
    def next_place(self) -> Place:
        """The position after the end of this epoch, or `place` when the epoch was left early."""
        place, num_batches = self.place, self.feed.num_batches
        if not self._is_over and (num_batches is None or place.batch < num_batches):
            return place
        return Place(self.epoch + 1, 0, place.kind, place.state)

    def _read(self) -> Place:
        return Place(self.epoch, self._batch, self.feed.kind, self.feed.state())
