"""Checks whether TensorBoard's curves belong to what is running now, or are left from before.

Owns only that question; reads the times of files, not their contents. Old curves beside a live run have made people
look for a bug that did not exist, and have hidden one that did.
"""

from __future__ import annotations

from pathlib import Path

from jackline.immutable import immutable
from jackline.rundir.layout import RunDir
from jackline.units import format_duration

# Curves are written with every line of metrics; a delay of a few minutes is a long validation or a slow disk.
BEHIND_S = 300.0


@immutable
class Curves:
    """When the newest event file and the newest metrics were written; None if there are none."""

    event_file_at_s: float | None = None
    metrics_at_s: float | None = None


def read_curves(run: RunDir) -> Curves:
    return Curves(_newest(run.tensorboard, "*tfevents*"), _newest(run.path, "metrics-*.jsonl"))


def _newest(folder: Path, pattern: str) -> float | None:
    times = []
    for path in folder.glob(pattern):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue  # removed since it was listed
    return max(times, default=None)


def stale_curves(curves: Curves, started_at_s: float | None) -> str:
    """What is wrong with the curves; '' when nothing is."""
    event_s, metrics_s = curves.event_file_at_s, curves.metrics_at_s
    if event_s is None or metrics_s is None or metrics_s - event_s < BEHIND_S:
        return ""
    behind = f"TensorBoard's files are {format_duration(metrics_s - event_s)} behind the run's own numbers"
    if started_at_s is not None and event_s < started_at_s:
        return f"{behind}, from before this attempt began: its curves are not what runs now"
    return f"{behind}: its curves have stopped"
