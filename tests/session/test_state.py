"""State that torch or the person keeps where no state_dict looks: restored exactly, or named in time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jackline.machine.gpu.watch import has_device_file
from tests.session.nursery import EVERY_SAVE, Nursery
from tests.session.test_attach import HEAD, final, killed_and_whole

needs_copies = pytest.mark.skipif(
    has_device_file(),
    reason="a process that trains on a machine with a GPU is not copied: two steps are not trained twice",
)

SHAPES = {
    "a ring and other plain objects": """
from collections import deque, Counter
ring, recent, seen, counts = np.zeros(5), deque(maxlen=3), set(), Counter()
with jackline.attach(model=model, optimizer=optimizer, loader=loader, ring=ring, recent=recent, seen=seen,
                     counts=counts, save_every_steps=1) as run:
    for batch in run.steps(total=12):
        loss = train([batch[0] * (1 + ring.mean() + len(seen) / 9 + sum(recent))])
        ring[run.step % 5] = loss.item(); recent.append(loss.item()); seen.add(run.step); counts["x"] += 1
        die_at(7)
show(); print("final", ring.tolist(), recent, seen, counts)
""",
    "a part is unfrozen, dropout and counters change, evaluation leaves eval mode": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.count = 0
    def forward(self, x):
        self.count += 1
        self.scale *= 0.9
        return self.last(self.drop(self.first(x)) * self.scale) * (1 + self.count / 10)
model = Net(); model.first.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=12):
        if run.step == 3: model.first.requires_grad_(True)
        if run.step == 4: model.drop.p = 0.5
        if run.step == 5: model.drop.eval()
        train(batch); die_at(7)
show()
""",
    "an optimizer inside an optimizer": """
class Sam(torch.optim.Optimizer):
    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
    def step(self, closure=None): self.base_optimizer.step()
    def load_state_dict(self, state):
        super().load_state_dict(state); self.base_optimizer.param_groups = self.param_groups
optimizer = Sam(model.parameters(), lr=0.1, momentum=0.9)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=12): train(batch); die_at(7)
show()
""",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_state_outside_state_dict_resumes_exactly(shape: str, nursery: Nursery, tmp_path: Path) -> None:
    script = SHAPES[shape].replace("show(); print", "print")
    found, wanted, output = killed_and_whole(nursery, script, tmp_path, **EVERY_SAVE)
    assert found == wanted
    assert "resuming from step-" in output


def test_what_cannot_be_filled_is_refused_before_there_is_a_run(nursery: Nursery, tmp_path: Path) -> None:
    script = "jackline.attach(model=model, optimizer=optimizer, pair=(1.5, [2]))"
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert (
        "error: pair is a tuple: it cannot be restored in your own variable\n"
        "hint: attach a list, dict, array, tensor or an object with state_dict(); plain values live in run.values\n"
    ) in ended.output
    assert not (tmp_path / "runs").exists()


def test_an_attribute_that_cannot_be_saved_is_named_at_the_save_and_at_the_resume(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, verify=False) as run:
    for batch in run.steps(total=9):
        model[0].source = iter([run.step])
        train(batch); die_at(5)
show()
"""
    died = nursery.run(HEAD + script, [], tmp_path, {"DIE": "1", **EVERY_SAVE})
    assert died.code == -9, died.output
    assert (
        died.output.count("[jackline] model.0.source (a list_iterator) changes during training and is not saved") == 1
    )
    again = nursery.run(HEAD + script, [], tmp_path)
    assert "[jackline]   model.0.source had changed and could not be saved (a list_iterator)" in again.output
    assert re.search(r"^final 9", final(again.output))


# -- two steps, trained twice ----------------------------------------------------------------------------------------

UNSAVED = {
    "a global counter": (
        """
count = 0
def go(batch):
    global count
    count += 1
    return train([batch[0] * count])
""",
        "count (1 -> 2)",
    ),
    "what a function closes over": (
        """
