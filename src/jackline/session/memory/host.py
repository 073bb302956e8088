"""Host memory inside a session: warn, free memory, use fewer workers; save and exit before the process is killed.

Owns what a session does about the guard's warnings (memory/guard/host.py), how a loader is made smaller, and which
settings an attempt starts with after one that ended because of memory. run.py saves and exits; the supervisor
restarts.
"""

from __future__ import annotations

import linecache
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import DataLoader

from jackline.diagnosis.frames import Frame
from jackline.diagnosis.user_code import is_user_file
from jackline.machine.waits import read_wait, thread_frames
from jackline.memory.guard.host import Go, HostGuard, SaveAndExit, smaller_settings, trim_host_memory
from jackline.rundir.intent import read_intent
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.records.exit import read_exit
from jackline.session.feeds.feed import Feed

Tell = Callable[..., None]  # Reporter.event
_WARN_EVERY_S = 30.0
_OURS = os.path.dirname(os.path.dirname(__file__))  # the whole session package
_IDLE = ("sleep", "network", "local_socket", "pipe", "keyboard", "child", "poll", "file_lock", "stopped")
_STEPS_SEEN = 8
# Causes of an end after which the same loading would fill the same memory again.
_MEMORY_ENDS = ("kernel_oom", "memory_guard", "host_memory_error")
# A limit this much larger means another machine, and what was too much before may fit here.
_LARGER_LIMIT = 1.2


@dataclass(frozen=True)
class Leave:
    """The limit is too close for another step: why, and which settings the next attempt should start with."""

    why: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class SaveCost:
    """The cost of a save: time until it is acknowledged, and host memory during it."""

    save_s: float
    kept_bytes: int


class HostMemory:
    """Watches host memory; the session calls it at every boundary.

    `reopen` makes the feed continue from its current position with its current settings.
    """

    def __init__(self, feed: Feed, tell: Tell, reopen: Callable[[], None], guard: HostGuard | None = None) -> None:
        self._feed, self._tell, self._reopen = feed, tell, reopen
        self._places: Counter[tuple[str, int, str]] = Counter()
        self._idle_places: Counter[tuple[str, int, str]] = Counter()  # seen asleep or waiting for something external
        self.guard = guard or HostGuard(on_growth=self._look)
        self._intervals_s: deque[float] = deque(maxlen=_STEPS_SEEN)
        self._last_s: float | None = None
        self._warned_s = float("-inf")
        self.leaving: Leave | None = None

    def start(self) -> None:
        self.guard.start()

    def stop(self) -> None:
        self.guard.stop()

    def mind(self, now_s: float, expect: Callable[[], SaveCost]) -> Leave | None:
        """Decide what to do at this boundary. Small measures are taken here; a Leave is for the caller to act on.

        `expect` is called only when memory is more than half full. Otherwise each step pays only 2 us.
        """
        if self._last_s is not None:
            self._intervals_s.append(now_s - self._last_s)
        self._last_s = now_s
        if self.guard.is_calm():
            return None
        cost = expect()
        action = self.guard.action(self._step_s(), cost.save_s, cost.kept_bytes)
        if isinstance(action, Go):
            return None
        if not self.guard.is_own_growth():
            self._warn_of_neighbour(now_s, action.left_s)
            return None
        text = self.guard.describe(action.left_s) + self._words()
        if isinstance(action, SaveAndExit):
            self.leaving = Leave(text, self._smaller())
            return self.leaving
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            self._give_back(text)
        return None

    def _warn_of_neighbour(self, now_s: float, left_s: float) -> None:
        """Leaving would free next to nothing. The kernel may still choose this process, so say what is at risk."""
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            self._tell("memory", self.guard.describe_neighbour(left_s), is_loud=True)

    def where(self) -> str:
        """'; it grows at train.py:41 `rows.append(row)`', as far as it was observed."""
        frame = self._frame()
        if frame is None:
            return ""
        return f"; it grows at {frame.place}" + (f" `{frame.source[:100]}`" if frame.source else "")

    def _words(self) -> str:
        """`where`, or an empty text: a line that cannot be named must not switch the guard off."""
        try:
            return self.where()
        except Exception:
            return ""

    def _frame(self) -> Frame | None:
        seen = [place for places in (self._places, self._idle_places) for place, _ in places.most_common()]
        frames = (
            Frame(function, file, line, linecache.getline(file, line).strip()[:200], is_user=True)
            for file, line, function in seen
        )
        # Lines seen working come first, the most frequent first; a line that sleeps counts only if no other was seen.
        return min(frames, key=lambda frame: frame.sleeps, default=None)

    def read(self) -> dict[str, Any]:
        """For session-RANK.json."""
        reading = self.guard.reading
        num_workers, prefetch = loading_of(self._feed)
        frame = self._frame()
        return {
            "used_bytes": reading.used_bytes if reading else None,
            "limit_bytes": reading.limit.limit_bytes if reading else None,
            "seconds_to_limit": self.guard.left_s(),
            "grows_at": self.where().removeprefix("; it grows at ") or None,
            # For whoever explains the end: on a busy machine no other process may get to look in time.
            "growing_frame": asdict(frame) if frame is not None else None,
            "num_workers": num_workers,
            "prefetch": prefetch,
        }

    def _step_s(self) -> float:
        """The second longest of the last steps: so a single evaluation or save among them does not count."""
        longest = sorted(self._intervals_s)
        return longest[-2] if len(longest) > 3 else longest[-1] if longest else 0.0

    def _give_back(self, text: str) -> None:
        words = use_less(self._feed, self._smaller(), can_change_workers=True)
        self._tell("memory", f"{text}; giving back what is free{f' and {words}' if words else ''}", is_loud=True)
        if words:
            self._reopen()
        trim_host_memory()

    def _smaller(self) -> dict[str, Any]:
        num_workers, prefetch = loading_of(self._feed)
        reading = self.guard.reading
        less: dict[str, Any] = smaller_settings(num_workers=num_workers, prefetch=prefetch) if num_workers else {}
        return {**less, "limit_bytes": reading.limit.limit_bytes} if reading else less

    def _look(self) -> None:
        """Record the line the training is at while memory grows; called from the guard's thread, takes 0.1 ms."""
        main = threading.main_thread()
        frame = thread_frames().get(main.ident or 0)
        # A thread that is busy in Python waits for the GIL while we look: waiting for a lock is no sign of idleness.
        places = self._idle_places if read_wait(os.getpid(), main.native_id).kind in _IDLE else self._places
        # A frame that is just being entered has no line yet; its caller has one.
        while frame is not None:
            line = frame.f_lineno
            if line is not None and is_user_file(frame.f_code.co_filename):
                places[frame.f_code.co_filename, line, frame.f_code.co_name] += 1
                return
            if _OURS in frame.f_code.co_filename:
                places = self._idle_places  # taking a batch or saving: the calling line did not cause the growth
            frame = frame.f_back


