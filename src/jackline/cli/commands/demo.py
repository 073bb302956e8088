"""`jackline demo`: half a minute in which a training is killed with SIGKILL, resumes, and ends bit-identical.

Owns the sequence, what is shown of it and the comparison. The trainings are ordinary `jackline train` commands, and
the kill is real. Needs the `train` extra, no download and no GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from jackline.errors import EXIT_DONE, EXIT_FAILED, JacklineError
from jackline.extras import TRAINING, require
from jackline.machine.host import describe_host
from jackline.rundir.find import runs_folder
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.exit import read_exit
from jackline.rundir.records.session import read_session
from jackline.units import format_duration

SAVE_EVERY = 5
POLL_S = 0.02
MAX_PRINTED = 4000
SHOW_EVERY_S = 0.5
QUIET_S = 10.0
MAX_SIGNS = 2  # of each of the three waits, so that the demo stays within 25 lines


@click.command(short_help="Half a minute: train, kill -9, resume, bit-equal.")
@click.option(
    "--steps", type=click.IntRange(min=4 * SAVE_EVERY), default=40, show_default=True, help="Steps of each run."
)
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(steps: int, runs_dir: str | None) -> None:
    """Train a nano GPT on the Python standard library's own sources, kill it half-way with SIGKILL, run the same
    command again, and compare every loss and the final weights with a run that nobody touched.
    """
    require("`jackline demo`", "train", TRAINING)
    began_s = time.monotonic()
    folder = runs_folder(runs_dir).absolute()
    stem = time.strftime("demo-%H%M%S")
    settings = ["demo", "--quick", f"max_steps={steps}", f"save_every_steps={SAVE_EVERY}", "full_eval=no"]
    killed, whole = RunDir(folder / f"{stem}-killed"), RunDir(folder / f"{stem}-whole")
    say(f"a nano GPT learns the Python standard library's sources, {steps} steps, saved every {SAVE_EVERY}")
    with training(whole, settings) as beside:
        say("the same training runs beside it and is left alone, to compare with", is_detail=True)
        with training(killed, settings, is_shown=True) as process:
            kill_half_way(killed, process, steps // 2)
        told(f"killed at step {newest_step(killed)}: {end_of(killed)}")
        say("the same command again")
        with training(killed, settings, is_shown=True) as process:
            told(f"resumes from the checkpoint of step {newest_step(killed)}, every byte verified")
            finish(killed, process)
        finish(whole, beside)
    lines, is_equal = compare(killed, whole)
    say(f"killed and resumed, beside never killed ({format_duration(time.monotonic() - began_s)} in all)")
    for line in lines:
        told(line)
    say("next:")
    hints = (
        ("jackline run -- python your_script.py", "your own command, watched, explained, restarted"),
        (f"jackline why {killed.name} --attempt 1", "what is known of the kill you just saw"),
        ("jackline train demo --data 'your/*.txt'", "the same trainer on your own text"),
    )
    width = max(len(words) for words, _ in hints)
    for words, text in hints:
        told(f"{words:<{width}}  {text}")
    sys.exit(EXIT_DONE if is_equal else EXIT_FAILED)


def say(text: str, *, is_detail: bool = False) -> None:
    """A line of the story, or one below it."""
    clear_live()
    print(f"  {text}" if is_detail else f"[jackline] {text}", file=sys.stderr, flush=True)


def told(text: str) -> None:
    say(text, is_detail=True)


def show_live(text: str, shown: Shown) -> None:
    """Replace the line at the cursor. In a pipe or a file, where that is not possible, print a line every 10 s."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K  {text[:76]}")
        sys.stderr.flush()
    elif time.monotonic() - shown.at_s > QUIET_S and shown.count < MAX_SIGNS:
        shown.at_s, shown.count = time.monotonic(), shown.count + 1
        told(text)


@dataclass
class Shown:
    """The signs of life of one phase, where they cannot be replaced."""

    at_s: float = field(default_factory=time.monotonic)
    count: int = 0


def clear_live() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")


