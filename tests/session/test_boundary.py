"""A save of an attached loop holds the state of its boundary, whatever the loop does next.

Before this rule the copy ran beside the next step, guarded by torch's version counters alone: writes by `.data` and
by numpy were in the checkpoint of the boundary before them, and a rebound tensor crashed the copying thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")

TARGET_NETWORK = """
import copy, hashlib, sys
from pathlib import Path
import torch
from torch import nn
import jackline
from tests.session.boundary_loop import digests, read_digests
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
target = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(64, 1024))
loader = torch.utils.data.DataLoader(data, batch_size=4)
wrong, expected = [], {}
with jackline.attach(model=model, target=target, optimizer=optimizer, loader=loader, runs_dir=sys.argv[1],
                     save_every_steps=5, verify=False, memory_guard=False) as run:
    engine = run._attached.saver.engine
    for (batch,) in run.steps(total=27):
        saved = run.step
        if saved >= 25 and saved % 10 == 5:  # the first thing after the boundary, as in reinforcement learning
            for old, new in zip(target.parameters(), model.parameters()):
                CHANGE
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if saved and saved % 5 == 0:
            while engine.is_busy: engine._link.pump(0.05)
            found = read_digests(engine.folder / f"step-{saved:08d}")
            wrong += [f"step {saved}: {name}" for name in expected if found.get(name) != expected[name]]
        if run.step % 5 == 0:
            expected = digests({"target": target})
print("wrong:", wrong, flush=True)
"""


def run_program(words: list[str], timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )


def drill(tmp_path: Path, *words: str, cases: int, seed: int = 0, timeout_s: float = 280) -> None:
    given = [str(tmp_path), "--cases", str(cases), "--seed", str(seed), *words]
    done = run_program(["-m", "tests.session.boundary_loop", *given], timeout_s)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert f"{cases} cases, 0 wrong tensors" in done.stdout


@pytest.mark.parametrize(
    "change", ["old.data.copy_(new.data)", pytest.param("old.data = new.data.clone()", marks=pytest.mark.slow)]
)
def test_a_target_network_that_moves_at_the_top_of_a_step_is_saved_as_it_was_at_the_boundary(
    tmp_path: Path, change: str
) -> None:
    """`.data.copy_`: five or six of six tensors were wrong; rebinding: a segmentation fault."""
    script = tmp_path / "script.py"
    script.write_text(TARGET_NETWORK.replace("CHANGE", change))
    done = run_program([str(script), str(tmp_path / "runs")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "wrong: []" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("words", [(), ("--overlap",)], ids=["a stranger's loop", "declared changes"])
def test_whatever_changes_after_a_boundary_is_not_in_its_checkpoint(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Every kind of saved tensor, every way to change it, at every instant of a step; some of the thousand."""
    drill(tmp_path, *words, cases=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("words", [(), ("--overlap",)], ids=["a stranger's loop", "declared changes"])
def test_a_thousand_changes_after_boundaries_are_in_no_checkpoint(
    tmp_path: Path, words: tuple[str, ...], seed: int
) -> None:
    drill(tmp_path, *words, cases=100, seed=seed)


@needs_gpu
@pytest.mark.parametrize("way", ["whole", "bounce", "none"])
@pytest.mark.parametrize("words", [(), ("--overlap",)], ids=["a stranger's loop", "declared changes"])
def test_on_cuda_no_stream_writes_into_the_checkpoint_of_the_boundary_before(
    tmp_path: Path, words: tuple[str, ...], way: str
) -> None:
    """A second stream, `.data`, rebinding; and a stream that was still at work when the boundary came."""
    drill(tmp_path, *words, "--device", "cuda", "--way", way, cases=100)
