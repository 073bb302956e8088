"""attach: whose run it is, what it restores and says, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jackline.session.saving.changes import compare_programs, describe_program
from tests.deadline import HANGS_S
from tests.faults import PAYLOAD, kill_at
from tests.session.nursery import EVERY_SAVE, ROOT, Nursery

HEAD = """
import copy, json, os, random, signal, sys, time
import numpy as np
import torch
import jackline
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(120, 4))
def make_loader(**more): return torch.utils.data.DataLoader(data, **{"batch_size": 10, "shuffle": True, **more})
loader = make_loader()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def train(batch):
    loss = model(batch[0]).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss
def die_at(step):
    if run.step == step and os.environ.get("DIE"): os.kill(os.getpid(), signal.SIGKILL)
def settle():  # until what was saved is acknowledged
    while run._attached.saver.engine.is_busy: run._attached.saver.engine._link.pump(0.05)
def show(): print("final", run.step, [p.sum().item().hex() for p in model.parameters()], flush=True)
"""


def final(output: str) -> str:
    found = [line for line in output.splitlines() if line.startswith("final")]
    assert len(found) == 1, output
    return found[0]


def killed_and_whole(nursery: Nursery, script: str, tmp_path: Path, **env: str) -> tuple[str, str, str]:
    """The last lines of a run that died once (DIE=1) and continued, and of one that did not; and what was said."""
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = nursery.run(HEAD + script, [], whole, env)
    assert wanted.code == 0, wanted.output
    died = nursery.run(HEAD + script, [], tmp_path, {**env, "DIE": "1"})
    assert died.code == -9, died.output
    again = nursery.run(HEAD + script, [], tmp_path, {**env, "DIE": ""})
    assert again.code == 0, again.output
    return final(again.output), final(wanted.output), again.output


# -- what is restored -----------------------------------------------------------------------------------------------

RICH = """
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
generator = torch.Generator().manual_seed(5)
rng = np.random.default_rng(6)
class Meter:
    def __init__(self): self.history = []
    def state_dict(self): return {"history": list(self.history)}
    def load_state_dict(self, state): self.history = list(state["history"])
meter, curriculum = Meter(), {"level": 1}
with jackline.attach(model=model, optimizer=optimizer, ema=ema, scaler=scaler, plateau=plateau, generator=generator,
                     rng=rng, meter=meter, curriculum=curriculum, best=1e9, note="fresh", loader=loader,
                     save_every_steps=1) as run:
    for (batch,) in run.steps(total=20):
        noise = torch.rand(batch.shape, generator=generator) + float(rng.random())
        loss = model(batch + 0.1 * noise).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer); scaler.update()
        ema.update_parameters(model)
        plateau.step(loss.item())
        meter.history.append(loss.item()); curriculum["level"] += 1
        run.values["best"] = min(run.values["best"], loss.item())
        run.values["note"] = f"step {run.step}"
        run.log(loss=loss)
        die_at(11)
print("final", run.step, [p.sum().item().hex() for p in [*model.parameters(), *ema.parameters()]], meter.history,
      curriculum, run.values, scaler.get_scale(), optimizer.param_groups[0]["lr"], plateau.num_bad_epochs,
      rng.random())
"""


def test_everything_that_makes_up_a_training_comes_back(nursery: Nursery, tmp_path: Path) -> None:
    found, wanted, output = killed_and_whole(nursery, RICH, tmp_path)
    assert found == wanted
    assert re.search(
        r"resuming from step-000000\d\d: model, optimizer, ema, scaler, plateau, generator, rng, meter, "
        r"curriculum, all random generators; [\d.]+ KiB, checksums verified, in [\d.]+ s\n",
        output,
    ), output


LOOPS = {
    "own range": """
sched = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
with jackline.attach(model=model, optimizer=optimizer, sched=sched, loader=loader, save_every_steps=5) as run:
    for epoch in range(3):
        for batch in run.steps():
            train(batch)
            if run.step == 20: run.save()  # asked for, so it is not skipped, and the epoch before is over then
            if run.step == 26: settle()
            die_at(27)
        sched.step()
