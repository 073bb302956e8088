"""`resume --skip-batches A:B`: batches leave the run, the order of the others stays, and it is said everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.review.facts import read_facts
from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import Skip, SkippedBatches, add_skip, parse_skip, read_skipped
from tests.deadline import HANGS_S
from tests.session.nursery import Nursery

SCRIPT = """
import os, signal, torch, jackline
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.arange(24.0))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
with jackline.attach(name="one", model=model, optimizer=optimizer, loader=loader, save_every_steps=2) as run:
    for (batch,) in run.steps(total=10):
        run._attached.saver.wait()
        loss = model(batch[:, None]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        print("trained", run.step, batch.int().tolist(), flush=True)
        if run.step == 5 and os.environ.get("DIE"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def trained(output: str) -> list[str]:
    return re.findall(r"trained \d+ (\[.*?\])", output)


def test_batches_leave_the_run_and_the_order_of_the_others_stays(tmp_path: Path, nursery: Nursery) -> None:
    """Three passes of six batches; the batches 5 to 7 are in two of them."""
    (tmp_path / "whole").mkdir()
    whole = nursery.run(SCRIPT.replace("total=10", "total=13"), [], tmp_path / "whole", {})
    order = trained(whole.output)
    assert whole.code == 0 and len(order) == 13, whole.output
    killed = nursery.run(SCRIPT, [], tmp_path, {"DIE": "1"})
    assert killed.code == -9 and trained(killed.output) == order[:5], killed.output
    run = RunDir(tmp_path / "runs/one")
    line = [sys.executable, "-m", "jackline", "resume", "one", "--step", "4", "--skip-batches", "5:8"]
    refused = subprocess.run([*line[:-1], "8:5"], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert refused.returncode == 2 and "is no range of batches" in refused.stderr and not run.skipped_file.exists()
    seen = subprocess.run([*line[:-1], "2:5"], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert (seen.returncode, seen.stderr) == (
        2,
        "error: step-00000004 was trained on the batches 0 to 3: 2:5 cannot be taken out of its weights\n"
        "hint: `--step 2` goes back to before them, `--skip-batches 4:5` leaves out the rest\n",
    )
    newest = [*line[:4], "--skip-batches", "0:2"]
    first = subprocess.run(newest, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert first.returncode == 2 and "hint: `--step 0` goes back to before them\n" in first.stderr
    assert not run.skipped_file.exists() and not list(run.checkpoints.glob("rewind-*"))
    add_skip(run, parse_skip("5:8"), "4")
    again = nursery.run(SCRIPT, [], tmp_path, {"DIE": ""})
    assert again.code == 0, again.output
    assert trained(again.output) == [order[4], *order[8:13]]
    for words in ("batch 5", "the batches 6 to 7"):  # an epoch ends between them
        assert f"left out {words}, as `resume --skip-batches` says" in again.output
    assert "left out: the batches 5:8 of the run (--skip-batches)" in again.output
    assert "not exact" not in again.output and "not bit-exact" not in again.output
    assert read_facts(run)["rewinds"]["batches left out"] == "5:8"


@pytest.mark.parametrize("text", ["5", "5:", "8:5", "5:5", "-1:4", "a:b", "5:8:9"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no range of batches"):
        parse_skip(text)


def test_ranges_add_up_and_a_damaged_file_leaves_nothing_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    add_skip(run, parse_skip("2:4"), None)
    found = add_skip(run, parse_skip("7:8"), "3")
    assert str(found) == "2:4, 7:8" and found.first == 2 and read_skipped(run) == found
    assert [number for number in range(10) if found.covers(number)] == [2, 3, 7]
    run.skipped_file.write_text('{"ranges": [{"first": "x", "end": 3}, 5, {"first": 1}]}')
    assert read_skipped(run) == SkippedBatches() and not Skip().covers(0)
