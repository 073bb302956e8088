"""What is made of a step's numbers: step lines, curves, alarms, and the statistics at the end.

Owns the commentary of one attempt. It is told about every step and reads the numbers when they have arrived; it
decides nothing about the training but that a fatal alarm ends it with sentinels=stop. Lines are at most 1.5 s apart
as long as steps end, or a minute where a live view draws what is between; inside a longer step the console speaks.

Loss and gradient norm are those that the loop logged. The session hands them back when they have arrived from the
device: reading them at once would make the loop wait.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from jackline import accelerator
from jackline.errors import JacklineError
from jackline.machine.memory import effective_limit
from jackline.rundir.layout import RunDir
from jackline.session.metrics.tensorboard import Board
from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.session.strange import why_not_back
from jackline.trainer.report.console import MINUTE_S, Console
from jackline.trainer.report.flops import mfu, peak_flops
from jackline.trainer.report.step_line import FinalFacts, StepLine, final_lines, step_line
from jackline.trainer.sentinels.watch import Alarm, EvalFacts, PairFacts, Sentinels, StepFacts
from jackline.trainer.startup.parallel import rank, world_size
from jackline.trainer.task import Task
from jackline.trainer.validate.evaluate import Evaluation

LINE_EVERY_S = 1.5
Event = Callable[[str, str], None]


class AlarmRaised(JacklineError):
    """A sentinel found something that continuing would make worse, and sentinels=stop. `ruined_step`: the weights are
    lost from that step on; 0 when they are not."""

    ruined_step = 0


@dataclass(frozen=True)
class Step:
    """What is known of a step at once. `seconds` since the step before it, of them `waited_s` for data and `saved_s`
    for saves."""

    step: int
    lr: float
    seconds: float
    waited_s: float
    epoch: int
    windows: Sequence[int]
    micro_batch: int
    saved_s: float = 0.0
    is_skipped: bool = False
    values: Mapping[str, float] = field(default_factory=dict)  # of the recipe's own


@dataclass(frozen=True)
class Arrived:
    """What was handed in with a step, and its numbers."""

    facts: Step
    loss: float
    grad_norm: float


@dataclass
class _Spent:
    """Where the time of this attempt went."""

    parts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + seconds


class Watch:
    """`begin` at the first step of the attempt, `after_step` for each, `end` in any case."""

    def __init__(self, task: Task, run: RunDir, console: Console, sentinels: Sentinels) -> None:
        self.task, self.run, self.console, self.sentinels = task, run, console, sentinels
        self._event: Event = lambda kind, text: None
        self._session: Run | OffRun | None = None
        self._coming: deque[Step] = deque()  # steps whose numbers have not arrived
        self._board = Board(run.tensorboard, console.say)
        self._board.is_on = self._board.is_on and not rank()
        self._flops = task.counting.flops_each
        peak = peak_flops(task.learner.device_name, task.learner.precision)
        self._peak = peak * world_size() if peak is not None else None
        self._limit_bytes = _limit_bytes(task.learner.device)
        self._total_steps = task.total_steps if task.config.has_known_end else 0
        self._began_s = self._line_s = self._step_s = time.monotonic()
        self._line_step = self._first_step = 0
        self._wait_s = self._line_wait_s = self._saving_s = 0.0
        self._aside_s = self._line_aside_s = 0.0
        self._spent = _Spent()
        self._are_blind = task.config.sentinels == "off"
        self._newest: Arrived | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin(self, run: Run | OffRun, event: Event) -> None:
        """`event(kind, text)` writes an alarm down."""
        self._session, self._event, step = run, event, run.step
        run.logged()  # from here on every logged line comes back
        self._began_s = self._line_s = self._step_s = time.monotonic()
        self._line_step = self._first_step = step
        self._wait_s = self._line_wait_s = self.task.loader.waited_s
        self._board.rewind(step)

    def clock(self) -> tuple[float, float]:
        """(seconds, of them waiting for data) since the last step ended."""
        now_s, waited_s = time.monotonic(), self.task.loader.waited_s
        seconds, waited = now_s - self._step_s, waited_s - self._wait_s
        self._step_s, self._wait_s = now_s, waited_s
        return seconds, waited

    def saved_s(self, total_s: float) -> float:
        """Of all that saves have cost so far, what is new since the last step."""
        since_s, self._saving_s = total_s - self._saving_s, total_s
        return since_s

    def training_s(self) -> float:
        """Since the attempt's first step."""
        return time.monotonic() - self._began_s

    def after_step(self, step: Step) -> None:
        """After `run.log(loss=..., grad_norm=...)` of this step."""
        self._coming.append(step)
        self.console.begin()
        self.take_in()
        config = self.task.config
        is_asked = config.verbose or (config.log_every > 0 and step.step % config.log_every == 0)
        is_edge = step.step == self._first_step + 1 or step.step == self.task.total_steps
        every_s = MINUTE_S if self.console.is_live else LINE_EVERY_S
        if is_asked or is_edge or self._step_s - self._line_s >= every_s:
            self._say_line(step.step)
        if config.verbose:
            ids = ", ".join(f"{window:,}" for window in step.windows)
            what = "windows at tokens" if config.is_language else self.task.counting.unit
            self.console.say(f"step {step.step:,}: {step.seconds:.3f} s, epoch {step.epoch}, {what} {ids}")

    def take_in(self, *, wait: bool = False) -> None:
        """What has arrived: curves and alarms, in order of steps."""
        for arrived in self._arrived(wait=wait):
            self._newest = arrived
            self.first_loss = arrived.loss if self.first_loss is None else self.first_loss
            self.last_loss = arrived.loss
            facts = step_facts(arrived, self.task.counting.per_step)
            values = {"loss": arrived.loss, "lr": arrived.facts.lr, "grad_norm": arrived.grad_norm}
            rate = {"tokens_per_s": facts.tokens_per_s} if facts.tokens_per_s else {}
            self._board.add(facts.step, {**values, **rate, **facts.values})
            self._look(partial(self.sentinels.look, facts))

    def _arrived(self, *, wait: bool) -> Iterator[Arrived]:
        lines = self._session.logged(wait=wait) if self._session is not None else []
        for _, values in lines:
            if self._coming and "loss" in values and "grad_norm" in values:  # a validation logs other names
                yield Arrived(self._coming.popleft(), values["loss"], values["grad_norm"])

    def _look(self, ask: Callable[[], list[Alarm]]) -> None:
        if self._are_blind:
            return
        try:
            alarms = ask()
        except Exception as problem:  # a mistake of ours must not end a training
            self._are_blind = True
            self.console.say(f"the sentinels are off: {type(problem).__name__}: {problem}", "sentinel")
            return
        for alarm in alarms:
            self.console.say(f"WARNING {alarm.text}", "sentinel")
            self.console.say(f"        {alarm.hint}", "sentinel")
            self._event(alarm.kind, alarm.text)
            if alarm.is_ruin and self._goes_back(alarm.step):
                continue
            if alarm.is_ruin or (alarm.is_fatal and self.task.config.sentinels == "stop"):
                raised = AlarmRaised(alarm.text, hint=alarm.hint)
                raised.ruined_step = alarm.step if alarm.is_ruin else 0
                raise raised

    def _goes_back(self, step: int) -> bool:
        """Whether the session will leave at the end of this step, to resume from before it (on_spike=rewind)."""
        is_wanted = self.task.config.on_spike == "rewind" and isinstance(self._session, Run) and world_size() == 1
        return is_wanted and not why_not_back(self.run, step)

    def _say_line(self, step: int) -> None:
        if self._newest is None:
            self.take_in(wait=True)  # the very first line: there is nothing to overlap with yet
        now_s = time.monotonic()
        seconds = max(1e-9, now_s - self._line_s - (self._aside_s - self._line_aside_s))
        done = step - self._line_step
        newest = self._newest
        rate = done * self.task.counting.per_step / seconds if done else None
        # The first step of an attempt carries compilation and caches: no forecast from it.
        pace_s = seconds / done if done and step > self._first_step + 1 else None
        text = step_line(
            StepLine(
                step=step,
                total_steps=self._total_steps,
                loss=newest.loss if newest else None,
                lr=newest.facts.lr if newest else None,
                grad_norm=newest.grad_norm if newest else None,
                tokens_per_s=rate,
                mfu=mfu(rate, self._flops, self._peak) if rate else None,
                data_wait_share=(self._wait_s - self._line_wait_s) / seconds,
                memory_bytes=memory_bytes(self.task.learner.device),
                memory_limit_bytes=self._limit_bytes,
                eta_s=pace_s * (self._total_steps - step) if pace_s and self._total_steps else None,
                bounds=self._session.at_risk if self._session is not None else None,
                unit=self.task.counting.unit,
                place=self.task.place_text(),
                notes=(f"(loss of step {newest.facts.step:,})",) if newest and newest.facts.step != step else (),
            ),
            self.console.columns,
        )
        self.console.say(text)
        self._line_s, self._line_step, self._line_wait_s = now_s, step, self._wait_s
        self._line_aside_s = self._aside_s

    # -- beside the steps --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Time that is no training: not in tokens/s, and named at the end."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            taken_s = time.monotonic() - began_s
            self._spent.add(name, taken_s)
            self._aside_s += taken_s
            self._step_s = time.monotonic()

    def add_curves(self, step: int, values: Mapping[str, float]) -> None:
        self._board.add(step, values)

    def after_eval(
        self, step: int, name: str, found: Evaluation, *, is_subset: bool, pairs: PairFacts | None = None
    ) -> None:
        self._board.add(step, {name: found.loss})
        facts = EvalFacts(step, found.losses, found.tokens_per_part, is_subset, pairs)
        self._look(partial(self.sentinels.look_eval, facts))

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, outcome: str, step: int, best: tuple[str, float, int] | None, commands: Sequence[str]) -> None:
        """Final statistics, whatever the end was. Never an error: they are the last thing said."""
        with contextlib.suppress(Exception):
            self.take_in(wait=True)
        seconds = time.monotonic() - self._began_s
        training_s = max(1e-9, seconds - self._aside_s)
        steps = max(0, step - self._first_step)
        tokens = self.task.tokens_between(self._first_step, self._first_step + steps)
        waited_s = min(self.task.loader.waited_s, training_s)
        saved_s = min(self._saving_s, training_s - waited_s)
        rate = tokens / training_s if steps else None
        facts = FinalFacts(
            outcome=outcome,
            step=step,
            total_steps=self._total_steps,
            tokens=tokens,
            seconds=seconds,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            best=best,
            tokens_per_s=rate,
            unit=self.task.counting.unit,
            mfu=mfu(rate, self._flops, self._peak) if rate else None,
            spent_s={
                "training": training_s - waited_s - saved_s,
                "data wait": waited_s,
                "saving": saved_s,
                **self._spent.parts,
            },
            peak_memory_bytes=peak_bytes(self.task.learner.device),
            checkpoint=self._session.newest_checkpoint if self._session is not None else None,
            num_alarms=self.sentinels.num_alarms,
            commands=tuple(commands),
            more=self.task.totals(),
        )
        for line in final_lines(facts):
            self.console.say(line, "end")
        self._board.close()


def step_facts(arrived: Arrived, tokens_per_step: int) -> StepFacts:
    """For the sentinels."""
    step = arrived.facts
    is_timed = step.seconds > 0
    return StepFacts(
        step=step.step,
        loss=arrived.loss,
        lr=step.lr,
        grad_norm=arrived.grad_norm,
        tokens_per_s=tokens_per_step / step.seconds if is_timed else None,
        data_wait_share=step.waited_s / step.seconds if is_timed else None,
        seconds=step.seconds,
        micro_batch=step.micro_batch,
        saved_s=step.saved_s,
        epoch=step.epoch,
        windows=step.windows,
        is_skipped=step.is_skipped,
        values=step.values,
    )


def plain_numbers(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Without those that are still on their way: reading them would make the device wait."""
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def memory_bytes(device: torch.device) -> int:
    if accelerator.is_gpu(device):
        return accelerator.reserved_bytes(device)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device) -> int:
    if accelerator.is_gpu(device):
        return accelerator.peak_reserved_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit_bytes(device: torch.device) -> int | None:
    if accelerator.is_gpu(device):
        return accelerator.total_bytes(device)
    return effective_limit().limit_bytes
