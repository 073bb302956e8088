"""`jackline demo`: in a minute, a training is killed with SIGKILL half-way, resumes, and ends bit-identical.

Owns the sequence and the comparison; the trainings are ordinary `jackline train` commands, and the kill is real.
Needs the `train` extra, no download and no GPU.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from jackline.cli.view.showing import say
from jackline.errors import EXIT_DONE, EXIT_FAILED, JacklineError
from jackline.extras import TRAINING, require
from jackline.rundir.find import runs_folder
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.session import read_session

SAVE_EVERY = 10
POLL_S = 0.02


@click.command(short_help="One minute: train, kill -9, resume, bit-equal.")
@click.option("--steps", type=click.IntRange(min=4 * SAVE_EVERY), default=80, show_default=True, help="Of each run.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(steps: int, runs_dir: str | None) -> None:
    """Train a nano GPT on the Python standard library's own sources, kill it half-way with SIGKILL, run the same
    command again, and compare every loss and the final weights with a run that nobody touched.
    """
    require("`jackline demo`", "train", TRAINING)
    folder = runs_folder(runs_dir).absolute()
    stem = time.strftime("demo-%H%M%S")
    settings = ["demo", "--quick", f"max_steps={steps}", f"save_every_steps={SAVE_EVERY}", "full_eval=no"]
    killed, whole = RunDir(folder / f"{stem}-killed"), RunDir(folder / f"{stem}-whole")
    say("1 of 3: a training; it will be killed with SIGKILL half-way")
    kill_half_way(killed, settings, steps // 2)
    say("2 of 3: the same command again resumes from the last checkpoint")
    train(killed, settings)
    say("3 of 3: the same training, left alone, to compare with")
    train(whole, settings)
    lines, is_equal = compare(killed, whole)
    for line in lines:
        say(line)
    say("next:")
    for words, text in (
        ("jackline run -- python your_script.py", "your own command, watched, explained, restarted"),
        (f"jackline why {killed.name} --attempt 1", "what is known of the death you just saw"),
        ("jackline train demo --data 'your/*.txt'", "the same trainer on your own text"),
    ):
        print(f"  {words:<44}{text}", file=sys.stderr, flush=True)
    sys.exit(EXIT_DONE if is_equal else EXIT_FAILED)


def start(run: RunDir, settings: list[str]) -> subprocess.Popen[bytes]:
    words = ["train", *settings, "--name", run.name]
    say(f"$ jackline {shlex.join(words)}")
    return subprocess.Popen([sys.executable, "-m", "jackline", *words, "--runs-dir", str(run.path.parent)])


def train(run: RunDir, settings: list[str]) -> None:
    with start(run, settings) as process:
        code = process.wait()
    if code != EXIT_DONE:
        raise JacklineError(f"the training ended with code {code}", hint=f"jackline why {run.name}")


def kill_half_way(run: RunDir, settings: list[str], step: int) -> None:
    """Kill the training as soon as a checkpoint of `step` or later exists. Its viewer then prints what happened."""
    is_killed = False
    with start(run, settings) as process:
        while process.poll() is None:
            pid = find_trainer(run) if newest_step(run) >= step else None
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                is_killed = True
                say(f"kill -9 {pid}, after the checkpoint of step {newest_step(run)}")
                break
            time.sleep(POLL_S)
        code = process.wait()
    if code == EXIT_DONE:
        raise JacklineError("the training was over before it could be killed", hint="jackline demo --steps 400")
    if not is_killed:
        hint = f"jackline why {run.name}" if run.path.exists() else None
        raise JacklineError(f"the training ended with code {code} before it could be killed", hint=hint)


def newest_step(run: RunDir) -> int:
    steps = [path.name.split("-")[1] for path in run.checkpoints.glob("step-*") if path.is_dir()]
    return max((int(word) for word in steps if word.isdigit()), default=-1)


def find_trainer(run: RunDir) -> int | None:
    process = read_session(run).process
    return process.pid if process is not None and is_alive(process) else None


def compare(killed: RunDir, whole: RunDir) -> tuple[list[str], bool]:
    """Compare every loss bit by bit, and the bytes of the final weights."""
    one, other = read_losses(killed), read_losses(whole)
    # Metrics logged in the killed process's last second are lost; their steps were saved and are not repeated.
    both = sorted(set(one) & set(other))
    differing = [step for step in both if one[step] != other[step]]
    equal_losses = bool(both) and not differing and both[-1] == max(other)
    missing = len(other) - len(both)
    unwritten = f" ({missing} more {'was' if missing == 1 else 'were'} not written down yet when it was killed)"
    weights = [hash_weights(run) for run in (killed, whole)]
    equal_weights = weights[0] == weights[1] != ""
    return [
        f"losses of {len(both)} steps: "
        + ("all bit-equal" if equal_losses else f"NOT equal from step {differing[0] if differing else '?'} on")
        + (unwritten if missing else ""),
        f"final weights: {weights[0][:16]} killed and resumed, {weights[1][:16]} left alone: "
        + ("bit-equal" if equal_weights else "NOT equal"),
    ], equal_losses and equal_weights


def read_losses(run: RunDir) -> dict[int, str]:
    """step -> the loss in hexadecimal. For a repeated step the last loss counts."""
    found: dict[int, str] = {}
    offset = 0
    while (lines := read_lines(run.metrics(0), offset)).next_offset > offset:
        offset = lines.next_offset
        found.update({int(line["step"]): float(line["loss"]).hex() for line in lines.records if "loss" in line})
    return found


def hash_weights(run: RunDir) -> str:
    path: Path = max(run.checkpoints.glob("step-*"), default=run.checkpoints) / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
