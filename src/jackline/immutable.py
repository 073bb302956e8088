"""`@immutable` is `@dataclass(frozen=True)` for classes that many processes import and few use.

The methods of a dataclass are compiled when it is declared, which takes 0.6 ms: with hundreds of them that was half
of the time in which a supervisor starts. Here it happens at the first instance, or when somebody asks for the fields.
From then on the class is an ordinary frozen dataclass.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, TypeVar, dataclass_transform

_Class = TypeVar("_Class", bound=type)
_FIELDS = "__dataclass_fields__"  # where dataclasses.fields, replace and asdict look
# Reentrant, because the fields of a base class are asked for while a class is made.
_lock = threading.RLock()


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def immutable(cls: _Class) -> _Class:
    """Declare `cls` now, make it a dataclass when it is needed."""
    is_made = False

    def make() -> None:
        nonlocal is_made
        with _lock:
            if not is_made:
                delattr(cls, _FIELDS)
                dataclasses.dataclass(frozen=True)(cls)
                is_made = True

    def new(kind: type, /, *_args: Any, **_named: Any) -> Any:
        if not is_made:
            make()
        return object.__new__(kind)

    # Stays for good: instances that are made without __init__, as by pickle and copy, come by here too.
    cls.__new__ = new  # type: ignore[method-assign]
    setattr(cls, _FIELDS, _Fields(make))
    return cls


class _Fields:
    """In the place of the fields, until somebody looks at them."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __get__(self, _instance: object, owner: type) -> Any:
        self._make()
        return getattr(owner, _FIELDS)
