"""`jackline plan` as a person types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.memory.plan.gpus import detect_gpu
from tests.deadline import HANGS_S

MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.zeros(32, 64), lambda model, batch: model(batch).sum()

def reads_values():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * x.sum().item()
    return Reads(4, 4), torch.zeros(8, 4)

def needs_a_gpu():
    class Kernel(nn.Linear):
        def forward(self, x):
            raise RuntimeError("no kernel for this device")
    return Kernel(4, 4), torch.zeros(8, 4)
"""


def jackline(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "jackline", "plan", *words]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, timeout=HANGS_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def test_json_has_what_a_script_needs(folder: Path) -> None:
    done = jackline("mine.py:make", "--gpu", "T4", "--json", "batch_size=48", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["micro_batch"], told["accumulation"], told["global_batch"]) == (48, 1, 48)
    assert (told["gpu"], told["precision"], told["fit"]) == ("T4", "fp16", "fits")
    assert sum(told["parts"].values()) == told["device_bytes"]
    assert told["peak_reserved_bytes"] >= told["peak_allocated_bytes"] > 0


def test_a_recipe_is_explained(folder: Path) -> None:
    done = jackline("sparsae", "--gpu", "T4", "--model-size", "tiny", "--explain", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "sparsae tiny on T4: fits"
    assert re.fullmatch(r"  batch 4 = micro-batch 4, accumulated once \(up to \d\d would fit\)", lines[1])
    assert lines[2] == "  precision fp16 autocast with a scaler"
    assert "parameters=49393489, is_head_tied=False" in lines[3]
    assert "what would save memory, cheapest first:" in lines
    assert any(line.endswith("logits and loss") for line in lines)


def test_a_model_too_large_says_so_and_exits_with_1(folder: Path) -> None:
    done = jackline("sparsae", "--gpu", "0.7", "--model_size", "tiny", cwd=folder)
    assert done.returncode == 1
    assert done.stdout.startswith("sparsae tiny on 0.7 GiB: does not fit, not even one sample at a time\n")
    assert "recompute activations" in done.stdout


def test_an_unknown_gpu_is_a_usage_error_that_lists_the_known_ones(folder: Path) -> None:
    done = jackline("mine.py:make", "--gpu", "T5", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no GPU 'T5' in the table\n       known GPUs: T4, P100, V100-16,")
    assert done.stderr.endswith("or give its memory in GiB: --gpu 15\n")


def test_without_a_gpu_one_must_be_named(folder: Path) -> None:
    if detect_gpu() is not None:
        pytest.skip("this machine has a GPU")
    done = jackline("mine.py:make", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no NVIDIA GPU here, so say which one is meant\n")


def test_a_model_that_cannot_be_traced_says_where(folder: Path) -> None:
    done = jackline("mine.py:needs_a_gpu", "--gpu", "T4", cwd=folder)
    assert done.returncode == 1
    assert "mine.py:needs_a_gpu cannot be traced without a GPU: no kernel for this device" in done.stderr
    assert 'raise RuntimeError("no kernel for this device")' in done.stderr
    assert "hint: the rehearsal before step 0 measures it instead" in done.stderr


def test_an_unknown_recipe_is_a_usage_error(folder: Path) -> None:
    done = jackline("sparsee", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no recipe 'sparsee'\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("demo", "--measure", "--gpu", "T4"), "--measure runs steps on the GPU of this machine"),
        (("demo", "--gpu", "L4", "--fit", "T4, 5 h"), "--gpu L4 and --fit 'T4, 5 h' name a GPU each"),
        (("--fit", "T4, 0 h"), "the time is above 0 and at most 10 years"),
        (("--gpu", "T4"), "a plan needs a target"),
    ],
)
def test_what_cannot_be_asked_is_said_before_torch_is_imported(
    words: tuple[str, ...], said: str, folder: Path
) -> None:
    done = jackline(*words, cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_word_behind_fit_may_be_a_setting(folder: Path) -> None:
    done = jackline("mine.py:make", "--gpu", "T4", "--fit", "batch_size=48", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "no change is needed" in done.stdout and "batch 48 = " in done.stdout


def test_the_table_goes_alone(folder: Path) -> None:
    done = jackline("sparsae", "--table", "--json", cwd=folder)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --table goes alone: it cannot be joined with --json, --explain or --fit\n"
        "hint: `jackline plan --help` shows its options\n"
    )
