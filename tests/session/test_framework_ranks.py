"""transformers, Lightning and Accelerate with two ranks: killed or stopped on one of them, resumed bit-exactly."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.session.framework_torture import SCRIPTS
from tests.session.nursery import EVERY_SAVE, Ended, Nursery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("integrations")]
FRAMEWORKS = ("transformers", "lightning", "accelerate")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_ranks(nursery: Nursery, library: str, place: Path, size: int = 2, die: str = "", **cell: Any) -> list[Ended]:
    """All ranks of one start, as torchrun would start them, to their ends."""
    pytest.importorskip(library)
    place.mkdir(exist_ok=True)
    env = {**EVERY_SAVE, "DIE": die, "CELL": json.dumps({"samples": 24, **cell}), "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    env |= {"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    script = SCRIPTS / f"{library}_cell.py"
    ranks = [
        nursery.start(script, [], place, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)
    ]
    return [one.wait() for one in ranks]


def results(place: Path, ended: list[Ended]) -> list[Any]:
    """What must be the same: each rank's last line, and the samples of each of its steps."""
    assert [one.code for one in ended] == [0] * len(ended), "\n".join(one.output for one in ended)
    found: list[Any] = []
    for rank, one in enumerate(ended):
        steps: dict[int, list[list[int]]] = {}
        previous = None
        path = place / (f"samples-{rank}.jsonl" if rank else "samples.jsonl")
        for process, step, numbers in map(json.loads, path.read_text().splitlines()):
            if (process, step) != previous:  # a step that is trained again begins anew
                steps[step] = []
            previous = (process, step)
            steps[step].append(numbers)
        found.append([re.findall(r"^final (.*)$", one.output, re.MULTILINE), steps])
    return found


@pytest.mark.parametrize("library", FRAMEWORKS)
def test_two_ranks_resume_exactly_after_kill_and_sigterm(
    framework_nursery: Nursery, tmp_path: Path, library: str
) -> None:
    whole = tmp_path / "whole"
    wanted = results(whole, run_ranks(framework_nursery, library, whole, accumulate=2))
    shares = [{index for batches in steps.values() for one in batches for index in one} for _, steps in wanted]
    assert shares[0] | shares[1] == set(range(24))
    first = [next(iter(steps.values()))[0] for _, steps in wanted]
    assert not set(first[0]) & set(first[1])  # the ranks divide one batch

    killed = tmp_path / "killed"
    codes = [one.code for one in run_ranks(framework_nursery, library, killed, die="kill:4", accumulate=2)]
    assert codes[1] == -9 and codes[0] not in (0, 75)  # it ended by itself: its partner is gone
    assert results(killed, run_ranks(framework_nursery, library, killed, accumulate=2)) == wanted

    stopped = tmp_path / "stopped"
    ended = run_ranks(framework_nursery, library, stopped, die="term:5", accumulate=2)
    assert [one.code for one in ended] == [75, 75], "\n".join(one.output for one in ended)
    assert re.search(r"stopped at step [56], saved", ended[0].output)
    if library != "accelerate":  # a framework's batch size is that of a rank: the batches would be others
        refused = run_ranks(framework_nursery, library, stopped, size=1, accumulate=2)
        assert refused[0].code in (1, 3)
        assert "it was saved with 2 ranks and would resume with 1 rank" in refused[0].output
    assert results(stopped, run_ranks(framework_nursery, library, stopped, accumulate=2)) == wanted


REFUSED = [
    ("lightning", {"samples": 25}, "the last batch of an epoch has 1 samples, which 2 ranks cannot share equally"),
    ("transformers", {"samples": 25}, "the last batch of an epoch has 1 samples, which 2 ranks cannot share equally"),
    ("transformers", {"extra": "weighted sampler"}, "cannot be divided among 2 ranks"),
    ("accelerate", {"samples": 25}, "the last batch of an epoch has 1 samples, which 2 ranks cannot share equally"),
    ("accelerate", {"extra": "weighted sampler"}, "cannot be divided among 2 ranks"),
]


@pytest.mark.parametrize(("library", "cell", "words"), REFUSED)
def test_what_ranks_cannot_resume_is_refused_before_the_first_step(
    framework_nursery: Nursery, tmp_path: Path, library: str, cell: dict[str, Any], words: str
) -> None:
    for one in run_ranks(framework_nursery, library, tmp_path / "job", **cell):
        assert one.code not in (0, 75)
        assert words in one.output
    assert not (tmp_path / "job/samples.jsonl").exists()
