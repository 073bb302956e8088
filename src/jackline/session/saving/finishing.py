"""The end of a run is a promise: it counts as finished only when what it must leave behind is durable.

    finish = Finish(saver, patience_s=600.0, ...)
    finish.promises.append(something_else_that_must_be_durable)
    why_not = finish.keep()                      # '' when every promise is kept

A promise is a function that is called again and again until it returns '' (kept); before that it returns why not yet.
The first one is the last save: a disk that is full or read-only may have room again in a minute. Owns the waiting and
its count-down. Does not own how the run ends (run.py, driver.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jackline.session.metrics.pulse import Pulse
from jackline.session.metrics.reporting import say
from jackline.session.phase import phase
from jackline.session.saving.saver import Saver
from jackline.session.stopping import StopRequest
from jackline.units import format_duration

Promise = Callable[[], str]
TRY_EVERY_S = 2.0
SAY_EVERY_S = 10.0


@dataclass
class Finish:
    """What must be true before a run is finished, in this order."""

    saver: Saver
    pulse: Pulse
    stop: StopRequest
    patience_s: float
    promises: list[Promise] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def keep(self) -> str:
        """Wait until every promise is kept, for `patience_s` at most or until a stop is requested.

        Returns why one is not kept; '' when all are.
        """
        for promise in (self._last_save, *self.promises):
            if why := self._wait_for(promise):
                return why
        return ""

    def _last_save(self) -> str:
        return self.saver.settle_last()

    def _wait_for(self, promise: Promise) -> str:
        why = promise()
        if not why or self._is_vain(why):
            return why
        until_s = self.clock() + self.patience_s
        said_s = float("-inf")
        with self.pulse.inside(phase("wait for room on the disk", total=self.patience_s, unit="s")) as progress:
            while why and (left_s := until_s - self.clock()) > 0 and not self._is_vain(why):
                if self.clock() - said_s >= SAY_EVERY_S:
                    said_s = self.clock()
                    say(f"{why}; waiting for room, {format_duration(left_s)} left; then it ends, to be resumed")
                progress.update(round(self.patience_s - left_s, 1))
                self.sleep(min(TRY_EVERY_S, left_s))
                why = promise()
        if not why:
            say("there was room again: everything is saved")
        return why

    def _is_vain(self, why: str) -> bool:
        """Whether waiting cannot help."""
        return self.stop.is_made or bool(self.saver.why_off or self.saver.engine.why_off)
