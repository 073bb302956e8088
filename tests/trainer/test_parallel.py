"""`jackline train RECIPE --nproc N`: the same batches, losses and checkpoints with any number of ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from jackline import accelerator
from jackline.cli.commands.train import with_ranks
from jackline.errors import UsageError
from jackline.trainer.startup.parallel import local_device, rank, share_of, world_size
from tests.deadline import HANGS_S

TRAINER = ["python", "-m", "jackline.trainer"]


def asked(**words: object) -> dict[str, object]:
    return {"nproc": None, "nnodes": None, "rdzv": None, **words}


def test_without_ranks_the_trainer_is_started_as_ever() -> None:
    given = asked()
    assert with_ranks(TRAINER, given) == TRAINER
    assert given == {}


def test_torchrun_starts_the_ranks() -> None:
    command = with_ranks(TRAINER, asked(nproc=2))
    assert command == [
        *("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "jackline.trainer"),
    ]
    far = with_ranks(TRAINER, asked(nproc=8, nnodes="1:4", rdzv="192.0.2.1:29500"))
    assert {"--nnodes=1:4", "--rdzv-endpoint=192.0.2.1:29500", "--nproc-per-node=8"} <= set(far)
    here = with_ranks(TRAINER, asked(nnodes="2", rdzv="127.0.0.1:1"))
    assert {"--rdzv-conf=is_host=1", "--local-addr=127.0.0.1"} <= set(here)
    assert "--rdzv-conf=is_host=0" in with_ranks(TRAINER, asked(nnodes="2", rdzv="192.0.2.1:1"))  # of no machine
    assert "--max-restarts=10" in far  # the ranks that are left begin again
    assert not any(word.startswith("--max-restarts") for word in here)
    with pytest.raises(UsageError, match="--nnodes needs a place to meet"):
        with_ranks(TRAINER, asked(nnodes="2"))


def test_the_shares_of_all_ranks_are_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(8)
    monkeypatch.setenv("WORLD_SIZE", "4")
    shares = []
    for number in range(4):
        monkeypatch.setenv("RANK", str(number))
        assert (rank(), world_size()) == (number, 4)
        shares.append(share_of(rows))
    assert np.concatenate(shares).tolist() == rows.tolist()
    monkeypatch.delenv("WORLD_SIZE")
    assert (rank(), share_of(rows).tolist()) == (0, rows.tolist())


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(word, value)
    monkeypatch.setattr(accelerator, "is_gpu", lambda device: True)
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    with pytest.raises(UsageError, match="rank 1 would use GPU 1, and this machine has 1"):
        local_device(torch.device("cuda"))


def begin(work: Path, name: str, *words: str) -> subprocess.Popen[str]:
    """One training by the command line."""
    env = {**os.environ, "JACKLINE_RUNS": str(work / "runs"), "XDG_STATE_HOME": str(work / "state")}
    env |= {"JACKLINE_DATA": str(work / "data"), "OMP_NUM_THREADS": "1"}
    for word in ("JACKLINE_RUN_DIR", "JACKLINE_ATTEMPT", "RANK", "WORLD_SIZE"):
        env.pop(word, None)
    return subprocess.Popen(
        [sys.executable, "-m", "jackline", "train", *words, "--name", name],
        env=env,
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_losses(work: Path, name: str) -> dict[int, float]:
    """By step; a step that was trained again counts as it was trained last."""
    path = work / "runs" / name / "metrics-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(line["step"]): line["loss"] for line in map(json.loads, lines) if "loss" in line}


def train(work: Path, name: str, *words: str) -> tuple[int, str, dict[int, float]]:
    """To its end: exit code, output, losses by step."""
    job = begin(work, name, *words)
    text = job.communicate(timeout=3 * HANGS_S)[0]
    return job.returncode, re.sub(r"\x1b\[[0-9;]*m", "", text), read_losses(work, name)


def wait_for_step(work: Path, name: str, step: int) -> None:
    until_s = time.monotonic() + 2 * HANGS_S
    while max(read_losses(work, name), default=0) < step:
        assert time.monotonic() < until_s, f"step {step} did not come"
        time.sleep(0.05)


LONG = ("demo", "--quick", "--max-steps", "40", "--eval-every", "0", "--save-every-steps", "3", "--full-eval", "no")
DEMO = ("demo", "--quick", "--max-steps", "8", "--eval-every", "4", "--save-every-steps", "4", "--sentinels", "off")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_losses_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    reference = train(tmp_path, "one", *DEMO)
    assert reference[0] == 0, reference[1]
    for number, mode in ((2, "ddp"), (2, "fsdp"), (4, "ddp")):
        code, text, losses = train(tmp_path, f"{mode}-{number}", *DEMO, "--nproc", str(number), "--parallel", mode)
        assert code == 0, text
        assert losses == pytest.approx(reference[2], rel=2e-5), (mode, number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_killed_rank_is_named_and_the_same_command_ends_bit_equal(tmp_path: Path, mode: str) -> None:
    words = (*LONG, "--nproc", "2", "--parallel", mode)
    code, text, wanted = train(tmp_path, "whole", *words)
    assert code == 0, text
    job = begin(tmp_path, "cut", *words)
    wait_for_step(tmp_path, "cut", 8)
    ranks = tmp_path / "runs/cut/attempts/001/ranks"
    os.kill(json.loads((ranks / "rank-1.json").read_text())["pid"], signal.SIGKILL)
    text = job.communicate(timeout=3 * HANGS_S)[0]
    assert job.returncode != 0 and "rank 1 of 2: killed with SIGKILL" in text, text  # somebody's kill is not undone
    code, text, found = train(tmp_path, "cut", *words)
    assert code == 0, text
    assert "resuming from step-" in text
    assert found == wanted


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sigterm_on_one_rank_ends_all_with_75_and_one_process_continues(tmp_path: Path) -> None:
    job = begin(tmp_path, "job", *LONG, "--nproc", "2", "--parallel", "fsdp")
    wait_for_step(tmp_path, "job", 4)
    ranks = tmp_path / "runs/job/attempts/001/ranks"
    os.kill(json.loads((ranks / "rank-1.json").read_text())["pid"], signal.SIGTERM)
    text = job.communicate(timeout=3 * HANGS_S)[0]
    assert job.returncode == 75, text
    code, text, losses = train(tmp_path, "job", *LONG)
    assert code == 0, text
    assert losses == pytest.approx(train(tmp_path, "whole", *LONG)[2], rel=2e-5)
