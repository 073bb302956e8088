"""The training loop, read top to bottom: build, rehearse, attach, and then steps.

    train(resolve("demo", ["--quick"]), RunDir(Path("runs/demo")))

It uses the same session as a stranger's loop (`jackline.attach`), so resume, saving, signals and status are that
code and not this. Owns the order of a step and when a validation is due. What a step's numbers are made into is
watch.py; how the task is built is build.py.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial

from jackline.data.loader.batches import ToDevice
from jackline.machine.disk import explain_refusal
from jackline.rundir.layout import RunDir
from jackline.session.attach import attach
from jackline.session.feeds.choose import whole_batches
from jackline.session.stopping import Stopped
from jackline.trainer.build import build
from jackline.trainer.config import Resolved, TrainConfig, save_config
from jackline.trainer.optim.schedule import lr_at
from jackline.trainer.planning.rehearsal import Rehearsed, rehearse_step, remember
from jackline.trainer.recipe import keep_source
from jackline.trainer.report.console import Console
from jackline.trainer.report.facts import (
    ask_for_the_end,
    doing_text,
    event_of,
    find_deadline_s,
    forbid_restart,
    next_commands,
    say_curves,
    sentinel_facts,
    session_settings,
)
from jackline.trainer.report.watch import AlarmRaised, Step, Watch, plain_numbers
from jackline.trainer.sentinels.speed import read_surroundings
from jackline.trainer.sentinels.tensors import first_bad_tensor
from jackline.trainer.sentinels.watch import Sentinels
from jackline.trainer.startup import shared_code
from jackline.trainer.startup.parallel import rank, world_size
from jackline.trainer.task import Between, Task
from jackline.trainer.validate.validation import best_of


@dataclass(frozen=True)
class Outcome:
    """How a training ended that was not stopped. `val_loss` is the full validation's."""

    steps: int
    last_loss: float | None
    val_loss: float | None
    best: tuple[str, float, int] | None


def _write_down(
    run_dir: RunDir, resolved: Resolved, task: Task, rehearsed: Rehearsed | None, console: Console
) -> None:
    """What the next attempt and a person want to know of this one. A disk that refuses it stops no training."""
    if rank():
        return
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)  # with JACKLINE=off nobody else has
        save_config(run_dir, resolved)
        remember(run_dir, task, rehearsed)
        shared_code.give()
        if changed := keep_source(run_dir, resolved.config.recipe):
            console.say(changed)
    except OSError as error:
        console.say(f"the settings cannot be written to {run_dir.path}: {explain_refusal(error, run_dir.path)}")


def train(resolved: Resolved | TrainConfig, run_dir: RunDir, console: Console | None = None) -> Outcome:
    """Train to the end, from wherever this run stands. Raises Stopped when somebody asked for an earlier end."""
    resolved = resolved if isinstance(resolved, Resolved) else Resolved(resolved)
    config = resolved.config
    with contextlib.ExitStack() as stack:
        console = console or stack.enter_context(Console())
        task = build(config, console, run_dir.path)
        stack.callback(task.close)
        stack.enter_context(task.kernels())
        # Not with several ranks: they would shrink apart.
        rehearsed = rehearse_step(task, console, run_dir) if config.rehearse and world_size() == 1 else None
        if rehearsed is not None:
            task = task.with_micro_batch(rehearsed.micro_batch)
        validation = task.make_validation(console, rehearsed.window_s if rehearsed else 0.0)
        facts, model = sentinel_facts(task, validation), task.learner.model
        sentinels = Sentinels(facts, read_surroundings, partial(first_bad_tensor, model))
        watch = Watch(task, run_dir, console, sentinels)
        to_device, deadline_s = ToDevice(task.learner.device), find_deadline_s(config)
        run, outcome, ruined_step = None, "failed", 0
        try:
            with attach(
                model=task.learner.model,
                optimizer=task.learner.optimizer,
                sentinels=sentinels,
                loader=whole_batches(task.loader),  # `on_device` takes this rank's rows
                best_value=None,
                best_step=None,
                **({"scaler": task.learner.scaler} if task.learner.scaler is not None else {}),
                **({"average": task.learner.average} if task.learner.average is not None else {}),
                **task.state(),
                **session_settings(task, run_dir),
            ) as run:
                _write_down(run_dir, resolved, task, rehearsed, console)
                total = task.total_steps if config.has_known_end else None
                left = f"{total - run.step:,} steps to go" if total is not None else "to the end of the data"
                stack.enter_context(console.phase("train", left))
                say_curves(run_dir, console)
                watch.begin(run, event_of(run))
                console.now(partial(doing_text, run, total))
                for batch in run.steps(total=total):
                    rate, before = lr_at(run.step, task.schedule), run.step
                    task.learner.set_rate(rate)
                    task.begin_step(run.step)
                    given = task.on_device(batch, to_device)
                    # Gradients of the whole batch, in slices that fit; the sum is divided by the count of all of it.
                    result = run.safe_step(
                        task.loss_sum, given, micro_batch=task.chosen.micro_batch, count=task.count_of(batch)
                    )
                    run.before_change()  # what is saved changes from here on
                    norm = task.update()
                    task.learner.follow(before)
                    run.log(loss=result.loss, lr=rate, grad_norm=norm, **(more := task.metrics()))
                    seconds, waited_s = watch.clock()
                    step = Step(
                        step=run.step,
                        lr=rate,
                        seconds=seconds,
                        waited_s=waited_s,
                        epoch=batch.epoch,
                        windows=batch.windows,
                        micro_batch=result.micro_batch,
                        saved_s=watch.saved_s(run.saving_s),
                        is_skipped=run.step == before,
                        values=plain_numbers(more),
                    )
                    watch.after_step(step)
                    if run.step != before:
                        spent_s, say, during = watch.training_s(), console.say, console.during
                        task.after_step(Between(run.step, run_dir.path, say, spent_s, result.loss, during))
                    validation.after_step(run, watch, before, run_dir.validation_request)
                    if time.monotonic() > deadline_s:
                        deadline_s = float("inf")
                        ask_for_the_end(console, config.time_limit_s)
                outcome = "finished"
                full = validation.finish(run, watch, run_dir.path)
        except AlarmRaised as alarm:
            outcome, ruined_step = f"stopped by a sentinel: {alarm.message}", alarm.ruined_step
            forbid_restart(run_dir, alarm.message)
            raise
        except Stopped as stopped:
            outcome = str(stopped) or "stopped"
            raise
        finally:
            steps = run.step if run is not None else 0
            best = best_of(run, config)
            watch.end(outcome, steps, best, next_commands(run_dir, outcome, ruined_step, config.can_sample))
        return Outcome(steps, watch.last_loss, full.loss if full else None, best)
