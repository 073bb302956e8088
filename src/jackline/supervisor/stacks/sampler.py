"""Takes stacks in a thread beside the loop, so that a slow py-spy never delays output or signals.

Owns one thread. Does not own how a stack is read (take.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jackline.diagnosis.frames import ProcessStack
from jackline.supervisor.stacks.standing import Standing, read_standing
from jackline.supervisor.stacks.take import native_text, sample_stacks, with_reports


@dataclass(frozen=True)
class StackRequest:
    pids: tuple[int, ...]
    native: bool = False
    inside: bool = False  # also ask each Python process who waits for whom


@dataclass(frozen=True)
class StackSample:
    """One sample of stacks. `native_text` and `standing` are set only when they were requested."""

    request: StackRequest
    stacks: tuple[ProcessStack, ...]
    native_text: str = ""
    standing: Standing | None = None


class StackSampler:
    """Takes at most one sample at a time; a request while busy is refused, not queued."""

    def __init__(self, stacks_folder: Path) -> None:
        self._folder = stacks_folder
        self._requests: queue.SimpleQueue[StackRequest] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StackSample] = queue.SimpleQueue()
        self._is_busy = False
        self._thread: threading.Thread | None = None
        self.problem = ""

    def request(self, pids: Sequence[int], *, native: bool = False, inside: bool = False) -> bool:
        if self._is_busy or not pids:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="jackline-stacks", daemon=True)
            self._thread.start()
        self._is_busy = True
        self._requests.put(StackRequest(tuple(pids), native, inside))
        return True

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    def take(self) -> StackSample | None:
        """The finished sample, if there is one; each is returned once."""
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self._is_busy = False
        return result

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            stacks: tuple[ProcessStack, ...] = ()
            native = ""
            standing: Standing | None = None
            try:
                stacks = sample_stacks(request.pids, stacks_folder=self._folder)
                native = native_text(request.pids) if request.native else ""
                standing = read_standing(request.pids, self._folder) if request.inside else None
                stacks = with_reports(stacks, standing.reports) if standing else stacks
                self.problem = ""
            except Exception as error:  # fail open: having no stacks is better than a crashed watcher
                self.problem = f"{type(error).__name__}: {error}"
            self._results.put(StackSample(request, stacks, native, standing))
