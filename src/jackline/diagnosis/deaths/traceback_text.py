"""Parses Python tracebacks from a log: chained, nested in messages, prefixed by rank, cut at the top.

Owns turning printed text back into frames and errors, and finding the error that came first. Does not decide what an
error means (the rule modules beside this one do).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jackline.diagnosis.frames import Frame
from jackline.diagnosis.user_code import is_user_file
from jackline.immutable import immutable
from jackline.rundir.atomic import sha256_hex

_HEADER = re.compile(r"(?:Original |Exception Group )?Traceback \(most recent call last\)(:| ─)")
_FRAME = re.compile(r'\s+File "(.+?)", line (\d+)(?:, in (.+))?$')
_RICH_FRAME = re.compile(r"(\S.*?):(\d+) in (\S+)")
_RICH_SOURCE = re.compile(r"│ ❱\s*\d+ │?\s*(.+?)\s*│$")
_ERROR = re.compile(r"((?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*))(?:: ?(.*))?$")
_SYNTAX_ERROR = re.compile(r"(SyntaxError|IndentationError|TabError): (.*)$")
_MARKS = re.compile(r"[\s^~]+")  # the line of carets below a source line

# Printed between two errors when the upper one was raised first.
_THEN = ("During handling of the above exception", "The above exception was the direct cause")
# Printed when the lower error is quoted inside the message of the upper one, so the lower was raised first.
_QUOTED = ("Original Traceback", "terminated with the following error", "+-----", "+-+---")
_IGNORED = ("Exception ignored in", "Error in atexit", "Error in sys.excepthook")
# What a launcher raises when the real error was printed by the process it launched.
WRAPPERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException"})
# What the other processes of a run print when they end because the first one failed.
_ECHOES = frozenset({"KeyboardInterrupt", "BrokenPipeError", "ConnectionResetError", "EOFError"})

_MAX_MESSAGE_LINES = 12
# Only the end of a long traceback may be known (two functions that call each other print 2,000 lines): it has no
# header and begins with a frame, or with the lines below one.
_CUT_WITHIN = 2
_MAX_REPORT_LINES = 100
_MAX_FOREIGN_LINES = 50
_MAX_PATH = 4096


@immutable
class ErrorText:
    """One error as printed. `frames` are outermost first, as Python prints them."""

    kind: str  # 'ValueError', 'torch.OutOfMemoryError'
    message: str
    frames: tuple[Frame, ...] = ()
    is_ignored: bool = False  # printed by Python itself while the program continued
    is_in_child: bool = False  # below a line 'Process Process-1:'
    # Python prints an inner error only from where it was caught, so its user frame may be in the error after it.
    called_from: Frame | None = None

    @property
    def name(self) -> str:
        return self.kind.rsplit(".", 1)[-1]

    @property
    def first_line(self) -> str:
        """'ValueError: boo', on one line. A line of output that is not a traceback has no `kind`."""
        head = self.message.split("\n", 1)[0].strip()
        return ": ".join(part for part in (self.kind, head) if part)

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.message}"

    @property
    def place(self) -> Frame | None:
        """The line in the user's own code where it was raised; the innermost frame when none is the user's."""
        if _SYNTAX_ERROR.match(self.first_line) and self.frames:
            return self.frames[-1]  # the file with the syntax error, whoever owns it
        innermost = self.frames[-1] if self.frames else None
        return self.user_frame or self.called_from or innermost

    @property
    def user_frame(self) -> Frame | None:
        """The innermost one; a method that Python writes for a dataclass only where there is no other."""
        found = [frame for frame in reversed(self.frames) if frame.is_user]
        return next((frame for frame in found if not _is_generated(frame)), found[0] if found else None)


def _is_generated(frame: Frame) -> bool:
    return frame.file == "<string>" and frame.function.rpartition(".")[2].startswith("__")


@immutable
class Chain:
    """Errors that caused one another, in order. `end` is the line after the last of them."""

    errors: tuple[ErrorText, ...]
    end: int = 0

    @property
    def root(self) -> ErrorText:
        return self.errors[0]

    @property
    def last(self) -> ErrorText:
        return self.errors[-1]


@dataclass
class _Block:
    """A traceback while it is parsed; `start` and `end` are line numbers."""

    prefix: str
    start: int
    end: int
    error: ErrorText


def find_chains(lines: Sequence[str]) -> list[Chain]:
    """All tracebacks of a text in the order they were printed, chained ones together."""
    chains: list[list[ErrorText]] = []
    ends: list[int] = []
    newest: dict[str, tuple[_Block, list[ErrorText]]] = {}  # by prefix, because the output of ranks is interleaved
    for block in _blocks(lines):
        before = newest.get(block.prefix.strip())
        relation = _relation(lines, before[0] if before else None, block)
        if before is not None and relation == "then":
            chain = before[1]
            chain.append(block.error)
        elif before is not None and relation == "quoted":
            chain = before[1]
            chain.insert(0, block.error)
        else:
            chain = [block.error]
            chains.append(chain)
            ends.append(0)
        place = next(index for index, known in enumerate(chains) if known is chain)
        ends[place] = max(ends[place], block.end)
        newest[block.prefix.strip()] = (block, chain)
    return [Chain(_with_callers(chain), end) for chain, end in zip(chains, ends, strict=True)]


def _with_callers(errors: list[ErrorText]) -> tuple[ErrorText, ...]:
    found: list[ErrorText] = []
    caller: Frame | None = None
    for error in reversed(errors):
        found.append(replace(error, called_from=caller))
        caller = error.user_frame or caller
    return tuple(reversed(found))


def fatal_chain(lines: Sequence[str]) -> Chain | None:
    """The chain that ended the program: the last, unless that only repeats the failure of another process."""
    chains = [chain for chain in find_chains(lines) if not chain.root.is_ignored]
    for chain in reversed(chains):
        if not _is_echo(chain):
            return chain if chain.root.name not in WRAPPERS else _first_of_ranks(chains, chain)
    return chains[-1] if chains else None


def traceback_hash(lines: Sequence[str]) -> str:
    """A hash that is equal for the same error at the same place; '' without a traceback. Messages contain pids and
    addresses, so they are left out."""
    chain = fatal_chain(lines)
    if chain is None:
        return ""
    places = [f"{frame.file}:{frame.line}:{frame.function}" for frame in chain.root.frames]
    return sha256_hex("\n".join([chain.root.kind, *places]).encode("utf-8", "replace"))[:16]


def _first_of_ranks(chains: list[Chain], wrapper: Chain) -> Chain:
    """What a launched process printed before its launcher gave up; the launcher's own error if it printed none."""
    earlier = [chain for chain in chains[: chains.index(wrapper)] if chain.root.name not in WRAPPERS]
    real = [chain for chain in earlier if not _is_echo(chain)]
    return (real or [wrapper])[0]


