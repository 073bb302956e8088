"""A person's own step: several models, several optimizers, a running average, their own autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jackline.memory.plan.choose import plan
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.plan.target import load_candidates
from jackline.memory.predict.step import predict

H200 = GPU_MODELS["H200"]
GAN = """
import copy
import torch
from torch import nn

def training():
    maker, judge = nn.Linear(512, 512), nn.Linear(512, 1)
    average = copy.deepcopy(maker).requires_grad_(False)
    first = torch.optim.AdamW(maker.parameters(), fused=True)
    second = torch.optim.SGD(judge.parameters(), lr=0.1)

    def step(n):
        noise = torch.randn(n, 512)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            made = maker(noise)
            loss = judge(made).mean()
        loss.backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        with torch.no_grad():
            for old, new in zip(average.parameters(), maker.parameters()):
                old.lerp_(new, 0.1)
        print("loss", float(loss))
    return step
"""
MAKER = (512 * 512 + 512) * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gan.py"
    path.write_text(GAN)
    return path


def test_an_own_step_is_planned_with_all_its_models(file: Path) -> None:
    (found,) = load_candidates(f"{file}:training", H200, ["batch_size=64"])
    made = predict(found.job, 64, H200)
    assert made.parts["weights"] == pytest.approx(2 * MAKER + 513 * 4, rel=0.02)
    assert made.parts["optimizer"] == pytest.approx(2 * MAKER, rel=0.02)
    assert any(note.startswith("a value that is read is 0 (gan.py:") for note in made.assumptions)


def test_its_own_optimizers_are_put_back(file: Path) -> None:
    before = torch.optim.AdamW.step
    (found,) = load_candidates(f"{file}:training", H200, [])
    chosen = plan(found.job, H200)
    assert (chosen.job, chosen.micro_batch, chosen.fit) == ("gan.py:training", 8, "fits")
    assert chosen.max_micro_batch > 8
    assert torch.optim.AdamW.step is before
