"""What is known of an end besides its words: where it was left, which file, whose folder, which child, whose C code.

Adds to findings of other rules what the process noted and what was measured when it had ended. Owns how that is told
and what it advises. Does not own how it is found (`last_words`, supervisor/child/inside). Pure.
"""

from __future__ import annotations

import re
import shlex
import signal as signals
from collections import Counter
from dataclasses import replace
from pathlib import PurePath

from jackline.diagnosis.deaths.evidence import Evidence, Finding, LastWords, NamedFile, OtherEnd, Rights
from jackline.diagnosis.deaths.sentences import place_line, short_place
from jackline.diagnosis.deaths.traceback_text import Chain
from jackline.diagnosis.frames import Frame

_REFUSED = re.compile(r"\[Errno (?:1|13|30)\]|Permission denied|Read-only file system|Operation not permitted")
_DAMAGED = re.compile(
    r"JSONDecodeError|codec can't decode|UnpicklingError|Ran out of input|BadZipFile|ReadError|BadGzipFile"
    r"|zlib\.error|LZMAError|SafetensorError|ParserError|EmptyDataError|UnidentifiedImageError|ArrowInvalid"
    r"|Parquet magic bytes|_csv\.Error|TOMLDecodeError|PytorchStreamReader|Compressed file ended"
    r"|image file is truncated|could not convert string to float|invalid literal for int"
)
_CONNECTION = re.compile(r"/(?:socket|ssl)\.py$|/(?:http|urllib3?|asyncio|requests|httpx|httpcore|aiohttp)/")
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_CTYPES = re.compile(r"[/\\]ctypes[/\\]\w+\.py$|[/\\]cffi[/\\]")
_FAULT_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_SOUNDS_BAD = re.compile(
    r"error|fail|mismatch|invalid|exception|abort|cannot|can't|refus|missing|not found|denied|fatal|panic",
    re.IGNORECASE,
)
_WORDS_ABOVE = 20
_MOST_FILES = 3


def with_particulars(found: Finding, chain: Chain, evidence: Evidence) -> Finding:
    """An uncaught exception, with what its message leaves out."""
    for rule in (_refused, _unreadable, _lost_reader, _failed_command):
        more = rule(found, chain, evidence)
        if more is not None:
            return more
    words = evidence.last_words
    if words is None or words.how == "exception" or words.code != evidence.exit_code:
        return found
    place = left_place(words)
    return _told(found, f"then it left by {words.how} at {short_place(place)}") if place else found


def _told(found: Finding, *lines: str) -> Finding:
    """The lines stand below the place of the error."""
    count = len(place_line(found.place))
    return replace(found, detail=(*found.detail[:count], *lines, *found.detail[count:]))


# -- left on purpose -------------------------------------------------------------------------------------------------


def left_place(words: LastWords | None) -> Frame | None:
    return next((frame for frame in words.frames if frame.is_user), None) if words is not None else None


def with_exit_place(found: Finding, evidence: Evidence) -> Finding:
    """An exit code, with the line that chose it."""
    words = evidence.last_words
    place = left_place(words)
    if words is None or place is None or words.code != evidence.exit_code or found.place is not None:
        return found
    code = f"ended with exit code {evidence.exit_code}"
    by = f" by {words.how} at {short_place(place)}"
    title = found.title.replace(code, code + by, 1) if found.title.startswith(code) else found.title
    handled = next((frame for frame in words.raised if frame.is_user), None)
    while_handling = f"while it handled {words.error}, raised at {short_place(handled)}" if handled else ""
    only = "no other line of the script raises a SystemExit that gives this code" if words.is_read else ""
    lines = (*place_line(place), *([while_handling] if while_handling else []), *([only] if only else []))
    sure = found.confidence
    if sure == "not sure" and words.is_own and not words.is_read:
        sure = "likely"
    return replace(found, title=title, detail=(*lines, *found.detail), place=place, confidence=sure)


# -- a path that may not be used -------------------------------------------------------------------------------------


def _refused(found: Finding, chain: Chain, evidence: Evidence) -> Finding | None:
    rights = evidence.rights
    if rights is None or not _REFUSED.search(chain.root.text):
        return None
    what, hint = _story(rights)
    who = f"the process was {rights.user}" if rights.is_user_known else f"`jackline run` was started by {rights.user}"
    return replace(_told(found, f"{what}; {who}"), hint=hint)


