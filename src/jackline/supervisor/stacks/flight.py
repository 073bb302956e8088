"""What PyTorch's flight recorder says of a collective that hangs: which rank has made which calls.

Stacks show where a rank stands. The recorder shows how many collectives each rank has called, and with which shapes,
so it tells a rank that is one call behind from one that called with another shape. The processes answer with JSON of
their own (`child/inside/recorder`); nothing is unpickled. Owns the question, its answers, and what they mean. NCCL
(2.24 and newer) has a service of its own for such questions (RAS; `ncclras` is its client), which is asked too.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.machine.net import find_listener
from jackline.machine.proc import read_environ
from jackline.rundir.access.reading import read_json
from jackline.units import rank_words

_WAIT_S, _POLL_S = 1.5, 0.05
_MOST_PIDS = 64
_MOST_SHOWN = 3
# With these all ranks give tensors of the same shape.
_ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "_allgather_base", "_all_gather_base")
_DEFAULT = ("default_pg", "")


@immutable
class Flight:
    """What the recorders of all ranks say together. `odd` are the ranks to look at; `timeout_s` is torch's own."""

    text: str
    odd: tuple[int, ...] = ()
    timeout_s: float = 0.0
    asked_at_s: float = 0.0


@immutable
class Call:
    """One collective as one rank has called it."""

    seq: int
    name: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_done: bool
    at_s: float
    timeout_ms: int

    @property
    def shape(self) -> str:
        """'all_reduce of Float [5, 6]'."""
        parts = [f"{dtype} {list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=False)]
        more = f" and {len(parts) - 2} more" if len(parts) > 2 else ""
        return f"{self.name} of {', '.join(parts[:2])}{more}" if parts else self.name

    @property
    def signature(self) -> str:
        return self.shape if self.name in _ALIKE else self.name


Group = dict[int, list[Call]]  # the calls of each rank


def ask_recorders(pids: Sequence[int], folder: Path) -> Flight | None:
    """Ask every process that has a recorder; None where fewer than two have one, or nothing is known."""
    doors = {pid: path for pid in pids[:_MOST_PIDS] if (path := folder / f"flight.{pid}").is_fifo()}
    if len(doors) < 2:
        return None
    asked_at_s, question = time.monotonic(), f"{time.monotonic_ns()}"
    for path in doors.values():
        _knock(path, question)
    answers: dict[int, Any] = {}
    while len(answers) < len(doors) and time.monotonic() - asked_at_s < _WAIT_S:
        time.sleep(_POLL_S)
        for pid, path in doors.items():
            told = read_json(path.with_name(path.name + ".json")) if pid not in answers else None
            if isinstance(told, dict) and told.get("question") == question:
                answers[pid] = told
    flight = explain(answers.values(), num_asked=len(doors), asked_at_s=asked_at_s)
    warning = ask_ras(list(doors)) if flight is not None else ""
    return replace(flight, text=f"{flight.text}; NCCL: {warning}") if flight is not None and warning else flight


def _knock(path: Path, question: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # it has ended
    try:
        os.write(fd, f"{question}\n".encode())
    except OSError:
        pass  # full: it does not answer
    finally:
        os.close(fd)


def explain(answers: Iterable[Any], *, num_asked: int = 0, asked_at_s: float = 0.0) -> Flight | None:
    """The oldest collective that is not over, of all groups: who is in it, who is not. None where none is open."""
    groups, ranks = _read_answers(answers)
    found: list[tuple[float, str, str, Group, Call]] = []
    for key, (name, calls) in groups.items():
        waiting = [call for one in calls.values() for call in one if not call.is_done]
        if waiting:
            oldest = min(waiting, key=lambda call: (call.seq, call.at_s))
            found.append((oldest.at_s, key, name, calls, oldest))
    if not found:
        return None
    _, key, name, calls, oldest = min(found, key=lambda entry: entry[:2])
    members = set(ranks) if name in _DEFAULT else set(calls)
    of_group = "" if name in _DEFAULT else f" of group {name or key}"
    text, odd = _difference(calls, of_group) or _who_is_missing(calls, members, oldest, of_group)
    if num_asked > len(ranks):
        text += f"; {num_asked - len(ranks)} of {num_asked} ranks do not answer"
    return Flight(text, tuple(odd), oldest.timeout_ms / 1000, asked_at_s)


def _who_is_missing(calls: Group, members: set[int], oldest: Call, of_group: str) -> tuple[str, list[int]]:
    last = {rank: max((call.seq for call in calls.get(rank, ())), default=0) for rank in members}
    behind = sorted(rank for rank in members if last[rank] < oldest.seq)
    inside = sorted(rank for rank in members if last[rank] >= oldest.seq)
    what = f"call {oldest.seq}{of_group} ({oldest.shape})"
    if not behind:
        return f"all {len(inside)} ranks are in {what}, with the same shapes", []
    has = "has" if len(behind) == 1 else "have"
    before = {last[rank] for rank in behind}
    done = f"; the last that it made is call {before.pop()}" if len(behind) == 1 else ""
    who = f"{rank_words(inside)} {'is' if len(inside) == 1 else 'are'} in it"
    return f"{rank_words(behind)} {has} not made {what}{done}; {who}", behind


def _difference(calls: Group, of_group: str) -> tuple[str, list[int]] | None:
    """The first call that ranks have made differently; the smallest group of ranks first."""
    by_seq: dict[int, dict[str, list[int]]] = {}
    for rank, made in calls.items():
        for call in made:
            by_seq.setdefault(call.seq, {}).setdefault(call.signature, []).append(rank)
    for seq, kinds in sorted(by_seq.items()):
        if len(kinds) > 1:
            groups = sorted(kinds.items(), key=lambda entry: (len(entry[1]), min(entry[1])))
            parts = [f"{rank_words(sorted(ranks))} called {shape}" for shape, ranks in groups[:_MOST_SHOWN]]
            return f"the ranks differ in call {seq}{of_group}: {'; '.join(parts)}", sorted(groups[0][1])
    return None


def _read_answers(answers: Iterable[Any]) -> tuple[dict[str, tuple[str, Group]], list[int]]:
    """Groups by their key, and all ranks that answered. What makes no sense is left out: any process may write it."""
    groups: dict[str, tuple[str, Group]] = {}
    ranks: list[int] = []
    for told in answers:
        rank = told.get("rank") if isinstance(told, Mapping) else None
        if not isinstance(rank, int):
            continue
        ranks.append(rank)
        found = told.get("groups")
        for key, group in found.items() if isinstance(found, Mapping) else ():
            if isinstance(group, Mapping) and isinstance(group.get("calls"), list):
                _, known = groups.setdefault(str(key), (str(group.get("name") or "")[:80], {}))
                known[rank] = [call for raw in group["calls"] if (call := _call(raw)) is not None]
    return groups, ranks


def _call(raw: Any) -> Call | None:
    try:
        return Call(
            seq=int(raw["seq"]),
            name=str(raw["call"])[:80],
            sizes=tuple(tuple(int(size) for size in sizes) for sizes in raw["sizes"]),
            dtypes=tuple(str(dtype)[:20] for dtype in raw["dtypes"]),
            is_done=bool(raw["is_done"]),
            at_s=float(raw["at_s"]),
            timeout_ms=int(raw["timeout_ms"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


# -- NCCL's own service ------------------------------------------------------------------------------------------

_RAS_ADDRESS = ("localhost", 28028)
_RAS_VARIABLE = "NCCL_RAS_ADDR"
_DEADLINE_S, _THEIR_DEADLINE_S = 4.0, 2
_MOST_BYTES = 1 << 20
_MOST_RAS_LINES, _MOST_RAS_CHARS = 4, 160
_HEAD = re.compile(r"^#\d+-\d+ \([0-9a-f]+\) ([A-Z_]+)$")
_NO_TEXT = re.compile(r"[^\x20-\x7e]+")


def ask_ras(pids: Collection[int]) -> str:
    """'' where no process of these has the service, or it has nothing to warn of."""
    host, port = ras_address(read_environ(next(iter(pids)))) if pids else _RAS_ADDRESS
    if not pids or find_listener(port) not in pids:
        return ""
    try:
        return explain_ras(_question(host, port))
    except (OSError, ValueError):
        return ""


def ras_address(environ: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environ.get(_RAS_VARIABLE, "").rpartition(":")
    return (host or _RAS_ADDRESS[0], int(port)) if port.isdigit() and int(port) < 65536 else _RAS_ADDRESS


def _question(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=_DEADLINE_S) as channel:
        lines = channel.makefile("rb")
        for word, answer in (
            (b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL"),
            (b"TIMEOUT %d\n" % _THEIR_DEADLINE_S, b"OK"),
        ):
            channel.sendall(word)
            if not lines.readline(200).startswith(answer):
                raise ValueError("this is no RAS service")
        channel.sendall(b"STATUS\n")
        return lines.read(_MOST_BYTES).decode("ascii", "replace")


def explain_ras(text: str) -> str:
    """The first errors and warnings of its report, each with its first lines: 'MISMATCH: 2 ranks have ...'."""
    found: list[list[str]] = []
    for line in _sections(text, ("Errors", "Warnings")):
        if head := _HEAD.match(line):
            found.append([head[1]])
        elif found and line.strip() and len(found[-1]) <= _MOST_RAS_LINES:
            found[-1].append(_NO_TEXT.sub(" ", line.strip())[:_MOST_RAS_CHARS])
    return "; ".join(f"{kind}: {', '.join(rest)}" for kind, *rest in found[:2])


def _sections(text: str, names: Sequence[str]) -> list[str]:
    """The lines below these headings, which are underlined with '='."""
    lines = [line.rstrip() for line in text.splitlines()]
    kept, is_wanted = [], False
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if line and below and not below.strip("="):
            is_wanted = line.split("...")[0] in names
        elif is_wanted and line.strip("="):
            kept.append(line)
    return kept
