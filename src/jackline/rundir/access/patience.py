"""Work on many folders of which one may hang: a network mount whose server is gone answers no call, for ever.

Owns the limit. Each call runs in a thread that is left behind when it hangs; the others continue in a new one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

LIMIT_S = 5.0
T = TypeVar("T")


def ask_each(calls: Sequence[Callable[[], T]], limit_s: float = LIMIT_S) -> tuple[dict[int, T], list[int]]:
    """Make all calls, one after another. Returns the answers by number, and the numbers of those that did not answer
    in time. A call that raises has no answer: what it reads may be damaged in any way."""
    found: dict[int, T] = {}
    hung: list[int] = []
    begun = 0
    while begun < len(calls):
        news: queue.SimpleQueue[tuple[int, T | None, bool]] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(calls, begun, news), daemon=True).start()
        while begun < len(calls):
            try:
                number, value, is_answer = news.get(timeout=limit_s)
            except queue.Empty:
                hung.append(begun)
                begun += 1
                break
            if is_answer:
                found[number] = value  # type: ignore[assignment]
            begun = number + 1
    return found, hung


def _serve(calls: Sequence[Callable[[], T]], start: int, news: queue.SimpleQueue[tuple[int, T | None, bool]]) -> None:
    for number in range(start, len(calls)):
        try:
            value = calls[number]()
        except Exception:
            news.put((number, None, False))
        else:
            news.put((number, value, True))