def _story(rights: Rights) -> tuple[str, str]:
    """(what is true of the path, what to do)."""
    owned = f"belongs to {rights.owner} with mode {rights.mode:04o}"
    name = rights.user.partition(" (")[0]
    user = f"user {name}" if " (" in rights.user else name
    if rights.is_read_only:
        return (
            f"the file system of {rights.at} is mounted read-only",
            f"write to another folder, or have it mounted writable: findmnt -T {shlex.quote(rights.at)}",
        )
    if rights.exists is None:
        return (
            f"the folder {rights.at} {owned} and may not be entered, so whether the path exists is not known",
            f"use a folder that {user} may enter, or have {rights.at} opened for it (chmod, its group)",
        )
    if not rights.exists:
        is_direct = str(PurePath(rights.path).parent) == rights.at
        where = f"its folder {rights.at}" if is_direct else f"the nearest folder that exists, {rights.at},"
        hint = (
            f"save to a folder that {user} may write, or let it in: sudo chown {name.removeprefix('uid ')} "
            f"{shlex.quote(rights.at)}"
            if not rights.can_write
            else _OTHER_REASONS
        )
        return f"it does not exist yet; {where} {owned}", hint
    return f"it {owned}", _advice_for_existing(rights, user)


_OTHER_REASONS = (
    "owner and mode would allow it: look for an access list (getfacl), a container's user, SELinux or a network file "
    "system that refuses root (root_squash)"
)


def _advice_for_existing(rights: Rights, user: str) -> str:
    path = shlex.quote(rights.path)
    if rights.is_sticky and rights.can_read:
        return f"in a folder like /tmp only its owner may write or replace it: take another name than {path}"
    missing = [word for word, may in (("read", rights.can_read), ("write", rights.can_write)) if not may]
    if missing:
        return f"{user} may not {' or '.join(missing)} it: have its owner change that (chmod), or use another path"
    if not rights.is_folder and not rights.can_execute:
        return f"if it is to be run, make it executable: chmod +x {path}; else {_OTHER_REASONS}"
    return _OTHER_REASONS


# -- a file that cannot be read --------------------------------------------------------------------------------------


def _unreadable(found: Finding, chain: Chain, evidence: Evidence) -> Finding | None:
    words = evidence.last_words
    if words is None or words.error != chain.root.name or not words.files or not _DAMAGED.search(chain.root.text):
        return None
    proved = next((file for file in words.files if file.is_proved), None)
    if proved is not None:
        return _proved(found, proved, chain.root.name)
    files = words.files[:_MOST_FILES]
    if len(files) > 1:
        return _told(found, f"it was reading one of these: {', '.join(file.path for file in files)}")
    (file,) = files
    at = f", which a csv reader had read to line {file.line}" if file.line else ""
    at = f", which had been read to byte {file.at_byte}" if file.at_byte and not at else at
    known = f"it was reading {file.path}{at}" if file.is_file else f"the code there names this file: {file.path}"
    return _told(found, known)


def _proved(found: Finding, file: NamedFile, kind: str) -> Finding:
    path, name = shlex.quote(file.path), PurePath(file.path).name
    if file.is_empty:
        return replace(
            _told(found, f"{file.path} is empty"),
            title=f"{found.title}: {name} is empty",
            hint="a download or a save that was cut off leaves an empty file: fetch or write it again",
        )
    where = f"line {file.line}" + (f", column {file.column}" if file.column else "")
    text = "its bytes are" if kind == "UnicodeDecodeError" else "the text that it could not read is"
    if file.is_whole:
        told = _told(found, f"{text} all of {file.path}; the error is in {where}")
        hint = f"cut off, or of another kind (an error page instead of data)? ls -l {path}; head -c 300 {path}"
        return replace(told, title=f"{found.title}, in {name}", hint=hint)
    told = _told(found, f"{text} in {where} of {file.path}")
    hint = (
        f"look at that line: sed -n {file.line}p {path} | cut -c 1-300; then repair it, or skip and count such lines"
    )
    if kind == "UnicodeDecodeError":
        hint = f"look at that line: sed -n {file.line}p {path} | xxd | head; then give open() the file's encoding"
    return replace(told, title=f"{found.title}, in line {file.line} of {name}", hint=hint)


# -- a pipe without a reader -----------------------------------------------------------------------------------------

_STDOUT_HINT = "the program that read its output ended first: the one after the `|` (head, grep -q)"
_ANY_READER = (
    "whoever read the other end ended first: a child that it writes to (Popen.stdin, multiprocessing), the program "
    "after a `|`, or the far side of a connection"
)


