"""What Lightning's own checkpoint leaves out and training depends on, read and put back.

RNG states; attributes of the module and of callbacks; states of torchmetrics; values logged so far in this epoch,
which schedulers and callbacks monitor; `requires_grad` and train/eval mode; gradients that manual optimization has
not used yet; the accumulation that a callback has set. Also which settings cannot be resumed exactly, and which are
compared; and the training loader that Lightning iterates, over one of Jackline's feeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from jackline import accelerator
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.errors import UsageError
from jackline.session.driver import Driver
from jackline.session.feeds.feed import END
from jackline.session.feeds.place import HandedOut
from jackline.session.integrations.attributes import Watched

_REFUSED = {
    "StochasticWeightAveraging": "it sets up its average when an epoch begins, and a resume may be inside one",
    "LearningRateFinder": "it searches again at each start and would change the learning rate of a resumed run",
    "BatchSizeFinder": "it searches again at each start and would change the batches of a resumed run",
}
_SAVEABLE = "keep plain values or tensors in it, or add state_dict() and load_state_dict()"


class LeftOut:
    """Of one trainer and its module, as they are when training begins."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        known = {id(trainer), id(module), *map(id, module.modules()), *map(id, trainer.optimizers)}
        known |= {id(config.scheduler) for config in trainer.lr_scheduler_configs}
        self._watched = {"module": Watched("the module", module, known=known, skip=vars(LightningModule()))}
        if trainer.datamodule is not None:
            skip = ("trainer", *(word for word in vars(trainer.datamodule) if word.startswith("_")))
            self._watched["datamodule"] = Watched("the datamodule", trainer.datamodule, known=known, skip=skip)
        for number, callback in enumerate(trainer.callbacks):
            kind = type(callback)
            is_declared = kind.state_dict is not Callback.state_dict
            if not is_declared and not kind.__module__.startswith(("lightning.", "pytorch_lightning.", "jackline.")):
                name = f"callback {kind.__name__}"
                self._watched[f"{number} {kind.__name__}"] = Watched(name, callback, known=known)

    def read(self, report: Callable[[str], None]) -> dict[str, Any]:
        trainer, module = self._trainer, self._module
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        found = {
            "random": ProcessRandom().state_dict(),
            "attributes": {name: watched.changed() for name, watched in self._watched.items()},
            "metrics": {name: _read_metric(part) for name, part in module.named_modules() if _is_metric(part)},
            "results": {key: _read_metric(part) for key, part in results.items() if part.is_tensor},
            "logged": [dict(connector._callback_metrics), dict(connector._logged_metrics)],
            "logging": [connector._first_loop_iter, connector._current_fx],
            "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "accumulate": trainer.accumulate_grad_batches,
            "gradients": {} if module.automatic_optimization else _read_gradients(module),
        }
        for watched in self._watched.values():
            watched.report_unsaved(report, _SAVEABLE)
        return found

    def put_back(self, kept: dict[str, Any]) -> None:
        trainer, module = self._trainer, self._module
        for name, values in kept["attributes"].items():
            if name in self._watched:
                self._watched[name].put_back(values)
        parts = dict(module.named_modules())
        for name, states in kept["metrics"].items():
            if _is_metric(parts.get(name)):
                _write_metric(parts[name], states)
        trainer.fit_loop.epoch_loop._results = _ResumedResults(kept["results"])
        connector = trainer._logger_connector
        for one, values in zip((connector._callback_metrics, connector._logged_metrics), kept["logged"], strict=True):
            one.update(values)
        connector._first_loop_iter, connector._current_fx = kept["logging"]
        frozen, evaluating = set(kept["frozen"]), set(kept["evaluating"])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
            gradient = kept["gradients"].get(name)
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device)
        for name, part in parts.items():
            part.training = name not in evaluating
        trainer.accumulate_grad_batches = kept["accumulate"]
        random = ProcessRandom()
        random.load_state_dict(kept["random"])


class _ResumedResults(_ResultCollection):
    """Values logged in this epoch: each starts from what it had reached at the checkpoint."""

    def __init__(self, states: dict[str, Any]) -> None:
        super().__init__(training=True)
        self._states = dict(states)

    def __setitem__(self, key: Any, metric: Any) -> None:
        super().__setitem__(key, metric)
        states = self._states.pop(key, None)
        if states is not None and metric.is_tensor:
            _write_metric(metric, states)

    def reset(self, *more: Any, **options: Any) -> None:
        self._states.clear()  # another epoch begins
        super().reset(*more, **options)


def join_early(environ: Mapping[str, str]) -> None:
    """Let the ranks of torchrun meet: Lightning does that in `fit` only, and uses the group that it finds."""
    size = environ.get("WORLD_SIZE", "1")
    is_launched = "MASTER_ADDR" in environ and "RANK" in environ and size.isdigit() and int(size) > 1
    if is_launched and torch.distributed.is_available() and not torch.distributed.is_initialized():
        if accelerator.is_available():
            number = int(environ.get("LOCAL_RANK", "0")) % accelerator.count()
            accelerator.use(torch.device(accelerator.device_type(), number))
        torch.distributed.init_process_group()  # gloo, and what there is for the GPUs


