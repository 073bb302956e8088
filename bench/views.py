"""What looking at a run costs: commands on a long run, and a live view that is open for an hour.

    python bench/views.py                     all rows, about two minutes
    python bench/views.py --seconds 600       a longer look at the live view

The run has 10^6 lines of metrics and a log of 2 GB, most of it a hole. Every row prints the CPU time of the whole
process, the least of five. The live view is watched on a terminal of 80 columns, beside a command that does ten steps
a second; its share of a core and its permanent lines are those of the watched time. The exit code is 1 when a promise
is broken.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jackline.rundir import atomic  # noqa: E402
from jackline.rundir.layout import RunDir  # noqa: E402
from tests.cli.terminal import Terminal  # noqa: E402
from tests.rundir.made import make_run, this_process, write_exit, write_start, write_state  # noqa: E402

LINES = 1_000_000
LOG_BYTES = 2 << 30
PROMISE_S = 0.3
CORE_SHARE = 0.005
LINES_AN_HOUR = 120
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WATCHED = ("status", "why", "runs", "runs --logs", "logs -n 20", "plot", "status --json", "--help")


def make_long_run(folder: Path) -> RunDir:
    """Ended, with every file as large as it gets."""
    run = make_run(folder / "long")
    with open(run.metrics(), "w") as file:
        for step in range(LINES):
            file.write(
                f'{{"step":{step},"at_s":{1.79e9 + step * 0.1:.3f},"loss":{2 - step / LINES:.6f},"lr":0.0003}}\n'
            )
    tail = b"2026-11-15T02:00:00.0Z step 1000000/1000000 loss 1.0\n" * 2000
    with open(run.out_log, "wb") as file:
        file.truncate(LOG_BYTES - len(tail))
        file.seek(0, os.SEEK_END)
        file.write(tail)
    write_state(run, this_process(), at_s=time.time(), is_finished=True, attempt=1)
    write_exit(run, 1, ended_at_s=time.time(), cause="own_exception", text="error: ValueError: x (train.py:1)")
    return run


def cpu_s(words: list[str], env: dict[str, str]) -> float:
    """Of the whole process and its children."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "jackline", *words], env=env, capture_output=True, cwd="/")
    after = os.times()
    assert done.returncode == 0, done.stderr.decode()
    return after.children_user - before.children_user + after.children_system - before.children_system


def measure_commands(folder: Path) -> bool:
    run = make_long_run(folder)
    env = {**os.environ, "JACKLINE_RUNS": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    size = format(sum(path.stat().st_size for path in (run.metrics(), run.out_log)) / 2**30, ".1f")
    print(f"a run with {LINES:,} metric lines and a log of {LOG_BYTES / 2**30:.0f} GiB ({size} GiB in all)\n")
    is_kept = True
    for command in WATCHED:
        words = command.split()
        named = words if words[0] in ("runs", "--help") else [words[0], "long", *words[1:]]
        least_s = min(cpu_s(named, env) for _ in range(5))
        promise_s = 0.15 if command == "--help" else None if command == "plot" else PROMISE_S
        is_kept &= promise_s is None or least_s <= promise_s
        promise = f"at most {promise_s} s" if promise_s else ""
        print(f"jackline {command:<14} {least_s:6.3f} s CPU   {promise}", flush=True)
    return is_kept


def measure_live_view(folder: Path, seconds: float) -> bool:
    """A viewer on a terminal, beside a session that reports every second and logs an evaluation every minute."""
    run = make_run(folder / "live")
    write_start(run, this_process())
    run.attempt(1).raw_out.touch()
    is_over = threading.Event()
    beat = threading.Thread(target=_train, args=(run, is_over), daemon=True)
    beat.start()
    time.sleep(1.5)
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm", "JACKLINE_RUNS": str(folder)})
        os.execv(sys.executable, [sys.executable, "-m", "jackline", "watch", "live"])
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    _read(master, 5.0)  # the start is not what an hour is made of
    first = _spent_s(pid)
    shown = _read(master, seconds)
    share = (_spent_s(pid) - first) / seconds
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    is_over.set()
    rows = Terminal(80).feed(shown.decode("utf-8", "replace")).rows
    an_hour = max(0, len(rows) - 1) * 3600 / seconds
    print(f"\na live view for {seconds:.0f} s, last row: {rows[-1] if rows else ''}")
    print(f"share of a core   {100 * share:6.2f} %     at most {100 * CORE_SHARE} %")
    print(f"permanent lines   {an_hour:6.0f} an hour  at most {LINES_AN_HOUR}")
    return share <= CORE_SHARE and an_hour <= LINES_AN_HOUR


def _train(run: RunDir, is_over: threading.Event) -> None:
    step = 0
    me = this_process().to_json()
    with open(run.metrics(), "a") as metrics:
        while not is_over.wait(1.0):
            step += 10
            now_s = time.time()
            values = {"loss": 3 / step**0.3, **({"val_loss": 3.3 / step**0.3} if step % 600 == 0 else {})}
            metrics.write(json.dumps({"step": step, "at_s": now_s, **values}) + "\n")
            metrics.flush()
            state = {
                "at_s": now_s, "attempt": 1, "supervisor": me, "child": me, "started_at_s": now_s - step / 10,
                "verdict": {"kind": "PROGRESS"}, "memory": {"own_bytes": 3 << 30, "limit_bytes": 24 << 30},
                "is_finished": False, "options": {},
            }  # fmt: skip
            session = {
                "at_s": now_s, "attempt": 1, "phase": "train", "done": step, "total": 100_000, "unit": "steps",
                "rate_per_s": 10.0, "eta_s": (100_000 - step) / 10, "step": step, "metrics": values,
                "last_checkpoint": {"at_s": now_s - step % 300 / 10, "step": step, "path": "x"},
            }  # fmt: skip
            atomic.write_json(run.supervisor_file, state)
            atomic.write_json(run.session_file(), session)


def _read(master: int, seconds: float) -> bytes:
    data, end_s = b"", time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([master], [], [], left_s)[0]:
            data += os.read(master, 1 << 16)
    return data


def _spent_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the live view is watched")
    parser.add_argument("--only", choices=["commands", "live"])
    options = parser.parse_args()
    is_kept = True
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "live":
            is_kept &= measure_commands(Path(folder) / "runs")
        if options.only != "commands":
            is_kept &= measure_live_view(Path(folder) / "live", options.seconds)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
