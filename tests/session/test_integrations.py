"""transformers, Lightning and Accelerate, the real ones, with the guide's own lines: killed with -9, continued.

They are not among Jackline's own dependencies: `pip install transformers accelerate lightning` beside it runs these.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.guide import find_block
from tests.session.nursery import EVERY_SAVE, Nursery

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


os.environ["ACCELERATE_USE_CPU"] = "true"
workers = int(os.environ.get("WORKERS", "0"))

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


model, data = Net(), Noisy()
"""
AFTER = """
print("final", [tensor.double().sum().item().hex() for tensor in model.state_dict().values()], flush=True)
"""
# What stands before the guide's own lines, and behind them. The lines themselves are the guide's.
BEFORE = {
    "transformers": """
import transformers.trainer
from transformers import TrainerCallback, TrainingArguments
class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **more): die_at(state.global_step)
transformers.trainer.DEFAULT_CALLBACKS.append(Die)
arguments = TrainingArguments("out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                              save_strategy="no", report_to=[], logging_steps=1, learning_rate=1e-2, seed=3,
                              use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
                              dataloader_num_workers=workers, warmup_steps=3)
""",
    "lightning": """
import functools, logging
import lightning.pytorch as pl
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
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
pl.Trainer = functools.partial(pl.Trainer, accelerator="cpu", logger=False, enable_progress_bar=False,
                               enable_model_summary=False, enable_checkpointing=False)
module = Module()
""",
    "accelerate": """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
""",
}
CHANGED = {
    "transformers": {'"save_every_steps": 50': '"save_every_steps": 3'},
    "lightning": {"save_every_steps=50": "save_every_steps=1", "seed=2": "seed=2, num_workers=workers"},
    "accelerate": {
        "save_every_steps=50": "save_every_steps=1",
        "run.log(loss=loss)": "run.log(loss=loss)\n            if accelerator.sync_gradients: die_at(run.step)",
    },
}
# All on one worker: each other one would import the three libraries again.
pytestmark = pytest.mark.xdist_group("integrations")
IMPORTS = {"transformers": "transformers", "lightning": "lightning.pytorch", "accelerate": "accelerate"}


@pytest.fixture(scope="module")
def nursery(framework_nursery: Nursery) -> Nursery:
    return framework_nursery


@pytest.fixture(scope="module")
def wanted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The last line of an undisturbed run, by library."""

    @functools.cache
    def find(library: str) -> str:
        code, output = start(nursery, library, tmp_path_factory.mktemp(f"whole-{library}"))
        assert code == 0, output
        return final(output)

    return find


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def needs(library: str) -> None:
    if not is_installed(library):
        pytest.skip(f"{library} is not installed")


def script_for(library: str) -> str:
    lines = find_block("python", rf"# {library}\n")
    for old, new in CHANGED[library].items():
        assert old in lines, f"the guide has no {old}"
        lines = lines.replace(old, new)
    return COMMON + BEFORE[library] + lines + AFTER


def start(nursery: Nursery, library: str, folder: Path, **env: str) -> tuple[int, str]:
    ended = nursery.run(script_for(library), [], folder, {**EVERY_SAVE, **env})
    return ended.code, ended.output


def final(output: str) -> str:
    found = re.findall(r"^final .*$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


@pytest.mark.parametrize("library", IMPORTS)
def test_a_killed_framework_ends_with_the_same_weights(
    library: str, nursery: Nursery, wanted: Callable[[str], str], tmp_path: Path
) -> None:
    """Every save that is due is taken, so each kill comes after one of its own attempt, on any disk."""
    needs(library)
    for env, expected in (({"DIE": "5"}, -9), ({"DIE": "11", "WORKERS": "1"}, -9), ({}, 0)):
        code, output = start(nursery, library, tmp_path, **env)
        assert code == expected, output
    assert re.search(r"\[jackline\] resuming from step-000000(0[6-9]|1[01])", output), output
    assert final(output) == wanted(library)


@pytest.mark.slow
@pytest.mark.parametrize("library", IMPORTS)
def test_a_framework_that_is_asked_to_end_saves_and_continues(
    library: str, nursery: Nursery, wanted: Callable[[str], str], tmp_path: Path
) -> None:
    needs(library)
    code, output = start(nursery, library, tmp_path, STOP="7")
    assert code == 75, output
    assert re.search(r"\[jackline\] SIGTERM: stopped at step [78], saved", output), output
    assert not re.search(r"^final", output, re.MULTILINE)
    code, output = start(nursery, library, tmp_path)
    assert code == 0, output
    assert re.search(r"resuming from step-0000000[78]", output), output
    assert final(output) == wanted(library)


@pytest.mark.parametrize("library", IMPORTS)
def test_off_leaves_the_framework_alone(library: str, nursery: Nursery, tmp_path: Path) -> None:
    needs(library)
    code, output = start(nursery, library, tmp_path, JACKLINE="off")
    assert code == 0, output
    assert re.search(r"^final", output, re.MULTILINE)
    assert "[jackline]" not in output
    assert not (tmp_path / "runs").exists()
