# mypy: ignore-errors
"""Reads local variables and the value stack of a running frame, without side effects on it.

`frame.f_locals` would create or refresh a dictionary that the user's code may hold (`locals()`), and keep large
objects alive. So the slots are read from memory. Their place differs between versions of Python; it is found once,
with a frame of our own whose values are known. Where it is not found, nothing is read.
The frames of other threads run on whenever Python lets another thread run, so a word that was read may be the address
of nothing by now. `_take` makes an object of it in the same instant in which it sees that the frame still stands.
"""

import os
import struct
import sys
import types

_WORD = struct.calcsize("P")
_MOST_HEAD_WORDS, _MOST_FRAME_WORDS = 10, 32
_TAGS = 3  # Python 3.14 marks borrowed references in the lowest bits
_METHODS = (types.BuiltinMethodType, types.MethodType, type(object().__str__))
_layout = {}


def _read_words(address, count):
    fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, count * _WORD, address)
        return struct.unpack(f"{len(data) // _WORD}P", data)
    except (OSError, OverflowError, struct.error):
        return ()
    finally:
        os.close(fd)


def _find_layout():
    """(word of the frame object that points to its data, word of the first local in that data)."""
    first, second, third = object(), object(), object()
    known = [id(first), id(second), id(third)]
    frame = sys._getframe()
    for at, address in enumerate(_read_words(id(frame), _MOST_HEAD_WORDS)):
        words = [word & ~_TAGS for word in _read_words(address, _MOST_FRAME_WORDS)] if address > 4096 else []
        for start in range(len(words) - 2):
            if words[start : start + 3] == known:
                return at, start
    return None


def _place():
    if "place" not in _layout:
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()  # without it no instant is one's own
        try:
            _layout["place"] = _find_layout() if sys.version_info >= (3, 11) and has_lock else None
        except Exception:
            _layout["place"] = None
    return _layout["place"]


def slot_names(code):
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    return [*code.co_varnames, *cells, *code.co_freevars]


def _slot(frame, index):
    """The object in one slot; None for an empty one."""
    return _take(frame, frame.f_lasti, index, None)


def _take(frame, at, index, kinds):
    """The object in a slot, while the frame stands at the instruction `at`; None for an empty slot, one whose object
    has none of these types, and one that changes meanwhile."""
    place = _place()
    if place is None or _is_watched():
        return None
    import ctypes  # 5 ms, only where a process stands still

    head = (_read_words(id(frame) + place[0] * _WORD, 1) or (0,))[0]
    where = head + (place[1] + index) * _WORD
    word = (_read_words(where, 1) or (0,))[0] if head else 0
    address = word & ~_TAGS
    # Only what has a type that is expected there becomes an object.
    if not address or (kinds is not None and (_read_words(address + _WORD, 1) or (0,))[0] not in kinds):
        return None
    copy = ctypes.c_size_t(address)
    found = ctypes.py_object.from_address(ctypes.addressof(copy))
    data = ctypes.c_size_t.from_address(id(frame) + place[0] * _WORD)
    slot = ctypes.c_size_t.from_address(where)
    # One line without a call: Python lets no other thread run before its end. A frame that has ended has its data
    # elsewhere; one that still stands there keeps what is in its slot.
    return found.value if frame.f_lasti == at and data.value == head and slot.value == word else None


def _is_watched():
    """A debugger or a measurement of coverage may run code of its own in the middle of a line."""
    tools = getattr(sys, "monitoring", None)
    has_tools = tools is not None and any(tools.get_tool(number) is not None for number in range(6))
    return has_tools or sys.gettrace() is not None or sys.getprofile() is not None


def local(frame, name):
    """The value of a local variable; None where it is unset or cannot be read."""
    code = frame.f_code
    if not code.co_flags & 0x1:  # CO_OPTIMIZED: a module or class body keeps its names in a dictionary
        return frame.f_locals.get(name) if isinstance(frame.f_locals, dict) else None
    names = slot_names(code)
    if name not in names:
        return None
    value = _slot(frame, names.index(name))
    if isinstance(value, types.CellType):
        try:
            return value.cell_contents
        except ValueError:
            return None
    return value


def entered(frame, at, depth):
    """The context manager whose `__exit__` is at this depth of the value stack, while the frame stands at the
    instruction `at`; None where it cannot be read.

    While a `with` block runs, Python keeps the bound `__exit__` there. During the call of `__enter__` some versions
    keep the manager itself.
    """
    if depth < 1:
        return None
    found = _take(frame, at, len(slot_names(frame.f_code)) + depth - 1, _known_types())
    return found.__self__ if isinstance(found, _METHODS) else found


def _known_types():
    if "types" not in _layout:
        import _thread

        found = [*_METHODS, type(_thread.allocate_lock()), _thread.RLock]
        found += [module.SemLock for name in ("_multiprocessing",) if (module := sys.modules.get(name))]
        _layout["types"] = {id(kind) for kind in found}
    return _layout["types"]
