"""`keep_best` and the end of a run in transformers and Lightning, the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jackline.checkpoint.format.verify import read_manifest
from tests.deadline import read_best_name
from tests.session.nursery import Nursery
from tests.session.test_integrations import needs

pytestmark = pytest.mark.xdist_group("integrations")

HEAD = """
import os, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
os.environ["ACCELERATE_USE_CPU"] = "true"
VALUES = {2: 5.0, 4: 1.0, 6: 3.0, 8: 1.0, 10: 2.0}
data = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 20

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean(), "logits": x}
"""
TRANSFORMERS = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from jackline.session.integrations.transformers import exact
class Own(exact(Trainer)):
    jackline = {"name": "x", "save_every_steps": 3, "keep_last": 2, "keep_best": "eval_score"}
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if os.environ.get("STOP") == str(state.global_step): os.kill(os.getpid(), signal.SIGTERM)
arguments = TrainingArguments("out", max_steps=10, per_device_train_batch_size=2, save_strategy=sys.argv[1],
                              save_steps=2, eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True,
                              disable_tqdm=True, remove_unused_columns=False)
trainer = Own(model=Net(), args=arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[Stop()],
              compute_metrics=lambda _: {"score": VALUES[trainer.state.global_step]})
trainer.train()
"""
LIGHTNING = """
import logging
import lightning.pytorch as pl
import jackline
from lightning.pytorch.callbacks import ModelCheckpoint
from jackline.session.integrations.lightning import JacklineCallback, JacklineIO
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index): return self.net(**batch)["loss"]
    def validation_step(self, batch, index): self.log("score", VALUES[self.trainer.global_step])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
io = JacklineIO(name="x", save_every_steps=3, keep_last=2, keep_every=1, keep_best="score")
trainer = pl.Trainer(max_steps=10, max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, accelerator="cpu",
                     logger=False, enable_progress_bar=False, enable_model_summary=False, plugins=[io],
                     callbacks=[JacklineCallback(io), ModelCheckpoint("out", monitor="score", save_top_k=-1)])
trainer.fit(Module(), jackline.Loader(data, 2), torch.utils.data.DataLoader(data[:2], batch_size=2))
"""


@pytest.fixture(scope="module")
def nursery(framework_nursery: Nursery) -> Nursery:
    return framework_nursery


def read_best(folder: Path, metric: str) -> tuple[int, float]:
    checkpoints = folder / "runs" / "x" / "checkpoints"
    manifest = read_manifest(checkpoints / read_best_name(checkpoints))
    return manifest.step, manifest.metrics[metric]


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_transformers_saves_the_best_right_after_its_evaluation(
    strategy: str, nursery: Nursery, tmp_path: Path
) -> None:
    needs("transformers")
    ended = nursery.run(HEAD + TRANSFORMERS, [strategy], tmp_path)
    assert ended.code == 0, ended.output
    assert read_best(tmp_path, "eval_score") == (4, 1.0)
    assert (tmp_path / "out" / "checkpoint-4").exists() == (strategy == "steps")


def test_a_stop_on_a_step_where_trainer_saves_itself_is_saved_before_it_is_said(
    nursery: Nursery, tmp_path: Path
) -> None:
    needs("transformers")
    ended = nursery.run(HEAD + TRANSFORMERS, ["steps"], tmp_path, {"STOP": "8"})
    assert ended.code == 75, ended.output
    said = re.search(r"stopped at step (\d+), saved", ended.output)
    assert said is not None, ended.output
    assert (tmp_path / "runs" / "x" / "checkpoints" / f"step-{int(said[1]):08d}").exists()
    assert (tmp_path / "out" / "checkpoint-8").exists()


def test_a_checkpoint_of_lightning_carries_the_value_of_its_own_validation_only(
    nursery: Nursery, tmp_path: Path
) -> None:
    needs("lightning")
    ended = nursery.run(HEAD + LIGHTNING, [], tmp_path)
    assert ended.code == 0, ended.output
    assert read_best(tmp_path, "score") == (4, 1.0)
    wanted = {2: 5.0, 4: 1.0, 6: 3.0, 8: 1.0, 10: 2.0}
    for path in (tmp_path / "runs" / "x" / "checkpoints").glob("step-*"):
        manifest = read_manifest(path)
        assert manifest.metrics.get("score") in (None, wanted.get(manifest.step)), (path.name, manifest.metrics)
