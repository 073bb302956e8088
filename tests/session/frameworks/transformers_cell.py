"""transformers' Trainer."""

import torch
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
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from jackline.session.integrations.transformers import ExactResume

SCHEDULERS = {"step": "linear", "cosine": "cosine", "plateau": "reduce_lr_on_plateau"}


class Lengths(Noisy):
    """Samples of unequal length, for samplers that group them."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "input_ids": [0] * (1 + index * 7 % 11)}


def collate(samples):
    return torch.utils.data.default_collate([{k: v for k, v in one.items() if k != "input_ids"} for one in samples])


class Counting(TrainerCallback):
    """Keeps its own count, and acts on it."""

    def __init__(self):
        self.steps = self.epochs = 0
        self.values = []

    def on_epoch_begin(self, args, state, control, **more):
        self.epochs += 1

    def on_step_end(self, args, state, control, model=None, **more):
        self.steps += 1
        self.values.append(self.steps * self.epochs)
        if self.steps % 3 == 0:
            with torch.no_grad():
                next(model.parameters()).mul_(1.0 + 0.001 * sum(self.values[-3:]))


class Average(TrainerCallback):
    """An average of the weights, which replaces the model's at each epoch's end."""

    def on_train_begin(self, args, state, control, model=None, **more):
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **more):
        for name, tensor in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(tensor.detach(), alpha=0.1)

    def on_epoch_end(self, args, state, control, model=None, **more):
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(self.shadow[name])


class ShortEpochs(TrainerCallback):
    """Ends each epoch after some steps."""

    def on_step_end(self, args, state, control, **more):
        if state.global_step % 5 == 0:
            control.should_epoch_stop = True
        return control


class Last(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        perhaps_die(state.global_step)


class Own(ExactResume, Trainer):
    jackline = {"name": "x", "save_every_steps": CELL["save_every"]}  # noqa: RUF012

    def training_step(self, model, inputs, *more, **options):
        note(self.state.global_step, inputs)
        return super().training_step(model, inputs, *more, **options)


if EXTRA == "weighted sampler":

    def choose(self, train_dataset=None):
        return WeightedRandomSampler(weights_for_samples(), SAMPLES)

    Own._get_train_sampler = choose
if EXTRA == "own loader":

    def make(self):
        sampler = WeightedRandomSampler(weights_for_samples(), SAMPLES)
        return DataLoader(Noisy(), batch_size=BATCH, sampler=sampler, num_workers=WORKERS)

    Trainer.get_train_dataloader = make  # as a class between the two would
data = {"iterable": Streamed, "stateful stream": StatefulStream}.get(EXTRA, Lengths)()
callbacks = {"counting callback": [Counting()], "average callback": [Average()], "short epochs": [ShortEpochs()]}
callbacks = callbacks.get(EXTRA, [])
options = {"eval_strategy": "epoch", "metric_for_best_model": "eval_loss"}
if RANKS > 1:
    options["ddp_backend"] = "gloo"
if EXTRA == "early stopping":
    callbacks = [EarlyStoppingCallback(2, 0.05)]
    options.update(
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_strategy="steps", save_steps=2
    )
if EXTRA in ("iterable", "stateful stream", "max_steps"):
    options["max_steps"] = 20
if EXTRA == "persistent evaluation":
    options.update(dataloader_persistent_workers=True, dataloader_num_workers=1)
if EXTRA == "evaluation at start":
    options.update(eval_on_start=True)
    callbacks = [EarlyStoppingCallback(20)]
if EXTRA in ("auto_find_batch_size", "ignore_data_skip"):
    options[EXTRA] = True
if EXTRA in ("group_by_length", "batch_rebalance", "sequential"):
    options["train_sampling_strategy"] = EXTRA
args = TrainingArguments(
    "out",
    **{
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": CELL.get("batch", BATCH),
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": CELL.get("accumulate_now", ACCUMULATE),
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 3,
        "learning_rate": 1e-2,
        "seed": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": WORKERS,
        "lr_scheduler_type": SCHEDULERS[CELL["scheduler"]],
        **options,
    },
)
trainer = Own(
    model=Net(),
    args=args,
    train_dataset=data,
    eval_dataset=Lengths(6),
    callbacks=[*callbacks, Last()],
    data_collator=collate,
)
trainer.train()
# How long it took is different each time.
logged = [
    {word: value for word, value in entry.items() if "runtime" not in word and "per_second" not in word}
    for entry in trainer.state.log_history
    if "train_loss" not in entry
]
finish(trainer.model, steps=trainer.state.global_step, best=trainer.state.best_metric, logged=logged)
