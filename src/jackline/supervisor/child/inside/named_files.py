# ruff: noqa: PTH100, PTH113, PTH202, SIM905
# mypy: ignore-errors
"""Which file an error was about whose message names none: damaged JSON, text, pickles, archives, images.

Owns looking for files in the variables of the frames that the error came through, and proving which one it is by
finding there the text that could not be read. Only names, lines and offsets leave this module. It calls nothing of
the user's: types are compared exactly, and attributes are read from where they are stored.
"""

import io
import os
import sys
import time

from _jackline_inside import scopes

_KINDS = frozenset(
    "JSONDecodeError UnicodeDecodeError UnpicklingError EOFError BadZipFile ReadError BadGzipFile LZMAError error"
    " Error SafetensorError ParserError EmptyDataError UnidentifiedImageError ArrowInvalid TOMLDecodeError"
    " ValueError RuntimeError OSError".split()
)
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)
_WITH_POSITION = (io.BufferedReader, io.BufferedRandom, io.FileIO)
_NAMES = ("path", "file", "filename", "fname", "filepath", "filepath_or_buffer", "fp", "fileobj", "fd", "f", "name")
_STORED = (*_NAMES, "_filename", "_fp", "_file", "_path", "handle", "handles", "_io", "buffer")
_MOST_FRAMES, _MOST_NAMES, _MOST_FILES = 40, 200, 4
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")  # what they hold is not found in their bytes
_MOST_BYTES, _PART_BYTES = 512 << 20, 4 << 20
_PATIENCE_S = 2.0
_FEW_BYTES = 8
_FAR = frozenset("nfs nfs4 cifs smb3 smbfs 9p virtiofs lustre ceph glusterfs afs beegfs gpfs pvfs2 orangefs".split())
_mounts = {}  # folder -> whether it is on a network
_MOST_AROUND = 64  # white space, and a mark of the byte order
_LONGEST_PATH = 4096


def files_of(error, frames):
    """[{path, line, column, is_proved, is_whole, is_open, at_byte}], the proved one alone if there is one."""
    if type(error).__name__ not in _KINDS or getattr(error, "filename", None):
        return []
    found = {}
    for frame, _ in frames[:_MOST_FRAMES]:
        if not frame.f_code.co_filename.startswith(scopes.PACKAGE):
            for path, facts in _named_in(frame):
                known = found.setdefault(path, {"path": path, **facts})
                known.update(facts if facts["is_file"] else {})
        if len(found) >= 4 * _MOST_FILES:
            break
    needle = _unreadable(error)
    if needle is not None:
        until_s = time.monotonic() + _PATIENCE_S
        places = (
            (one, _place_in(one["path"], error, needle, until_s)) for one in found.values() if _may_prove(one, needle)
        )
        proved = [{**one, **place} for one, place in places if place]
        packed = [one for one in found.values() if one["is_file"] and one["path"].endswith(_PACKED)]
        return proved[:1] or packed[:_MOST_FILES]
    line = _line_of_csv(frames)
    sure = [one for one in found.values() if one["is_file"]]
    return [{**one, "line": line} for one in (sure or list(found.values()))[:_MOST_FILES]]


def _named_in(frame):
    """(path, facts) of the files that a frame's variables name."""
    code = frame.f_code
    is_library = code.co_filename.startswith((scopes._LIBRARY, "<frozen")) or "-packages" in code.co_filename
    is_module = not code.co_flags & 0x1
    values = dict(frame.f_globals) if is_module else scopes.slots_local(frame)
    if is_library:
        values = {name: value for name, value in values.items() if name in (*_NAMES, "self")}
    else:
        values.update((name, frame.f_globals[name]) for name in code.co_names if name in frame.f_globals)
        texts = [one for one in code.co_consts if type(one) is str]
        values.update((f"constant {number}", text) for number, text in enumerate(texts[:_MOST_NAMES]))
    for name, value in list(values.items())[:_MOST_NAMES]:
        if not name.startswith("__"):
            yield from _files_in(value, 2 if name == "self" or is_library else 1)


def _files_in(value, depth):
    """The file that a value is or names; one that an object keeps, as archives keep theirs."""
    kind = type(value)
    if kind in (str, bytes) or kind.__module__.startswith("pathlib"):
        path = _path_of(value)
        if path and _is_near_file(path) and not path.endswith((".py", ".pyc")):
            yield os.path.abspath(path), {"is_file": False}
    elif kind in _FILES:
        yield from _file(value)
    elif depth and not isinstance(value, type):
        try:
            stored = object.__getattribute__(value, "__dict__")
        except Exception:
            return
        if isinstance(stored, dict):
            kept = [one for name, one in list(stored.items())[:_MOST_NAMES] if name in _STORED or depth > 1]
            for one in kept:
                for path, facts in _files_in(one, depth - 1):
                    yield path, {**facts, "is_file": facts["is_file"] or "-packages" in _file_of(kind)}


