# mypy: ignore-errors
"""The variables of frames: how a script names what it trains with, and where it stood when it was left.

Reads frames of this thread without side effects on them, and those of another thread that is inside a call.
"""

import os
import sys

_MOST_FRAMES = 60
PACKAGE = __file__.rpartition("/supervisor/child/")[0]
_LIBRARY = os.path.dirname(os.__file__)


def traced(trace):
    """The frames of a traceback, innermost first, with the lines at which they were left."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1][:_MOST_FRAMES]


def listed(frame):
    frames = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def scopes(frame, is_own_thread=True):
    return scopes_of(listed(frame), slots_local if is_own_thread else local_of_another)


def scopes_of(frames, read):
    """[(file, function, line, names, is_own)], innermost first, without Jackline's own; the script's globals last."""
    found, seen = [], set()
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            continue
        is_module = not frame.f_code.co_flags & 0x1  # CO_OPTIMIZED
        if is_module:
            seen.add(id(frame.f_globals))
        names = dict(frame.f_globals) if is_module else read(frame)
        is_own = not (file.startswith((_LIBRARY, "<frozen")) or "-packages" in file)
        found.append((file, frame.f_code.co_name, line, names, is_own))
    main = sys.modules.get("__main__")
    if main is not None and id(main.__dict__) not in seen:
        found.append((str(getattr(main, "__file__", "")), "<module>", 0, dict(main.__dict__), True))
    return found


def slots_local(frame):
    """Variables of a frame of this thread, without side effects on it."""
    from _jackline_inside import slots

    names = slots.slot_names(frame.f_code)
    return {name: value for name in names if (value := slots.local(frame, name)) is not None}


def local_of_another(frame):
    """Variables of a frame that another thread may be running: one call into C, during which it cannot run. Before
    Python 3.13 this leaves a dictionary with the frame, from which tensors are removed, so that none lives longer."""
    stored = frame.f_locals
    names = dict(stored)
    if sys.version_info < (3, 13):
        for name, value in names.items():
            if type(value).__name__ == "Tensor":
                stored.pop(name, None)
    return names
