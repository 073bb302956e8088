"""Mirrors a run of a user's own script: uploads its record and its newest complete checkpoint to a second place.

Runs in a process of its own (`start_mirror`) at its own interval, so a slow, hanging or broken store delays nothing
else. Layout:

    NAME/run-000012.tar.gz                     settings, events, findings, end of the log
    NAME/foreign/step-0040.pt-17a4.../         the checkpoint's files; where.json is written last and makes it valid

Owns mirror.json in the run. Jackline's own checkpoints are mirrored by `checkpoint.mirror`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jackline.checkpoint.mirror.bundle import pack_run
from jackline.checkpoint.mirror.store import Store, open_store
from jackline.machine.priority import step_back
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify, is_alive
from jackline.rundir.run_file import read_run_file
from jackline.supervisor.foreign.find import ForeignCheckpoint, list_checkpoints
from jackline.supervisor.foreign.find import newest_whole as newest_whole_of
from jackline.supervisor.options import SuperviseOptions

EVERY_S = 60.0
POLL_S = 0.5
STORIES_KEPT = 3
CHECKPOINTS_KEPT = 2
LAST_TRIES = 3
WHERE = "where.json"
_PACKAGE_PARENT = Path(__file__).parents[3]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from jackline.supervisor.foreign.mirror import main; main(sys.argv[2:])"
)


def start_mirror(run: RunDir, options: SuperviseOptions, *, every_s: float = EVERY_S) -> subprocess.Popen[bytes]:
    """Start a mirror process that runs as long as this process and uploads once more after it has exited."""
    words = [str(run.path), options.mirror or "", options.checkpoints or "", str(every_s), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, str(_PACKAGE_PARENT), *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(words: list[str]) -> None:
    path, place, pattern, every, owner_pid = words
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    step_back(10)
    keep_mirrored(RunDir(Path(path)), place, pattern, every_s=float(every), owner=identify(int(owner_pid)))


def keep_mirrored(run: RunDir, place: str, pattern: str, *, every_s: float, owner: ProcessId | None) -> None:
    """Upload until the owner has exited, then until one more upload has succeeded."""
    state: dict[str, Any] = {"place": place, "story_at_s": None, "checkpoint": None, "trouble": None}
    next_s = 0.0
    while is_alive(owner):
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + every_s
            upload(run, place, pattern, state)
        time.sleep(POLL_S)
    for again in range(LAST_TRIES):
        if upload(run, place, pattern, state):
            return
        time.sleep(2.0 * 2**again)


def upload(run: RunDir, place: str, pattern: str, state: dict[str, Any]) -> bool:
    """Upload the newest complete checkpoint, then the record that names it. False when it must be tried again."""
    try:
        store = open_store(place)
        checkpoint = newest_whole(run, pattern) if pattern else None
        if checkpoint is not None and upload_checkpoint(store, run, checkpoint):
            state["checkpoint"] = {"path": str(checkpoint.path), "at_s": checkpoint.mtime_s}
        upload_story(store, run)
        state.update(story_at_s=time.time(), trouble=None)
    except Exception as problem:  # stores may raise any type of exception
        state["trouble"] = {"why": str(problem)[:300] or type(problem).__name__, "at_s": time.time()}
    with contextlib.suppress(OSError):
        atomic.write_json(run.mirror_file, state)
    return state["trouble"] is None


def newest_whole(run: RunDir, pattern: str) -> ForeignCheckpoint | None:
    contents = read_run_file(run)
    found = list_checkpoints(pattern, Path(contents.cwd))
    ours = [checkpoint for checkpoint in found if checkpoint.mtime_s >= contents.created_at_s - 1.0]
    return newest_whole_of(ours, set())


def upload_checkpoint(store: Store, run: RunDir, checkpoint: ForeignCheckpoint) -> bool:
    """True when the store has it, now or from before. A folder in the store is valid only with its where.json."""
    folder = f"{run.name}/foreign"
    name = f"{checkpoint.path.name}-{int(checkpoint.mtime_s * 1e6):x}"
    place = f"{folder}/{name}"
    if WHERE in store.names(place):
        return True
    if store.names(place):
        store.delete(place)  # an upload that was interrupted
    cwd = Path(read_run_file(run).cwd)
    files = list_files(checkpoint.path)
    for file in files:
        store.put(file, f"{place}/{file.relative_to(checkpoint.path.parent).as_posix()}")
    where = {
        "relative": os.path.relpath(checkpoint.path, cwd),
        "files": [[file.relative_to(checkpoint.path.parent).as_posix(), file.stat().st_size] for file in files],
        "mtime_s": checkpoint.mtime_s,
    }
    store.put_bytes(json.dumps(where).encode(), f"{place}/{WHERE}")
    for old in whole_checkpoints(store, run.name)[CHECKPOINTS_KEPT:]:
        store.delete(f"{folder}/{old}")
    return True


def whole_checkpoints(store: Store, name: str) -> list[str]:
    """Folders of finished uploads, newest first."""
    folder = f"{name}/foreign"
    found = [entry for entry in store.names(folder) if WHERE in store.names(f"{folder}/{entry}")]
    return sorted(found, key=lambda entry: int(entry.rpartition("-")[2], 16), reverse=True)


def list_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def upload_story(store: Store, run: RunDir) -> None:
    known = sorted(name for name in store.names(run.name) if name.startswith("run-"))
    numbers = [int(name[4:10]) for name in known if name[4:10].isdigit()]
    store.put_bytes(pack_run(run), f"{run.name}/run-{max(numbers, default=0) + 1:06d}.tar.gz")
    for name in known[: -(STORIES_KEPT - 1)]:
        store.delete(f"{run.name}/{name}")
