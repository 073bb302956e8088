"""A time of day for people: every command uses the time zone of the log's stamps and prints which one it is."""

from __future__ import annotations

import time


def clock(at_s: float, now_s: float | None = None) -> str:
    """'22:46:10 UTC'; with the date when that is not today."""
    moment, today = time.gmtime(at_s), time.gmtime(now_s)
    same_day = moment[:3] == today[:3]
    return time.strftime("%H:%M:%S UTC" if same_day else "%Y-%m-%d %H:%M:%S UTC", moment)
