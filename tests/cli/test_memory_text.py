"""Memory in `status` and `why`: sentences from what session and supervisor wrote."""

from __future__ import annotations

from typing import Any

from jackline.cli.text.memory import memory_section
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import SupervisorRecord

GIB = 2**30
STATE: dict[str, Any] = {
    "memory": {
        "used_bytes": 3 * GIB,
        "limit_bytes": 4 * GIB,
        "limit_source": "cgroup /pod",
        "growth_bytes_per_s": 200 * 2**20,
        "seconds_to_limit": 5.1,
        "grows_at": "train.py:41 `rows.append(row)`",
    },
    "gpu_others": [{"pid": 77, "name": "python old.py", "used_bytes": 2 * GIB}, {"pid": 78, "name": ""}],
}
OOM = {
    "step": 41,
    "shape": "16 x 1024",
    "micro_batch": 16,
    "wanted_bytes": 2 * GIB,
    "free_bytes": GIB // 2,
    "total_bytes": 16 * GIB,
    "parts": {"weights": GIB, "activations, gradients and temporaries": 9 * GIB},
    "fitting_micro_batch": 13,
    "others": [{"pid": 4211, "name": "", "used_bytes": 3 * GIB}],
}
SESSION: dict[str, Any] = {
    "attempt": 2,
    "memory": {
        "card": {
            "allocated_bytes": 9 * GIB,
            "reserved_bytes": 10 * GIB,
            "peak_allocated_bytes": 11 * GIB,
            "peak_reserved_bytes": 12 * GIB,
        },
        "micro_batch": 8,
        "num_shrinks": 1,
        "last_oom": OOM,
    },
}


def told(session: dict[str, Any], state: dict[str, Any], attempt: int) -> list[str]:
    return list(memory_section(SessionRecord.from_json(session), SupervisorRecord.from_json(state), attempt))


def test_everything_known_of_memory_is_told() -> None:
    assert told(SESSION, STATE, 2) == [
        "host memory: 3.0 GiB of 4.0 GiB (cgroup /pod) in use, 75 %; full in about 5.1 s at this rate, growing"
        " 200 MiB/s; it grows at train.py:41 `rows.append(row)`",
        "GPU memory: 9.0 GiB in tensors, 10.0 GiB reserved (at most 11.0 GiB and 12.0 GiB); micro-batch 8 after"
        " running out once",
        "also on the GPU: pid 77 (python old.py), 2.0 GiB",
        "also on the GPU: pid 78 (not visible from here: another container, or already dead), an unknown amount",
        "the GPU's memory ran out at step 41, batch 16 x 1024: needed 2.0 GiB, 512 MiB free of 16.0 GiB",
        "  largest part: activations, gradients and temporaries, 9.0 GiB",
        "  about micro-batch 13 would have fitted; run.safe_step finds it and keeps the batch",
        "  also on the GPU then: pid 4211 (not visible from here: another container, or already dead), 3.0 GiB",
    ]


def test_what_another_attempt_wrote_is_not_told_of_this_one() -> None:
    assert told(SESSION, {}, 3) == []


def test_a_bare_sessions_own_reading_stands_in_for_the_supervisors() -> None:
    host = {"used_bytes": GIB, "limit_bytes": 4 * GIB, "seconds_to_limit": None}
    session = {"attempt": 1, "memory": {"host": host}}
    assert told(session, {}, 1) == ["host memory: 1.0 GiB of 4.0 GiB in use, 25 %"]


def test_damaged_values_are_left_out() -> None:
    session = {"attempt": 1, "memory": {"card": "x", "last_oom": {"step": "41"}, "host": [], "num_shrinks": None}}
    assert told(session, {"memory": 3, "gpu_others": [{"pid": None}, 4]}, 1) == []
