"""What an ended process left behind beside its output, and what its last error speaks of, measured at once.

Owns reading the note that a process leaves (supervisor/child/inside/last_words), finding the only `raise SystemExit`
of a script, who may use a path that was refused, and which ways into C a crashed file imports. Each of these reads
files that may lie on a disk that hangs: the caller limits the time. `particulars` draws the conclusions.
"""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jackline.diagnosis.deaths.collect import source_line
from jackline.diagnosis.deaths.evidence import LastWords, Rights, last_words_of
from jackline.diagnosis.frames import Frame
from jackline.diagnosis.user_code import is_user_file
from jackline.rundir.access.reading import read_end, read_part, read_text
from jackline.rundir.records.fields import number

_MARK = "jackline end: "  # as in supervisor/child/inside/last_words.py
_END_BYTES = 1 << 16
_SOURCE_BYTES = 1 << 20
_REFUSED = re.compile(
    r"(?:\[Errno (?:1|13|30)\]|Permission denied|Operation not permitted|Read-only file system)"
    r".{0,80}?: (?:b?'([^']+)'|(/\S+))"
)
_BINDINGS = re.compile(r"^\s*(?:import|from)\s+(ctypes|cffi)\b", re.MULTILINE)


def read_last_words(stacks: Path, pid: int, code: int | None) -> LastWords | None:
    """The note of the command's first process. Of a launcher, whose own error is none of the person's code, that of
    the rank that failed first; of a shell, that of its last program. Each ended with the same code."""
    found = (_note_in(path) for path in stacks.glob("fh.*"))
    notes = [note for note in found if note is not None and note.get("code") == code]
    own = next((note for note in notes if note["pid"] == pid), None)
    others = sorted((note for note in notes if note is not own and _is_told(note)), key=_time_of)
    is_launcher = own is not None and own.get("raised") and not _is_told(own)
    if own is None or (is_launcher and others):
        other = next(iter(others if is_launcher else others[::-1]), None)
        return last_words_of(other) if other is not None else None
    return last_words_of({**own, "is_own": True})


def _time_of(note: dict[str, Any]) -> float:
    return number(note.get("at_s")) or 0.0


def _is_told(note: dict[str, Any]) -> bool:
    frames = [*note.get("frames", ()), *note.get("raised", ())]
    return any(is_user_file(frame["file"]) for frame in frames if isinstance(frame, dict))


def _note_in(path: Path) -> dict[str, Any] | None:
    try:
        lines = read_end(path, _END_BYTES)[0].decode("utf-8", "replace").splitlines()
        line = next((line for line in reversed(lines) if line.startswith(_MARK)), "")
        note = json.loads(line.removeprefix(_MARK)) if line else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(note, dict):
        return None
    pid = path.suffix[1:]
    note.update({name: _frames(note.get(name)) for name in ("frames", "raised")})
    return {**note, "pid": int(pid) if pid.isdecimal() else 0}


def _frames(places: object) -> list[dict[str, Any]]:
    found = []
    for place in places if isinstance(places, list) else ():
        if isinstance(place, list) and [type(one) for one in place] == [str, int, str]:
            file, line, function = place
            source = source_line(file, line) if line > 0 else ""
            found.append(
                {"file": file, "line": line, "function": function, "source": source, "is_user": is_user_file(file)}
            )
    return found


# -- raise SystemExit ------------------------------------------------------------------------------------------------