def make():
    average = [0.0]
    def go(batch):
        average[0] += batch[0].mean().item()
        return train([batch[0] + average[0]])
    return go
go = make()
""",
        "go: average (a list)",
    ),
    "an object of one's own": (
        """
class Curriculum: level = 1.0
curriculum = Curriculum()
def go(batch):
    curriculum.level *= 1.5
    return train([batch[0] * curriculum.level])
""",
        "curriculum.level (1.5 -> 2.25)",
    ),
    "an optimizer that is not attached": (
        """
other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def go(batch):
    loss = train(batch); other.step(); return loss
""",
        "other (a SGD)",
    ),
}
TRIED = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=9): print("step", run.step, go(batch).item()); die_at(6)
show()
"""


@needs_copies
@pytest.mark.parametrize("what", UNSAVED)
def test_state_that_no_checkpoint_holds_is_an_error_after_two_steps(
    what: str, nursery: Nursery, tmp_path: Path
) -> None:
    head, named = UNSAVED[what]
    ended = nursery.run(HEAD + head + TRIED, [], tmp_path)
    assert ended.code == 1, ended.output
    assert "error: steps 1 and 2 give another result when they are trained again from the saved state" in ended.output
    assert re.search(rf"changed by these steps and not attached: .*{re.escape(named)}", ended.output), ended.output
    assert len(re.findall(r"^step \d", ended.output, re.MULTILINE)) == 2, "nothing is printed twice"
    found = nursery.run(HEAD + head + TRIED.replace("save_every", "trial=False, new=True, save_every"), [], tmp_path)
    assert found.code == 0, found.output


@needs_copies
def test_a_counter_that_starts_from_the_runs_step_is_no_error(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for number, batch in enumerate(run.steps(total=9), run.step):
        optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
        train(batch); die_at(6)
show()
"""
    found, wanted, _ = killed_and_whole(nursery, script, tmp_path, **EVERY_SAVE)
    assert found == wanted
    fresh = nursery.run(HEAD + script.replace("attach(", "attach(new=True, "), [], tmp_path)
    assert (
        "unless a counter of the loop that starts from run.step explains it; different after step 1" in fresh.output
    )
    assert "number (0 -> 1)" in fresh.output


@needs_copies
def test_a_loop_that_saves_all_it_has_is_verified_and_not_disturbed(nursery: Nursery, tmp_path: Path) -> None:
    script = """
from tqdm import tqdm
torch.set_num_threads(2)
lines, loader = open("lines.txt", "w"), make_loader(num_workers=1)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, name="x",
                     TRIAL, history=[]) as run:
    for i, batch in enumerate(tqdm(run.steps(total=9))):
        loss = train([batch[0].add_(torch.rand(()).item())])
        run.values["last"] = loss.item(); run.log(loss=loss)
        print(i, loss.item().hex()); lines.write(f"{i}\\n"); lines.flush()
show()
"""
    outputs = []
    for word in ("trial=True", "trial=False"):
        folder = tmp_path / word
        folder.mkdir()
        ended = nursery.run(HEAD + script.replace("TRIAL", word), [], folder)
        assert ended.code == 0, ended.output
        assert (folder / "lines.txt").read_text().split() == [str(number) for number in range(9)]
        outputs.append(re.findall(r"\d -?0x1\S+|final.*", ended.output))
        events = (folder / "runs" / "x" / "events-0.jsonl").read_text()
        said = "steps 1 and 2, trained again from the restored state, gave the same bits"
        assert (said in events) == (word == "trial=True"), events
    assert outputs[0] == outputs[1] and len(outputs[0]) == 10


@needs_copies
def test_a_loop_that_writes_files_in_its_first_steps_keeps_them(nursery: Nursery, tmp_path: Path) -> None:
    script = """
