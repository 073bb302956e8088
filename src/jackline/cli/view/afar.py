"""Follows a run of another machine: through a folder that both see, or through copies of its records in a mirror.

Nothing of it is touched. What it prints comes from its log, what it does from its supervisor's records. Both are
as old as those. showing.py and viewer.py follow runs of this machine.
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

from jackline.cli.commands.logs import tail_offset
from jackline.cli.text.paint import Tone
from jackline.cli.text.safety import safe_output
from jackline.cli.view.live_line import live_line
from jackline.cli.view.screen import MARK, Screen
from jackline.cli.view.viewer import open_screen
from jackline.errors import EXIT_FAILED, UsageError
from jackline.rundir.access.reading import offset_after, read_part
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import read_session
from jackline.rundir.registry import is_copy
from jackline.rundir.status import RunStatus, read_status, stale_after_s
from jackline.units import format_duration

if TYPE_CHECKING:
    from jackline.cli.mirrored import Renewing

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 60.0  # in a pipe
SHOWN_LINES = 200
_MOST_BYTES, _KNOWN_BYTES = 4 << 20, 1000
_STAMP = re.compile(rb"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\dZ (\[jackline\] )?", re.MULTILINE)


class LogSince:
    """What a log says beyond what was shown. A copy holds the end of a long log, so it is found by its last lines."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.out_log
        self._offset = tail_offset(self._path, SHOWN_LINES)
        self._last = b""

    def read(self) -> bytes:
        """Whole lines. Only what is new is read: a log may have gigabytes, and lie on a network."""
        try:
            self._offset = offset_after(self._path, self._offset, self._last, _MOST_BYTES) or 0
            data = read_part(self._path, self._offset, _MOST_BYTES)
        except FileNotFoundError:  # nothing was printed yet
            return b""
        new = data[: data.rfind(b"\n") + 1]
        self._offset += len(new)
        self._last = (self._last + new)[-_KNOWN_BYTES:]
        return new


def follow_from_afar(run: RunDir, renewing: Renewing | None, *, is_quiet: bool = False) -> int:
    """Until it has ended, with its exit code, or until Ctrl-C."""
    refuse_silent(run, read_status(run))
    screen, log = open_screen(is_quiet=is_quiet), LogSince(run)
    through = "its mirror" if is_copy(run) else f"the folder {run.path.parent}"
    screen.say(f"watching run '{run.name}' of '{host_of(read_status(run))}' through {through}; Ctrl-C leaves")
    said_s, trouble = float("-inf"), ""
    try:
        while True:
            _show(screen, log.read())
            status = read_status(run)
            if (code := _end(screen, run, status)) is not None:
                return code
            said_s = _say(screen, run, status, said_s)
            time.sleep(LOOK_EVERY_S)
            if renewing is not None and renewing.trouble != trouble:
                trouble = renewing.trouble
                screen.say(f"{trouble}; trying again" if trouble else "the mirror can be read again", "warn")
    except KeyboardInterrupt:
        screen.clear_status()
        screen.say("detached: the run continues")
        return 128 + 2


def refuse_silent(run: RunDir, status: RunStatus) -> None:
    """Raise when nothing new can be expected: an old copy would be watched for ever."""
    age_s = _age_s(status)
    if _is_over(status) or not status.is_stale:
        return
    since = f", last heard of {format_duration(age_s)} ago" if age_s < math.inf else ""
    raise UsageError(
        f"run '{run.name}' runs on '{host_of(status)}', not here{since}",
        hint=f"watch it there, or read what is here: jackline logs {run.name}",
    )


def host_of(status: RunStatus) -> str:
    known = status.child or status.supervisor
    return known.host if known else "another machine"


def _show(screen: Screen, data: bytes) -> None:
    if data:
        screen.show(safe_output(_STAMP.sub(lambda found: MARK.encode() if found[1] else b"", data), with_colors=True))


def _end(screen: Screen, run: RunDir, status: RunStatus) -> int | None:
    if not _is_over(status):
        return None
    screen.clear_status()
    screen.say(f"run '{run.name}' {status.end_words}; `jackline why` tells more")
    code = status.exit_code
    return EXIT_FAILED if code is None else 128 - code if code < 0 else code


def _say(screen: Screen, run: RunDir, status: RunStatus, said_s: float) -> float:
    """What it does; on a screen a line that stays at the bottom, in a pipe one from time to time."""
    now_s, wall_s, state = time.monotonic(), time.time(), status.supervisor_state
    is_plain = screen.surface == "plain"
    if is_plain and now_s - said_s < SAY_EVERY_S:
        return said_s
    age_s = _age_s(status)
    age = format_duration(age_s)
    tone: Tone = "warn"
    if age_s > stale_after_s(run, is_afar=True):
        text = f"not heard of for {age}: its machine may be down, or cut off"
    else:
        room = None if is_plain else screen.columns - len(MARK) - len(age) - 8
        line = live_line(state, read_session(run), state.at_s or wall_s, columns=room)
        text, tone = f"{age} ago: {line.text}" if is_copy(run) else line.text, line.tone
    if is_plain:
        screen.say(text, tone)
    else:
        screen.set_status(text, tone)
    return now_s


def _is_over(status: RunStatus) -> bool:
    return status.state not in ("alive", "unwatched", "elsewhere")


def _age_s(status: RunStatus) -> float:
    """Of the newest sign of life."""
    at_s = status.supervisor_state.at_s
    return math.inf if at_s is None else max(0.0, time.time() - at_s)