# -- loaders -------------------------------------------------------------------------------------------------------


def loading_of(feed: Feed) -> tuple[int, int]:
    """Workers, and batches that each prefetches; (0, 0) for a loader that we must not change."""
    loader = _own_loader(feed)
    return (0, 0) if loader is None else (loader.num_workers, loader.prefetch_factor or 0)


def _own_loader(feed: Feed) -> Any:
    """The DataLoader that Jackline rebuilt; a user's wrapper around it is left alone."""
    loader = getattr(feed, "loader", None)
    return loader if type(loader) is DataLoader else None


def use_less(feed: Feed, settings: Mapping[str, Any], *, can_change_workers: bool) -> str:
    """Use fewer workers and less prefetch from the next `open` on; return text about it, '' when nothing changed.

    The order of the data does not depend on either, so a resumed run stays bit-exact. Only random augmentation that
    is not keyed depends on them, and then nothing is changed.
    """
    loader, dataset = _own_loader(feed), getattr(feed, "dataset", None)
    if loader is None or not getattr(dataset, "is_keyed", False) or not loader.num_workers:
        return ""
    words = []
    wanted = settings.get("num_workers")
    if can_change_workers and isinstance(wanted, int) and 0 <= wanted < loader.num_workers:
        words.append(f"{wanted} instead of {loader.num_workers} workers")
        loader.num_workers = wanted
    ahead = settings.get("prefetch")
    if isinstance(ahead, int) and loader.num_workers and 1 <= ahead < (loader.prefetch_factor or 2):
        words.append(f"{ahead} instead of {loader.prefetch_factor} batches read ahead by each")
        loader.prefetch_factor = ahead
    if words:
        loader._iterator = None  # persistent workers: the next pass starts the new ones
    return "reading with " + " and ".join(words) if words else ""


# -- what an attempt starts with -----------------------------------------------------------------------------------


def settings_to_start_with(
    run: RunDir, attempt: AttemptDir | None, num_workers: int, limit_bytes: int
) -> dict[str, Any]:
    """The settings that earlier attempts found for memory: those the last one asked for, halved for each kill since.

    {} when none ended because of memory, or when the limit then was much smaller than now.
    """
    found: dict[str, Any] = {}
    for former in run.list_attempts():
        if attempt is not None and former.number >= attempt.number:
            break
        intent = read_intent(former)
        if intent is not None and intent.restart and intent.settings:
            found = dict(intent.settings)
        elif _ended_for_memory(former):
            less = smaller_settings(
                num_workers=int(found.get("num_workers", num_workers)), prefetch=int(found.get("prefetch", 2))
            )
            found = {**found, **less}
    then = found.get("limit_bytes")
    if isinstance(then, int) and limit_bytes > _LARGER_LIMIT * then:
        return {}
    return found


def _ended_for_memory(attempt: AttemptDir) -> bool:
    return read_exit(attempt).cause in _MEMORY_ENDS
