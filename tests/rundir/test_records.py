"""Whatever a file of a run holds, reading it never raises, and what is right in it is read."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jackline.diagnosis.deaths.evidence import Evidence
from jackline.rundir import atomic
from jackline.rundir.intent import Intent, read_intent, write_intent
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.event import EventRecord
from jackline.rundir.records.exit import ExitRecord, read_exit, write_exit
from jackline.rundir.records.memory import MemoryRecord
from jackline.rundir.records.mirror import MirrorRecord
from jackline.rundir.records.session import SessionRecord, read_session, write_session
from jackline.rundir.records.start import StartRecord, WaitRecord, read_start, write_start
from jackline.rundir.records.stop_request import StopRequest, read_stop_request, write_stop_request
from jackline.rundir.records.supervisor import (
    IncidentRecord,
    NowRecord,
    SupervisorRecord,
    VerdictRecord,
    read_supervisor,
    write_supervisor,
)
from jackline.rundir.registry import RegistryEntry
from jackline.rundir.run_file import DamagedRun, read_run_file
from jackline.supervisor.options import SuperviseOptions
from tests.rundir.made import make_run, this_process

GOLDEN = Path(__file__).parents[1] / "golden"
ME = {"pid": 7, "start_ticks": 8, "host": "box", "boot_id": "boot"}
GIB = 2**30
SESSION = {
    "at_s": 1794000000.5,
    "process": ME,
    "attempt": 2,
    "phase": "train",
    "done": 41,
    "total": 100,
    "unit": "steps",
    "rate_per_s": 2.5,
    "eta_s": 23.6,
    "ending": None,
    "doing": "backward",
    "step": 41,
    "epoch": 0,
    "batch": 41,
    "place": {"epoch": 1, "epochs": 3, "batch": 41, "num_batches": 437},
    "best": {"name": "val_loss", "step": 30, "value": 0.25},
    "loss_bounds": {"process_s": 3.5, "machine_s": 60.0, "text": "words", "note": "last upload, confirmed"},
    "last_checkpoint": {"step": 40, "at_s": 1793999999.0, "path": "/runs/a/checkpoints/step-00000040"},
    "metrics": {"loss": 0.5, "lr": 1e-3},
    "memory": {
        "micro_batch": 8,
        "num_shrinks": 1,
        "last_oom": {
            "step": 41,
            "micro_batch": 16,
            "shape": "16 x 1024",
            "wanted_bytes": GIB,
            "free_bytes": 1,
            "total_bytes": 16 * GIB,
            "parts": {"weights": GIB},
            "new_micro_batch": 8,
            "fitting_micro_batch": 13,
            "needs_new_process": False,
            "others": [{"pid": 4211, "name": "", "used_bytes": 3 * GIB}],
            "phase": "backward",
            "text": "words",
        },
        "gpu": {
            "allocated_bytes": 1,
            "reserved_bytes": 2,
            "peak_allocated_bytes": 3,
            "peak_reserved_bytes": 4,
        },
        "host": {
            "used_bytes": GIB,
            "limit_bytes": 2 * GIB,
            "seconds_to_limit": 5.5,
            "grows_at": "train.py:3",
            "growing_frame": {"function": "f", "file": "train.py", "line": 3, "source": "x", "is_user": True},
            "num_workers": 2,
            "prefetch": 1,
        },
    },
    "stop_requested_by": None,
    "protections_off": ["saving"],
}
WAIT = {
    "status": 9,
    "exit_code": None,
    "signal": 9,
    "ended_at_s": 1794000000.0,
    "max_rss_bytes": GIB,
    "cpu_s": 1.5,
    "orphans": [{"pid": 5, "command": "worker"}],
    "is_settled": True,
}
START = {"child": ME, "keeper": ME, "started_at_s": 1794000000.0, "exec_errno": 2}
STOP = {"at_s": 1794000000.0, "by": "jackline stop", "grace_s": 30.0, "asker": ME}
EVENT = {"at_s": 1794000000.0, "event": "started", "text": "attempt 1", "attempt": 1, "argv": ["a"], "pid": 3}
MEMORY = {
    "micro_batch": 8,
    "predicted_allocated_bytes": GIB,
    "predicted_reserved_bytes": GIB,
    "measured_allocated_bytes": GIB,
    "measured_reserved_bytes": GIB,
    "measured": {"step": {"allocated_bytes": GIB}},
    "failed_act": "",
    "correction": 1.05,
    "rehearsed": {
        "device": "CPU",
        "settings": {"seq_len": 16},
        "micro_batch": 8,
        "step_s": 0.5,
        "reserved_bytes": GIB,
        "window_s": 0.1,
    },
}
MIRROR = {
    "store": "/mnt/far",
    "process": ME,
    "at_s": 1794000000.0,
    "checkpoints": {
        "step-00000004": {
            "state": "confirmed",
            "at_s": 1794000000.0,
            "saved_at_s": 1794000000.0,
            "place": "x/checkpoints/step-00000004-0123456789ab-cdef",
            "size_bytes": GIB,
            "confirmed_at_s": 1794000000.0,
        }
    },
    "uploading": {"name": "step-00000008", "done_bytes": 5, "total_bytes": GIB},
    "trouble": {"why": "no route to host", "at_s": 1794000000.0},
    "story_at_s": 1794000000.0,
    "answered": 7,
}
INTENT = {"restart": True, "why": "memory", "settings": {"num_workers": 2}}


def golden(name: str) -> Any:
    return json.loads((GOLDEN / "format1-stuck" / name).read_text())


def killed(name: str) -> Any:
    (path,) = (GOLDEN / "format1-killed-oom" / "attempts").glob(f"001/{name}")
    return json.loads(path.read_text())


Read = Callable[[object], Any]
RECORDS: dict[str, tuple[Read, Callable[[], Any]]] = {
    "supervisor": (SupervisorRecord.from_json, lambda: golden("supervisor.json")),
    "options": (SuperviseOptions.from_json, lambda: SuperviseOptions(mirror="/m", time_limit_s=3.5).to_json()),
    "session": (SessionRecord.from_json, lambda: SESSION),
    "exit": (ExitRecord.from_json, lambda: killed("exit.json")),
    "evidence": (Evidence.from_json, lambda: killed("exit.json")["evidence"]),
    "start": (StartRecord.from_json, lambda: START),
    "wait": (WaitRecord.from_json, lambda: WAIT),
    "stop request": (StopRequest.from_json, lambda: STOP),
    "event": (EventRecord.from_json, lambda: EVENT),
    "mirror": (MirrorRecord.from_json, lambda: MIRROR),
    "intent": (Intent.from_json, lambda: INTENT),
    "memory": (MemoryRecord.from_json, lambda: MEMORY),
    "registry": (RegistryEntry.from_json, lambda: {"path": "/runs/a", "registered_at_s": 1794000000.0}),
    "process": (ProcessId.from_json, lambda: ME),
}
NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**400,
    -(10**400),
    1e308,
    -0.0,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "12",
    "\ud800",
    "nul\0",
    "a" * 10_000,
    [],
    [[]],
    [None, 1, "x", {}],
    {},
    {"pid": "x"},
    {"": None},
    {"at_s": math.nan, "path": [], "step": {}},
]


def mutations(value: Any, rng_state: random.Random) -> Iterator[Any]:
    """`value` with one part of it, at any depth, lost or replaced; then with several."""
    places = list(all_places(value))
    for place in places:
        for nasty in NASTY:
            yield replaced(value, [(place, nasty)])
        yield removed(value, place)
    for _ in range(200):
        chosen = rng_state.sample(places, min(len(places), rng_state.randint(2, 6)))
        yield replaced(value, [(place, rng_state.choice(NASTY)) for place in chosen])


def all_places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield (*before, name)
        yield from all_places(entry, (*before, name))


def replaced(value: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    found = copy.deepcopy(value)
    for place, nasty in changes:
        target = found
        for name in place[:-1]:
            target = target[name] if has(target, name) else None
        if has(target, place[-1]):
            target[place[-1]] = copy.deepcopy(nasty)
    return found


def has(target: Any, name: Any) -> bool:
    if isinstance(target, dict):
        return name in target
    return isinstance(target, list) and isinstance(name, int) and name < len(target)


def removed(value: Any, place: tuple[Any, ...]) -> Any:
    found = copy.deepcopy(value)
    target = found
    for name in place[:-1]:
        target = target[name]
    del target[place[-1]]
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_no_damage_makes_a_reader_raise(name: str) -> None:
    read, example = RECORDS[name]
    count = 0
    for raw in (*NASTY, *mutations(example(), random.Random(name))):
        found = read(raw)
        count += 1
        if found is None:  # a process or an intent that is not whole
            continue
        assert_types(found)
        if hasattr(found, "to_json"):
            atomic._encode(found.to_json())  # it can be written again
    assert count > 100


def assert_types(record: Any) -> None:
    """Every number is finite and has a date where it is a time; nothing has a type that the field does not say."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        annotation = str(entry.type)
        if value is None:
            assert "None" in annotation, (entry.name, annotation)
        elif "float" in annotation and "dict" not in annotation:
            assert isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value), entry.name
            assert not entry.name.endswith("at_s") or 0 <= value < 253402300800, entry.name
        elif annotation in ("int", "int | None"):
            assert type(value) is int, entry.name
        elif annotation in ("str", "str | None"):
            assert isinstance(value, str) and value.encode("utf-8", "surrogateescape") is not None, entry.name
        elif annotation in ("bool", "bool | None"):
            assert isinstance(value, bool), entry.name
        elif annotation.startswith("dict"):
            assert isinstance(value, dict), entry.name
        elif annotation.startswith("tuple"):
            assert isinstance(value, tuple), entry.name


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in ("evidence", "options", "exit")])
def test_what_is_whole_is_read_whole(name: str) -> None:
    read, example = RECORDS[name]
    raw = example()
    again = read(raw).to_json()
    assert known(again, raw) == raw


