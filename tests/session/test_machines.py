""" "Machines" that share no folder: each has its own folder of runs, its own run, and the parts of its own ranks.

Real ranks over gloo. A machine is a folder of runs with a run of the job in it; losing it is kill -9 of its ranks and
their writers, and its whole folder deleted.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from jackline.checkpoint.place import join_job
from jackline.rundir.create import claim_run
from jackline.rundir.layout import RunDir
from jackline.rundir.records.start import StartRecord, write_start
from jackline.rundir.registry import register
from jackline.rundir.run_file import describe_run
from tests.session.nursery import Nursery
from tests.session.ranks_torture import IMPORTS, NODE, PROGRAM, Job, digests, losses


@dataclass
class Cluster:
    """The machines of one job. `sizes`: how many ranks each of them has."""

    work: Path
    nursery: Nursery
    mode: str = "fsdp"
    mirror: Path | None = None
    sizes: dict[str, int] = field(default_factory=lambda: {"A": 1, "B": 1})

    def root(self, name: str) -> Path:
        return self.work / name

    def checkpoints(self, name: str) -> list[Path]:
        return sorted((self.root(name) / "runs/job.job/checkpoints").glob("step-*"))

    def run_of(self, name: str) -> RunDir:
        """The run of the job on this machine, as `jackline train --nnodes` would make it, with one attempt more."""
        run = RunDir(self.root(name) / "runs" / f"job-{name}")
        if not run.has_run_file:
            contents = describe_run(run.name, kind="run", argv=["true"], settings={}, options={}, cwd=self.work)
            claim = claim_run(run, contents, hint="")
            assert claim is not None
            claim.release()
            register(run, vouched=True)
        attempt = run.attempt(len(run.list_attempts()) + 1)
        attempt.path.mkdir(parents=True)
        write_start(attempt, StartRecord())
        join_job(run, str(run.path.parent / "job.job"))
        return run

    def start(self, total: int, **environ: str) -> Job:
        size, token = sum(self.sizes.values()), uuid.uuid4().hex
        meet = self.work / f"meet-{token}"
        job = Job([], [])
        for name, count in self.sizes.items():
            os.environ["XDG_STATE_HOME"] = str(self.root(name) / "state")
            run = self.run_of(name)
            for _ in range(count):
                rank = len(job.ranks)
                env = {**os.environ, "JACKLINE_RUN_DIR": str(run.path), "INIT": f"file://{meet}", "TOTAL": str(total)}
                env |= {"JACKLINE_ATTEMPT": str(len(run.list_attempts())), "OMP_NUM_THREADS": "1", "MODE": self.mode}
                env |= {"RANK": str(rank), "WORLD_SIZE": str(size), NODE: f"{token}-{name}", "DROPOUT": "0.1"}
                env |= {"JACKLINE_MIRROR": str(self.mirror or ""), "JACKLINE_MIRROR_PATIENCE": "60", **environ}
                job.nodes.append(env[NODE])
                job.ranks.append(self.nursery.start(PROGRAM, [], self.work, env if size > 1 else _alone(env)))
        return job

    def lose(self, job: Job, name: str) -> None:
        """kill -9 of everything on that machine, and nothing is left of it."""
        (node,) = {one for one in job.nodes if one.endswith(f"-{name}")}
        job.kill_node(node)
        job.kill()
        job.wait()
        self.remove(job, name)

    def remove(self, job: Job, *names: str) -> None:
        """The folders of machines, once nothing writes there any more: writers and mirrors outlive their ranks."""
        job.wait_for_writers(*(f"-{name}" for name in names))
        for name in names:
            shutil.rmtree(self.root(name))


def _alone(env: dict[str, str]) -> dict[str, str]:
    return {word: value for word, value in env.items() if word not in ("RANK", "WORLD_SIZE")}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(*IMPORTS)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "")  # set for each machine, and put back at the end


def undisturbed(cluster: Cluster, total: int) -> tuple[set[str], dict[int, float]]:
    """How a training of as many ranks ends that nobody kills: digest of the weights, and losses."""
    cluster = replace(cluster, work=cluster.work / "whole", mirror=None)
    cluster.work.mkdir(parents=True)
    job = cluster.start(total)
    assert set(job.wait()) == {0}, job.text
    return digests(job), losses(job)


def run_and_kill(cluster: Cluster, total: int, at: int) -> Job:
    """All ranks of a job, of which the last kills itself in step `at`."""
    job = cluster.start(total, SIGNAL="SIGKILL", WHO=str(sum(cluster.sizes.values()) - 1), AT=str(at))
    job.wait()
    return job


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_machines_with_folders_of_their_own_resume_bit_equal(tmp_path: Path, nursery: Nursery, mode: str) -> None:
    cluster = Cluster(tmp_path, nursery, mode)
    wanted = undisturbed(cluster, 9)
    cut = run_and_kill(cluster, 9, 8)
    files = {name: {path.name for one in cluster.checkpoints(name) for path in one.iterdir()} for name in "AB"}
    if mode == "fsdp":  # each machine keeps the parts of its own ranks
        assert "model.rank-0.safetensors" in files["A"] and "model.rank-1.safetensors" not in files["A"]
        assert "model.rank-1.safetensors" in files["B"] and "model.rank-0.safetensors" not in files["B"]
    else:  # each has everything
        assert "model.safetensors" in files["A"] & files["B"]
    job = cluster.start(9)
    assert job.wait() == [0, 0], job.text
    assert "resuming from step-" in job.text
    assert digests(job) == wanted[0]
    assert {**losses(cut), **losses(job)} == wanted[1]


def test_a_lost_machine_is_replaced_by_an_empty_one_from_the_mirror(tmp_path: Path, nursery: Nursery) -> None:
    cluster = Cluster(tmp_path, nursery, mirror=tmp_path / "mirror")
    wanted = undisturbed(cluster, 12)
    job = cluster.start(8)  # two halves of one training: the first is left with all of it in the mirror
    assert job.wait() == [0, 0], job.text
    begun = losses(job)
    assert {path.name for path in (tmp_path / "mirror").iterdir()} == {"job-A", "job-B"}
    cluster.remove(job, "B")
    cluster.sizes = {"A": 1, "C": 1}  # a new machine with another name
    job = cluster.start(12)
    assert job.wait() == [0, 0], job.text
    assert min(losses(job)) == 9
    assert digests(job) == wanted[0]
    assert {**begun, **losses(job)} == wanted[1]
    cluster.remove(job, "A", "C")
    cluster.sizes = {"A": 1, "B": 1}
    job = cluster.start(12)  # everything is lost but the mirror
    assert job.wait() == [0, 0], job.text
    assert "complete: all 12 steps" in job.text
    assert digests(job) == wanted[0]


def test_what_is_missing_is_said_by_name(tmp_path: Path, nursery: Nursery) -> None:
    cluster = Cluster(tmp_path, nursery)
    first = cluster.start(4)
    assert first.wait() == [0, 0]
    cluster.remove(first, "B")
    shutil.rmtree(cluster.root("A") / "runs/job.job/checkpoints/copies")  # of what B has saved
    job = cluster.start(8)
    assert 0 not in job.wait()
    said = "the part of rank 1, saved by job-B, is on none of the machines and not in a mirror"
    assert "no checkpoint of this job is whole" in job.text and said in job.text, job.text
    assert "start the machine that has what is missing, or give the mirror (--mirror)" in job.text


def test_machines_that_change_places_send_each_other_their_parts(tmp_path: Path, nursery: Nursery) -> None:
    cluster = Cluster(tmp_path, nursery, sizes={"A": 2, "B": 2})
    wanted = undisturbed(cluster, 9)
    cut = run_and_kill(cluster, 9, 8)
    cluster.sizes = {"B": 2, "A": 2}
    job = cluster.start(9)
    assert set(job.wait()) == {0}, job.text
    assert digests(job) == wanted[0]
    assert {**losses(cut), **losses(job)} == wanted[1]


@pytest.mark.parametrize("is_copy_damaged", [False, True], ids=["part", "copy too"])
def test_a_damaged_part_is_replaced_by_its_copy_or_all_go_back(
    tmp_path: Path, nursery: Nursery, is_copy_damaged: bool
) -> None:
    cluster = Cluster(tmp_path, nursery)
    assert cluster.start(8).wait() == [0, 0]
    before, newest = cluster.checkpoints("B")[-2:]
    damaged = [newest, cluster.root("A") / "runs/job.job/checkpoints/copies/job-B" / newest.name]
    for folder in damaged[: 1 + is_copy_damaged]:
        part = folder / "optimizer.rank-1.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    job = cluster.start(10)
    assert job.wait() == [0, 0], job.text
    assert min(losses(job)) == 1 + int((before if is_copy_damaged else newest).name.split("-")[1])
    assert "optimizer.rank-1.safetensors has wrong bytes" in job.text


def test_kill_9_of_a_machine_in_the_middle_and_another_one_in_its_place(tmp_path: Path, nursery: Nursery) -> None:
    cluster = Cluster(tmp_path, nursery)
    wanted = undisturbed(cluster, 12)
    copied = cluster.root("A") / "runs/job.job/checkpoints/copies/job-B/step-*"
    cut = cluster.start(12, SIGNAL="SIGKILL", WHO="1", AT="10", AFTER=str(copied))
    while not cut.ranks[1].has_ended:
        time.sleep(0.05)
    cluster.lose(cut, "B")
    cluster.sizes = {"A": 1, "C": 1}
    job = cluster.start(12)
    assert job.wait() == [0, 0], job.text
    assert digests(job) == wanted[0]
    assert {**losses(cut), **losses(job)} == wanted[1]
    assert "resuming from step-" in job.text


@pytest.mark.parametrize("sizes", [{"A": 1}, {"A": 2, "C": 2}, {"B": 2}], ids=["one", "four", "two"])
def test_other_ranks_and_machines_resume_from_the_mirror(
    tmp_path: Path, nursery: Nursery, sizes: dict[str, int]
) -> None:
    cluster = Cluster(tmp_path, nursery, mirror=tmp_path / "mirror")
    first = cluster.start(4)
    assert first.wait() == [0, 0], first.text
    cluster.remove(first, "B")
    cluster.sizes = sizes
    job = cluster.start(8)
    assert set(job.wait()) == {0}, job.text
    assert min(losses(job)) == 5


def test_a_neighbour_has_a_copy_of_a_lost_machine(tmp_path: Path, nursery: Nursery) -> None:
    cluster = Cluster(tmp_path, nursery)
    wanted = undisturbed(cluster, 12)
    job = cluster.start(8)
    assert job.wait() == [0, 0], job.text
    begun = losses(job)
    assert list(cluster.root("A").glob("runs/job.job/checkpoints/copies/job-B/step-*"))
    cluster.remove(job, "B")
    cluster.sizes = {"A": 1, "C": 1}
    job = cluster.start(12)
    assert job.wait() == [0, 0], job.text
    assert digests(job) == wanted[0]
    assert {**begun, **losses(job)} == wanted[1]
    assert min(losses(job)) == 9
