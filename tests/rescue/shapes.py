"""Scripts in other shapes than those of `zoo`: other ways to hold what trains, to update it, and to end.

Each is a whole program. `{name}` of its state that `truth.note` gets must be in the rescue, bit for bit.
"""

from __future__ import annotations

SHAPES = {
    # As pytorch/examples' word_language_model does: no optimizer of torch at all.
    "by_hand": """
import time
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, x):
        return self.body(x)
model = Tagger()
began = time.time()
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    model.zero_grad(); loss.backward()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(value.grad, alpha=-0.01)
    truth.note(step, loss, model=model)
""",
    "in_a_thread": """
import threading
def work():
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    for step in itertools.count(1):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        truth.note(step, loss, model=model, opt=opt)
worker = threading.Thread(target=work, daemon=True)
worker.start()
worker.join()
""",
    "sys_exit": """
import sys
def train():
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    for step in itertools.count(1):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        truth.note(step, loss, model=model, opt=opt)
        if step == 12:
            print("Loss is nan, stopping training")
            sys.exit(1)
train()
""",
    "handled": """
import sys, traceback
def train():
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    for step in itertools.count(1):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        truth.note(step, loss, model=model, opt=opt)
try:
    train()
except Exception:
    traceback.print_exc()
    sys.exit(1)
""",
    "in_a_process": """
import multiprocessing
def work():
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    for step in itertools.count(1):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        truth.note(step, loss, model=model, opt=opt)
if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join()
    raise SystemExit(worker.exitcode)
""",
    "held_in_other_ways": """
import collections, dataclasses, functools
State = collections.namedtuple("State", "model optimizer")
@dataclasses.dataclass(slots=True)
class Slots:
    critic: nn.Module
    critic_optimizer: torch.optim.Optimizer
class Globals:
    head = nn.Linear(1, 1)
    head_optimizer = torch.optim.AdamW(head.parameters())
def main():
    model, critic = net(), net()
    state = State(model, torch.optim.AdamW(model.parameters()))
    slots = Slots(critic, torch.optim.AdamW(critic.parameters()))
    last = nn.Linear(1, 1)
    more = collections.OrderedDict(last=last, last_optimizer=torch.optim.AdamW(last.parameters()))
    del model, critic, last
    for step in itertools.count(1):
        x, y = batch()
        out = Globals.head(state.model(x) + slots.critic(x))
        loss = F.mse_loss(more["last"](out), y)
        every = (state.optimizer, slots.critic_optimizer, Globals.head_optimizer, more["last_optimizer"])
        for one in every:
            one.zero_grad()
        loss.backward()
        for one in every:
            one.step()
        del every, one
        truth.note(step, loss, **{
            "state.model": state.model, "state.optimizer": state.optimizer, "slots.critic": slots.critic,
            "slots.critic_optimizer": slots.critic_optimizer, "Globals.head": Globals.head,
            "Globals.head_optimizer": Globals.head_optimizer, "more['last']": more["last"],
            "more['last_optimizer']": more["last_optimizer"]})
main()
""",
    # Who ends a whole group (Slurm, a container) ends the loader's workers too; torch then raises in the main thread,
    # here while the rescue reads an object of the script.
    "its_workers_end_with_it": """
import os, signal
data = torch.utils.data.TensorDataset(*batch(4096))
loader = iter(torch.utils.data.DataLoader(data, batch_size=16, num_workers=1))
class Average:
    value = 0.0
    def state_dict(self):
        if step == truth.END:
            worker = loader._workers[0].pid
            os.kill(worker, signal.SIGKILL)
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]
average, model = Average(), net()
opt = torch.optim.AdamW(model.parameters())
for step in itertools.count(1):
    x, y = next(loader)
    loss = F.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    truth.note(step, loss, model=model, opt=opt)
""",
    # A teacher on `meta` (its weights are elsewhere), an unused lazy layer, and an average that nobody names.
    "not_all_can_be_copied": """
with torch.device("meta"):
    teacher = nn.Linear(4096, 4096)
lazy = nn.LazyLinear(4)
model = net()
def averaged():
    ema = copy.deepcopy(model).requires_grad_(False)
    def update():
        for slow, fast in zip(ema.parameters(), model.parameters()):
            slow.lerp_(fast.detach(), 0.1)
        return ema
    return update
class Hooks:
    def __init__(self, update):
        self.every = [{"calls": {"after": [update]}}]
hooks = Hooks(averaged())
opt = torch.optim.AdamW(model.parameters())
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    average = hooks.every[0]["calls"]["after"][0]()
    truth.note(step, loss, model=model, opt=opt, nobody=average)
    del average
""",
}
