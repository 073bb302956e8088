"""The loop of an exporter: read what is new, deliver it, try again while that fails, end with the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jackline.errors import JacklineError
from jackline.exporters.reader import About, Batch, Message, Points, Reader, about_run
from jackline.rundir.status import read_status

POLL_S = 2.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
PATIENCE_S = 600.0  # after the run's end
LIVE = ("alive", "unwatched")


class Refused(Exception):
    """The other side will never accept this; trying again is of no use."""


class Sink(Protocol):
    """Where an exporter sends to. Every call may raise anything and may take long."""

    takes_points: bool = False
    events: frozenset[str] = frozenset()

    def open(self, about: About) -> Mapping[str, float]:
        """Connect. Returns the highest step of each metric that is there already, as far as it can tell."""

    def send_points(self, points: tuple[Points, ...]) -> None:
        """Only of one that takes points."""
        return

    def send_message(self, about: About, message: Message) -> None:
        """Only of those in `events`."""
        return

    def close(self, state: str) -> None:
        """`state`: how the run stands, as `jackline status` says it."""


@dataclass
class Sending:
    """One run to one sink. `say` prints a line; `sleep` waits."""

    reader: Reader
    sink: Sink
    say: Callable[[str], None]
    once: bool = False
    patience_s: float = PATIENCE_S
    sleep: Callable[[float], None] = time.sleep

    def work(self) -> int:
        """Until the run is over and everything is delivered. Returns how many points and messages were sent."""
        about = about_run(self.reader.run)
        before = self.reader.record.num_points + self.reader.record.num_messages
        self._patiently(lambda: self.reader.raise_marks(self.sink.open(about)))
        while True:
            # The state is read first: what is written after that is read by the next turn.
            state = read_status(self.reader.run).state
            batch = self.reader.read(points=self.sink.takes_points, events=self.sink.events)
            self._deliver(about, batch)
            if not batch.is_more and (state not in LIVE or self.once):
                self._patiently(lambda: self.sink.close(state))  # noqa: B023 - called at once
                return self.reader.record.num_points + self.reader.record.num_messages - before
            if not batch.is_more:
                self.sleep(POLL_S)

    def _deliver(self, about: About, batch: Batch) -> None:
        if batch.points:
            self._patiently(lambda: self.sink.send_points(batch.points))
        for message in batch.messages:
            self._send_message(about, message)
        self.reader.commit()

    def _send_message(self, about: About, message: Message) -> None:
        try:
            self._patiently(lambda: self.sink.send_message(about, message))
        except Refused as refusal:
            self.say(f"not accepted, and not tried again: {message.event}: {refusal}")
        self.reader.commit_message(message)

    def _patiently(self, act: Callable[[], None]) -> None:
        wait_s, waited_s = FIRST_WAIT_S, 0.0
        while True:
            try:
                return act()
            except (Refused, JacklineError):
                raise
            except Exception as error:  # of any library: a tracker's failure must not end its own exporter
                self._note(error, wait_s)
            is_over = read_status(self.reader.run).state not in LIVE
            if (is_over or self.once) and waited_s >= self.patience_s:
                raise JacklineError(
                    f"not everything was sent: {self.reader.record.trouble}",
                    hint="the same command sends the rest later; nothing is sent twice",
                )
            self.sleep(wait_s)
            waited_s, wait_s = waited_s + wait_s, min(LONGEST_WAIT_S, 2 * wait_s)

    def _note(self, error: Exception, wait_s: float) -> None:
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if text != self.reader.record.trouble:
            self.say(f"could not send ({text}); trying again, at first in {wait_s:.0f} s")
        self.reader.note_trouble(text)