def known(again: Any, raw: Any) -> Any:
    """Of `again` what `raw` has: later versions know more fields."""
    if isinstance(raw, dict):
        return {name: known(again[name], raw[name]) for name in raw}
    return [known(one, other) for one, other in zip(again, raw, strict=True)] if isinstance(raw, list) else again


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("format1-*")), ids=lambda path: path.name)
def test_golden_runs_are_read(folder: Path) -> None:
    found = SupervisorRecord.from_json(atomic.read_json(folder / "supervisor.json"))
    assert found.is_there or folder.name == "format1-torn"
    for path in folder.glob("attempts/*/exit.json"):
        ended = ExitRecord.from_json(atomic.read_json(path))
        assert ended.is_there and Evidence.from_json(ended.evidence).is_whole, path


def test_damage_of_run_json_is_said_or_passed_over(tmp_path: Path) -> None:
    """A run whose command cannot be read must not be started; the rest counts as not known."""
    run = make_run(tmp_path / "run", git={"commit": "a"}, machine={"cards": ["H200"]}, former=[{"argv": ["x"]}])
    whole = json.loads(run.run_file.read_text())
    num_read = 0
    for raw in (*NASTY, *mutations(whole, random.Random(1))):
        run.run_file.write_text(json.dumps(raw))
        try:
            found = read_run_file(run)
        except DamagedRun:
            continue
        num_read += 1
        assert isinstance(found.git, dict) and isinstance(found.machine, dict)
        json.dumps(found.to_json())
    assert num_read > 100