def _file_of(kind):
    module = sys.modules.get(kind.__module__)
    return str(getattr(module, "__file__", "") or "")


def _is_near_file(path):
    """A disk whose server is gone would hold a process that is about to end, and nobody could start it again. No path
    on a mount of a network or of FUSE is touched."""
    path = os.path.abspath(path)
    if not _mounts:
        _mounts.update(_read_mounts())
    nearest = max((mount for mount in _mounts if path.startswith(mount)), key=len, default="/")
    return not _mounts.get(nearest, False) and os.path.isfile(path)


def _read_mounts():
    with open("/proc/self/mounts") as lines:
        for line in lines:
            _, folder, kind = line.split(" ")[:3]
            folder = folder.encode().decode("unicode_escape").rstrip("/") + "/"
            yield folder, kind.startswith("fuse") or kind in _FAR


def _path_of(value):
    try:
        path = os.fsdecode(value) if type(value) in (str, bytes) else os.fspath(value)
    except Exception:
        return ""
    is_plain = 0 < len(path) <= _LONGEST_PATH and "\n" not in path and "\0" not in path
    return path if is_plain else ""


def _file(file):
    try:
        path = os.fsdecode(file.name) if type(file.name) in (str, bytes) else ""
        if not path or not _is_near_file(path):
            return
        is_open = not file.closed
        at_byte = file.tell() if is_open and type(file) in _WITH_POSITION else None
    except Exception:
        return
    yield os.path.abspath(path), {"is_file": True, "is_open": is_open, "at_byte": at_byte}


def _line_of_csv(frames):
    """The line that a csv reader has come to, if there is just one."""
    module = sys.modules.get("_csv")
    kinds = [type(module.reader(()))] if module is not None else []
    lines = set()
    for frame, _ in frames[:_MOST_FRAMES]:
        is_module = not frame.f_code.co_flags & 0x1
        values = dict(frame.f_globals) if is_module else scopes.slots_local(frame)
        for value in list(values.values())[:_MOST_NAMES]:
            inner = getattr(value, "reader", None) if type(value).__module__ == "csv" else value
            if type(inner) in kinds:
                lines.add(inner.line_num)
    return lines.pop() if len(lines) == 1 else None


# -- the proof ------------------------------------------------------------------------------------------------------


def _unreadable(error):
    """The bytes that could not be read, which the error keeps; None where it keeps none."""
    text = getattr(error, "doc", None) if type(error).__name__ == "JSONDecodeError" else None
    if type(text) is str:
        return text.strip().encode("utf-8", "surrogateescape")
    if type(text) is bytes:
        return text.strip()
    return bytes(error.object) if type(error) is UnicodeDecodeError else None


def _may_prove(one, needle):
    """A few bytes stand in many files, and no bytes in any empty one: then the code must have had it open."""
    return one["is_file"] or len(needle) >= _FEW_BYTES


def _place_in(path, error, needle, until_s):
    """{line, column, ...} of the error in this file; None where the file does not hold that text."""
    size = os.path.getsize(path)
    if not size and not needle:
        return {"is_proved": True, "is_whole": True, "is_empty": True}
    if not needle or not 0 < size <= _MOST_BYTES:
        return None
    import mmap

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = _find(data, needle, 0, until_s)
        if type(error) is UnicodeDecodeError:
            return _place_of_byte(data, at + error.start) if at >= 0 else None
        # A short text stands in many files, and in front of longer ones: it must be a whole line, or all of the file.
        while at >= 0 and not _is_line(data, at, len(needle)):
            at = _find(data, needle, at + 1, until_s)
        if at < 0:
            return None
        above = error.doc[: len(error.doc) - len(error.doc.lstrip())].count("\n")
        below = min(max(0, error.lineno - 1 - above), needle.count(b"\n"))  # its own line's end is not in the needle
        is_whole = len(data) <= len(needle) + _MOST_AROUND and not (data[:at] + data[at + len(needle) :]).strip()
        line = _count_lines(data, at) + 1 + below
        return {"is_proved": True, "line": line, "column": error.colno, "is_whole": is_whole}


def _place_of_byte(data, at):
    column = at - data.rfind(b"\n", 0, at)
    return {"is_proved": True, "line": _count_lines(data, at) + 1, "column": column, "is_whole": False}


def _is_line(data, at, length):
    before = data[data.rfind(b"\n", 0, at) + 1 : at]
    after = data[at + length : at + length + _MOST_AROUND].partition(b"\n")[0]
    return not before.strip(b"\xef\xbb\xbf \t") and not after.strip()


def _find(data, needle, first, until_s):
    """By parts: a file on a slow disk must not hold up the end of the program."""
    for start in range(first, len(data), _PART_BYTES):
        at = data.find(needle, start, start + _PART_BYTES + len(needle))
        if at >= 0 or time.monotonic() > until_s:
            return at
    return -1


def _count_lines(data, end):
    count, at = 0, 0
    while at < end:
        count += data[at : min(end, at + (1 << 20))].count(b"\n")
        at += 1 << 20
    return count
