"""What was measured on this machine's GPUs, so that the next plan for the same GPU is better.

Owns the folder `measured` in the user's state folder: one file for each GPU, job and set of options, with its last
few measurements, and what follows from them for a plan. A rehearsal writes. A file that is damaged, or belongs to
somebody else, counts as absent; a folder that cannot be written costs only the calibration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jackline.memory.plan.choose import Plan, Room
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.rehearse import corrected_room
from jackline.memory.predict.job import StepOptions
from jackline.rundir import atomic
from jackline.rundir.access.writing import make_private_folder
from jackline.rundir.records.fields import decode, encode
from jackline.rundir.registry import own_state_folder, state_folder

_FOLDER = "measured"
_KEEP = 5
_MOST_FILES = 500
_PLAUSIBLE = (0.2, 5.0)  # a ratio beyond is of something else
_SURE_ERROR = 0.15  # of the time of a step that was measured before; the batch may differ
_ENOUGH_JOBS = 3  # before other models say something about this one


@dataclass(frozen=True)
class MeasuredRecord:
    """Ratios are measured / predicted, the newest last."""

    gpu: str | None = None
    job: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    memory_ratios: list[float] = field(default_factory=list)
    time_ratios: list[float] = field(default_factory=list)

    @staticmethod
    def from_json(raw: object) -> MeasuredRecord:
        return decode(MeasuredRecord, raw, {"list[float]": _sound})


@dataclass(frozen=True)
class Calibration:
    """`memory` and `time` are measured / predicted; 1.0 where nothing was measured. `words` say where it is from."""

    memory: float = 1.0
    time: float = 1.0
    words: str = ""
    is_same_job: bool = False


def _sound(ratios: object) -> list[float]:
    low, high = _PLAUSIBLE
    found = ratios if isinstance(ratios, list) else []
    return [float(one) for one in found if isinstance(one, int | float) and low < one < high][-_KEEP:]


def note_measured(made: Plan, memory_ratio: float, time_ratio: float | None) -> None:
    """Remember how a step of this plan was measured. Never raises: a training does not depend on it."""
    with contextlib.suppress(OSError):
        folder = own_state_folder() / _FOLDER
        with contextlib.suppress(FileExistsError):
            make_private_folder(folder)
        place = folder / _name(made.gpu, made.job, made.options)
        if not place.exists() and len(list(folder.iterdir())) >= _MOST_FILES:
            return
        before = MeasuredRecord.from_json(atomic.read_json(place))
        record = MeasuredRecord(
            gpu=made.gpu.name,
            job=made.job,
            options=_plain(made.options),
            memory_ratios=_sound([*before.memory_ratios, memory_ratio]),
            time_ratios=_sound([*before.time_ratios, *([] if time_ratio is None else [time_ratio])]),
        )
        atomic.write_json(place, encode(record))


def calibration_of(gpu: GpuModel, job: str, options: StepOptions) -> Calibration:
    """Memory only from the same job: what compiling or a kernel saves there says nothing about another model. The
    time of a step also from at least three other jobs on this GPU in the same precision."""
    if gpu.count > 1:
        return Calibration()
    own = MeasuredRecord.from_json(atomic.read_json(state_folder() / _FOLDER / _name(gpu, job, options)))
    if own.job == job and own.memory_ratios:
        times = own.time_ratios or [1.0]
        count = len(own.memory_ratios)
        words = f"this training was measured {count} {'time' if count == 1 else 'times'} on {gpu.name} here"
        return Calibration(max(own.memory_ratios), statistics.median(times), words, is_same_job=True)
    others = [record.time_ratios[-1] for record in _others(gpu, options) if record.time_ratios]
    if len(others) < _ENOUGH_JOBS:
        return Calibration()
    return Calibration(
        1.0, statistics.median(others), f"{len(others)} other trainings were measured on {gpu.name} here"
    )


def _others(gpu: GpuModel, options: StepOptions) -> list[MeasuredRecord]:
    places = sorted((state_folder() / _FOLDER).glob("*.json"))[:_MOST_FILES]
    records = [MeasuredRecord.from_json(atomic.read_json(place)) for place in places]
    return [one for one in records if one.gpu == gpu.name and one.options.get("precision") == options.precision]


def calibrated_room(room: Room, found: Calibration) -> Room:
    return corrected_room(room, found.memory) if found.is_same_job else room


def calibrated(made: Plan, found: Calibration) -> Plan:
    """The plan with figures as they will be measured, and a note that says so."""
    if not found.words:
        return made
    peak, memory = made.prediction, found.memory
    scaled = replace(
        peak,
        peak_allocated_bytes=int(peak.peak_allocated_bytes * memory),
        peak_reserved_bytes=int(peak.peak_reserved_bytes * memory),
        parts={part: int(size * memory) for part, size in peak.parts.items()},
    )
    time = made.time
    if time is not None:
        error = min(time.error, _SURE_ERROR) if found.is_same_job else time.error
        time = replace(time, seconds=time.seconds * found.time, error=error)
    said = f"memory {memory - 1:+.1%}, " if found.is_same_job else ""
    note = f"calibrated: {found.words} ({said}time of a step {found.time - 1:+.0%} against the bare prediction)"
    return replace(made, prediction=scaled, time=time, notes=(*made.notes, note))


def _plain(options: StepOptions) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return found


def _name(gpu: GpuModel, job: str, options: StepOptions) -> str:
    text = json.dumps([gpu.name, job, _plain(options)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16] + ".json"
