"""Work on many folders of which one may hang: a network mount whose server is gone answers no call, for ever.

Owns the limit. Each call runs in a thread that is left behind when it hangs; the others go on in a new one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

LIMIT_S = 5.0
T = TypeVar("T")


class Answers(Generic[T]):
    """`found`: what each call returned, by its number. `hung`: the numbers of those that did not answer in time."""

    def __init__(self) -> None:
        self.found: dict[int, T] = {}
        self.hung: list[int] = []


def ask_each(calls: Sequence[Callable[[], T]], limit_s: float = LIMIT_S) -> Answers[T]:
    """Make all calls, one after another. One that raises has no answer: what it reads may be damaged in any way."""
    answers: Answers[T] = Answers()
    begun = 0
    while begun < len(calls):
        news: queue.SimpleQueue[tuple[int, T | None, bool]] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(calls, begun, news), daemon=True).start()
        while begun < len(calls):
            try:
                number, value, is_answer = news.get(timeout=limit_s)
            except queue.Empty:
                answers.hung.append(begun)
                begun += 1
                break
            if is_answer:
                answers.found[number] = value  # type: ignore[assignment]
            begun = number + 1
    return answers


def _serve(calls: Sequence[Callable[[], T]], start: int, news: queue.SimpleQueue[tuple[int, T | None, bool]]) -> None:
    for number in range(start, len(calls)):
        try:
            value = calls[number]()
        except Exception:
            news.put((number, None, False))
        else:
            news.put((number, value, True))