def find_raise(argv: Sequence[str], cwd: str, code: int | None) -> LastWords | None:
    """The only line of the script that raises a SystemExit with such a code. Nothing notes that while it happens."""
    script = next((word for word in argv[1:4] if word.endswith(".py")), "")
    path = os.path.join(cwd, script)
    try:
        source = read_part(path, 0, _SOURCE_BYTES) if script else b""
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and _may_give(node.exc, code)]
    if len(raised) != 1:
        return None
    line = raised[0].lineno
    function = next((one.name for one in _functions(tree) if one.lineno <= line <= (one.end_lineno or 0)), "<module>")
    frame = Frame(function, path, line, source_line(path, line), is_user=True)
    return LastWords("raise SystemExit", code, (frame,), is_own=True, is_read=True)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def _may_give(node: ast.expr | None, code: int | None) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name) or name.id != "SystemExit":
        return False
    given = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if given is None:
        return code == 0
    if isinstance(given, ast.Constant):
        return (given.value if isinstance(given.value, int) else 1) == code
    return code == 1 if isinstance(given, ast.JoinedStr) else True


# -- a path that was refused -----------------------------------------------------------------------------------------


def measure_rights(lines: Iterable[str], words: LastWords | None, cwd: str) -> Rights | None:
    """Of the path in the last line that says that one may not be used."""
    said = next((line for line in reversed(list(lines)) if not line.startswith(" ") and _REFUSED.search(line)), "")
    found = _REFUSED.search(said)
    if found is None:
        return None
    target = re.search(r"-> '([^']+)'", said)
    name = (target[1] if target else None) or found[1] or found[2]
    user = words.user if words is not None and words.is_own else ()
    try:
        return _look(os.path.normpath(os.path.join(cwd, name)), user or (os.geteuid(), os.getegid()), bool(user))
    except (OSError, ValueError):
        return None


def _look(path: str, user: Sequence[int], is_known: bool) -> Rights:
    at, exists, is_closed = os.sep, True, False
    for part in Path(path).parts[1:]:
        status = os.stat(at)  # noqa: PTH116
        is_closed = stat.S_ISDIR(status.st_mode) and not _may(status, user, 1)
        below = os.path.join(at, part)
        exists = os.path.lexists(below)
        if is_closed or not exists:
            break
        at = below
    status, above = os.stat(at), os.stat(os.path.dirname(at) or os.sep)  # noqa: PTH116
    return Rights(
        path=path,
        exists=None if is_closed else exists,
        at=at,
        is_folder=stat.S_ISDIR(status.st_mode),
        owner=_name("/etc/passwd", "uid", status.st_uid),
        group=_name("/etc/group", "gid", status.st_gid),
        mode=stat.S_IMODE(status.st_mode),
        user=_name("/etc/passwd", "uid", user[0]),
        is_user_known=is_known,
        can_read=_may(status, user, 4),
        can_write=_may(status, user, 2),
        can_execute=_may(status, user, 1),
        is_read_only=bool(os.statvfs(at).f_flag & os.ST_RDONLY),
        is_sticky=bool(above.st_mode & stat.S_ISVTX) and status.st_uid != user[0],
    )


def _may(status: os.stat_result, user: Sequence[int], bit: int) -> bool:
    """By owner, group and mode alone, as the kernel does without an access list."""
    uid, *groups = user
    if uid == 0:
        return bit != 1 or stat.S_ISDIR(status.st_mode) or bool(status.st_mode & 0o111)
    shift = 6 if status.st_uid == uid else 3 if status.st_gid in groups else 0
    return bool(status.st_mode >> shift & bit)


def _name(file: str, word: str, number: int) -> str:
    """'nobody (uid 65534)'. Read from the file: a lookup may ask a server that does not answer."""
    try:
        entries = [line.split(":") for line in read_text(file, _SOURCE_BYTES).splitlines()]
    except OSError:
        entries = []
    name = next((entry[0] for entry in entries if len(entry) > 2 and entry[2] == str(number)), "")
    return f"{name} ({word} {number})" if name else f"{word} {number}"


# -- a crash in C ----------------------------------------------------------------------------------------------------


def find_bindings(place: Frame | None) -> tuple[str, ...]:
    """The ways into C that the file of a crash imports, of the person's own files."""
    if place is None or not place.is_user:
        return ()
    try:
        source = read_part(place.file, 0, _SOURCE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ()
    return tuple(dict.fromkeys(_BINDINGS.findall(source)))