show(); print(optimizer.param_groups[0]["lr"])
""",
    "epochs": """
sched = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
with jackline.attach(model=model, optimizer=optimizer, sched=sched, loader=loader, save_every_steps=4) as run:
    for epoch in run.epochs(3):
        for batch in run.steps():
            train(batch); die_at(26)
        if epoch == 1: torch.rand(3)
        sched.step()
show()
""",
    "epochs cut short": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for epoch in run.epochs(4):
        for batch in run.steps():
            train(batch); die_at(17)
            if run.step % 7 == 0: break  # enumerate() would begin anew in the middle of an epoch
show()
""",
    "epochs and total": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=2) as run:
    for epoch in run.epochs(100):
        for batch in run.steps(total=31):
            train(batch); die_at(17)
show()
""",
    "one pass": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=2) as run:
    for batch in run.steps():
        train(batch); die_at(7)
show()
""",
    "no loader": """
with jackline.attach(model=model, optimizer=optimizer, save_every_steps=2) as run:
    for number in run.steps(total=20):
        assert number == run.step
        train([torch.randn(10, 4) * number]); die_at(7)
show()
""",
    "accumulation by hand": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for number, (batch,) in enumerate(run.steps(total=10), 1):
        model(batch).square().mean().backward()
        if number % 3 == 0:
            optimizer.step(); optimizer.zero_grad(); die_at(6)
show()
""",
    "accumulate": """
class Plain:  # an optimizer nobody can hook
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
    def step(self):
        with torch.no_grad():
            for p in model.parameters(): p -= 0.01 * p.grad; p.grad = None
plain = Plain()
with jackline.attach(model=model, plain=plain, loader=loader, save_every_steps=1, accumulate=3) as run:
    for number, (batch,) in enumerate(run.steps(total=10), 1):
        model(batch).square().mean().backward()
        if number % 3 == 0: plain.step()
        die_at(6)
show()
""",
    "two optimizers in turn": """
rest = torch.optim.SGD(list(model[0].parameters()), lr=0.01)
optimizer = torch.optim.Adam(list(model[2].parameters()), lr=0.01)
with jackline.attach(model=model, both=[optimizer, rest], loader=loader, save_every_steps=1) as run:
    for number, batch in enumerate(run.steps(total=8)):
        train(batch)
        if number % 3 == 2: rest.step(); rest.zero_grad()
        die_at(5)
show()
""",
    "compiled": """
compiled = torch.compile(model, backend="aot_eager")
with jackline.attach(model=compiled, optimizer=optimizer, loader=loader, save_every_steps=2) as run:
    for (batch,) in run.steps(total=12):
        loss = compiled(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); die_at(7)
show()
""",
    "skipped batches": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for number, batch in enumerate(run.steps(total=12)):
        if batch[0].sum() < -2: continue
        train(batch); die_at(7)
show()
""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_every_shape_go_on_exactly(loop: str, nursery: Nursery, tmp_path: Path) -> None:
    found, wanted, output = killed_and_whole(nursery, LOOPS[loop], tmp_path)
    assert found == wanted
    said = "[jackline] epoch 0 was done before; `for epoch in run.epochs(...)` would continue at once" in output
    assert said == (loop == "own range")


FIRST_LOSS = """
other = os.environ.get("OTHER", "")
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1000, name="x") as run:
    if other == "state":
        for state in optimizer.state.values(): state["exp_avg"].zero_()
    for batch in run.steps(total=30):
        loss = train(batch)
        run.log(loss=loss, accuracy=float(run.step == 11 and other == "value"), tokens_per_s=time.time())
        if run.step == 10: run.save()
        if run.step == 12: settle()
        while run.step == 13 and not all(word in open(f"runs/x/{name}-0.jsonl").read() for name, word in
            (("metrics", '"step":11'), ("events", '"step":11,"digest"'))): time.sleep(0.01)
        die_at(14)
