"""Memory inside an attached loop: steps that shrink, an end before the kernel's, and an account of what ran out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from jackline.memory.guard.safe_step import Slicing
from jackline.session.memory.gpu import GpuMemory
from tests.memory.injected import OutOfMemoryAt
from tests.session.nursery import ROOT, Ended, Nursery

SHRINKING = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, jackline
from tests.memory.injected import OutOfMemoryAt
max_rows, micro_batch = int(os.environ["MAX_ROWS"]), int(os.environ.get("MICRO_BATCH", "0")) or None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)

def loss_sum(part):
    inputs, targets = part
    return (model(inputs) - targets).square().sum(), targets.numel()

with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, name="safe") as run:
    for batch in run.steps(total=8):
        optimizer.zero_grad()
        with OutOfMemoryAt(max_rows=max_rows):
            result = run.safe_step(loss_sum, batch, micro_batch=micro_batch)
        optimizer.step()
        run.log(loss=result.loss)
        print("step", run.step, result.micro_batch, result.loss.item().hex(), flush=True)
        if run.step == int(os.environ.get("DIES_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
print("weights", sum(weight.double().sum().item() for weight in model.parameters()).hex())
"""


def shrink(nursery: Nursery, folder: Path, max_rows: int, **more: str) -> Ended:
    folder.mkdir(exist_ok=True)
    return nursery.run(SHRINKING, [], folder, {"MAX_ROWS": str(max_rows), **more})


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    text = (folder / "runs" / "safe" / "events-0.jsonl").read_text()
    return [record for record in map(json.loads, text.splitlines()) if record["event"] == kind]


def lines(ended: Ended, word: str) -> list[str]:
    return [line for line in ended.output.splitlines() if line.startswith(word)]


def test_a_step_that_runs_out_shrinks_loudly_and_a_resumed_run_keeps_the_size(
    nursery: Nursery, tmp_path: Path
) -> None:
    dead = shrink(nursery, tmp_path / "one", 4, DIES_AT="3")
    assert dead.code == -9
    told = records(tmp_path / "one", "out_of_memory")
    assert [(one["step"], one["micro_batch"], one["new_micro_batch"]) for one in told] == [(1, 16, 8), (1, 8, 4)]
    assert told[0]["text"] == (
        "out of GPU memory at step 1 in the forward pass: needed 2.0 GiB, 614 MiB free of 15.9 GiB"
        " (pid 4211 beside it: 15.2 GiB); micro-batch 16 -> 8 and the whole step again; batch, learning rate, data"
        " order and step count stay"
    )
    assert f"[jackline] {told[0]['text']}" in dead.output
    assert told[0]["parts"] == {"weights": 4 * (8 * 16 + 16 + 16 * 4 + 4)}
    assert told[0]["others"] == [{"pid": 4211, "name": "", "used_bytes": 16320875724}]
    again = shrink(nursery, tmp_path / "one", 4)
    assert again.code == 0, again.output
    assert "[jackline] micro-batch 4, as it was after running out of memory before" in again.output
    assert len(records(tmp_path / "one", "out_of_memory")) == 2
    clean = shrink(nursery, tmp_path / "two", 4, MICRO_BATCH="4")
    assert "out of GPU memory" not in clean.output
    # The step it died in is done again, or not, depending on whether its checkpoint was acknowledged.
    assert list(dict.fromkeys(lines(dead, "step") + lines(again, "step"))) == lines(clean, "step")
    assert lines(again, "weights") == lines(clean, "weights") != []


def test_one_sample_that_does_not_fit_ends_the_run_with_an_account_of_it(nursery: Nursery, tmp_path: Path) -> None:
    ended = shrink(nursery, tmp_path, 0)
    assert ended.code == 1
    session = json.loads((tmp_path / "runs" / "safe" / "session-0.json").read_text())
    account = session["memory"]["last_oom"]
    assert (account["step"], account["micro_batch"], account["shape"]) == (1, 1, "16 x 8")
    assert account["wanted_bytes"] == 2 * 2**30
    assert "error: out of GPU memory at step 1: needed 2.0 GiB, 614 MiB free of 15.9 GiB" in ended.output
    assert "also on this GPU: pid 4211" in ended.output


def test_switched_off_the_step_is_the_plain_one(nursery: Nursery, tmp_path: Path) -> None:
    off = shrink(nursery, tmp_path / "off", 99, JACKLINE="off")
    on = shrink(nursery, tmp_path / "on", 99)
    assert off.code == on.code == 0, off.output
    assert [line.split()[:3] for line in lines(off, "step")] == [line.split()[:3] for line in lines(on, "step")]
    assert not (tmp_path / "off" / "runs").exists()
    failed = shrink(nursery, tmp_path / "off", 4, JACKLINE="off")
    assert failed.code == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in failed.output


STRANGER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch, jackline
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=16)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="safe") as run:
    for (batch,) in run.steps(total=8):
        optimizer.zero_grad(); model(batch).sum().backward()
        if run.step == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.90 GiB of which"
                " 1.00 GiB is free. Of the allocated memory 10.00 GiB is allocated by PyTorch, and 1.00 GiB is"
                " reserved by PyTorch but unallocated."
            )
        optimizer.step()
"""


def test_a_loop_without_safe_step_that_runs_out_is_told_what_would_have_fitted(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = nursery.run(STRANGER, [], tmp_path)
    assert ended.code == 1
    (told,) = records(tmp_path, "out_of_memory")
    assert told["text"] == (
        "error: out of GPU memory at step 3: needed 2.0 GiB, 1.0 GiB free of 15.9 GiB\n"
        "       largest part: activations, gradients and temporaries, 10.0 GiB at micro-batch 16 (16 x 8)\n"
        "hint: micro-batch 14 would have fitted; run.safe_step keeps the batch the same"
    )
    assert told["needs_new_process"] is False


def test_it_grows_back_only_when_the_loop_asks_for_another_size() -> None:
    model = torch.nn.Linear(8, 4)
    gpu = GpuMemory({"model": model}, [], lambda *_, **__: None)
    batch = torch.randn(16, 8)

    def sizes(asked: int | None, max_rows: int = 99) -> tuple[int, int]:
        model.zero_grad()
        with OutOfMemoryAt(max_rows=max_rows):
            result = gpu.step(lambda part: (model(part).sum(), len(part)), batch, Slicing(asked), step=1)
        return result.micro_batch, result.num_slices

    assert sizes(16, max_rows=4) == (4, 4)
    assert sizes(16) == (4, 4)
    assert sizes(8) == (8, 2)
    assert sizes(8, max_rows=4) == (4, 4)
    kept = gpu.state()
    again = GpuMemory({"model": model}, [], lambda *_, **__: None)
    again.restore(kept)
    gpu = again
    assert sizes(8) == (4, 4)