class TrainingFailed(JacklineError):
    def __init__(self, run: RunDir, text: str, *, hint: str) -> None:
        super().__init__(text, hint=hint)
        self.run = run


@contextlib.contextmanager
def training(run: RunDir, settings: list[str], *, is_shown: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """An ordinary `jackline train`, whose output is in the run's log. It does not outlive the demo's own error."""
    words = ["train", *settings, "--name", run.name]
    if is_shown:
        told(f"$ jackline {shlex.join(words)}")
    # Two trainings share the cores. Every part of the demo computes with as many threads, else bits may differ.
    threads = max(1, int(describe_host()["effective_cpus"]) // 2)
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, after the process
    process = subprocess.Popen(
        [sys.executable, "-m", "jackline", *words, "--runs-dir", str(run.path.parent)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=printed,
    )
    try:
        yield process
    except BaseException as error:
        # Of two trainings that could not start only the one that ended the demo is told. There is no log to name.
        if isinstance(error, TrainingFailed) and error.run == run and not run.has_run_file:
            printed.seek(0)
            told(printed.read(MAX_PRINTED).decode("utf-8", "replace").rstrip())
        process.send_signal(signal.SIGINT)  # a viewer passes it on as a stop
        raise
    finally:
        process.wait()
        printed.close()


def finish(run: RunDir, process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, showing how far it is."""
    shown = Shown()
    while process.poll() is None:
        show_live(progress_of(run), shown)
        time.sleep(SHOW_EVERY_S)
    if process.returncode != EXIT_DONE:
        clear_live()
        hint = f"jackline logs {run.name}" if run.path.exists() else f"jackline train demo --quick --name {run.name}"
        raise TrainingFailed(run, f"the training ended with code {process.returncode}", hint=hint)


def kill_half_way(run: RunDir, process: subprocess.Popen[bytes], step: int) -> None:
    """Kill the training as soon as a checkpoint of `step` or later exists."""
    shown_s, shown = 0.0, Shown()
    while process.poll() is None:
        pid = find_trainer(run) if newest_step(run) >= step else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            told(f"$ kill -9 {pid}")
            process.wait()
            return
        if time.monotonic() - shown_s > SHOW_EVERY_S:
            shown_s = time.monotonic()
            show_live(progress_of(run), shown)
        time.sleep(POLL_S)
    clear_live()
    if process.returncode == EXIT_DONE:
        raise JacklineError("the training was over before it could be killed", hint="jackline demo --steps 400")
    hint = f"jackline logs {run.name}" if run.path.exists() else "jackline train demo --quick"
    text = f"the training ended with code {process.returncode} before it could be killed"
    raise TrainingFailed(run, text, hint=hint)


def progress_of(run: RunDir) -> str:
    session = read_session(run)
    loss = f"  loss {session.metrics['loss']:.3f}" if "loss" in session.metrics else ""
    if session.step and session.total:
        return f"step {session.step}/{session.total:.0f}{loss}"
    return session.doing or session.phase or "starting, importing torch"


def end_of(run: RunDir) -> str:
    """How the last attempt ended, as its supervisor explained it."""
    attempt = run.last_attempt()
    text = (read_exit(attempt).text or "" if attempt else "").strip().split("\n")[0]
    return text.removeprefix("error: ") or "nobody saw how"


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
    shown = [step for step in dict.fromkeys((both[0], both[len(both) // 2], both[-1]))] if both else []
    return [
        *(f"step {step:>4}  loss {one[step]}   {other[step]}   {_equal(one[step] == other[step])}" for step in shown),
        f"losses of {len(both)} steps: "
        + ("all bit-equal" if equal_losses else f"NOT equal from step {differing[0] if differing else '?'} on")
        + (unwritten if missing else ""),
        f"final weights: sha256 {weights[0][:12]} and {weights[1][:12]}: {_equal(equal_weights)}",
    ], equal_losses and equal_weights


def _equal(is_equal: bool) -> str:
    return "bit-equal" if is_equal else "NOT equal"


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