import safetensors.torch
for number, write in enumerate((
    lambda: torch.save(run.step, "a.pt"),
    lambda: open("a.txt", "w").write(str(run.step)),
    lambda: safetensors.torch.save_file({"x": torch.tensor(run.step)}, "a.safetensors"),
)):
    with jackline.attach(model=model, optimizer=optimizer, loader=loader, name=f"n{number}") as run:
        for batch in run.steps(total=3):
            train(batch); write()
            if run.step == 2: print("there", [os.path.getsize(p) for p in ("a.pt", "a.txt", "a.safetensors")
                                              if os.path.exists(p)], flush=True)
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    assert all(int(size) for line in re.findall(r"there \[(.*)\]", ended.output) for size in line.split(", "))
    assert torch.load(tmp_path / "a.pt") == 3
    assert (tmp_path / "a.txt").read_text() == "3"
    assert load_file(tmp_path / "a.safetensors")["x"].item() == 3
    assert "not verified by training two steps twice: the loop does this within its first two steps: torch.save" in (
        ended.output
    )


@needs_copies
@pytest.mark.parametrize(
    "make",
    [
        "torch.zeros(1).share_memory_()",
        "np.memmap(make_folder() / 'count', 'float32', 'w+', shape=1)",
        "torch.zeros(1).share_memory_(); loader = make_loader(num_workers=1)",
    ],
)
def test_memory_that_the_loop_shares_is_written_once_a_step(make: str, nursery: Nursery, tmp_path: Path) -> None:
    script = """
from pathlib import Path
def make_folder(): Path("jackline").mkdir(); return Path("jackline")
count = MAKE
with jackline.attach(model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run.steps(total=8): train(batch); count += 1
print("final", count)
"""
    ended = nursery.run(HEAD + script.replace("MAKE", make), [], tmp_path)
    assert ended.code == 0, ended.output
    assert "8." in final(ended.output), ended.output
    assert "not verified by training two steps twice: the process shares memory with others (/" in ended.output


