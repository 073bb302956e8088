"""GPU memory that creeps up: forecast in time, with the line; on GPU figures and a clock of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.machine.readings import GpuProcess, GpuReading
from jackline.rundir.layout import AttemptDir
from jackline.supervisor.attempt.gpu_creep import GpuCreep, find_creep, growing_line, read_lines
from jackline.supervisor.child.environment import child_environment
from tests.deadline import HANGS_S

MIB = 1 << 20
GPU = GpuReading(0, "T4", 15360 * MIB, 0, 90, 40, 60.0, is_ours=True)

# torch is not needed: the injected code reads its allocator through these two modules alone.
PROGRAM = """
import sys, time, types
torch = types.ModuleType("torch"); torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
torch._C = types.SimpleNamespace()
memory = types.ModuleType("torch.cuda.memory")
is_recording, kept = [None], []
def record(enabled, **_): is_recording[0] = enabled; print("recording", enabled, flush=True)
def snapshot():
    kept.append(1)  # LEAKS
    def block(size, line, file=__file__):
        return {"state": "active_allocated", "size": size, "frames": [
            {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"},
            {"filename": file, "line": line, "name": "main"}]}
    busy = 900 if len(kept) % 2 else 100
    blocks = [block(20 * 2**20 * len(kept), 9), block(busy * 2**20, 5), {"state": "inactive", "size": 5}]
    return {"segments": [{"blocks": blocks}]}
memory._record_memory_history, memory._snapshot = record, snapshot
sys.modules["torch"], sys.modules["torch.cuda.memory"] = torch, memory
print("ready", flush=True)
while True: time.sleep(0.05)
"""


class Heard:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, text: str, **facts: Any) -> None:
        assert event == "memory"
        self.told.append((text, facts))


def creeping(used_of: Callable[[float], float], until_s: float, total_mib: int = 15360) -> tuple[Any, float] | None:
    """The first creep found and when, by readings every 5 s."""
    points: list[tuple[float, int]] = []
    for at_s in range(0, int(until_s), 5):
        used = int(used_of(at_s)) * MIB
        points.append((float(at_s), used))
        if at_s % 30:
            continue
        found = find_creep(points, replace(GPU, used_bytes=used, total_bytes=total_mib * MIB))
        if found is not None:
            return found, float(at_s)
    return None


@pytest.mark.parametrize("free_mib", [800, 2000, 8000])
def test_50_mb_a_minute_is_forecast_more_than_ten_minutes_ahead(free_mib: int) -> None:
    """The allocator takes 20 MiB at a time."""
    found = creeping(lambda at_s: 15360 - free_mib + 20 * int(50 * at_s / 60 / 20), 4 * 3600)
    assert found is not None
    creep, at_s = found
    full_s = free_mib / 50 * 60
    assert full_s - at_s >= 600 and abs(creep.left_s - (full_s - at_s)) < 0.35 * (full_s - at_s)


@pytest.mark.parametrize(
    "used_of",
    [
        lambda at_s: 14000,  # full and steady
        lambda at_s: 6000 + min(8000, 40 * at_s),  # filled in three minutes, and then steady
        lambda at_s: 12000 + 500 * (1 - 0.5 ** (at_s / 120)),  # an allocator that meets ever fewer larger batches
        lambda at_s: 12000 + (1500 if at_s % 600 > 500 else 0),  # a validation now and then
        lambda at_s: 9000 + 3000 * (at_s > 900),  # one jump
    ],
)
def test_what_is_no_creep_is_not_told(used_of: Callable[[float], float]) -> None:
    found = creeping(used_of, 2 * 3600)
    assert found is None or found[1] < 300, found  # a growth that is still going on may be taken for one


def test_only_a_line_that_holds_more_each_time_grows() -> None:
    leak, busy, new = ("a.py", 3, "f"), ("a.py", 9, "g"), ("b.py", 1, "h")
    looks = [{leak: 10, busy: 900}, {leak: 30, busy: 100}, {leak: 50, busy: 950, new: 800}]
    assert growing_line(looks) == (leak, 40)
    assert growing_line(looks[:2]) is None and growing_line([{busy: 5}] * 3) is None
    for damaged in (b"", b"[", b"[1]", b'{"lines": 3}', b'{"lines": [[1]]}', b'{"lines": [["a", "b", "c", "d"]]}'):
        assert read_lines(damaged) == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the injected report needs Python 3.11")
def test_a_process_is_asked_for_the_line_and_it_is_named(tmp_path: Path) -> None:
    """A real process, asked by signals; its allocator and the GPU's figures are the test's."""
    attempt, script = AttemptDir(tmp_path), tmp_path / "train.py"
    attempt.stacks.mkdir()
    script.write_text(PROGRAM)
    line = 1 + next(number for number, text in enumerate(PROGRAM.splitlines()) if "LEAKS" in text)
    script.write_text(PROGRAM.replace("len(kept), 9)", f"len(kept), {line})"))
    env = child_environment(
        os.environ, stacks=attempt.stacks, inject=True, stdbuf=None, surface_is_terminal=False, columns=80
    )
    heard = Heard()
    with subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            creep = GpuCreep(attempt, heard, is_injected=True)  # type: ignore[arg-type]
            began_s, at_s = time.monotonic(), 0.0
            while not heard.told and time.monotonic() - began_s < HANGS_S:
                at_s += 5.0
                used = 12000 * MIB + 20 * int(50 * at_s / 60 / 20) * MIB
                gpu = replace(GPU, used_bytes=used, processes=(GpuProcess(program.pid, used),))
                num_asked = creep._search.num_asked if creep._search else 0
                creep.poll(at_s, (gpu,), (program.pid,))
                question, answer = (attempt.stacks / f"{word}.{program.pid}" for word in ("gpu-ask", "gpu"))
                is_asked = creep._search is not None and creep._search.num_asked > num_asked
                # The clock of the forecast is the test's; it stands until the question is read and answered.
                while (
                    question.exists() or (is_asked and not answer.exists())
                ) and time.monotonic() - began_s < HANGS_S:
                    time.sleep(0.005)
                    os.kill(program.pid, 0)
            creep.close()
            said = [program.stdout.readline(), program.stdout.readline()]
        finally:
            program.kill()
    ((text, facts),) = heard.told
    assert facts["line"] == f"{script}:{line}" and f"train.py:{line} `kept.append(1)  # LEAKS`" in text
    assert text.startswith("GPU 0: ") and " a minute for " in text and "full in about " in text
    assert facts["seconds_to_limit"] > 600 and said == ["recording state\n", "recording None\n"]
