"""A pretrained part that does not train: not stored, named by its hash, and asked for again on resume."""

from __future__ import annotations

from pathlib import Path

from tests.session.nursery import Nursery

SCRIPT = """
import os, torch, jackline
torch.manual_seed(int(os.environ['SEED']))
encoder = torch.nn.Linear(256, 256).requires_grad_(False)
head = torch.nn.Linear(256, 1)
model = torch.nn.Sequential(encoder, head)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(40, 256))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
with jackline.attach(
    model=model, optimizer=optimizer, loader=loader, save_every_steps=1, leave_out_frozen=True, name="frozen"
) as run:
    for (batch,) in run.steps(total=7):
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if run.step == 3 and 'DIE' in os.environ: os.kill(os.getpid(), 9)
print("final", run.step)
"""


def test_a_frozen_part_is_not_stored_and_another_one_in_its_place_is_refused(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    killed = nursery.run(script, [], tmp_path, {"SEED": "0", "DIE": "1"})
    assert killed.code == -9, killed.output
    stored = max((tmp_path / "runs" / "frozen" / "checkpoints").glob("step-*")) / "model.safetensors"
    assert stored.stat().st_size < 256 * 256 * 4

    other = nursery.run(script, [], tmp_path, {"SEED": "1"})
    assert other.code == 1
    assert (
        "error: model.0.weight was frozen and left out of the checkpoint, and is not the same now\n"
        "hint: load the same frozen weights before resuming\n"
    ) in other.output

    ended = nursery.run(script, [], tmp_path, {"SEED": "0"})
    assert ended.code == 0, ended.output
    assert "resuming from step-" in ended.output
    assert "final 7" in ended.output
