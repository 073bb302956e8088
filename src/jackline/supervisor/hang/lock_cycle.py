"""Deadlocks: which locks threads hold and wait for, inferred from the source code around their lines.

A thread inside the body of `with X:` holds X; a thread whose line is `with X:` or `X.acquire()` waits for X. That is
evidence, not proof (two names may mean one lock, one name may mean two), and the printed sentences say so. Pure: the
caller reads the files.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.immutable import immutable

ReadSource = Callable[[str], str | None]


@immutable
class LockView:
    """Which lock one thread waits for, and which locks it holds as far as the source shows."""

    thread: ThreadStack
    frame: Frame
    wants: str
    holds: tuple[str, ...]


def explain_locks(threads: Sequence[ThreadStack], read_source: ReadSource) -> list[str]:
    """Sentences about threads of one process that wait for each other; empty when nothing is evident."""
    views = [view for thread in threads if (view := view_of(thread, read_source)) is not None]
    sentences = [_alone_words(view) for view in views if _same(view.wants, view.holds)]
    for first, second in _pairs(views):
        if _same(first.wants, second.holds) and _same(second.wants, first.holds):
            sentences.append(
                f"{_half_words(first, second)}; {_half_words(second, first)}: they wait for each other for ever; "
                "take both locks in the same order everywhere"
            )
    if not sentences and len(views) >= 2:
        places = ", ".join(f"{_name(view)} for '{view.wants}' at {view.frame.place}" for view in views)
        sentences.append(f"several threads wait for locks and may wait for each other: {places}")
    return sentences


def _alone_words(view: LockView) -> str:
    return (
        f"{_name(view)} waits at {view.frame.place} for '{view.wants}', which it holds already: "
        "a plain Lock cannot be taken twice by one thread; threading.RLock can"
    )


def _half_words(view: LockView, other: LockView) -> str:
    return f"{_name(view)} holds '{_held(view, other)}' and waits for '{view.wants}' at {view.frame.place}"


def view_of(thread: ThreadStack, read_source: ReadSource) -> LockView | None:
    """None when the thread does not wait for a lock that its current line names."""
    if not thread.wait.startswith("lock") and thread.wait:
        return None
    users = [frame for frame in thread.frames if frame.is_user]
    if not users:
        return None
    wants = ""
    holds: list[str] = []
    for number, frame in enumerate(users):
        # A frame with source text means that the file was read a moment ago, so its disk responds.
        tree = _parse(read_source(frame.file)) if frame.source else None
        if tree is None:
            continue
        if number == 0:
            wants = wanted_at(tree, frame.line)
        holds += held_around(tree, frame.line)
    return LockView(thread, users[0], wants, tuple(holds)) if wants else None


def wanted_at(tree: ast.AST, line: int) -> str:
    """The lock that the statement at `line` acquires: the `X` of `with X:` or `X.acquire()`; '' for neither."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and node.lineno <= line < node.body[0].lineno:
            return _words(node.items[0].context_expr)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr == "acquire":
                return _words(called.value)
    return ""


def held_around(tree: ast.AST, line: int) -> list[str]:
    """The `X` of every `with X:` whose body `line` is in."""
    held = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            held += [_words(item.context_expr) for item in node.items]
    return held


def _parse(text: str | None) -> ast.AST | None:
    try:
        return ast.parse(text) if text is not None else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _words(node: ast.expr) -> str:
    return ast.unparse(node)[:80]


def _same(wanted: str, held: Sequence[str]) -> bool:
    # 'self.lock' in one place may be 'cache.lock' in another, so only the last part of the name is compared.
    return any(wanted.rpartition(".")[2] == other.rpartition(".")[2] for other in held)


def _held(view: LockView, by_whom: LockView) -> str:
    last = by_whom.wants.rpartition(".")[2]
    return next(name for name in view.holds if name.rpartition(".")[2] == last)


def _pairs(views: Sequence[LockView]) -> list[tuple[LockView, LockView]]:
    return [(first, second) for number, first in enumerate(views) for second in views[number + 1 :]]


def _name(view: LockView) -> str:
    if view.thread.is_main:
        return "the main thread"
    return f"thread '{view.thread.name}'" if view.thread.name else "another thread"
