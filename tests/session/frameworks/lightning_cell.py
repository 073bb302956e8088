"""Lightning's Trainer."""

import logging

import lightning.pytorch as pl
import torch
import torchmetrics
from common import (
    ACCUMULATE,
    BATCH,
    CELL,
    EPOCHS,
    EXTRA,
    RANKS,
    SAMPLES,
    WORKERS,
    Net,
    Noisy,
    StatefulStream,
    Streamed,
    finish,
    note,
    perhaps_die,
    weights_for_samples,
)
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, WeightedRandomSampler

import jackline
from jackline.session.integrations.lightning import JacklineCallback, JacklineIO

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
VALIDATIONS = []


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.error = torchmetrics.MeanSquaredError()
        self.outputs = []
        self.count = 0
        self.automatic_optimization = EXTRA != "manual optimization"

    def training_step(self, batch, index):
        note(self.global_step, batch)
        found = self.net(**batch)
        if EXTRA == "outputs kept":
            self.outputs.append(found["loss"].detach())
            self.count += 1
        if EXTRA == "metric of the epoch":
            self.error(found["logits"], batch["labels"])
            self.log("error", self.error, on_step=False, on_epoch=True)
        if EXTRA == "mean of the epoch":
            self.log("mean", found["loss"], on_step=False, on_epoch=True, batch_size=BATCH)
        self.log("loss", found["loss"], batch_size=BATCH)
        return self.by_hand(found["loss"], index) if not self.automatic_optimization else found["loss"]

    def by_hand(self, loss, index):
        """The first optimizer steps at each batch; the other one's gradients gather for three."""
        first, other = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if index % 3 == 2:
            other.step()
            other.zero_grad()

    def on_train_epoch_end(self):
        if EXTRA == "outputs kept":
            with torch.no_grad():
                next(self.net.parameters()).mul_(
                    1 + 0.001 * float(torch.stack(self.outputs).mean()) + 1e-4 * self.count
                )
            self.outputs.clear()

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(**batch)["loss"], batch_size=3)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            VALIDATIONS.append(self.global_step)
            with open("validations.txt", "a") as file:
                file.write(f"{self.global_step}\n")

    def configure_optimizers(self):
        parameters = list(self.net.parameters())
        if EXTRA == "manual optimization":
            return torch.optim.SGD(parameters[:4], lr=1e-2), torch.optim.Adam(parameters[4:], lr=1e-2)
        optimizer = torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2)
        if EXTRA == "estimated steps":
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        monitor = {"metric of the epoch": "error", "mean of the epoch": "mean"}.get(EXTRA, "val_loss")
        if CELL["scheduler"] == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": scheduler, "monitor": monitor, "strict": "other" not in EXTRA}]
        if CELL["scheduler"] == "cosine":
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8), "interval": "step"}]


class Last(pl.Callback):
    def on_train_batch_end(self, trainer, module, *more):
        self.step = trainer.global_step

    def on_train_batch_start(self, trainer, module, *more):
        perhaps_die(trainer.global_step)


class Counting(pl.Callback):
    """Keeps its own count, and acts on it."""

    def __init__(self):
        self.batches = 0

    def on_train_epoch_start(self, trainer, module):
        self.in_epoch = 0

    def on_train_batch_end(self, trainer, module, *more):
        self.batches += 1
        self.in_epoch += 1
        if self.batches % 3 == 0:
            with torch.no_grad():
                next(module.net.parameters()).mul_(1 + 0.001 * self.in_epoch)


class Thaw(BaseFinetuning):
    """The first layer trains from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.net.layers[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.layers[0], optimizer)


io = JacklineIO(name="x", save_every_steps=CELL["save_every"], seed=2)
extra_callbacks = {
    "early stopping": lambda: [EarlyStopping("val_loss", patience=1, min_delta=0.05)],
    "counting callback": lambda: [Counting()],
    "accumulation scheduler": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})],
    "fine-tuning": lambda: [Thaw()],
    "weight averaging": lambda: [StochasticWeightAveraging(1e-2)],
    "model checkpoint": lambda: [ModelCheckpoint("out", monitor="val_loss", save_top_k=1)],
}
callbacks = [*extra_callbacks.get(EXTRA, list)(), JacklineCallback(io), Last()]
options = {"max_epochs": EPOCHS}
if RANKS > 1:
    options.update(devices=RANKS, strategy=EXTRA or "ddp")
if EXTRA in ("iterable", "stateful stream", "max_steps"):
    options.update(max_steps=20, max_epochs=-1)
if EXTRA in ("val_check_interval", "early stopping", "model checkpoint"):
    options["val_check_interval"] = 4
if EXTRA == "validation every other epoch":
    options["check_val_every_n_epoch"] = 2
if EXTRA == "limit_train_batches":
    options["limit_train_batches"] = 7
accumulate = (
    1 if EXTRA in ("manual optimization", "accumulation scheduler") else CELL.get("accumulate_now", ACCUMULATE)
)
trainer = pl.Trainer(
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=EXTRA == "model checkpoint",
    accumulate_grad_batches=accumulate,
    num_sanity_val_steps=2,
    plugins=[io],
    callbacks=callbacks,
    **options,
)
with_workers = {"batch_size": CELL.get("batch", BATCH), "num_workers": WORKERS}
if EXTRA in ("iterable", "stateful stream"):
    loader = DataLoader({"iterable": Streamed, "stateful stream": StatefulStream}[EXTRA](), **with_workers)
elif EXTRA == "weighted sampler":
    loader = DataLoader(Noisy(), sampler=WeightedRandomSampler(weights_for_samples(), SAMPLES), **with_workers)
elif EXTRA == "jackline.Loader":
    loader = jackline.Loader(Noisy(), shuffle=True, seed=2, **with_workers)
else:
    loader = DataLoader(Noisy(), shuffle=True, **with_workers)
if EXTRA == "two loaders":
    loader = {"a": loader, "b": DataLoader(Noisy(), batch_size=BATCH)}
module = Module()
trainer.fit(module, loader, DataLoader(Noisy(6), batch_size=3), ckpt_path=io.resume_path())
more = {}
if EXTRA == "model checkpoint":
    best = trainer.checkpoint_callback.best_model_path
    more["best"] = str(Module.load_from_checkpoint(best).net.layers[0].weight.double().sum().item().hex())
rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
finish(module, steps=trainer.global_step, lr=rates, **more)
