"""The trainings of a sweep at the same time: how many there may be, by number or by memory, and the waiting for them.

On a GPU the memory plan says beforehand what each one needs, and each gets that much and no more (`max_gpu_bytes`):
two that start together would both find the whole GPU free. On a CPU nothing is foretold. There the next one starts
when those that train have done a step and a save, and the most that one of them has needed is free once more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from jackline.cli.commands.plan import plan_request
from jackline.errors import EXIT_STOPPED
from jackline.immutable import immutable
from jackline.machine.gpu.watch import read_gpus
from jackline.machine.memory import effective_limit, used_against
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import read_session
from jackline.rundir.records.supervisor import read_supervisor
from jackline.trainer.recipe import is_own_file
from jackline.units import format_bytes, format_duration

STOPPED = (EXIT_STOPPED, 128 + signal.SIGINT, -signal.SIGINT)
_LOOK_S = 0.2
_TELL_EVERY_S = 10.0
_SHARE = 0.8  # of the free memory: the rest is for what nobody foresees
# Of a plan's prediction: the training plans again, with a reserve of its own, and must come to the same micro-batch.
_MARGIN = 1.15
_MARGIN_BYTES = 256 * 2**20
# They change nothing of what a step needs. Any other setting may, so its combinations are planned one by one.
_WITHOUT = (
    "lr min_lr seed warmup_steps decay_steps schedule schedule_start weight_decay beta1 beta2 clip clip_by max_steps"
    " epochs patience min_gain label_smoothing eval_every save_every_steps"
)
_NO_MEMORY = frozenset(_WITHOUT.split())


@immutable
class Combination:
    """One training: `varied` are the values that tell it from the others."""

    words: tuple[str, ...]
    varied: tuple[str, ...]
    run: RunDir
    config: Mapping[str, Any]
    is_high_good: bool
    state: str

    @property
    def metric(self) -> str:
        return str(self.config["metric"])


@immutable
class Limits:
    """`number`: that many at the same time; None: by memory. `needs`: bytes of the GPU for each run's name, where one
    is trained on and it was planned."""

    number: int | None = None
    needs: Mapping[str, int] = field(default_factory=dict)
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


@immutable
class Memory:
    """Of now. `peak_bytes`: the most host memory that one training has needed; None: not known yet."""

    gpu_bytes: int  # that nobody else uses
    free_bytes: int
    peak_bytes: int | None


def may_start(name: str, running: Sequence[str], limits: Limits, memory: Memory) -> bool:
    """Whether one more may start beside those that train. One alone may in any case."""
    if not running:
        return True
    if limits.number is not None:
        return len(running) < limits.number
    if len(running) >= limits.num_cores or memory.peak_bytes is None:
        return False
    if limits.needs:
        taken = sum(limits.needs.get(one, memory.gpu_bytes) for one in running)
        if taken + limits.needs.get(name, memory.gpu_bytes) > memory.gpu_bytes:
            return False
    return memory.peak_bytes <= _SHARE * memory.free_bytes


def train_together(
    recipe: str, left: Sequence[tuple[str, Combination]], limits: Limits, runs_dir: str | None
) -> list[int]:
    """Exit codes; what the trainings print is in their logs."""
    waiting, codes = list(left), list[int]()
    running: dict[subprocess.Popen[bytes], tuple[str, Combination]] = {}
    gpu_bytes = _free_of_gpu() if limits.needs else 0
    is_stopped, told_s = False, time.monotonic()
    while (waiting and not is_stopped) or running:
        trained = [one.run for _, one in running.values()]
        if waiting and not is_stopped and _is_room(waiting[0][1], trained, limits, gpu_bytes):
            title, one = waiting.pop(0)
            say(f"{title}: started; `jackline logs {one.run.name} -f` shows it")
            share = limits.needs.get(one.run.name)
            words = [f"max_gpu_bytes={share}"] if share and "max_gpu_bytes" in one.config else []
            running[start([recipe, *one.words, *words], runs_dir, is_quiet=True)] = (title, one)
            continue
        try:
            time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            is_stopped = True  # their viewers have got it too, and stop their runs
            say("stopping: what trains now is saved")
        for child in [child for child in running if child.poll() is not None]:
            codes.append(child.returncode)
            say(f"{running.pop(child)[0]}: {'finished' if not codes[-1] else f'ended with code {codes[-1]}'}")
            is_stopped = is_stopped or codes[-1] in STOPPED
        if running and time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            say(f"{len(running)} at work, {len(waiting)} waiting: {'; '.join(map(_told, running.values()))}")
    return codes


def _is_room(one: Combination, trained: Sequence[RunDir], limits: Limits, gpu_bytes: int) -> bool:
    names = [run.name for run in trained]
    if not names or limits.number is not None:
        return may_start(one.run.name, names, limits, Memory(0, 0, None))
    limit = effective_limit()
    peaks = [_peak_of(run) for run in trained]
    known = [peak for peak in peaks if peak is not None]
    peak = max(known) if len(known) == len(peaks) else None
    return may_start(one.run.name, names, limits, Memory(gpu_bytes, limit.limit_bytes - used_against(limit), peak))


def _peak_of(run: RunDir) -> int | None:
    """The host memory it has needed so far, once it has done a step and saved: later it hardly grows."""
    session = read_session(run)
    if not (session.step and session.last_checkpoint.path):
        return None
    return read_supervisor(run).memory.peak_bytes


def _told(running: tuple[str, Combination]) -> str:
    title, one = running
    session = read_session(one.run)
    if not session.step:
        return f"{title}: {session.phase or 'starting'}"
    of = f"/{session.total:,.0f}" if session.total else ""
    loss = f", loss {session.metrics['loss']:.4g}" if "loss" in session.metrics else ""
    left = f", {format_duration(session.eta_s)} left" if session.eta_s else ""
    return f"{title}: step {session.step:,}{of}{loss}{left}"


def planned_needs(recipe: str, left: Sequence[Combination]) -> dict[str, int]:
    """What each training needs of the GPU, by the name of its run; {} where none is trained on."""
    if not left or left[0].config.get("device") == "cpu" or not (gpus := read_gpus()):
        return {}
    total_bytes = gpus[0].total_bytes
    found: dict[tuple[str, ...], int] = {}
    needs: dict[str, int] = {}
    for one in left:
        words = tuple(word for word in one.words if _name_of(word) not in _NO_MEMORY)
        if words not in found:
            say(f"planning the GPU's memory of {' '.join([recipe, *words])}")
            found[words] = min(total_bytes, _plan(recipe, words) or total_bytes)
        needs[one.run.name] = found[words]
    sizes = " or ".join(map(format_bytes, sorted(set(needs.values()))))
    say(f"each needs {sizes} of {format_bytes(total_bytes)}: so many train at the same time as fit")
    return needs


def _name_of(word: str) -> str:
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _plan(recipe: str, words: Sequence[str]) -> int | None:
    """Bytes of the GPU; None where it does not fit, or cannot be planned: then it trains alone."""
    request = json.dumps(plan_request(recipe, words, output="json", is_recipe=is_own_file(recipe)))
    done = subprocess.run([sys.executable, "-m", "jackline.memory", request], stdout=subprocess.PIPE)
    if done.returncode:
        say("it is not known to fit beside another: one after another")
        return None
    return int(_MARGIN * json.loads(done.stdout)["device_bytes"]) + _MARGIN_BYTES


def _free_of_gpu() -> int:
    gpus = read_gpus()
    return gpus[0].total_bytes - gpus[0].used_bytes if gpus else 0


def start(words: list[str], runs_dir: str | None, *, is_quiet: bool = False) -> subprocess.Popen[bytes]:
    place = ["--runs-dir", runs_dir] if runs_dir else []
    stream = subprocess.DEVNULL if is_quiet else None
    return subprocess.Popen([sys.executable, "-m", "jackline", "train", *words, *place], stdout=stream, stderr=stream)


def say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)
