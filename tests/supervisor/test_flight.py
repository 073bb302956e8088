"""PyTorch's flight recorder: what the answers of several ranks mean together, and how a process is asked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jackline.diagnosis.frames import Frame
from jackline.machine.readings import RankPlace, Wait
from jackline.supervisor.stacks.flight import Flight, ask_recorders, explain
from tests.deadline import HANGS_S
from tests.supervisor.worlds import Proc, World, play

INSIDE = Path(__file__).parents[2] / "src/jackline/supervisor/child/inside"
# As torch 2.13 writes it, with one entry left out.
TRACE = {
    "entries": [
        {
            "collective_seq_id": 7,
            "input_dtypes": ["Float"],
            "input_sizes": [[5, 6]],
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "retired": False,
            "state": "scheduled",
            "time_created_ns": 1794853626462093900,
            "timeout_ms": 1800000,
        },
        {"is_p2p": True, "process_group": ["0", "default_pg"], "profiling_name": "gloo:send"},
    ],
    "version": "2.10",
}


def call(seq: int, *, name: str = "all_reduce", size: int = 6, is_done: bool = False) -> dict[str, Any]:
    shape = {"sizes": [[5, size]], "dtypes": ["Float"]}
    return {"seq": seq, "call": name, **shape, "is_done": is_done, "at_s": 100.0 + seq, "timeout_ms": 1800000}


def answer(rank: int, *calls: dict[str, Any], group: str = "default_pg", size: int = 3) -> dict[str, Any]:
    return {"rank": rank, "world_size": size, "groups": {"0": {"name": group, "calls": list(calls)}}}


def test_a_rank_that_has_not_made_the_call_is_named_first() -> None:
    done = call(3, is_done=True)
    found = explain([answer(0, done, call(4)), answer(1, done), answer(2, done, call(4))])
    assert found is not None
    assert found.odd == (1,)
    assert found.timeout_s == 1800
    assert found.text == (
        "rank 1 has not made call 4 (all_reduce of Float [5, 6]); the last that it made is call 3; "
        "ranks 0, 2 are in it"
    )


def test_another_shape_or_another_call_is_told_apart_the_odd_one_first() -> None:
    found = explain([answer(0, call(4)), answer(1, call(4)), answer(2, call(4, size=7))])
    assert found is not None
    assert found.text == (
        "the ranks differ in call 4: rank 2 called all_reduce of Float [5, 7]; "
        "ranks 0-1 called all_reduce of Float [5, 6]"
    )
    found = explain([answer(0, call(4, name="gather", size=9)), answer(1, call(4, name="gather")), answer(2)])
    assert found is not None  # the shapes of a gather may differ
    assert found.text.startswith("rank 2 has not made call 4 (gather of Float")
    found = explain([answer(0, call(4, name="barrier", size=1)), answer(1, call(4)), answer(2, call(4))])
    assert found is not None
    assert found.odd == (0,)


def test_nothing_is_said_when_nothing_is_open_and_nonsense_is_left_out() -> None:
    done = call(3, is_done=True)
    assert explain([answer(0, done), answer(1, done)]) is None
    odd: list[Any] = [None, 7, {"rank": "x"}, {"rank": 1, "groups": {"0": {"calls": [None, {"seq": "x"}]}}}]
    found = explain([answer(0, done, call(4)), *odd], num_asked=3)
    assert found is not None
    assert found.text.startswith("rank 1 has not made call 4")
    assert found.text.endswith("1 of 3 ranks do not answer")
    part = explain([answer(0, call(2), group="tp"), answer(2, group="tp"), {"rank": 1, "groups": {}}])
    assert part is not None
    assert part.odd == (2,)  # rank 1 is not known to be in that group
    assert "call 2 of group tp" in part.text


def test_a_process_answers_while_its_main_thread_is_in_c_code(tmp_path: Path) -> None:
    """Here the library is a stand-in that returns a recorded trace; torch itself is in the slow tests."""
    program = f"""
import importlib.util, json, sys, time, types
spec = importlib.util.spec_from_file_location("recorder", {str(INSIDE / "recorder.py")!r})
recorder = importlib.util.module_from_spec(spec); spec.loader.exec_module(recorder)
trace = json.loads({json.dumps(json.dumps(TRACE))})
library = types.SimpleNamespace(_dump_fr_trace_json=lambda all, active: json.dumps(trace).encode())
sys.modules["torch"] = types.SimpleNamespace(__version__="2.13.0")
sys.modules["torch._C._distributed_c10d"] = library
rank = int(sys.argv[1])
recorder.switch_on()
recorder.open_door(types.SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 2), {str(tmp_path)!r})
print(__import__("os").environ["TORCH_FR_BUFFER_SIZE"], flush=True)
sys.stdin.read()  # outside of Python, until the test has seen enough
"""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank)], **pipes) for rank in range(2)]
    try:
        assert [one.stdout.readline() for one in ranks if one.stdout] == ["2000\n"] * 2
        until_s = time.monotonic() + HANGS_S
        found = None
        while found is None or "do not answer" in found.text:  # a busy machine may be slower than the question waits
            assert time.monotonic() < until_s
            found = ask_recorders([one.pid for one in ranks], tmp_path)
        assert found.text == "all 2 ranks are in call 7 (all_reduce of Float [5, 6]), with the same shapes"
        assert ask_recorders([ranks[0].pid], tmp_path) is None
    finally:
        for one in ranks:
            one.communicate()
    assert [one.returncode for one in ranks] == [0, 0]
    found = ask_recorders([one.pid for one in ranks], tmp_path)  # they have ended
    assert found is None


def test_the_alarm_repeats_what_the_recorder_says() -> None:
    def rank(number: int) -> Proc:
        inside = (Frame("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", 3000),)
        place, line = RankPlace(number, 2, number), "dist.all_reduce(x)"
        return Proc(10 + number, ppid=5, source=line, file="/me/train.py", inside=inside, rank=place)

    world = World([Proc(5, comm="pt_elastic", wait=Wait("child")), rank(0), rank(1)])
    told = Flight("the ranks differ in call 4", (1,), 1800.0, 1e9)
    sample = world.sample
    world.sample = lambda second: replace(sample(second), flight=told)  # type: ignore[method-assign]
    found = play(world, 30)[-1]
    assert (found.kind, found.pid) == ("STUCK", 11)
    assert found.text.endswith("; flight recorder: the ranks differ in call 4; torch itself gives up after 30 min")
