"""Which part of a step is under way: known at every moment, and to be read from outside while it lasts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.session.nursery import Nursery
from tests.shell import wait_for

SCRIPT = """
import json, time
from pathlib import Path
import torch, jackline

seen = []
class Data:
    def __iter__(self):
        for _ in range(2):
            seen.append(f"data: {run.doing}")
            yield torch.ones(4, 3)
class Average:
    def state_dict(self):
        seen.append(f"state: {run.doing}")
        return {"a": 1}
    def load_state_dict(self, state):
        pass
def before_forward(*_):
    seen.append(f"model: {run.doing}")
    while run.step == 1 and not Path("go").exists():
        time.sleep(0.01)
model = torch.nn.Linear(3, 1)
model.register_forward_pre_hook(before_forward)
model.weight.register_hook(lambda gradient: seen.append(f"gradient: {run.doing}"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with jackline.attach(model=model, optimizer=optimizer, average=Average(), loader=Data(), name="x", verify=False,
                     save_every_steps=1) as run:
    optimizer.register_step_pre_hook(lambda *_: seen.append(f"update: {run.doing}"))
    for batch in run.steps():
        run.safe_step(lambda rows: (model(rows).sum(), len(rows)), batch, micro_batch=2)
        optimizer.step()
        optimizer.zero_grad()
        with run.phase("look"):
            seen.append(f"phase: {run.doing}")
Path("seen.json").write_text(json.dumps(seen))
"""
STEP = [
    "data: fetch",
    *("model: forward 1 of 2", "gradient: backward 1 of 2", "model: forward 2 of 2", "gradient: backward 2 of 2"),
    *("update: optimizer", "phase: ", "state: save"),
]


def test_every_part_of_a_step_is_named_while_it_is_under_way(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.start(SCRIPT, [], tmp_path)
    state = tmp_path / "runs" / "x" / "session-0.json"
    wait_for(
        lambda: state.exists() and json.loads(state.read_text())["doing"] == "forward 1 of 2",
        "the session to tell that a forward pass is under way",
    )
    (tmp_path / "go").touch()
    ended = child.wait()
    assert ended.code == 0, ended.output
    seen = json.loads((tmp_path / "seen.json").read_text())
    told = [text for text in seen if text != "state: "]  # measured once, between two steps, before it is ever saved
    assert told[: 2 * len(STEP)] == [*STEP, *STEP]
    assert json.loads(state.read_text())["doing"] is None