def test_an_empty_part_is_null_and_an_optional_field_is_absent() -> None:
    found = SupervisorRecord(
        verdict=VerdictRecord(kind="BUSY"), incidents=(IncidentRecord(1, "p", 2.0, "t"),)
    ).to_json()
    assert found["now"] is None
    assert found["verdict"] == {
        "kind": "BUSY",
        "label": None,
        "for_s": None,
        "text": None,
        "pid": None,
        "frame": None,
    }
    assert found["incidents"] == [{"number": 1, "path": "p", "at_s": 2.0, "text": "t"}]
    assert "restart_at_s" not in found
    assert SupervisorRecord(restart_at_s=3.0).to_json()["restart_at_s"] == 3.0
    assert SupervisorRecord.from_json({"now": None}).now == NowRecord()


def test_each_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    state = SupervisorRecord.from_json(golden("supervisor.json"))
    write_supervisor(run, state)
    assert read_supervisor(run) == state
    write_session(run, 0, SessionRecord.from_json(SESSION))
    assert read_session(run) == SessionRecord.from_json(SESSION)
    start = StartRecord(this_process(), started_at_s=3.0, is_bare=True)
    write_start(attempt, start)
    assert read_start(attempt) == start
    request = StopRequest(3.0, "me", 5.0, this_process())
    write_stop_request(run, request)
    assert read_stop_request(run) == request
    assert write_intent(attempt, restart=True, why="memory", settings={"prefetch": 1})
    assert read_intent(attempt) == Intent(True, "memory", {"prefetch": 1})
    write_exit(attempt, ExitRecord(exit_code=1, cause="network", findings=({"cause": "network"},)))
    assert (read_exit(attempt).exit_code, read_exit(attempt).attempt, read_exit(attempt).format) == (1, 1, 1)
    assert atomic.read_json(attempt.findings_file) == [{"cause": "network"}]


def test_an_end_without_a_supervisor_has_the_fields_it_always_had(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    write_exit(attempt, ExitRecord(exit_code=0, child_exit_code=0, cause="finished", is_bare=True))
    wanted = (
        "format attempt exit_code child_exit_code signal started_at_s ended_at_s duration_s is_stopped cause text"
    )
    assert list(atomic.read_json(attempt.exit_file) or {}) == [*wanted.split(), "findings", "is_bare"]
    assert not attempt.findings_file.exists()


def test_the_gpu_of_an_older_session_file_is_still_read() -> None:
    found = SessionRecord.from_json({"memory": {"card": {"allocated_bytes": 7}}})
    assert found.memory.gpu.allocated_bytes == 7
