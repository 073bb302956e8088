"""Work on many chunks in a few threads. The expensive calls (pwrite, pread, hashing, memmove) release the GIL."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Task = TypeVar("Task")


def run_in_threads(work: Callable[[Task], None], tasks: Sequence[Task], num_threads: int) -> None:
    """Run all tasks in roughly their order. The first error cancels the rest and is raised here."""
    if num_threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            work(task)
        return
    waiting, lock = iter(tasks), threading.Lock()
    problems: list[BaseException] = []

    def work_on() -> None:
        while not problems:
            with lock:
                task = next(waiting, None)
            if task is None:
                return
            try:
                work(task)
            except BaseException as problem:
                problems.append(problem)

    threads = [
        threading.Thread(target=work_on, daemon=True, name="jackline-work")
        for _ in range(min(num_threads, len(tasks)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class WorkPool:
    """A pool of permanent threads for work that arrives bit by bit.

    After an error the rest is skipped until `drain`.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None] | None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_open = 0
        self._problem: BaseException | None = None
        self._is_started = False

    def submit(self, work: Callable[[], None], afterwards: Callable[[], None] | None = None) -> None:
        """`afterwards` is always called, even when the work failed or was skipped."""
        if not self._is_started:
            self._is_started = True
            for _ in range(self._num_threads):
                threading.Thread(target=self._work_on, daemon=True, name="jackline-work").start()
        with self._changed:
            self._num_open += 1
        self._waiting.put((work, afterwards))

    def drain(self) -> None:
        """Wait for all submitted work; raise the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)
            problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _work_on(self) -> None:
        while True:
            work, afterwards = self._waiting.get()
            try:
                if self._problem is None:
                    work()
            except BaseException as problem:
                self._problem = self._problem or problem
            finally:
                if afterwards is not None:
                    afterwards()
            # Otherwise an idle thread keeps a reference to its last work: a slice of shared memory, and with it all
            # of an outgrown arena (400 MB for a tiny model) until the next save.
            del work, afterwards
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()
