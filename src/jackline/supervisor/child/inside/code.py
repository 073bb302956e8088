# mypy: ignore-errors
"""Reads the bytecode around a frame's current instruction: which `with` blocks it is in, which method it calls.

Owns nothing but bytecode; the values come from `slots`. Names are looked up without running code of the user's.
"""

import builtins
import dis
import types

from _jackline_inside import slots

_LEAVES = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_CONST")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_TWO_LOCALS = ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
_MATH = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "%": lambda left, right: left % right if right else None,
    "//": lambda left, right: left // right if right else None,
}
_FILLERS = ("CACHE", "PRECALL", "PUSH_NULL", "NOP", "RESUME", "EXTENDED_ARG", "KW_NAMES")
_ENTERS = ("BEFORE_WITH", "LOAD_SPECIAL")
_AROUND_ENTER = (*_ENTERS, "COPY", "SWAP", "CALL", "PUSH_NULL")
_known = {}


class Code:
    """One code object: its instructions and the table of its exception handlers."""

    def __init__(self, code):
        self.instructions = [one for one in dis.get_instructions(code) if one.opname not in _FILLERS]
        self.at = {one.offset: number for number, one in enumerate(self.instructions)}
        self.entries = dis._parse_exception_table(code) if hasattr(dis, "_parse_exception_table") else []

    def number_at(self, offset):
        while offset >= 0 and offset not in self.at:
            offset -= 2
        return self.at.get(offset, 0)

    def covering(self, offset):
        return next((entry for entry in self.entries if entry.start <= offset < entry.end), None)

    def is_with(self, target):
        number = self.number_at(target)
        names = [one.opname for one in self.instructions[number : number + 2]]
        return names == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]

    def begin_of(self, target):
        return min(entry.start for entry in self.entries if entry.target == target)


def read_code(code):
    if code not in _known:
        _known[code] = Code(code)
    return _known[code]


def entered_blocks(frame):
    """(manager, name, line) of every `with` block the frame is in, the innermost first."""
    code = read_code(frame.f_code)
    at = frame.f_lasti
    found, offset, seen = [], at, set()
    while (entry := code.covering(offset)) is not None and entry.target not in seen:
        seen.add(entry.target)
        if code.is_with(entry.target):
            start = code.number_at(code.begin_of(entry.target)) - 1
            found.append((slots.entered(frame, at, entry.depth), *_name_before(code, start)))
        offset = entry.target
    return found


def entering(frame):
    """(manager, name) of the `with` statement whose `__enter__` is being called; None when there is none."""
    code = read_code(frame.f_code)
    at = frame.f_lasti
    number = code.number_at(at)
    current = code.instructions[number] if code.instructions else None
    if current is None or not _is_enter(code, number):
        return None
    after = [entry for entry in code.entries if entry.start > current.offset and code.is_with(entry.target)]
    entry = min(after, key=lambda one: one.start, default=None)
    manager = slots.entered(frame, at, entry.depth) if entry else None
    name, _ = _name_before(code, number)
    if manager is None:
        manager = _value_before(frame, code, number)
    return manager, name


def _is_enter(code, number):
    current = code.instructions[number]
    before = code.instructions[number - 1].opname if number else ""
    return current.opname == "BEFORE_WITH" or (current.opname == "CALL" and before == "LOAD_SPECIAL")


def _last_of_expression(code, number):
    while number >= 0 and code.instructions[number].opname in _AROUND_ENTER:
        number -= 1
    return number


def _name_before(code, number):
    last = _last_of_expression(code, number)
    parsed = parse_chain(code, last)
    line = code.instructions[max(0, last)].positions.lineno or 0
    return (chain_text(parsed[0]) if parsed else ""), line


def _value_before(frame, code, number):
    parsed = parse_chain(code, _last_of_expression(code, number))
    return value_of(frame, parsed[0]) if parsed else None


def calling(frame, names):
    """(object, method name, text) of the method call that the frame is in, if its name is one of `names`."""
    code = read_code(frame.f_code)
    number = code.number_at(frame.f_lasti)
    for at in range(number, max(-1, number - 64), -1):
        one = code.instructions[at]
        if one.opname in _ATTRIBUTES and one.argval in names and _starts_together(one, code.instructions[number]):
            parsed = parse_chain(code, at - 1)
            if parsed:
                return value_of(frame, parsed[0]), one.argval, chain_text(parsed[0], frame)
            return None, one.argval, ""
    return None


