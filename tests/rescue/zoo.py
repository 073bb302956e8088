"""Fifteen shapes of training scripts that never save. Each is a whole program; none knows Jackline.

The only line that is not a stranger's is `truth.note(...)` at the end of an iteration (truth.py).
"""

from __future__ import annotations

from tests.rescue.shapes import SHAPES

_HEAD = """
import copy, itertools, torch, truth
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def batch(n=16):
    x = torch.randn(n, 8)
    return x, x.sum(1, keepdim=True)
def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
"""

SCRIPTS = {
    "plain": """
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    truth.note(step, loss, model=model, opt=opt)
""",
    "function": """
def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100_000)
    step = 0
    for epoch in range(1000):
        for _ in range(5):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
            step += 1
            truth.note(step, loss, model=model, optimizer=optimizer, scheduler=scheduler)
main()
""",
    "class": """
class Trainer:
    def __init__(self):
        self.net = net()
        self.optim = torch.optim.Adam(self.net.parameters())
        self.step = 0
    def train_step(self):
        x, y = batch()
        loss = F.mse_loss(self.net(x), y)
        self.optim.zero_grad(); loss.backward(); self.optim.step()
        return loss
    def fit(self):
        while True:
            loss = self.train_step()
            self.step += 1
            truth.note(self.step, loss, net=self.net, optim=self.optim)
Trainer().fit()
""",
    "gan": """
generator, critic = nn.Linear(4, 8), net()
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3)
d_opt = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for step in itertools.count(1):
    for _ in range(2):
        real, _ = batch()
        fake = generator(torch.randn(16, 4)).detach()
        d_loss = critic(fake).mean() - critic(real).mean()
        d_opt.zero_grad(); d_loss.backward(); d_opt.step()
    g_loss = -critic(generator(torch.randn(16, 4))).mean()
    g_opt.zero_grad(); g_loss.backward(); g_opt.step()
    truth.note(step, g_loss, generator=generator, critic=critic, g_opt=g_opt, d_opt=d_opt)
""",
    "ema_dict": """
model = net()
ema = {name: value.clone() for name, value in model.state_dict().items()}
opt = torch.optim.AdamW(model.parameters())
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    for name, value in model.state_dict().items():
        ema[name].mul_(0.9).add_(value, alpha=0.1)
    truth.note(step, loss, model=model, opt=opt, ema=ema)
""",
    "ema_module": """
model = net()
ema = torch.optim.swa_utils.AveragedModel(model)
opt = torch.optim.AdamW(model.parameters())
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    ema.update_parameters(model)
    truth.note(step, loss, model=model, opt=opt, ema=ema)
""",
    "amp": """
model = net()
opt = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for step in itertools.count(1):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x).float(), y)
    opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
    truth.note(step, loss, model=model, opt=opt, scaler=scaler)
""",
    "lbfgs": """
model = net()
opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x, y = batch(64)
def closure():
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
for step in itertools.count(1):
    loss = opt.step(closure)
    truth.note(step, loss, model=model, opt=opt)
""",
    "frozen": """
backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
backbone.requires_grad_(False)
head = nn.Linear(16, 1)
opt = torch.optim.Adam(head.parameters())
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(head(backbone(x)), y)
    opt.zero_grad(); loss.backward(); opt.step()
    truth.note(step, loss, backbone=backbone, head=head, opt=opt)
""",
    "compiled": """
model = net()
fast = torch.compile(model, backend="eager")
opt = torch.optim.AdamW(model.parameters())
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(fast(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    truth.note(step, loss, model=model, opt=opt)
""",
    "accumulate": """
model = net()
opt = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-2}])
step = 0
for number in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(model(x), y) / 4
    loss.backward()
    if number % 4 == 0:
        opt.step(); opt.zero_grad()
        step += 1
        truth.note(step, loss, model=model, opt=opt)
""",
    "tied": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.out = nn.Linear(8, 32, bias=False)
        self.out.weight = self.embed.weight
    def forward(self, ids):
        return self.out(self.embed(ids))
nets = {"main": Tied()}
opt = torch.optim.AdamW(nets["main"].parameters())
for step in itertools.count(1):
    ids = torch.randint(0, 32, (16,))
    loss = F.cross_entropy(nets["main"](ids), ids)
    opt.zero_grad(); loss.backward(); opt.step()
    truth.note(step, loss, **{"nets.main": nets["main"], "opt": opt})
""",
    "loose": """
actor, critic = net(), net()
log_alpha = torch.zeros(1, requires_grad=True)
opt = torch.optim.Adam(itertools.chain(actor.parameters(), critic.parameters()))
alpha_opt = torch.optim.Adam([log_alpha], lr=1e-2)
target = copy.deepcopy(critic).requires_grad_(False)
for step in itertools.count(1):
    x, y = batch()
    loss = F.mse_loss(actor(x), y) + F.mse_loss(critic(x), target(x) * 0.9 + y)
    opt.zero_grad(); loss.backward(); opt.step()
    alpha_loss = (log_alpha.exp() * loss.detach()).sum()
    alpha_opt.zero_grad(); alpha_loss.backward(); alpha_opt.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), critic.parameters()):
            slow.lerp_(fast, 0.05)
    truth.note(step, loss, actor=actor, critic=critic, target=target, opt=opt, alpha_opt=alpha_opt,
               loose_parameters={"log_alpha": log_alpha.detach()})
""",
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
import os, tempfile
class Note(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **more):
        inner = getattr(optimizer, "optimizer", optimizer), getattr(lr_scheduler, "scheduler", lr_scheduler)
        names = ("trainer.model", "trainer.optimizer", "trainer.lr_scheduler")
        truth.note(state.global_step, **dict(zip(names, (model, *inner))))
data = [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))} for _ in range(4000)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=900, report_to=[],
                         save_strategy="no", disable_tqdm=True, use_cpu=True)
trainer = Trainer(model, args, train_dataset=data, callbacks=[Note()])
trainer.train()
""",
    "lightning": """
import lightning, logging, warnings
warnings.filterwarnings("ignore"); logging.getLogger("lightning").setLevel(logging.ERROR)
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, pair, index):
        return F.mse_loss(self.net(pair[0]), pair[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
class Note(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, pair, index):
        truth.note(trainer.global_step, outputs["loss"], module=module, opt=trainer.optimizers[0])
x, y = batch(8000)
module = Lit()
trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Note()])
trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4))
""",
}


def source_of(name: str) -> str:
    return _HEAD + (SCRIPTS.get(name) or SHAPES[name])
