"""Provides eras that do not exist yet: who builds them, and what a reader sees while it waits.

Owns: opening the data of a spec, starting the builder process when none is running, restarting it after a kill, and
passing on its progress or its error. Does not own building (builder.py) or reading (loader.py).

What a waiting reader reports comes from `builder.json` and the builder's state in /proc. Ages are measured with this
process's own monotonic clock from the moment the file last changed, so setting the system clock causes no alarm.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from jackline.data.build.builder import adopt_era, cache_folder, judge_damage, read_builder_error, run_builder
from jackline.data.cache.directory import Cache, era_path, folder_trouble, is_gone, read_meta
from jackline.data.cache.readers import Reading, Registration
from jackline.data.progress import TICK_S, Progress, Reporter, silent
from jackline.data.spec import CacheSettings, DataSpec
from jackline.errors import JacklineError
from jackline.rundir.atomic import read_json
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import ProcessId, is_alive
from jackline.units import format_duration

_POLL_S = 0.02
_MAX_DEATHS = 5
_MAX_IDLE_ENDS = 50
_TERM_GRACE_S = 2.0


class Supply(Protocol):
    """Provides missing eras."""

    def start(self) -> None:
        """Ensure that a builder works ahead; returns at once."""

    def wait_until(self, is_there: Callable[[], bool], what: str) -> None:
        """Return once `is_there()` is true; raise the error that stopped the builder."""

    def stop(self) -> None:
        """End the builder that was started here. Another reader of the same cache starts its own if it needs one."""


class InlineSupply:
    """Builds in this process when something is missing: for small data and for tests."""

    def __init__(self, folder: Path, settings: CacheSettings, reporter: Reporter = silent) -> None:
        self._folder, self._settings, self._reporter = folder, settings, reporter

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def wait_until(self, is_there: Callable[[], bool], what: str) -> None:
        if is_there():
            return
        run_builder(self._folder, self._settings, self._reporter, for_readers=True)
        if not is_there():
            raise JacklineError(f"{what} could not be built: another process is building in {self._folder}")


class BackgroundSupply:
    """A builder process beside the reader, so that tokenising takes neither the reader's memory nor its GIL."""

    def __init__(self, folder: Path, settings: CacheSettings, reporter: Reporter = silent) -> None:
        self._folder, self._settings, self.reporter = folder, settings, reporter
        self._lock = threading.Lock()  # a loading thread may have to wait for an era too
        self._process: subprocess.Popen[bytes] | None = None
        self._num_deaths = 0
        self._num_idle_ends = 0
        self._num_stops = 0

    def start(self) -> None:
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        lock = RunLock(self._folder / "builder.lock")
        if is_gone(self._folder):
            raise folder_trouble(self._folder, FileNotFoundError())
        try:
            if not lock.try_acquire():
                return  # another reader's builder is running
            lock.release()
            self._process = start_builder(self._folder, self._settings)
        except OSError as error:
            raise folder_trouble(self._folder, error) from error

    def wait_until(self, is_there: Callable[[], bool], what: str) -> None:
        last_report_s, num_stops = float("-inf"), self._num_stops
        watch = BuilderWatch(self._folder)
        while not is_there():
            with self._lock:
                if self._num_stops != num_stops:
                    raise JacklineError(f"{what} is not waited for any more: the data was closed")
                self._start_again_if_dead()
            now_s = time.monotonic()
            if now_s - last_report_s >= TICK_S:
                last_report_s = now_s
                self.reporter(watch.describe(what))
            time.sleep(_POLL_S)
        self._num_deaths = self._num_idle_ends = 0

    def stop(self) -> None:
        with self._lock:
            self._num_stops += 1
            process, self._process = self._process, None
            if process is None:
                return
            process.terminate()  # safe at any instant: the next builder continues from its last commit
            try:
                process.wait(_TERM_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # a process stopped by SIGSTOP does not react to SIGTERM
                process.wait()

    def _start_again_if_dead(self) -> None:
        """Restart a killed builder, which continues from its last commit; raise the error if it wrote one."""
        code = None if self._process is None else self._process.poll()
        if self._process is None or code == 0:
            self._num_idle_ends += code == 0
            if self._num_idle_ends > _MAX_IDLE_ENDS:
                raise JacklineError(f"the tokeniser says there is nothing to do; its cache is {self._folder}")
            self._process = None
            self._start()
            return
        if code is None:
            return
        self._process = None
        error = read_builder_error(self._folder) if code > 0 else None
        if error is not None:
            raise error
        self._num_deaths += 1
        if self._num_deaths >= _MAX_DEATHS:
            raise JacklineError(
                f"the tokeniser process was lost {self._num_deaths} times in a row, the last time with code {code}",
                hint=f"its last words are in {self._folder / 'builder.log'}",
            )


@dataclass(frozen=True)
class Data:
    """A cache, its supply, and a registration on behalf of the future reader, so that building begins at once."""

    cache: Cache
    supply: Supply
    kept_place: Registration
    eras_ahead: int

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.kept_place.remove()
        self.supply.stop()


def open_data(
    spec: DataSpec,
    settings: CacheSettings,
    reporter: Reporter = silent,
    *,
    state: dict[str, Any] | None = None,
    inline: bool = False,
) -> Data:
    """The data of a spec, built if it does not exist; returns once its vocabulary is known.

    `state` is the loader's state to resume from: building then begins at its era, even on a machine without a cache.
    """
    folder = cache_folder(spec, settings)
    settings = settings.limited_by(spec)
    return _open(folder, settings, reporter, state, inline=inline)


def open_cache(
    folder: Path, settings: CacheSettings, reporter: Reporter = silent, *, state: dict[str, Any] | None = None
) -> Data:
    """Open a cache by its path, wherever it was built; a finished one needs no source."""
    if read_meta(folder) is None:
        raise JacklineError(f"{folder} is not a token cache", hint="`jackline data prepare SOURCE` makes one")
    return _open(folder, settings, reporter, state, inline=False)


def _open(
    folder: Path, settings: CacheSettings, reporter: Reporter, state: dict[str, Any] | None, *, inline: bool
) -> Data:
    kept_place, supply = _begin(folder, settings, reporter, inline=inline)
    kept_place.move_to(Reading(int(state["era"]) if state else 0, repeats=True))
    if state is not None:
        adopt_era(folder, state)
    try:
        supply.wait_until((folder / "meta.json").exists, "the tokenizer")
    except BaseException:
        kept_place.remove()
        supply.stop()
        raise
    meta = read_meta(folder)
    assert meta is not None
    cache = Cache(folder, meta)
    try:
        judge_damage(cache, settings)
    except BaseException:
        kept_place.remove()
        supply.stop()
        raise
    return Data(cache, supply, kept_place, settings.eras_ahead)


_BEGUN: dict[Path, tuple[Registration, BackgroundSupply]] = {}


def begin_data(spec: DataSpec, settings: CacheSettings) -> None:
    """Start tokenising for an `open_data` that follows in this process, after seconds of imports say.

    It waits for nothing and reports nothing: what goes wrong is told by whoever opens it. Does nothing when there is
    a tokenizer already: the reader decides then whether more is needed.
    """
    folder = cache_folder(spec, settings)
    if folder in _BEGUN or (folder / "meta.json").exists():
        return
    kept_place, supply = Registration(folder), BackgroundSupply(folder, settings.limited_by(spec))
    kept_place.move_to(Reading(0, repeats=True))
    _BEGUN[folder] = kept_place, supply
    with contextlib.suppress(JacklineError):
        supply.start()


def end_begun() -> None:
    """End what was begun and never opened."""
    while _BEGUN:
        kept_place, supply = _BEGUN.popitem()[1]
        kept_place.remove()
        supply.stop()


def _begin(folder: Path, settings: CacheSettings, reporter: Reporter, *, inline: bool) -> tuple[Registration, Supply]:
    if inline:
        return Registration(folder), InlineSupply(folder, settings, reporter)
    if (begun := _BEGUN.pop(folder, None)) is not None:
        begun[1].reporter = reporter
        return begun
    return Registration(folder), BackgroundSupply(folder, settings, reporter)


def is_running_low(cache: Cache, reading: Reading, eras_ahead: int) -> bool:
    """Whether building must start again: an era is missing in the nearer half of the eras to keep ahead.

    Half of them, so that a builder is started once for several eras and not for each of them.
    """
    if not cache.ledger.is_sealed:
        cache.ledger.refresh()
    last = cache.ledger.last_era
    for era in range(reading.era, reading.era + max(1, eras_ahead // 2) + 1):
        if last is None or era <= last:
            is_there = is_era_ready(cache, era)
        else:
            is_there = not reading.repeats or is_era_ready(cache, era % (last + 1))
        if not is_there:
            return True
    return False


def is_era_ready(cache: Cache, era: int) -> bool:
    """Whether an era can be read now, or is known to be after the end."""
    num_tokens = cache.num_tokens(era)
    if num_tokens is None:
        cache.ledger.refresh()
        num_tokens = cache.num_tokens(era)
    return num_tokens == 0 or (num_tokens is not None and era_path(cache.folder, era).exists())


def start_builder(folder: Path, settings: CacheSettings) -> subprocess.Popen[bytes]:
    """Start `python -m jackline.data build` in this process's group, with its output in builder.log."""
    source_root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "PYTHONPATH": f"{source_root}:{inherited}" if inherited else source_root,
        # With one malloc arena per thread each would keep what it freed: 100 MB and more after an hour.
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "true",
    }
    command = [sys.executable, "-m", "jackline.data", "build", str(folder), json.dumps(settings.to_json())]
    with open(folder / "builder.log", "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)


_SILENT_AFTER_S = 10.0  # it writes once a second


class BuilderWatch:
    """One waiting reader's view of the builder."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / "builder.json"
        self._clock = clock
        self._stamp: int | None = None
        self._changed_at_s = clock()

    def describe(self, what: str) -> Progress:
        """A report for a reader that waits for `what`."""
        silent_s = self._silent_s()
        value = read_json(self._path)
        process = ProcessId.from_json(value.get("process")) if isinstance(value, dict) else None
        if not isinstance(value, dict) or "progress" not in value or process is None or not is_alive(process):
            return Progress("wait", unit="B", detail=f"{what}: starting the tokenizer")
        found = replace(Progress.from_json(value["progress"]), phase="wait")
        if _is_stopped(process.pid):
            trouble = f"is stopped by a signal: `kill -CONT {process.pid}` lets it continue"
            return replace(found, rate_per_s=None, detail=f"{what}: the tokeniser {trouble}")
        if silent_s >= _SILENT_AFTER_S:
            trouble = f"no sign of life from the tokeniser (process {process.pid}) for {format_duration(silent_s)}"
            return replace(found, rate_per_s=None, detail=f"{what}: {trouble}")
        doing = f"{value['progress']['phase']} {found.detail}".rstrip()
        return replace(found, detail=f"{what}: {doing}")

    def _silent_s(self) -> float:
        try:
            stamp: int | None = self._path.stat().st_mtime_ns
        except OSError:
            stamp = None
        if stamp != self._stamp:
            self._stamp, self._changed_at_s = stamp, self._clock()
        return self._clock() - self._changed_at_s


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rfind(b")") + 2 :][:1] in (b"T", b"t")
