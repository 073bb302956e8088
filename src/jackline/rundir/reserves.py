"""Disk space that is kept for the records of a run's end, so that a full disk cannot hide how it ended.

A few hundred KiB in files named .NAME.spareN beside the records (atomic.py). Owns which records have one and how
large. What no reserve can help against is a disk that has become read-only.
"""

from __future__ import annotations

from jackline.rundir.atomic import drop_spares, keep_spares
from jackline.rundir.layout import AttemptDir, RunDir

STATE_BYTES = 32 << 10  # supervisor.json and session-0.json: 3 to 10 KiB
EXIT_BYTES = 128 << 10  # exit.json: with the last 200 lines of output
SMALL_BYTES = 8 << 10


def reserve_records(run: RunDir, attempt: AttemptDir, *, is_supervised: bool) -> bool:
    """Reserve the space, when an attempt starts. False when there is no room for it even then."""
    found = [keep_spares(attempt.exit_file, EXIT_BYTES), keep_spares(attempt.intent_file, SMALL_BYTES)]
    if is_supervised:
        # Replaced each second, also while the disk is full: what is shown of a run must not be out of date.
        found.append(keep_spares(run.supervisor_file, STATE_BYTES, count=2))
        found.append(keep_spares(run.stop_request, SMALL_BYTES))
    else:
        found.append(keep_spares(attempt.start_file, SMALL_BYTES))
    return all(found)


def reserve_session(run: RunDir, rank: int) -> bool:
    return keep_spares(run.session_file(rank), STATE_BYTES, count=2)


def release_records(run: RunDir, attempt: AttemptDir) -> None:
    """Give the space back when the attempt's end is recorded."""
    for path in (attempt.exit_file, attempt.intent_file, attempt.start_file, attempt.wait_file):
        drop_spares(path)
    for path in (run.supervisor_file, run.stop_request, *run.session_files()):
        drop_spares(path)