def _lost_reader(found: Finding, chain: Chain, evidence: Evidence) -> Finding | None:
    if chain.root.name != "BrokenPipeError" and "[Errno 32]" not in chain.root.text:
        return None
    pipes = evidence.last_words.pipes if evidence.last_words is not None else ()
    broken = [end for end in pipes if end.is_broken]
    children = [end for end in broken if end.what == "child"]
    if len(children) == 1:
        return _lost_child(found, children[0], chain, evidence)
    if broken and not children:
        return replace(_told(found, f"nobody reads its {broken[0].what} any more"), hint=_STDOUT_HINT)
    if any(_CONNECTION.search(frame.file) for frame in chain.root.frames):
        hint = "the far side closed the connection: look at the log of the server, or at its limits; then try again"
        return replace(found, confidence="likely", hint=hint)
    ended = [end for end in pipes if end.what in ("child", "worker") and end.returncode is not None]
    lines = [f"{child_text(end)} {end_text(end)}" for end in ended[:2]]
    return replace(_told(found, *lines), confidence="likely", hint=_ANY_READER)


def _lost_child(found: Finding, child: OtherEnd, chain: Chain, evidence: Evidence) -> Finding:
    ended = end_text(child)
    said = _words_of_child(chain, evidence)
    lines = [f"perhaps its last words: {said}"] if said else []
    return replace(
        _told(found, *lines),
        title=f"{found.title}: {child_text(child)} {ended}",
        hint=f"find out why {child.name} ended: what it said stands above the traceback (`jackline logs`)",
    )


def child_text(end: OtherEnd) -> str:
    return f"its child {end.name} (pid {end.pid})"


def end_text(end: OtherEnd) -> str:
    if end.returncode is None:
        return "no longer reads what is written to it" if end.is_broken else "still lived"
    code = end.returncode
    if code >= 0:
        return f"had ended with exit code {code}"
    names = {one.value: one.name for one in signals.Signals}
    return f"had been ended by {names.get(-code, f'signal {-code}')}"


def _words_of_child(chain: Chain, evidence: Evidence) -> str:
    """A line above the traceback that is like no other: what a script prints itself, it prints again and again."""
    lines = _lines_above(chain, evidence)
    shapes = Counter(re.sub(r"\d+", "0", line) for line in lines)
    single = [line for line in lines[-_WORDS_ABOVE:] if shapes[re.sub(r"\d+", "0", line)] == 1]
    bad = [line for line in single if _SOUNDS_BAD.search(line)]
    return (bad[-1] if bad else single[0] if len(single) == 1 else "")[:200]


def _lines_above(chain: Chain, evidence: Evidence) -> list[str]:
    tail = evidence.output_tail[: chain.end]
    start = next((at for at in range(len(tail) - 1, -1, -1) if "Traceback (most recent" in tail[at]), 0)
    return [line.strip() for line in tail[:start] if line.strip()]


def _failed_command(found: Finding, chain: Chain, evidence: Evidence) -> Finding | None:
    """The last line above the traceback may be the command's, or one of the script where its output was captured."""
    if chain.root.name != "CalledProcessError":
        return None
    above = _lines_above(chain, evidence)
    return _told(found, f"the line above the traceback: {above[-1][:200]}") if above else None


# -- a crash in C ----------------------------------------------------------------------------------------------------


def native_hint(evidence: Evidence, place: Frame | None) -> str:
    """Whose C code it was that crashed, as far as the innermost Python frame tells."""
    lines = evidence.fault_text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    match = next((found for line in lines[start:] if (found := _FAULT_FRAME.fullmatch(line))), None)
    inner = match[1] if match else ""
    package = _PACKAGE.search(inner)
    if package is not None and not _CTYPES.search(inner):
        name = package[1].removesuffix(".py")
        return f"the C code is called by {name}: update or pin {name} and what it is built on"
    by = place.source if place is not None else ""
    bindings = [name for name in evidence.bindings if name in ("ctypes", "cffi")]
    if _CTYPES.search(inner) or "ctypes." in by or (bindings and place is not None and inner == place.file):
        return (
            f"that line calls C through {'cffi' if bindings == ['cffi'] else 'ctypes'}: look at the address it "
            "passes (null, freed), at argtypes and restype, and that what it points to still lives"
        )
    loaded = next((line for line in lines if line.startswith("Extension modules: ")), "")
    names = re.findall(r"[\w.]+", loaded.removeprefix("Extension modules: ").partition(" (total")[0])
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names if not name.startswith("_")))
    if place is None or not place.is_user or not tops:
        return "the call at that line enters C code; update or pin the package it belongs to"
    whose = tops[0] if len(tops) == 1 else f"one of {', '.join(tops[:4])}"
    return f"the call at that line enters C code, of {whose}: look at what is passed (sizes, dtypes), or update it"