show()
"""
FIRST_STEPS = {
    "": r"step 11 gave the recorded values again, bit for bit: accuracy, loss "
    r"\(measured and therefore not compared: tokens_per_s\)",
    "value": r"accuracy is 1\.0 at step 11, but 0\.0 was recorded: this resume is not bit-exact",
    "state": "weights or optimizer state after step 11 are not those recorded: this resume is not bit-exact",
}


def test_what_is_logged_after_the_last_step_belongs_to_that_step(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x") as run:
    for batch in run.steps(total=3): run.log(loss=train(batch))
    run.log(val_loss=0.5)
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    lines = [json.loads(line) for line in (tmp_path / "runs" / "x" / "metrics-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line] == [(3, 0.5)]


@pytest.mark.parametrize("other", FIRST_STEPS)
def test_steps_that_are_trained_again_are_compared_with_what_was_recorded(
    other: str, nursery: Nursery, tmp_path: Path
) -> None:
    died = nursery.run(HEAD + FIRST_LOSS, [], tmp_path, {"DIE": "1"})
    assert died.code == -9, died.output
    again = nursery.run(HEAD + FIRST_LOSS, [], tmp_path, {"OTHER": other})
    assert again.code == 0, again.output
    assert "resuming from step-00000010" in again.output
    assert re.search(rf"\[jackline\] {FIRST_STEPS[other]}\n", again.output), again.output
    assert ("bit for bit" in again.output) == (other == "")


def test_a_save_that_was_asked_for_is_not_skipped(nursery: Nursery, tmp_path: Path) -> None:
    """The automatic ones are, while the writer is busy with the one before."""
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1000, keep_last=50) as run:
    for batch in run.steps(total=12): train(batch); run.save()
"""
    assert nursery.run(HEAD + script, [], tmp_path).code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")) == list(range(13))


def test_how_the_data_are_read_is_announced(nursery: Nursery, tmp_path: Path) -> None:
    script = "with jackline.attach(model=model, loader=LOADER, new=True, SETTINGS): pass\n"
    cases = {
        ("loader", "seed=7"): "shuffled by Jackline's own order (seed 7), seekable; "
        "random augmentation depends on (seed, epoch, index) alone\n",
        ("make_loader(shuffle=False)", "keyed_random=False"): "in plain order, seekable; "
        "random augmentation is left alone (keyed_random=False): exact with the same workers only\n",
        ("loader", "seekable=False"): "indices of RandomSampler are drawn again at resume, without reading data, "
        "and compared; "
        "random augmentation depends on (seed, epoch, index) alone\n",
        ("[1, 2]", "seed=1"): "list has no state_dict(): batches are read over at resume "
        "and compared with those of before\n",
    }
    whole = HEAD + "".join(script.replace("LOADER", one).replace("SETTINGS", other) for one, other in cases)
    ended = nursery.run(whole, [], tmp_path)
    assert ended.code == 0, ended.output
    said = re.findall(r"\[jackline\] saving automatically .*?; data: (.*\n)", ended.output)
    assert said == list(cases.values())


