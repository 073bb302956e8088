"""Where in a script lines that load a state belong, and what its loops must begin with: read from its source.

The lines go before the outermost loop that trains and does not make the objects anew. Owns the search in the syntax
tree, the numbers that a loop carries from pass to pass, and the edit of its `range`. Knows nothing of checkpoints.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import add, mul, sub
from typing import Any

from jackline.immutable import immutable

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_STEPS = frozenset(("step", "backward", "manual_backward"))
_CLOCKS = frozenset(("time", "perf_counter", "monotonic", "process_time", "time_ns", "now", "default_timer"))
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
_RANGES = frozenset(("range", "trange", "count"))


@immutable
class Spot:
    """`statement`: the lines go before it. `outer`: loops around it, the outermost first; then they are run once.
    `is_loop`: it trains itself, else it calls something that does. `is_over`: that loop had ended."""

    statement: ast.stmt
    outer: tuple[ast.stmt, ...] = ()
    is_loop: bool = True
    is_over: bool = False


def find_spot(tree: ast.Module, function: str, line: int, names: Iterable[str]) -> Spot | None:
    """`names`: how the function spells what is loaded ('model', 'self.optimizer')."""
    body = _body_of(tree, function, line)
    path = _path_to(body, line)
    if not path:
        return None
    wanted = set(names) | {_root(name) for name in names}
    loops = [one for one in path if isinstance(one, _LOOPS)]
    for number, loop in enumerate(loops):
        if not wanted & bound_in(loop):
            return Spot(loop, tuple(loops[:number]))
    if loops:  # made anew in every pass: what comes next
        return Spot(path[-1], tuple(loops), is_loop=False)
    roots = {_root(name) for name in names}
    ended = [one for one in _blocks(body) if isinstance(one, _LOOPS) and (one.end_lineno or 0) < line]
    over = [one for one in ended if _trains(one, roots) and not wanted & bound_in(one)]
    return Spot(over[-1], is_over=True) if over else Spot(path[-1], is_loop=False)


def _body_of(tree: ast.Module, function: str, line: int) -> list[ast.stmt]:
    """Of the innermost function of that name around the line; without one, the module's."""
    body: list[ast.stmt] = tree.body
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name == function and node.lineno <= line <= (node.end_lineno or 0):
            body = node.body
    return body


def _path_to(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """The statements around a line, the outermost first."""
    for statement in body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            inner = [] if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) else _path_to(_below(statement), line)
            return [statement, *inner]
    return []


def _below(statement: ast.AST) -> list[ast.stmt]:
    """The statements of its blocks: bodies, `else`, handlers and cases."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            found += child.body
    return found


def _blocks(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a function in order, without those of functions and classes in it."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            yield from _blocks(_below(statement))


def _root(expression: str) -> str:
    return expression.partition(".")[0].partition("[")[0]


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        waiting = list(statement.targets)
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        waiting = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        waiting = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        waiting = []
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.Tuple | ast.List):
            waiting += one.elts
        elif isinstance(one, ast.Starred):
            waiting.append(one.value)
        else:
            yield one


def bound_in(loop: ast.stmt) -> set[str]:
    """What a loop binds, in each spelling of its source."""
    return {ast.unparse(target) for one in (loop, *_blocks(_below(loop))) for target in _targets(one)}


def _trains(loop: ast.stmt, roots: set[str]) -> bool:
    """Whether it steps an optimizer, or gives one of the objects to a function."""
    calls = [node for one in _below(loop) for node in ast.walk(one) if isinstance(node, ast.Call)]
    return any(
        (isinstance(call.func, ast.Attribute) and call.func.attr in _STEPS)
        or any(isinstance(word, ast.Name) and word.id in roots for word in call.args)
        for call in calls
    )


# -- what a loop counts ----------------------------------------------------------------------------------------------


def carried(tree: ast.Module, function: str, spot: Spot, values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words that the loop takes from one pass to the next: set before it and changed in it. Times of day
    are left out."""
    if not spot.is_loop or not isinstance(spot.statement, _LOOPS):
        return {}
    body = _body_of(tree, function, spot.statement.lineno)
    every = list(_blocks(body))
    inside = list(_blocks(_below(spot.statement)))
    ours = {id(one) for one in (spot.statement, *inside)}
    before = {
        ast.unparse(target)
        for one in every
        if id(one) not in ours and one.lineno < spot.statement.lineno and not isinstance(one, _LOOPS)
        for target in _targets(one)
    }
    clocks = _clocks(every)
    found: dict[str, Any] = {}
    for one in inside:
        if isinstance(one, _LOOPS):
            continue
        for target in _targets(one):
            name = ast.unparse(target)
            is_counted = isinstance(one, ast.AugAssign) and not isinstance(target, ast.Name)
            if name in values and name not in clocks and (name in before or is_counted):
                found[name] = values[name]
    return found


