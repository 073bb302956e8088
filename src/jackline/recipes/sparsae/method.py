"""SparsAE's step: masked weights, a teacher that is an average of the student, and a mask that is searched for.

Owns what is added to the plain step: gradients and moments of switched-off weights are zero, new connections
learn faster for a few steps (by what the update did, because scaling gradients does nothing under Adam), the teacher
follows the weights, and every `mask_opt_every` steps the mask is put to the test. The search is mask_search's, masks
are masks.py's, settings are the recipe's.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from jackline.data.loader.batches import ToDevice
from jackline.errors import UsageError
from jackline.memory.plan.gpus import Precision
from jackline.recipes.sparsae.mask_search import MaskSearch, Record
from jackline.recipes.sparsae.masks import Change, Masks, maskable
from jackline.recipes.sparsae.memory import distilled, teachers
from jackline.rundir.jsonl import JsonlWriter, read_lines
from jackline.trainer.language import Additions, LanguageTask
from jackline.trainer.startup.parallel import rank
from jackline.trainer.startup.precision import autocast
from jackline.trainer.task import Between
from jackline.trainer.validate.evaluate import count_windows, read_windows

if TYPE_CHECKING:
    from jackline.recipes.sparsae.recipe import SparsaeConfig

_POOL = 4  # validation batches that candidates are judged on, in turn
_FILE = "masks.jsonl"


def distill_weight(step: int, config: SparsaeConfig, total_steps: int) -> float:
    """0 during warm-up, then half a cosine from the first to the last weight over 0.7 of all steps."""
    if step < config.distill_warmup:
        return 0.0
    span = max(1.0, 0.7 * total_steps)
    share = min(1.0, (step - config.distill_warmup) / span)
    first, last = config.distill_first, config.distill_last
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


class BurnIn:
    """Connections switched on lately: each update of theirs is stretched, 1 to `most` times over `steps` steps."""

    def __init__(self, steps: int, most: float) -> None:
        self.steps, self.most = steps, most
        self.left = 0
        self.places: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def begin(self, change: Change) -> None:
        self.places = {name: flips.on for name, flips in change.items() if flips.on.numel()}
        self.left = self.steps if self.places else 0

    def before(self, weights: Mapping[str, Tensor]) -> None:
        if self.left:
            self._before = {name: weights[name].view(-1)[at] for name, at in self.places.items()}

    def after(self, weights: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """`copies` are what the network computes with, where `weights` are its masters."""
        if not self.left:
            return
        factor = 1 + (self.most - 1) * (self.steps - self.left + 1) / self.steps
        for name, at in self.places.items():
            flat, before = weights[name].view(-1), self._before[name]
            flat[at] = before + factor * (flat[at] - before)
            copies[name].view(-1)[at] = flat[at].to(copies[name].dtype)
        self._before = {}
        self.left -= 1

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "places": dict(self.places) if self.left else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left, self.places = int(state["left"]), dict(state["places"])


class SparseAdditions(Additions):
    """Made before the optimizer, so that its masters are taken from masked weights."""

    def __init__(self, model: nn.Module, config: SparsaeConfig) -> None:
        self.config = config
        self.hardest_step = config.distill_warmup
        self.weights = maskable(model)
        masks = Masks(self.weights, config.sparsity, seed=config.seed)
        masks.zero(dict(self.weights))
        self.teacher = copy.deepcopy(model).requires_grad_(False).eval()
        planned = max(1, config.max_steps // config.mask_opt_every)
        self.search = MaskSearch(masks, config.search_settings(), seed=config.seed, planned=planned)
        self.burn_in = BurnIn(config.burn_in_steps, config.burn_in_most)
        self._alpha = 0.0
        self._last: dict[str, float | Tensor] = {}
        self._spent_s = 0.0
        self._log: JsonlWriter | None = None
        self._pool: list[NDArray[Any]] = []

    def bind(self, task: LanguageTask) -> None:
        self._task = task
        data = task.corpus.validation
        if self.config.sparsity and (data is None or not count_windows(data, self.config.seq_len)):
            # Else it would be found at the first update of the masks, hours later.
            raise UsageError(
                f"masks are judged on validation data, and it has no window of {self.config.seq_len} tokens",
                hint="more data, a larger val_fraction, a shorter seq_len, or split_by=lines for long text files",
            )

    def state(self) -> dict[str, Any]:
        return {"teacher": self.teacher, "mask_search": self.search, "burn_in": self.burn_in}

    def begin_step(self, step: int) -> None:
        self._alpha = distill_weight(step, self.config, self._task.total_steps)

    def loss_sum(self, model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        count = targets.numel()
        if not self._alpha:
            return model(ids, targets), count
        with torch.no_grad(), autocast(_teacher_precision(self._task.learner.precision), self._task.learner.device):
            teacher = teachers(self.teacher(ids))
        loss, entropy, divergence = distilled(teacher, model(ids), targets, self._alpha)
        self._last = {"loss_ce": entropy.detach() / count, "loss_kl": divergence.detach() / count}
        return loss, count

    def before_update(self) -> None:
        gradients = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        self.search.masks.zero(gradients)
        self.burn_in.before(self._masters())

    @torch.no_grad()
    def after_update(self) -> None:
        self.burn_in.after(self._masters(), {name: weight.detach() for name, weight in self.weights.items()})
        rate, state = 1 - self.config.ema_decay, self._task.learner.optimizer.state
        for average, weight in zip(self.teacher.parameters(), self._task.learner.model.parameters(), strict=True):
            average.lerp_(state.get(weight, {}).get("master", weight.detach()), rate)

    def after_step(self, between: Between) -> None:
        if between.step % self.config.mask_opt_every or self.config.sparsity == 0:
            return
        began_s = time.monotonic()
        with between.during(f"mask update {self.search.num_updates}, after step {between.step:,}"):
            records, change = self.search.update(self._evaluate, self._gradients, self._tensors())
            self.burn_in.begin(change)
            self._task.learner.model.zero_grad(set_to_none=True)
            loss = self._judge(_POOL)  # a batch that no candidate was chosen on
        is_boosted = self.search.stagnation.see(loss, self.search.settings.boosted_updates)
        took_s = time.monotonic() - began_s
        self._spent_s += took_s
        self._write(between.folder, records, between.step)
        share = 100 * self._spent_s / max(1e-9, between.seconds + took_s)
        self._last |= {"mask_loss": loss, "mask_share": share / 100}
        between.tell(update_text(records, loss, took_s, share))
        if is_boosted:
            between.tell("the mask has brought nothing lately: reshuffles are likelier for two updates")

    def metrics(self) -> dict[str, float | Tensor]:
        found, self._last = self._last, {}
        return {**found, "alpha_kl": self._alpha, "sparsity": self.config.sparsity}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _masters(self) -> dict[str, Tensor]:
        """What the optimizer moves: float32 masters, or the weights themselves."""
        state = self._task.learner.optimizer.state
        return {name: state.get(weight, {}).get("master", weight.detach()) for name, weight in self.weights.items()}

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """The weights and all that goes with each: masters, moments, the teacher is dense and stays."""
        state = self._task.learner.optimizer.state
        found = {"weights": {name: weight.detach() for name, weight in self.weights.items()}}
        for word in ("master", "exp_avg", "exp_avg_sq"):
            if all(word in state.get(weight, {}) for weight in self.weights.values()):
                found[word] = {name: state[weight][word] for name, weight in self.weights.items()}
        return found

    def _evaluate(self, update: int) -> float:
        """Loss of the network as it stands, and its gradients; in eval mode, so that no dropout decides."""
        self._task.learner.model.zero_grad(set_to_none=True)
        return self._judge(update % _POOL, with_gradients=True)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}

    def _judge(self, number: int, *, with_gradients: bool = False) -> float:
        task, model = self._task, self._task.learner.model
        was_training = model.training
        model.eval()
        try:
            with torch.set_grad_enabled(with_gradients):
                found = task.eval_sum(self._batch(number))
                if with_gradients:
                    torch.autograd.backward(found.loss / found.count)
        finally:
            model.train(was_training)
        return float(found.loss.detach()) / found.count

    def _batch(self, number: int) -> Tensor:
        """Validation windows, a micro-batch at a time; the last of them is what no candidate is chosen on."""
        task, data = self._task, self._task.corpus.validation
        assert data is not None
        if not self._pool:
            size = min(16, task.config.batch_size, task.chosen.micro_batch)
            windows = read_windows(data, task.config.seq_len, size, size * (_POOL + 1))
            self._pool = [batch.copy() for batch in windows]
        return ToDevice(task.learner.device)(self._pool[min(number, len(self._pool) - 1)])

    def _write(self, folder: Path, records: list[Record], step: int) -> None:
        if rank():
            return  # all ranks find the same, and rank 0 writes it down
        if self._log is None:
            path = folder / _FILE
            _forget_after(path, self.search.num_updates - 1)
            self._log = JsonlWriter(path)
        for record in records:
            self._log.append({"step": step, **asdict(record)})


def _teacher_precision(precision: Precision) -> Precision:
    return "bf16" if precision == "bf16-weights" else precision


def _forget_after(path: Path, update: int) -> None:
    """Records of updates that a resumed run does again go: each update is told once."""
    if not path.exists():
        return
    kept = [record for record in read_lines(path).records if int(record.get("update", 0)) < update]
    path.unlink()
    writer = JsonlWriter(path)
    for record in kept:
        writer.append(record)
    writer.close()


def update_text(records: list[Record], loss: float, took_s: float, share: float) -> str:
    """'mask update 3: swap taken of 4, 12,345 flips, loss 5.2345; 1.2 s, 3.4 % of the time so far'."""
    taken = next((record for record in records if record.is_taken), None)
    if taken is None:
        return f"mask kept (static), loss {loss:.4f}"
    what = "kept as it was" if taken.kind == "current" else f"{taken.kind} taken, {taken.flips:,} flips"
    return (
        f"mask update {taken.update}: {what}, of {len(records)} candidates; loss {loss:.4f}; {took_s:.1f} s, "
        f"{share:.1f} % of the time so far"
    )
