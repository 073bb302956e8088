"""Work on many chunks by a few threads. The calls that matter (pwrite, pread, hashing, memmove) let the GIL go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Task = TypeVar("Task")


def run_in_threads(work: Callable[[Task], None], tasks: Sequence[Task], num_threads: int) -> None:
    """Does all tasks in about their order. The first error ends the rest and is raised here."""
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

    threads = [threading.Thread(target=work_on, daemon=True) for _ in range(min(num_threads, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
