"""Bytecode is kept where Python would compile at every start, and nowhere else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import HANGS_S

KEEPING = """
import gc, os, sys
from jackline.trainer.startup.process import keep_bytecode, without_collecting
print(keep_bytecode("heavy"))
with without_collecting():
    import heavy.part
    assert not gc.isenabled()
print(gc.isenabled(), gc.get_freeze_count() > 1000)
print(os.environ.get("PYTHONPYCACHEPREFIX"), os.environ.get("PYTHONDONTWRITEBYTECODE"))
print(heavy.part.__cached__, os.path.exists(heavy.part.__cached__))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "heavy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("NUMBER = 1\n")
    return folder


def start(package: Path, **more: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join([str(package.parent), *(entry for entry in sys.path if entry)])
    environment = {**kept, "PYTHONPATH": path, "XDG_CACHE_HOME": str(package.parents[1] / "home"), **more}
    command = [sys.executable, "-c", KEEPING]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=HANGS_S
    ).stdout.splitlines()


def test_where_nothing_may_be_written_beside_the_sources_it_is_kept_in_a_folder_of_ours(
    package: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "home" / "jackline" / "bytecode"
    kept = f"{ours}{package}/part.{sys.implementation.cache_tag}.pyc"
    for _ in range(2):
        lines = start(package, PYTHONDONTWRITEBYTECODE="1")
        assert lines == [str(ours), "True True", f"{ours} None", f"{kept} True"]
    assert not (package / "__pycache__").exists()
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700


def test_bytecode_that_python_can_write_or_has_is_left_to_python(package: Path) -> None:
    beside = package / "__pycache__" / f"part.{sys.implementation.cache_tag}.pyc"
    assert start(package) == ["None", "True True", "None None", f"{beside} True"]
    # Now it is there, so it does not matter any more that none may be written.
    assert start(package, PYTHONDONTWRITEBYTECODE="1") == ["None", "True True", "None 1", f"{beside} True"]


def test_bytecode_of_other_sources_is_as_good_as_none(package: Path, tmp_path: Path) -> None:
    start(package)
    os.utime(package / "__init__.py", (1, 1))
    assert start(package, PYTHONDONTWRITEBYTECODE="1")[0] == str(tmp_path / "home" / "jackline" / "bytecode")


def test_a_persons_own_folder_is_kept(package: Path, tmp_path: Path) -> None:
    mine = str(tmp_path / "mine")
    lines = start(package, PYTHONPYCACHEPREFIX=mine, PYTHONDONTWRITEBYTECODE="1")
    assert lines[0] == "None" and lines[2] == f"{mine} 1" and lines[3].endswith(" False")


def test_a_folder_that_cannot_be_made_is_done_without(package: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    lines = start(package, PYTHONDONTWRITEBYTECODE="1")
    assert lines[0] == "None" and lines[2] == "None 1"


OPTIMIZERS = """
import sys, torch
from jackline.trainer.startup.process import delay_compiler

class Own(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        return super().step()

def train(make, num_steps):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = make([weight])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        schedule.step()
        assert torch.is_grad_enabled()
    again = make([weight])
    again.load_state_dict(optimizer.state_dict())
    return weight

kinds = [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, lambda p: Own(p, lr=0.1, momentum=0.9)]
delay_compiler()
without = [train(kind, 5) for kind in kinds]
print("torch._dynamo" in sys.modules)
import torch._dynamo
print(all(map(torch.equal, without, [train(kind, 5) for kind in kinds])))
inside = torch.optim.Optimizer.zero_grad.__wrapped__
print(torch.compiler.is_compiling(), inside.__dynamo_disable.__module__)
"""


def test_an_optimizer_works_without_the_compiler_and_alike_once_it_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", OPTIMIZERS], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.splitlines() == ["False", "True", "False torch._dynamo.eval_frame"], done.stderr