def _starts_together(one, other):
    """A call begins where the expression of its method begins."""
    if one.positions is None or other.positions is None or one.positions.lineno is None:
        return True
    return (one.positions.lineno, one.positions.col_offset) == (other.positions.lineno, other.positions.col_offset)


def calls_before(frame, names):
    """(object, method name, text, line) of method calls above the frame's current instruction, in order."""
    if not any(name in frame.f_code.co_names for name in names):
        return []
    code = read_code(frame.f_code)
    current = code.number_at(frame.f_lasti)
    found = []
    for at, one in enumerate(code.instructions[:current]):
        if one.opname in _ATTRIBUTES and one.argval in names:
            parsed = parse_chain(code, at - 1)
            value = value_of(frame, parsed[0]) if parsed else None
            found.append(
                (value, one.argval, chain_text(parsed[0], frame) if parsed else "", one.positions.lineno or 0)
            )
    return found


def parse_chain(code, number):
    """(chain, number of its first instruction) of the expression that ends at `number`; None if it is more than
    names, attributes, subscripts and arithmetic of numbers."""
    if number < 0:
        return None
    one = code.instructions[number]
    if one.opname in _LEAVES or one.opname in _LOCALS:
        return (("name" if one.opname != "LOAD_CONST" else "value", one.argval),), number
    if one.opname in _TWO_LOCALS:
        return (("name", one.argval[1]),), number
    if one.opname in _ATTRIBUTES:
        inner = parse_chain(code, number - 1)
        return (((*inner[0], ("attribute", one.argval)), inner[1])) if inner else None
    if one.opname == "BINARY_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr == "[]"):
        index = parse_chain(code, number - 1)
        inner = parse_chain(code, index[1] - 1) if index else None
        return (((*inner[0], ("item", index[0])), inner[1])) if inner else None
    return _parse_math(code, number) if one.opname == "BINARY_OP" and one.argrepr in _MATH else None


def _parse_math(code, number):
    right = parse_chain(code, number - 1)
    if right is None or code.instructions[right[1]].opname in _TWO_LOCALS:
        return None  # that one instruction holds a part of the left side, too
    left = parse_chain(code, right[1] - 1)
    return ((("math", (left[0], code.instructions[number].argrepr, right[0])),), left[1]) if left else None


def chain_text(chain, frame=None):
    """The expression as text; an index by its value in `frame`, so that one lock has one name."""
    text = ""
    for kind, what in chain:
        if kind == "item":
            index = value_of(frame, what) if frame is not None else None
            text += f"[{index!r}]" if type(index) in (int, str) else f"[{chain_text(what)}]"
        elif kind == "math":
            text += f"({chain_text(what[0])} {what[1]} {chain_text(what[2])})"
        else:
            text += f".{what}" if kind == "attribute" else str(what)[:40]
    return text[:80]


def value_of(frame, chain):
    value = None
    for kind, what in chain:
        if kind == "value":
            value = what
        elif kind == "name":
            value = _variable(frame, what)
        elif kind == "attribute":
            value = plain_attribute(value, what)
        elif kind == "math":
            value = _computed(value_of(frame, what[0]), what[1], value_of(frame, what[2]))
        else:
            value = _item(value, value_of(frame, what))
        if value is None:
            return None
    return value


def _computed(left, sign, right):
    """Only of small numbers: an operator of another type would be code of the user's."""
    is_plain = type(left) is int and type(right) is int and max(abs(left), abs(right)) < 1 << 40
    return _MATH[sign](left, right) if is_plain else None


def _variable(frame, name):
    value = slots.local(frame, name)
    if value is None:
        value = frame.f_globals.get(name)
    return vars(builtins).get(name) if value is None else value


def _item(value, index):
    if type(value) in (list, tuple) and type(index) is int and -len(value) <= index < len(value):
        return value[index]
    return value.get(index) if type(value) is dict and type(index) in (str, int) else None


def plain_attribute(value, name):
    """An attribute that is stored in the object, its class or a slot. No property and no `__getattr__` is called."""
    try:
        stored = object.__getattribute__(value, "__dict__")
    except Exception:
        stored = {}
    if isinstance(stored, dict) and name in stored:
        return stored[name]
    for kind in getattr(value if isinstance(value, type) else type(value), "__mro__", ()):
        found = vars(kind).get(name)
        if isinstance(found, types.MemberDescriptorType):
            try:
                return found.__get__(value)
            except AttributeError:
                return None
        if found is not None and not hasattr(type(found), "__get__"):
            return found
    return None