def _is_echo(chain: Chain) -> bool:
    return chain.root.is_in_child and chain.root.name in _ECHOES


def _relation(lines: Sequence[str], before: _Block | None, block: _Block) -> str:
    if before is None:
        return ""
    # The members of an exception group are indented further than the group.
    prefix = "" if block.prefix.strip() == "|" else block.prefix
    gap = [_strip(line, prefix) for line in lines[before.end : block.start + 1]]
    words = [line.lstrip(" |") for line in gap if line is not None]
    if any(line.startswith(_THEN) for line in words):
        return "then"
    if any(mark in line for line in words for mark in _QUOTED):
        return "quoted"
    return ""


def _blocks(lines: Sequence[str]) -> Iterable[_Block]:
    covered = -1
    for index, line in enumerate(lines):
        header = _HEADER.search(line)
        if header is not None:
            prefix = _prefix(line[: header.start()].replace("+", "|"), lines[index + 1 : index + 2])
            if header[1] != ":":
                block = _read_rich(lines, index)
            else:
                block = _read_plain(lines, index, prefix)
        elif line.startswith(_THEN):
            block = _read_headless(lines, index, covered)
        elif index > covered and _FRAME.match(line):
            block = _read_bare_syntax_error(lines, index)
            if block is None and index <= _CUT_WITHIN:
                block = _read_plain(lines, index - 1, "")
        else:
            continue
        if block is not None:
            covered = max(covered, block.end)
            yield block


def _read_plain(lines: Sequence[str], start: int, prefix: str) -> _Block | None:
    frames: list[Frame] = []
    num_foreign = 0
    for index in range(start + 1, len(lines)):
        line = _strip(lines[index], prefix)
        if line is None:
            num_foreign += 1
        elif _FRAME.match(line):
            frames.append(_frame(line))
        elif line.startswith(" "):
            _add_source(frames, line)
        elif _is_error_line(line):
            message, end = _read_message(lines, index, prefix)
            return _Block(prefix, start, end, _error(message, frames, lines, start, prefix))
        elif line.startswith("Traceback ") or num_foreign > _MAX_FOREIGN_LINES:
            return None
        else:
            num_foreign += 1
    return None


def _read_headless(lines: Sequence[str], below: int, covered: int) -> _Block | None:
    """An error that was never raised where it is printed, only given as a cause: Python prints no header for it."""
    for index in range(below - 1, max(covered, below - _MAX_MESSAGE_LINES) - 1, -1):
        match = _ERROR.match(lines[index]) if index >= 0 else None
        if match is not None and match[3] and match[2].endswith(("Error", "Exception", "Exit", "Timeout")):
            message, end = _read_message(lines, index, "")
            return _Block("", index, end, _error(message, [], lines, index, ""))
    return None


