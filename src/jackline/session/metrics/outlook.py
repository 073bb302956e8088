"""What the reporting thread says about a session: session-RANK.json, progress for the supervisor, a warning in time.

Only reads the session's parts. Owns the contents of session-RANK.json and when a stop is called too slow.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jackline.rundir.process_id import identify
from jackline.session.home import read_grace_s
from jackline.session.phase import Phase
from jackline.units import format_duration

if TYPE_CHECKING:
    from jackline.session.attachment import Attachment

_PATIENCE = 0.7  # share of the grace period after which a warning says that it will not be enough


class Outlook:
    """One session, seen from the thread that reports it."""

    def __init__(self, attached: Attachment) -> None:
        self._attached = attached
        self._bar: Phase | None = None
        self._has_warned = False

    def read_state(self) -> dict[str, Any]:
        """The contents of session-RANK.json."""
        at = self._attached
        me, newest = identify(at.pid), at.saver.look_at_disk()
        return {
            "at_s": time.time(),
            "process": me.to_json() if me else None,
            "attempt": at.home.attempt.number if at.home.attempt else None,
            **at.pulse.beat(time.monotonic(), at.stepper.steps_done),
            "spent_s": at.pulse.spent_s(),
            "step": at.stepper.steps_done,
            "epoch": at.position.epoch,
            "batch": at.position.batch,
            "place": self._place(),
            "best": at.saver.best(),
            "loss_bounds": at.saver.bounds(newest),
            "last_checkpoint": newest,
            "metrics": dict(at.scalars.latest),
            "memory": {**at.gpu.read(), "host": at.host.read() if at.host is not None else None},
            "stop_requested_by": at.stop.by or None,
            "protections_off": [at.saver.why_off] if at.saver.why_off else [],
            "disk_budget": at.saver.engine.settings.disk_budget,
        }

    def look_around(self) -> None:
        """Once a second: report progress to the supervisor, and warn the user when stopping in time is unlikely."""
        at = self._attached
        if at.home.is_supervised and at.pulse.name == "train":
            self._bar = self._bar or Phase("train", None, total=at.pulse.total, unit="steps")
            self._bar.update(at.stepper.steps_done)
        if at.stop.is_made and not self._has_warned:
            waited_s = time.monotonic() - at.stop.at_s
            grace_s = read_grace_s(at.home.run, at.settings.grace_s)
            if waited_s > _PATIENCE * grace_s and not at.is_over:
                self._has_warned = True
                left = at.saver.what_stands(at.stepper.steps_done)
                text = (
                    f"{at.stop.by} came {format_duration(waited_s)} ago and this step has not ended; the grace is "
                    f"over after {format_duration(grace_s)}. If it is killed, {left}"
                )
                at.reporter.event("grace", text, is_loud=True)

    def _place(self) -> dict[str, Any]:
        """Which epoch of how many and which batch of how many, counted from 1.

        A loader's own counts replace these.
        """
        at = self._attached
        place = at.position
        own: dict[str, Any] = getattr(at.feed, "place", dict)()
        epochs = at.fingerprint["schedule"].get("epochs")
        return {
            "epoch": place.epoch + 1,
            "epochs": epochs,
            "batch": place.batch,
            "num_batches": at.feed.num_batches,
            **own,
        }
