"""What NCCL's RAS service says of a job that stands still: which ranks are behind, dead or silent.

NCCL (2.24 and newer) answers questions on a local port of every machine; `ncclras` is its client. This is the same
question: its text protocol is three lines. Owns the question and the reading of the warnings. Only a process of the
run itself is asked.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping, Sequence

from jackline.machine.net import find_listener
from jackline.machine.proc import read_environ

_ADDRESS = ("localhost", 28028)
_VARIABLE = "NCCL_RAS_ADDR"
_DEADLINE_S, _THEIR_DEADLINE_S = 4.0, 2
_MOST_BYTES = 1 << 20
_MOST_LINES, _MOST_CHARS = 4, 160
_HEAD = re.compile(r"^#\d+-\d+ \([0-9a-f]+\) ([A-Z_]+)$")
_NO_TEXT = re.compile(r"[^\x20-\x7e]+")


def ask_ras(pids: Collection[int]) -> str:
    """'' where no process of these has the service, or it has nothing to warn of."""
    host, port = ras_address(read_environ(next(iter(pids)))) if pids else _ADDRESS
    if not pids or find_listener(port) not in pids:
        return ""
    try:
        return explain_ras(_question(host, port))
    except (OSError, ValueError):
        return ""


def ras_address(environ: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = environ.get(_VARIABLE, "").rpartition(":")
    return (host or _ADDRESS[0], int(port)) if port.isdigit() and int(port) < 65536 else _ADDRESS


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
        elif found and line.strip() and len(found[-1]) <= _MOST_LINES:
            found[-1].append(_NO_TEXT.sub(" ", line.strip())[:_MOST_CHARS])
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