def test_exact_asks_torch_for_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    script = """
assert not torch.are_deterministic_algorithms_enabled()
torch.backends.cudnn.benchmark = True
with jackline.attach(model=model, optimizer=optimizer, loader=loader, exact=True) as run:
    for batch in run.steps(total=2): train(batch)
cudnn = torch.backends.cudnn
print("flags", torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic,
      os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert "flags True False True :4096:8\n" in ended.output, ended.output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: exactness on a GPU was not tried")
def test_a_run_on_a_gpu_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
model.cuda(); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, exact=True, save_every_steps=2) as run:
    for (batch,) in run.steps(total=20):
        run.log(loss=train([batch.cuda()])); die_at(13)
show()
"""
    )
    (tmp_path / "gpu.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    outputs = []
    for runs, die, code in (("a", "1", -9), ("a", "", 0), ("b", "", 0)):
        done = subprocess.run(
            [sys.executable, "gpu.py"], env={**env, "DIE": die, "JACKLINE_RUNS": str(tmp_path / runs)},
            capture_output=True, text=True, timeout=HANGS_S, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        outputs.append(done.stdout)
    assert final(outputs[1]) == final(outputs[2])


# -- the proof ------------------------------------------------------------------------------------------------------

TRACE = """
random.seed(1); np.random.seed(2)
out = []
with jackline.attach(model=model, optimizer=optimizer, loader=loader, verify=PROVE, save_every_steps=SAVE) as run:
    for batch in run.steps(total=25):
        out.append(train(batch).item() + random.random() + np.random.randn() + torch.rand(()).item())
print("final", [value.hex() for value in out])
"""


def test_the_check_and_saves_leave_no_trace(nursery: Nursery, tmp_path: Path) -> None:
    found = set()
    for number, (verify, save) in enumerate([("True", "3"), ("False", "1000000"), ("False", "3")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = nursery.run(HEAD + TRACE.replace("PROVE", verify).replace("SAVE", save), [], folder)
        found.add(final(ended.output))
    assert len(found) == 1


BROKEN = {
    "forgetful": (
        """
class Forgetful:
    decay = 0.9
    def state_dict(self): return {"decay": self.decay}
    def load_state_dict(self, state): self.decay = 0.5
extra = Forgetful()
""",
        "error: what was saved does not come back the same\n"
        "       extra.state.decay: 0.9 -> 0.5\n"
        "hint: its state_dict() and load_state_dict() do not match; attach(verify=False) continues regardless\n",
    ),
    "unsavable": (
        """
class Unsavable:
    def state_dict(self): return {"lambda": print}
    def load_state_dict(self, state): pass
extra = Unsavable()
""",
        "error: extra.lambda cannot be saved: a 'builtin_function_or_method' has no state_dict()\n",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_come_back_is_found_before_step_1(what: str, nursery: Nursery, tmp_path: Path) -> None:
    head, words = BROKEN[what]
    loop = """
with jackline.attach(model=model, optimizer=optimizer, extra=extra, loader=loader) as run:
    for batch in run.steps(total=5): print("step"); train(batch)
"""
    ended = nursery.run(HEAD + head + loop, [], tmp_path)
    assert ended.code == 1
    assert words in ended.output
    assert "step\n" not in ended.output


def test_a_value_that_cannot_be_saved_later_does_not_stop_training(nursery: Nursery, tmp_path: Path) -> None:
    script = """
bag = {"x": 1}
with jackline.attach(model=model, optimizer=optimizer, bag=bag, loader=loader, save_every_steps=2) as run:
    for batch in run.steps(total=9):
        train(batch)
        if run.step == 5: bag["x"] = print
show()
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0
    assert "final 9" in ended.output
    assert ended.output.count("[jackline] checkpoints are off: CannotSave: error: bag.x cannot be saved") == 1


# -- what changed ---------------------------------------------------------------------------------------------------

CHANGING = """
lr = float(os.environ.get("LR", "0.01"))
size = int(os.environ.get("SIZE", "120"))
total = int(os.environ.get("TOTAL", "12"))
numbers = torch.arange(size * 4.0).reshape(size, 4) / 1000 + float(os.environ.get("ADD", 0))
data = torch.utils.data.TensorDataset(numbers)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
on_change = json.loads(os.environ.get("ON_CHANGE", "{}"))
with jackline.attach(model=model, optimizer=optimizer, loader=make_loader(), on_change=on_change,
                     save_every_steps=1, name="x") as run:
    for batch in run.steps(total=total):
        train(batch); die_at(6)
show()
"""
CHANGES = {
    "other length": ({"SIZE": "100"}, 3, "error: data changed since it was saved\n       dataset.tensors: "),
    "other contents": ({"ADD": "1"}, 3, "error: data changed since it was saved\n       dataset.tensors: "),
    "data, forced": ({"ADD": "1", "ON_CHANGE": '"continue"'}, 0, ""),
    "data, forced in the older word": ({"ADD": "1", "ON_CHANGE": '"continue"'}, 0, ""),
    "learning rate": (
        {"LR": "0.02"}, 0,
        "[jackline] schedule changed since it was saved: optimizer 0 group 0 lr: 0.01 -> 0.02 in the program; "
        "the saved one stays in use (on_change={'lr': 'use new'} takes the new one)\n",
    ),
    "learning rate, the new one": (
        {"LR": "0.02", "ON_CHANGE": '{"lr": "use new"}'}, 0,
        "[jackline] optimizer 0 group 0 lr: 0.01 -> 0.02, used: it is 0.02 now\n",
    ),
    "a setting that no optimizer has": (
        {"LR": "0.02", "ON_CHANGE": '{"learning_rate": "use new"}'}, 1,
        "error: on_change: no optimizer has a setting 'learning_rate'\nhint: the optimizers have ",
    ),
    "learning rate, refused": (
        {"LR": "0.02", "ON_CHANGE": '{"schedule": "refuse"}'}, 3,
        "error: schedule changed since it was saved\n       optimizer 0 group 0 lr: 0.01 -> 0.02 in the program; "
        "the saved one stays in use (on_change={'lr': 'use new'} takes the new one)\n"
        "hint: attach(new=True) starts another run, on_change={'schedule': 'warn'} continues this one",
    ),
    "total": ({"TOTAL": "14"}, 0, "[jackline] the schedule has changed since it was saved: total: 12 -> 14\n"),
    "threads": ({"OMP": "2"}, 0, "[jackline] versions changed since it was saved: threads: 1 -> 2\n"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_program_gets_its_verdict_before_training(what: str, nursery: Nursery, tmp_path: Path) -> None:
    env, code, words = CHANGES[what]
    script = HEAD + "torch.set_num_threads(int(os.environ.get('OMP', '1')))\n" + CHANGING
    assert nursery.run(script, [], tmp_path, {"DIE": "1"}).code == -9
    ended = nursery.run(script, [], tmp_path, env)
    assert (ended.code == 0) == (code == 0), ended.output
    assert words in ended.output, ended.output
    assert bool(re.search(r"^final", ended.output, re.MULTILINE)) == (code == 0)
    if code == 0 and not words:
        assert "changed since" not in ended.output


def test_an_edited_script_is_named(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(HEAD + CHANGING, [], tmp_path, {"DIE": "1"}).code == -9
    ended = nursery.run(HEAD + CHANGING + "# a word\n", [], tmp_path)
    assert ended.code == 0
    assert "[jackline] code changed since it was saved: script.py was edited\n" in ended.output


def test_other_arguments_under_the_same_name_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(HEAD + CHANGING, ["--a"], tmp_path, {"DIE": "1"}).code == -9
    ended = nursery.run(HEAD + CHANGING, ["--b"], tmp_path)
    assert "error: run 'x' was started with another command\n       argv: " in ended.output
    assert (
        "hint: attach(new=True) starts another run, on_change={'arguments': 'warn'} continues this one"
        in ended.output
    )


def test_another_model_is_refused_by_name(nursery: Nursery, tmp_path: Path) -> None:
    script = HEAD + "if os.environ.get('WIDE'): model[2] = torch.nn.Linear(8, 2)\n" + CHANGING
    assert nursery.run(script, [], tmp_path, {"DIE": "1"}).code == -9
    ended = nursery.run(script, [], tmp_path, {"WIDE": "1"})
    assert "error: model.2.weight does not fit: the checkpoint has float32[1, 8], the program float32[2, 8]" in (
        ended.output
    )


# -- whose run ------------------------------------------------------------------------------------------------------


def test_two_at_a_time_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="a") as run:
    jackline.attach(model=model, name="b")
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert (
        "error: this process is attached to run 'a' already\n"
        "hint: one run at a time: put all objects into one attach(), or leave its `with` block first" in ended.output
    )


def test_one_after_the_other_needs_names(nursery: Nursery, tmp_path: Path) -> None:
    script = """
for name in NAMES:
    with jackline.attach(model=model, optimizer=optimizer, loader=loader, name=name) as run:
        for batch in run.steps(total=3): train(batch)
    print("done", run.name, run.step)
"""
    ended = nursery.run(HEAD + script.replace("NAMES", "['a', 'b', 'a']"), [], tmp_path)
    assert ended.code == 0
    assert re.findall("done .*", ended.output) == ["done a 3", "done b 3", "done a 3"]
    ended = nursery.run(HEAD + script.replace("NAMES", "[None, None]"), [], tmp_path)
    assert "error: attach() a second time in one process needs a name\nhint: attach(name=...); the first was" in (
        ended.output
    )


def test_a_cell_that_is_run_again_continues(nursery: Nursery, tmp_path: Path) -> None:
    """In a notebook the same code runs again in the same process, after an interruption."""
    script = """
import types; sys.modules["ipykernel"] = types.ModuleType("ipykernel")
cell = '''
torch.manual_seed(0)
model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=9):
        train(batch)
        if run.step == STOP: os.kill(os.getpid(), signal.SIGINT)
'''
try: exec(cell.replace("STOP", "5"))
except SystemExit as error: print("stopped", error.code, str(error))
exec(cell.replace("STOP", "-1"))
print("final", run.name.rpartition("-")[0], run.step)
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    assert "stopped 75 Ctrl-C: stopped at step 5, saved" in ended.output
    assert "resuming from step-00000005" in ended.output
    assert final(ended.output) == "final notebook 9"


@pytest.mark.parametrize(
    ("saved", "argv", "is_same"),
    [
        ("x.py --lr 1", ["/usr/bin/python", "-u", "./x.py", "--lr", "1"], True),
        ("-u /elsewhere/x.py --lr 1", ["python", "x.py", "--lr", "1"], True),
        ("x.py --lr 1", ["python", "x.py", "--lr", "2"], False),
        ("x.py", ["python", "y.py"], False),
        ("-c a\n  b", ["python", "-c", "a\n  b"], True),
        ("-m pkg.train", ["python3", "-um", "pkg.train"], True),
        ("", ["notebook"], True),
    ],
)
def test_a_spelling_is_no_change_of_arguments(saved: str, argv: list[str], is_same: bool) -> None:
    now = describe_program({}, None, argv, {})
    changes = compare_programs({"arguments": {"argv": saved}}, now)
    assert [change.kind for change in changes] == ([] if is_same else ["arguments"])


SPELLED = """
sys.orig_argv = os.environ["SPELLED"].split()
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=int(os.environ["TOTAL"])): train(batch)
print("final", run.name, run.step)
"""


def test_every_spelling_of_a_script_continues_one_run(nursery: Nursery, tmp_path: Path) -> None:
    spellings = ["python script.py", "python3.11 -u script.py", f"python {tmp_path}/script.py", "python ./script.py"]
    names = []
    for number, spelled in enumerate(spellings, 1):
        env = {"SPELLED": spelled, "TOTAL": str(2 * number)}
        ended = nursery.run(HEAD + SPELLED, [], tmp_path, {**EVERY_SAVE, **env})
        assert ended.code == 0, ended.output
        names.append(final(ended.output).split()[1:])
    assert len({name for name, _ in names}) == 1
    assert [step for _, step in names] == ["2", "4", "6", "8"]


def test_other_arguments_are_a_new_run_that_names_the_others(nursery: Nursery, tmp_path: Path) -> None:
    def start(spelled: str) -> str:
        ended = nursery.run(HEAD + SPELLED, [], tmp_path, {"SPELLED": spelled, "TOTAL": "2"})
        assert ended.code == 0, ended.output
        return ended.output

    first = final(start("python script.py --lr 1")).split()[1]
    second = start("python script.py --lr 2")
    name = final(second).split()[1]
    assert name != first
    assert f"[jackline] '{name}' is a new run. Other runs of script.py:\n" in second
    assert f"[jackline]   '{first}' (--lr 1), finished\n" in second
    assert f"jackline run --name {first} --continue-with-changes -- python script.py --lr 2\n" in second


def test_a_renamed_folder_continues_its_run(nursery: Nursery, tmp_path: Path) -> None:
    env = {**EVERY_SAVE, "SPELLED": "python script.py", "TOTAL": "2"}
    (tmp_path / "before").mkdir()
    assert nursery.run(HEAD + SPELLED, [], tmp_path / "before", env).code == 0
    (tmp_path / "before").rename(tmp_path / "after")
    ended = nursery.run(HEAD + SPELLED, [], tmp_path / "after", {**env, "TOTAL": "4"})
    assert (
        f"[jackline] this run ran in {tmp_path}/before, which is gone: it continues in {tmp_path}/after"
        in ended.output
    )
    assert "resuming from step-00000002" in ended.output
    assert final(ended.output).endswith(" 4")
    assert len(list((tmp_path / "after" / "runs").iterdir())) == 1


def test_the_same_command_twice_at_a_time_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run.steps(total=3):
        train(batch); print("at step", run.step, flush=True)
        while run.step == 2 and not run.should_stop: time.sleep(0.01)
"""
    child = nursery.start(HEAD + script, [], tmp_path)
    child.wait_for("at step 2")
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert re.search(rf"error: run 'script-\w+' is alive \(process {child.pid}\)\n", ended.output), ended.output
    child.kill()
    child.wait()


@pytest.mark.parametrize("point", ["run.open", "run.rename", "attempt.mkdir", "start.replace"])
def test_a_process_killed_while_it_makes_its_run_is_followed_by_a_normal_start(
    nursery: Nursery, tmp_path: Path, point: str
) -> None:
    script = f"exec(open({str(PAYLOAD)!r}).read())\n" + HEAD + "with jackline.attach(name='mine') as run: pass\n"
    with kill_at(point) as fault:
        killed = nursery.run(script, [], tmp_path, {"FAULT": json.dumps(fault.spec)})
        assert killed.code == -9, killed.output
    again = nursery.run(script, [], tmp_path, {"FAULT": ""})
    assert again.code == 0, again.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def test_off_is_the_loop_and_nothing_else(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, best=3) as run:
    for batch in run.steps(total=30): run.log(loss=train(batch)); run.save()
    assert run.values == {"best": 3} and not run.should_stop
    with run.phase("x"): pass
print("epoch", run.epoch)
with jackline.attach(model=model, optimizer=optimizer, loader=loader) as run:
    for epoch in run.epochs(2):
        for batch in run.steps(): train(batch)
show()
"""
    ended = nursery.run(HEAD + script, [], tmp_path, {"JACKLINE": "off"})
    assert ended.code == 0, ended.output
    assert "[jackline]" not in ended.output
    assert "epoch 2\n" in ended.output
    assert "final 24 " in ended.output
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_setting_is_no_state(nursery: Nursery, tmp_path: Path) -> None:
    ended = nursery.run(HEAD + "jackline.attach(model=model, save_every_step=5)", [], tmp_path)
    assert (
        "error: unknown setting 'save_every_step'\n"
        "hint: did you mean 'save_every_steps'? A value to be saved needs a name less like a setting" in ended.output
    )


@pytest.mark.slow
def test_plain_python_does_what_the_nursery_does(tmp_path: Path) -> None:
    """The one test that pays for the import: kill -9, rerun, same weights, and exit code 75 for a stop."""
    script = (
        HEAD
        + """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=2) as run:
    for batch in run.steps(total=15):
        train(batch); die_at(7)
        if run.step == 9 and os.environ.get("STOP"): os.kill(os.getpid(), signal.SIGTERM)
show()
"""
    )
    path = tmp_path / "plain.py"
    path.write_text(script)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    outputs = []
    for runs, extra, code in (("a", {"DIE": "1"}, -9), ("a", {"STOP": "1"}, 75), ("a", {}, 0), ("b", {}, 0)):
        done = subprocess.run(
            [sys.executable, str(path)], env={**env, **extra, "JACKLINE_RUNS": str(tmp_path / runs)},
            capture_output=True, text=True, timeout=HANGS_S, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        outputs.append(done.stdout)
    assert final(outputs[2]) == final(outputs[3])
    (run,) = (tmp_path / "a").iterdir()
    state = json.loads((run / "session-0.json").read_text())
    assert (state["step"], state["done"], state["total"], state["unit"]) == (15, 15, 15, "steps")
    assert state["last_checkpoint"]["step"] == 15
    assert json.loads((run / "attempts" / "002" / "intent.json").read_text()) == {
        "restart": False, "why": "SIGTERM: stopped at step 9, saved", "settings": {},
    }  # fmt: skip