def _read_message(lines: Sequence[str], start: int, prefix: str) -> tuple[str, int]:
    """Read a message. It may have several lines and ends at an empty line or where something else begins."""
    parts: list[str] = []
    end = start
    for index in range(start, len(lines)):
        line = _strip(lines[index], prefix)
        if line is None:
            continue
        if not line.strip() and len(parts) == 1 and parts[0].endswith("rror:") and index + 1 < len(lines):
            continue  # 'Graph execution error:', an empty line, and then what it was
        is_over = not line.strip() or line.startswith(('"""', *_THEN, *_IGNORED, "[rank")) or _HEADER.search(line)
        # A launcher's report begins below an empty first line and is long; its last part names the failed process.
        most = _MAX_REPORT_LINES if parts and parts[0].endswith(":") else _MAX_MESSAGE_LINES
        if is_over or len(parts) == most:
            break
        parts.append(line.rstrip())
        end = index + 1
    return "\n".join(parts), end


def _error(text: str, frames: list[Frame], lines: Sequence[str], start: int, prefix: str) -> ErrorText:
    match = _ERROR.match(text.split("\n", 1)[0])
    kind, head = (match[1], match[3] or "") if match else ("", text)
    rest = text.split("\n", 1)[1:] if match else []
    above = (_strip(lines[start - 1], prefix) or "") if start > 0 else ""
    return ErrorText(
        kind=kind,
        message="\n".join([head, *rest]),
        frames=tuple(frames),
        is_ignored=above.startswith(_IGNORED),
        is_in_child=re.match(r"Process \S+:$", above.strip()) is not None,
    )


def _read_rich(lines: Sequence[str], start: int) -> _Block | None:
    """Parse a traceback of rich, which draws a box; the error is below it."""
    frames: list[Frame] = []
    wrapped = ""  # a path too long for the box continues on the next line
    for index in range(start + 1, len(lines)):
        line = lines[index].rstrip()
        source = _RICH_SOURCE.search(line)
        if source:
            _add_source(frames, source[1])
        elif line.lstrip().startswith(("│", "╭", "╰")):
            inside = line.strip()[1:-1].removeprefix(" ").rstrip()
            found = _RICH_FRAME.fullmatch(wrapped + inside) or _RICH_FRAME.fullmatch(f"{wrapped} {inside}".strip())
            if found:
                frames.append(Frame(found[3], found[1], int(found[2]), is_user=is_user_file(found[1])))
            goes_on = inside and not inside.startswith(" ") and not found and len(wrapped) < _MAX_PATH
            wrapped = wrapped + inside if goes_on else ""
        elif _is_error_line(line):
            message, end = _read_message(lines, index, "")
            return _Block("", start, end, _error(message, frames, lines, start, ""))
        else:
            return None
    return None


def _read_bare_syntax_error(lines: Sequence[str], start: int) -> _Block | None:
    """A script that does not parse has no traceback, only the file, the line and the error."""
    frames = [_frame(lines[start])]
    for index in range(start + 1, min(start + 5, len(lines))):
        match = _SYNTAX_ERROR.match(lines[index])
        if match:
            return _Block("", start, index + 1, ErrorText(match[1], match[2], tuple(frames)))
        _add_source(frames, lines[index])
    return None


def _prefix(text: str, below: Sequence[str]) -> str:
    """The prefix of a rank. Text before a header may instead be an unfinished line (a prompt, a bar); then ''."""
    is_unended = bool(text) and bool(below) and not below[0].startswith(text) and bool(_FRAME.match(below[0]))
    return "" if is_unended else text


def _strip(line: str, prefix: str) -> str | None:
    """The line without its rank's prefix; None for a line of another process."""
    if line.startswith(prefix):
        return line[len(prefix) :].rstrip("\n")
    return "" if line.strip() == prefix.strip() else None


def _is_error_line(line: str) -> bool:
    match = _ERROR.match(line)
    if match is None or match[0].startswith("Traceback"):
        return False
    name = match[2]
    return name[0].isupper() or "." in match[1] or name.endswith("error")


def _frame(line: str) -> Frame:
    match = _FRAME.match(line)
    assert match is not None
    return Frame(match[3] or "", match[1], int(match[2]), is_user=is_user_file(match[1]))


def _add_source(frames: list[Frame], line: str) -> None:
    if frames and not frames[-1].source and line.strip() and not _MARKS.fullmatch(line):
        last = frames[-1]
        frames[-1] = Frame(last.function, last.file, last.line, line.strip(), last.is_user)
