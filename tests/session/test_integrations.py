"""transformers, Lightning and Accelerate, the real ones: killed with -9 and gone on with, bit for bit.

They are not among Jackline's own dependencies: `pip install transformers accelerate lightning` beside it runs these.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.nursery import ROOT

COMMON = """
import os, random, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
SEEN = []

def die_at(step):
    if os.environ.get("DIE") == str(step): os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("STOP") == str(step): os.environ["STOP"] = ""; os.kill(os.getpid(), signal.SIGTERM)


class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 44
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return {"x": x + 0.1 * torch.randn(8), "labels": (x.sum() > 0).long()}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(),
                                          torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def show(model):
    print("final", [tensor.double().sum().item().hex() for tensor in model.state_dict().values()], flush=True)
"""
SCRIPTS = {
    "transformers": """
from transformers import Trainer, TrainerCallback, TrainingArguments
from jackline.session.integrations.transformers import ExactResume

class MyTrainer(ExactResume, Trainer):
    jackline = {"name": "hf", "save_every_steps": 3}

class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **more): die_at(state.global_step)

arguments = TrainingArguments("out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                              save_strategy="no", report_to=[], logging_steps=1, learning_rate=1e-2, seed=3,
                              use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
                              dataloader_num_workers=int(os.environ.get("WORKERS", "0")), warmup_steps=3)
net = Net()
MyTrainer(model=net, args=arguments, train_dataset=Noisy(), callbacks=[Die()]).train()
show(net)
""",
    "lightning": """
import lightning.pytorch as pl
import logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import jackline
from jackline.session.integrations.lightning import JacklineCallback, JacklineIO

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        loss = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
    def on_train_batch_start(self, batch, index):
        die_at(self.trainer.global_step)

io = JacklineIO(name="pl", save_every_steps=1)
trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
                     enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=2,
                     plugins=[io], callbacks=[JacklineCallback(io)])
loader = jackline.Loader(Noisy(), 4, shuffle=True, seed=2, num_workers=int(os.environ.get("WORKERS", "0")))
module = Module()
trainer.fit(module, loader, ckpt_path=io.resume_path())
show(module)
""",
    "accelerate": """
from accelerate import Accelerator
from jackline.session.integrations import accelerate as integration

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
workers = int(os.environ.get("WORKERS", "0"))
loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
with integration.attach(accelerator, model=net, optimizer=optimizer, scheduler=scheduler, loader=loader,
                        name="acc", save_every_steps=1) as run:
    for epoch in run.epochs(3):
        for batch in run.steps():
            with accelerator.accumulate(net):
                loss = net(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step(); scheduler.step(); optimizer.zero_grad()
            run.log(loss=loss)
            if accelerator.sync_gradients: die_at(run.step)
show(net)
""",
}
NUM_STEPS = 18  # 11 batches an epoch, two to a step, the last alone


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def start(library: str, folder: Path, **env: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(COMMON + SCRIPTS[library])
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
        "JACKLINE_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env={**environment, **env}, timeout=280,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def final(output: str) -> str:
    found = re.findall(r"^final .*$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_killed_framework_ends_with_the_same_weights(library: str, tmp_path: Path) -> None:
    needs(library)
    whole = tmp_path / "whole"
    whole.mkdir()
    code, wanted = start(library, whole)
    assert code == 0, wanted
    for env, expected in (({"DIE": "5"}, -9), ({"DIE": "11", "WORKERS": "1"}, -9), ({}, 0)):
        code, output = start(library, tmp_path, **env)
        assert code == expected, output
    assert re.search(r"\[jackline\] going on from step-000000(0[6-9]|1[01])", output), output
    assert final(output) == final(wanted)


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_framework_that_is_asked_to_end_saves_and_goes_on(library: str, tmp_path: Path) -> None:
    needs(library)
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = start(library, whole)[1]
    code, output = start(library, tmp_path, STOP="7")
    assert code == 75, output
    assert re.search(r"\[jackline\] SIGTERM: stopped at step [78], saved", output), output
    assert "final" not in output
    code, output = start(library, tmp_path)
    assert code == 0, output
    assert re.search(r"going on from step-0000000[78]", output), output
    assert final(output) == final(wanted)


@pytest.mark.parametrize("library", SCRIPTS)
def test_off_leaves_the_framework_alone(library: str, tmp_path: Path) -> None:
    needs(library)
    if library == "lightning":
        pytest.skip("with Lightning the plugin is what is added; leaving it out is turning it off")
    code, output = start(library, tmp_path, JACKLINE="off")
    assert code == 0, output
    assert "[jackline]" not in output
    assert not (tmp_path / "runs").exists()
