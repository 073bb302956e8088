"""What a loop tells others about itself: the session its settings, the sentinels their facts, people the next step.

Owns the translation from config and task into their words. Pure but for the lines it says.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.place import choose_place
from jackline.rundir.intent import write_intent
from jackline.rundir.layout import RunDir
from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.session.settings import USE_NEW
from jackline.trainer.config import TrainConfig
from jackline.trainer.report.console import Console
from jackline.trainer.report.step_line import curves_lines
from jackline.trainer.sentinels.watch import Facts
from jackline.trainer.task import Task, Validating
from jackline.units import format_duration


def session_settings(task: Task, run_dir: RunDir) -> dict[str, Any]:
    """For `jackline.attach`. Who started it has compared the settings already, so changed arguments only warn, and an
    optimizer's changed settings are the ones that a person asked for."""
    config, groups = task.config, task.learner.optimizer.param_groups
    used = [word for word in ("lr", "weight_decay") if all(word in group for group in groups)]
    return {
        "name": run_dir.name,
        "runs_dir": str(run_dir.path.parent),
        "save_every_steps": config.save_every_steps or None,
        "save_every_s": config.save_every_s or None,
        "keep_last": config.keep_last,
        "keep_every": config.keep_every or None,
        "keep_best": f"{'+' if config.IS_HIGH_GOOD else ''}best_{config.metric}",
        "mirror": config.mirror or None,
        "disk_budget": config.disk_budget or None,
        "wait_for_disk_s": config.wait_for_disk_s,
        "mirror_patience_s": config.mirror_patience_s,
        "seed": config.seed,
        "exact": config.exact,
        "replay_every": config.replay_every or None,
        "on_spike": config.on_spike,
        "on_change": {"arguments": "warn", **dict.fromkeys(used, USE_NEW)},
        "trial": False,  # the recipes' own tests train every step twice
        "overlap": True,  # loop.py says where a step begins to change what is saved
    }


def sentinel_facts(task: Task, validation: Validating) -> Facts:
    return Facts(
        vocab_size=task.counting.vocab_size,
        schedule=task.schedule,
        tokens_per_step=task.counting.per_step,
        unit=task.counting.unit,
        is_any_loss=task.counting.is_any_loss,
        floor=None if task.config.sentinels == "off" else validation.floor(),
        full_validation_parts=validation.num_parts if validation.num_quick < validation.num_windows else None,
    )


def event_of(run: Run | OffRun) -> Callable[[str, str], None]:
    """Writes an alarm into the run's events; nothing with JACKLINE=off."""
    return lambda kind, text: run.event("alarm", text, alarm=kind, step=run.step)


def doing_text(run: Run | OffRun, total: int | None) -> str:
    """'step 13/100, backward 2 of 16': which part of which step is under way."""
    if total and run.step >= total:
        return f"all {total:,} steps are done"
    step = f"step {run.step + 1:,}{f'/{total:,}' if total else ''}"
    return f"{step}, {run.doing}" if run.doing else f"{step} under way"


def find_deadline_s(config: TrainConfig) -> float:
    """Under a supervisor the limit is the supervisor's: two requests to end would mean "at once, unsaved"."""
    if not config.time_limit_s or os.environ.get("JACKLINE_RUN_DIR"):
        return float("inf")
    return time.monotonic() + config.time_limit_s


def ask_for_the_end(console: Console, limit_s: float) -> None:
    """As anybody would: the session saves at the end of this step and leaves."""
    console.say(f"the time limit of {format_duration(limit_s)} is reached")
    os.kill(os.getpid(), signal.SIGTERM)


def forbid_restart(run_dir: RunDir, why: str) -> None:
    """The same steps would end the same way."""
    number = os.environ.get("JACKLINE_ATTEMPT", "")
    if number.isdigit():
        write_intent(run_dir.attempt(int(number)), restart=False, why=why)


def say_curves(run_dir: RunDir, console: Console) -> None:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "you"
    for line in curves_lines(run_dir.tensorboard, os.environ, user=user, host=socket.gethostname()):
        console.say(line)


def next_commands(run_dir: RunDir, outcome: str, ruined_step: int = 0, can_sample: bool = False) -> list[str]:
    """From `ruined_step` on the weights are lost. A GPU's numbers are known a step or two later, so a save may have
    come between; then the command goes back behind it."""
    name = run_dir.name
    if outcome == "finished":
        return [f'jackline sample {name} "..."' if can_sample else f"jackline checkpoints {name}"]
    steps = [saved.step for saved in list_names(choose_place(run_dir).folder)] if ruined_step else []
    good = [step for step in steps if step < ruined_step]
    back = f" --step {max(good)}" if good and max(steps) >= ruined_step else ""
    return [f"jackline resume {name}{back}", f"jackline why {name}"]