def _refuse_ranks(trainer: Any, num_ranks: int) -> None:
    way = type(trainer.strategy).__name__
    if trainer.world_size != num_ranks:
        raise UsageError(
            f"Lightning trains with {trainer.world_size} ranks, and JacklineIO was made in a job of {num_ranks}",
            hint=f"start them with torchrun --nproc-per-node {trainer.world_size}, or Trainer(devices=1)",
        )
    if num_ranks > 1 and way != "DDPStrategy":
        raise UsageError(
            f"JacklineIO does not know how to save {num_ranks} ranks of {way}", hint='Trainer(strategy="ddp")'
        )
    if num_ranks > 1 and not trainer._accelerator_connector.use_distributed_sampler:
        raise UsageError(
            "use_distributed_sampler=False leaves it to the loader what each rank gets, and JacklineIO divides it",
            hint="leave use_distributed_sampler out",
        )


def refuse_unsupported(trainer: Any, module: Any, num_ranks: int) -> None:
    """Raise UsageError for what could not be resumed exactly, by the name the user knows."""
    _refuse_ranks(trainer, num_ranks)
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _REFUSED:
                why = _REFUSED[kind.__name__]
                raise UsageError(f"{kind.__name__} cannot be used with JacklineIO: {why}", hint="remove it")
    if trainer.overfit_batches > 0:
        raise UsageError("overfit_batches cannot be used with JacklineIO: it replaces the sampler", hint="remove it")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise UsageError(
            "val_check_interval is a time: a resumed run would validate at other steps",
            hint="give it as a number of batches or a part of an epoch",
        )
    if "dataloader_iter" in _argument_names(module.training_step):
        raise UsageError(
            "training_step(dataloader_iter) reads batches by itself, so there is no step's end to save at",
            hint="use training_step(batch, batch_idx)",
        )


def describe_trainer(trainer: Any) -> dict[str, dict[str, Any]]:
    """For `Driver.compare`: by kind of change."""
    schedule = {
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "gradient_clip_val": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "val_check_interval": trainer.val_check_interval,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
    }
    for number, optimizer in enumerate(trainer.optimizers):
        schedule[f"optimizer {number}"] = type(optimizer).__name__
    return {
        "data": {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "limit_train_batches": trainer.limit_train_batches,
        },
        "schedule": schedule,
    }


def limits_of(trainer: Any) -> list[Any]:
    """Where training ends."""
    return [trainer.max_steps, trainer.max_epochs]


def _argument_names(function: Any) -> tuple[str, ...]:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def _is_metric(part: Any) -> bool:
    metrics = sys.modules.get("torchmetrics")  # a package that Lightning brings; who has none of it has no metric
    return metrics is not None and isinstance(part, metrics.Metric)


def _read_metric(metric: Any) -> dict[str, Any]:
    states = {word: _copy(getattr(metric, word)) for word in metric._defaults}
    return {"states": states, "count": metric._update_count}


def _write_metric(metric: Any, kept: dict[str, Any]) -> None:
    for word, value in kept["states"].items():
        setattr(metric, word, value.to(metric.device) if isinstance(value, torch.Tensor) else value)
    metric._update_count, metric._computed = kept["count"], None


def _copy(value: Any) -> Any:
    return [one.detach().clone() for one in value] if isinstance(value, list) else value.detach().clone()


def _read_gradients(module: Any) -> dict[str, Any]:
    return {name: part.grad.detach().clone() for name, part in module.named_parameters() if part.grad is not None}


def choose_batches(driver: Driver, loader: Any) -> HandedOut:
    """The feed for Lightning's training loader. Where its length is unknown, Lightning reads one batch ahead."""
    if isinstance(loader, CombinedLoader | dict | list | tuple):
        raise UsageError(
            "several training loaders together cannot be resumed exactly",
            hint="give Lightning one loader, over a dataset that combines them (torch.utils.data.ConcatDataset ...)",
        )
    feed = driver.choose(loader)
    return HandedOut(feed, num_ahead=1 if feed.num_batches is None else 0)


class FedLoader:
    """`on_ask` is called each time Lightning asks for a batch; `epoch` gives the number of the epoch."""

    def __init__(self, batches: HandedOut, loader: Any, on_ask: Callable[[], None], epoch: Callable[[], int]) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self._batches = batches
        self._on_ask = on_ask
        self._epoch = epoch

    def __len__(self) -> int:
        count = self._batches.feed.num_batches
        if count is None:
            raise TypeError("the number of batches is not known")
        return count

    def __iter__(self) -> Iterator[Any]:
        is_open = False
        while True:
            self._on_ask()
            if not is_open:
                self._batches.open(self._epoch())
                is_open = True
            batch = self._batches.take()
            if batch is END:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is in Jackline's part of the checkpoint. Lightning warns about loaders without it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