def test_a_parameter_that_is_trained_and_not_attached_is_named_before_step_1(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = """
weights = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.AdamW([*model.parameters(), weights], lr=1e-2)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, trial=False, name="x", MORE) as run:
    for batch in run.steps(total=3): print("step"); x, y = batch; train(batch)
"""
    said = (
        "optimizer trains 1 of its 5 parameters (of shape [2]) that are in no attached object, so they are in no "
        "checkpoint. Attach them too: attach(name=parameter)"
    )
    outputs = [
        nursery.run(HEAD + script.replace("MORE", more), [], tmp_path).output
        for more in ("save_every_steps=1", "weights=weights, new=True")
    ]
    assert said in outputs[0].split("step\n")[0], outputs[0]
    # The batch, x and y are variables of the script itself, and each step sets them anew.
    assert "in no checkpoint" not in outputs[1], outputs[1]


def test_variables_that_matter_later_are_named_while_there_is_time(nursery: Nursery, tmp_path: Path) -> None:
    script = """
from tqdm import tqdm
class Pool:
    def __init__(self): self.images, self.size = [], 50
class Stopper: bad = 0
def main():
    global run
    pool, stopper, losses, count, mean, others, best = Pool(), Stopper(), [], 0, 0.0, iter(make_loader()), 9.0
    with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x") as run:
        for epoch in run.epochs(3):
            for i, batch in enumerate(bar := tqdm(run.steps())):
                loss = train(batch); value = loss.item(); now = time.time()
                pool.images.append(batch[0][0]); losses.append(value); count += 1; mean = 0.9 * mean + value
            stopper.bad += 1; seen = [value for value in losses]; worst = max(seen)
            if value < best: best = value
main()
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    lines = re.findall(r"is in no checkpoint, so a resume starts it over: (.*?)\. Attach it", ended.output)
    named = [sorted(re.findall(r"(\S+) \(", line)) for line in lines]
    assert named == [["count", "losses", "mean", "others", "pool.images"], ["best", "stopper.bad"]], ended.output


def test_what_each_pass_of_a_flat_script_sets_again_is_no_state(nursery: Nursery, tmp_path: Path) -> None:
    """The import of torch gives the script's module a second name, under which its variables were read again."""
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x") as run:
    for epoch in run.epochs(2):
        for (batch,) in run.steps():
            loss = train([batch]); value = loss.item(); doubled = batch * 2
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    assert "in no checkpoint" not in ended.output, ended.output


# -- the program changes ---------------------------------------------------------------------------------------------


def test_a_new_learning_rate_is_used_through_its_schedule_and_another_optimizer_is_refused(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = """
lr = float(os.environ.get("LR", 0.5))
kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[os.environ.get("KIND", "SGD")]
optimizer = kind(model.parameters(), lr=lr, weight_decay=lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)
with jackline.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, save_every_steps=1,
                     name="x", on_change={"lr": "use new", "code": "continue"}) as run:
    for batch in run.steps(total=5):
        print("lr", run.step, optimizer.param_groups[0]["lr"]); train(batch); scheduler.step(); die_at(3)
group = optimizer.param_groups[0]
print("final", group["lr"], group["weight_decay"], scheduler.base_lrs, scheduler.get_last_lr())
"""
    died = nursery.run(HEAD + script, [], tmp_path, {"DIE": "1", **EVERY_SAVE})
    assert died.code == -9, died.output
    other = nursery.run(HEAD + script, [], tmp_path, {"KIND": "AdamW"})
    assert (
        "error: optimizer was SGD when it was saved and is AdamW now: one cannot use the other's state\n"
        "hint: resume with SGD; or export the weights (jackline checkpoints export) and train them in a new run with "
        "AdamW\n"
    ) in other.output
    ended = nursery.run(HEAD + script, [], tmp_path, {"LR": "0.25"})
    assert ended.code == 0, ended.output
    # From step 2, or from step 1 if the save of step 2 was under way.
    used = r"lr: 0\.5 -> 0\.25, used: it is 0\.(0625|125) now \(0\.(125|25) by its schedule, times 0\.5\)"
    assert re.search(used, ended.output), ended.output
    assert "weight_decay: 0.5 -> 0.25 in the program; the saved one stays in use" in ended.output
    assert final(ended.output) == "final 0.0078125 0.5 [0.25] [0.0078125]"


def test_a_lazy_module_is_refused_with_what_to_do(nursery: Nursery, tmp_path: Path) -> None:
    script = """
model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 1))
if os.environ.get("FIRST"):
    with torch.no_grad(): model(next(iter(loader))[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with jackline.attach(model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run.steps(total=3): train(batch)
show()
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert "error: model.0.weight has no shape yet: it is part of a lazy module\n" in ended.output
    assert not (tmp_path / "runs").exists()
    assert nursery.run(HEAD + script, [], tmp_path, {"FIRST": "1"}).code == 0


def test_a_model_that_grows_is_built_at_its_size_by_peek(nursery: Nursery, tmp_path: Path) -> None:
    script = """
seen = jackline.peek("x")
print("peeked", seen and (seen.step, seen.epoch, seen.values))
def grow():
    block = torch.nn.Linear(1, 1)
    model.append(block); optimizer.add_param_group({"params": list(block.parameters())})
if seen is not None and seen.step >= 4: grow()
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x", save_every_steps=1, best=9.0) as run:
    for epoch in run.epochs(2):
        for batch in run.steps():
            train(batch); run.values["best"] = 1.5
            if run.step == 4: grow()
            die_at(15)
show()
"""
    found, wanted, output = killed_and_whole(nursery, script, tmp_path, **EVERY_SAVE)
    assert found == wanted
    assert re.search(r"^peeked \(1[34], 1, {'best': 1\.5}\)$", output, re.M)  # the save of step 14 may be under way
    small = nursery.run(HEAD + script.replace("seen.step >= 4", "False"), [], tmp_path)
    assert "error: model is not the model that was saved\n" in small.output
    assert "hint: build what was saved (jackline.peek(name) gives its step and epoch before that), or start" in (
        small.output
    )