def _clocks(statements: list[ast.stmt]) -> set[str]:
    """Names that hold times, directly (`t0 = time.time()`) or through another name."""
    found: set[str] = set()
    while True:
        size = len(found)
        for one in statements:
            value = getattr(one, "value", None)
            if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign) and value is not None:
                used = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute)}
                if used & found or any(name.rpartition(".")[2] in _CLOCKS for name in used):
                    found |= {ast.unparse(target) for target in _targets(one)}
        if len(found) == size:
            return found


def continued(loop: ast.stmt, text: str, values: Mapping[str, Any], *, is_over: bool = False) -> str:
    """`for epoch in range(1, 90)` as `range(3, 90)`, where epoch was 3; any other line as it is."""
    if not isinstance(loop, ast.For | ast.AsyncFor) or not isinstance(loop.target, ast.Name):
        return text
    call, reached = _range_in(loop.iter), values.get(loop.target.id)
    if call is None or type(reached) is not int or call.lineno != loop.lineno:
        return text
    first = call.args[0] if call.args else None
    is_odd = any(word.arg in ("start", "step") for word in call.keywords) or (is_over and len(call.args) > 2)
    if is_odd or (first is not None and first.end_lineno != loop.lineno):
        return text
    if is_over and _last_of(call, values) not in (None, reached):
        is_over = False  # left in the middle, as by Ctrl-C in a `try`: an interrupted pass begins again
    raw, start = text.encode(), str(reached + is_over).encode()
    if first is None or (len(call.args) == 1 and _name_of(call) != "count"):
        if start == b"0":
            return text
        at = first.col_offset if first is not None else (call.end_col_offset or 0) - 1
        return (raw[:at] + start + (b", " if first is not None else b"") + raw[at:]).decode()
    return (raw[: first.col_offset] + start + raw[first.end_col_offset :]).decode()


def _last_of(call: ast.Call, values: Mapping[str, Any]) -> int | None:
    """The last number of a `range`, where its end can be computed from numbers that are known."""
    ends = call.args[1:2] or call.args[:1]
    end = _number_of(ends[0], values) if ends and _name_of(call) != "count" else None
    return end - 1 if end is not None else None


def _number_of(node: ast.expr, values: Mapping[str, Any]) -> int | None:
    """Of `90`, `args.epochs` and `args.epochs + 1`."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number_of(node.left, values), _number_of(node.right, values)
        return _OPERATORS[type(node.op)](left, right) if left is not None and right is not None else None
    found = node.value if isinstance(node, ast.Constant) else values.get(ast.unparse(node))
    return found if type(found) is int else None


def _range_in(node: ast.expr) -> ast.Call | None:
    """`range(90)`, also as the first thing that a progress bar is given."""
    if not isinstance(node, ast.Call):
        return None
    if _name_of(node) in _RANGES:
        return node if all(not isinstance(word, ast.Starred) for word in node.args) else None
    is_counting = _name_of(node) in ("enumerate", "zip", "reversed", "sorted", "list", "map")
    return _range_in(node.args[0]) if node.args and not is_counting else None


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
