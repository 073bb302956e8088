"""What torchrun and its relatives print when a rank has failed: a repetition that hides the rank's own error.

Owns recognising it line by line, for a viewer that shows a run while it is written and for the diagnosis. An error of
the launcher itself (a port in use, a rendezvous that failed) is no repetition and passes.
"""

from __future__ import annotations

import re

HEADER = "Traceback (most recent call last):"
# glog-like lines of the elastic agent: 'E1116 12:00:00.000000 4242 torch/distributed/elastic/...py:1003] failed ...'
_LOGGED = re.compile(r"[WEI]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (?:\S*/)?torch/distributed/elastic/")
_LOG_START = re.compile(r"[WEI](?:\d{1,4}|\d{4} .*)?")
_OF_LAUNCHER = re.compile(
    r'\s+File "(?:.*/bin/(?:torchrun|accelerate|accelerate-launch)|.*/torch/distributed/(?:run|launch)\.py'
    r'|.*/accelerate/commands/\w+\.py|<frozen runpy>)"'
)
_REPORT = re.compile(r"(?:[\w.]+\.)?(?:ChildFailedError|CalledProcessError|SignalException)\b")
_BORDER = re.compile(r"=+\s*$")
_MOST_HELD = 120
_MOST_TABLE = 400


class LauncherNoise:
    """Takes the lines of an output one by one and leaves out a launcher's report of failed ranks.

    A traceback whose outermost frame is a launcher's is held until its last line tells whether it is such a report.
    `num_folded` counts the lines left out.
    """

    def __init__(self) -> None:
        self.num_folded = 0
        self._held: list[str] = []
        self._table = 0  # lines of the table below the error; 0 outside
        self._borders = 0

    @property
    def is_holding(self) -> bool:
        return bool(self._held) or self._table > 0

    def is_of_interest(self, start: str) -> bool:
        """Whether a line that begins like this must be complete before it is shown."""
        is_header = HEADER.startswith(start) or start.startswith(HEADER)
        return self.is_holding or is_header or _LOG_START.fullmatch(start) is not None

    def feed(self, line: str) -> list[str]:
        """The lines to show now."""
        if self._table:
            return self._in_table(line)
        if self._held:
            return self._in_traceback(line)
        if line.startswith(HEADER):
            self._held = [line]
            return []
        if _LOGGED.match(line):
            self.num_folded += 1
            return []
        return [line]

    def release(self) -> list[str]:
        """What is held, when nothing more comes."""
        held, self._held, self._table = self._held, [], 0
        return held

    def _in_traceback(self, line: str) -> list[str]:
        is_foreign = len(self._held) == 1 and not _OF_LAUNCHER.match(line)
        self._held.append(line)
        if is_foreign or len(self._held) > _MOST_HELD:
            return self.release()
        if line.startswith((" ", HEADER)) or not line.strip():
            return []
        if not _REPORT.match(line):
            return self.release()
        self.num_folded += len(self._held)
        has_table = "ChildFailedError" in line
        self._held, self._table, self._borders = [], int(has_table), 0
        return []

    def _in_table(self, line: str) -> list[str]:
        self._borders += bool(_BORDER.match(line))
        if self._table == 1 and line.strip() and not self._borders:
            self._table = 0  # no table follows
            return self.feed(line)
        self._table = 0 if self._borders == 2 or self._table > _MOST_TABLE else self._table + 1
        self.num_folded += 1
        return []
