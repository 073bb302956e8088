"""Faults by sentence: `kill_at("state.replace", nth=3)`, `fail_at("log.write", with_errno=ENOSPC)`.

The fault strikes a real process at a real call, without a hook in the product: the process gets a wrapped function.
A `with` block that a fault does not strike in fails, because a test that injects nothing verifies nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAYLOAD = Path(__file__).parent / "fault_payload" / "sitecustomize.py"

# name -> (function that is called there, part of the path it is called with)
POINTS = {
    "state.replace": ("os.replace", "/supervisor.json"),
    "exit.replace": ("os.replace", "/exit.json"),
    "run.mkdir": ("os.mkdir", ".draft"),
    "run.open": ("os.open", ".draft/"),
    "run.sync": ("os.fsync", ".draft"),
    "run.replace": ("os.replace", ".draft/"),
    "run.rename": ("os.rename", ".draft"),
    "supervisor.log": ("os.open", "/supervisor.log"),
    "log.open": ("os.open", "/out.log"),
    "event.open": ("os.open", "/events-supervisor.jsonl"),
    "attempt.mkdir": ("os.mkdir", "/attempts"),
    "start.replace": ("os.replace", "/start.json"),
    "reserve.open": ("os.open", "/reserve"),
    "log.write": ("os.write", "/out.log"),
    "event.write": ("os.write", "/events-supervisor.jsonl"),
    "raw.read": ("os.pread", "/raw.out"),
    "checkpoint.rename": ("os.rename", "/checkpoints/"),
    "checkpoint.replace": ("os.replace", "/checkpoints/"),
    "checkpoint.sync": ("os.fsync", "/checkpoints/"),
    "embedding.write": ("os.write", "/embeddings/"),
    "embedding.replace": ("os.replace", "/embeddings/"),
    "embedding.sync": ("os.fsync", "/embeddings/"),
}


@dataclass(frozen=True)
class Fault:
    """What strikes, and the file in which it says that it did."""

    spec: dict[str, Any]

    def in_child(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a Python process that carries the fault."""
        before = environment.get("PYTHONPATH", "")
        path = f"{PAYLOAD.parent}:{before}" if before else str(PAYLOAD.parent)
        return {**environment, "FAULT": json.dumps(self.spec), "PYTHONPATH": path}

    def in_supervisor(self, environment: Mapping[str, str]) -> dict[str, str]:
        """For `jackline`: the fault strikes in the supervisor only, which ignores PYTHONPATH."""
        return {**environment, "FAULT": json.dumps(self.spec)}

    def jackline(self, *words: str) -> list[str]:
        """The command line of a `jackline` whose supervisor carries the fault."""
        boot = f"exec(open({str(PAYLOAD)!r}).read()); "
        code = (
            "import jackline.supervisor.start as start\n"
            f"start._BOOT = {boot!r} + start._BOOT\n"
            "from jackline.cli.main import main\n"
            "main()"
        )
        return [sys.executable, "-c", code, *words]

    def strikes(self) -> list[dict[str, Any]]:
        """One record for each time it fired: pid, time, command line."""
        path = Path(self.spec["fired"])
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def kill_at(point: str, *, nth: int = 1) -> Iterator[Fault]:
    """SIGKILL in the instant before the call, the nth time."""
    with _fault(point, action="kill", nth=nth) as fault:
        yield fault


@contextlib.contextmanager
def fail_at(point: str, *, with_errno: int, nth: int = 1, goes_on: bool = False) -> Iterator[Fault]:
    """The call fails with an OSError: once, or from then on."""
    with _fault(point, action="fail", nth=nth, errno=with_errno, goes_on=goes_on) as fault:
        yield fault


@contextlib.contextmanager
def stall_at(point: str, *, for_s: float, nth: int = 1) -> Iterator[Fault]:
    """The call takes its time, as on a disk that is far away."""
    with _fault(point, action="stall", nth=nth, seconds=for_s) as fault:
        yield fault


@contextlib.contextmanager
def _fault(point: str, **how: Any) -> Iterator[Fault]:
    function, path = POINTS[point]
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        spec = {"point": point, "function": function, "path": path, "goes_on": False, **how}
        fault = Fault({**spec, "fired": str(Path(folder) / "fired")})
        yield fault
        assert fault.strikes(), f"the fault at {point} never struck: the test verified nothing"
