"""`jackline resume --step N`, as a person types it: a run that has finished goes back and takes another way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jackline.checkpoint.format.catalogue import list_left_behind, list_names
from jackline.checkpoint.mirror.fetch import fetch_newest
from jackline.checkpoint.mirror.store import FolderStore
from tests.session.nursery import Nursery
from tests.session.test_supervised import jackline, run_of, wait_until

# After step 2 the rate is what the file says, so two runs differ there and only there. `die` holds signals.
SCRIPT = """
import os, torch, jackline
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
with jackline.attach(
    model=model, optimizer=optimizer, loader=loader, save_every_steps=2, mirror=os.path.abspath("far")
) as run:
    for step, (batch,) in enumerate(run.steps(total=6), run.step):
        run._attached.saver.wait()  # these steps are quicker than a disk: no save may be skipped
        optimizer.param_groups[0]["lr"] = 0.01 if step < 2 else float(open("rate").read())
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        if os.path.exists("die"):
            number = int(open("die").read()); os.unlink("die"); os.kill(os.getpid(), number)
print("final", [value.hex() for value in model.weight.flatten().tolist()])
"""


def make_folder(path: Path, rate: str) -> Path:
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    (path / "rate").write_text(rate)
    return path


def final_of(output: str) -> str:
    (found,) = [line for line in output.splitlines() if line.startswith("final ")]
    return found


@pytest.mark.slow
def test_a_run_gone_back_ends_as_one_that_never_went_past_that_step(tmp_path: Path, nursery: Nursery) -> None:
    other = nursery.run(SCRIPT, (), make_folder(tmp_path / "other", "0.5"))
    folder = make_folder(tmp_path / "one", "0.01")
    first = jackline(folder, "run", "--name", "one", "--", sys.executable, "train.py")
    assert (other.code, first.returncode) == (0, 0), other.output + first.stderr
    assert final_of(first.stdout) != final_of(other.output)
    refused = jackline(folder, "resume", "one")
    assert refused.stderr == (
        "error: run 'one' has finished\n"
        "hint: start it again: jackline run --new -- ...; or go back: jackline resume --step N\n"
    )
    wait_until(lambda: any(path.name.startswith("step-00000006") for path in uploads(folder)))

    # Killed at the first step after it went back, then crashed and started again: nobody takes up step 6.
    (folder / "rate").write_text("0.5")
    (folder / "die").write_text("9")
    killed = jackline(folder, "resume", "one", "--step", "2")
    assert killed.returncode != 0
    assert "going back to step-00000002; left behind, not deleted: step-00000004, step-00000006" in killed.stderr
    assert (
        "left behind: step-00000006 and 1 more; numbers of later steps stay in metrics-0.jsonl, the new ones follow"
        in killed.stdout + killed.stderr
    )
    (folder / "die").write_text("11")
    done = jackline(folder, "resume", "one")
    assert done.returncode == 0, done.stderr
    assert final_of(done.stdout) == final_of(other.output)
    told = [json.loads(line) for line in (run_of(folder) / "events-supervisor.jsonl").read_text().splitlines()]
    resumed = [Path(event["checkpoint"]).name for event in told if event["event"] == "resumes"]
    assert resumed == ["step-00000002"] * 3

    checkpoints = run_of(folder) / "checkpoints"
    assert [str(name) for name in list_left_behind(checkpoints)] == ["step-00000006", "step-00000004"]
    assert [str(name) for name in list_names(checkpoints)] == [
        "step-00000006-r1",
        "step-00000004-r1",
        "step-00000002",
    ]
    steps = [json.loads(line)["step"] for line in (run_of(folder) / "metrics-0.jsonl").read_text().splitlines()]
    assert steps[:6] == [1, 2, 3, 4, 5, 6] and steps[-4:] == [3, 4, 5, 6]
    # On another machine only the new way comes back.
    wait_until(lambda: any(path.name.startswith("step-00000006-r1") for path in uploads(folder)))
    fetched = fetch_newest(FolderStore(folder / "far"), "one", tmp_path / "empty")
    assert fetched is not None and fetched.path.name == "step-00000006-r1"


def uploads(folder: Path) -> list[Path]:
    return [path.parent for path in (folder / "far").glob("*/checkpoints/*/manifest.json")]
