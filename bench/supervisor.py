"""What supervision costs and what it brings, beside running the same command bare, in one run.

    python bench/supervisor.py            all rows, about 12 minutes on 2 cores
    python bench/supervisor.py --quick    a short form, about 4 minutes
    python bench/supervisor.py --only burst,cpu

Every row prints the bare figure, ours, their ratio, the spread where there are repeats, and the promise. The exit
code is 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import expectations, zoo  # noqa: E402
from tests.marked import MARK, end_marked, wait_until_gone  # noqa: E402
from tests.places import Unavailable  # noqa: E402

JACKLINE = [*zoo.JACKLINE]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One line of the table. `ours` against `promise` decides `is_kept`; None when there is nothing to hold."""

    what: str
    bare: str
    ours: str
    ratio: str = ""
    promise: str = ""
    is_kept: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """How thorough to be."""

    folder: Path
    is_quick: bool

    def place(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True)
        return path


# -- a line's way to the eye -------------------------------------------------------------------------------------

PRINTS_TIMES = """
import sys, time
for _ in range({count}):
    print(repr(time.time()))
    time.sleep(0.1)
"""


def measure_delay(plan: Plan) -> Iterator[Row]:
    script = plan.folder / "prints_times.py"
    script.write_text(PRINTS_TIMES.format(count=15 if plan.is_quick else 40))
    command = [sys.executable, str(script)]
    for surface in ("pipe", "file", "pty"):
        bare = line_delays(command, surface, plan.place(f"delay-bare-{surface}"))
        ours = line_delays([*JACKLINE, "run", "--", *command], surface, plan.place(f"delay-{surface}"))
        yield Row(
            f"delay of a printed Python line, {surface}",
            f"{max(bare):.3f} s",
            f"{max(ours):.3f} s",
            f"{max(ours) / max(bare):.2f} times the delay",
            "0.25 s",
            max(ours) <= 0.25,
            f"worst of {len(ours)}; median {statistics.median(bare):.3f} s and {statistics.median(ours):.3f} s",
        )


def line_delays(command: list[str], surface: str, folder: Path) -> list[float]:
    """Seconds between print() and the line being there for a reader of `surface`."""
    env = zoo.environment(folder)
    if surface == "pty":
        reader, writer = pty.openpty()
    elif surface == "file":
        writer = os.open(folder / "seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        reader = os.open(folder / "seen", os.O_RDONLY)
    else:
        reader, writer = os.pipe()
    process = subprocess.Popen(
        command, stdout=writer, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=env, cwd=folder
    )
    os.close(writer)
    delays: list[float] = []
    rest = b""
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # a terminal whose other side was closed
            data = b""
        if not data and (surface != "file" or process.poll() is not None):
            break
        if surface == "file":
            time.sleep(0.002)
        now_s = time.time()
        *lines, rest = (rest + data).split(b"\n")
        delays += [now_s - float(found) for line in lines for found in re.findall(rb"\d{10}\.\d+", line)[:1]]
    process.wait()
    os.close(reader)
    wait_until_gone(env[MARK])
    return delays


# -- silence and alarms ------------------------------------------------------------------------------------------


def measure_silence(plan: Plan) -> Iterator[Row]:
    programs = zoo.list_programs(zoo.PROGRAMS)
    if plan.is_quick:
        names = ("regex_backtracking", "lock_abba", "slow_import", "gil_held_in_c", "children_200", "own_exception")
        programs = [program for program in programs if program.name in names]
    for surface, promise_s in (("pty", 2.0), ("pipe", 10.0)):
        runner = zoo.Zoo(programs, plan.place(f"silence-{surface}"), at_once=6, surface=surface, quiet_after_s=None)
        silences: dict[str, float] = {}
        for program in programs:
            try:
                silences[program.name] = runner.outcome(program, print).longest_silence_s
            except Unavailable:
                continue
        runner.close()
        order = sorted(silences, key=lambda name: -silences[name])
        worst = order[0]
        yield Row(
            f"longest silence over {len(silences)} zoo programs, {'terminal' if surface == 'pty' else surface}",
            "for ever",
            f"{silences[worst]:.2f} s",
            "",
            f"{promise_s:.0f} s",
            silences[worst] <= promise_s,
            ", ".join(f"{name} {silences[name]:.1f} s" for name in order[:4])
            + f"; median {statistics.median(silences.values()):.1f} s",
        )


def measure_false_alarms(plan: Plan) -> Iterator[Row]:
    programs = zoo.list_programs(zoo.HEALTHY)
    if plan.is_quick:
        programs = programs[::4]
    runner = zoo.Zoo(programs, plan.place("healthy"), at_once=6)
    alarms: list[str] = []
    ran = 0
    for program in programs:
        try:
            found = expectations.alarms_of(runner.outcome(program, print))
        except Unavailable:
            continue
        ran += 1
        alarms += [f"{program.name}: {text}" for text in found[:1]]
    runner.close()
    yield Row(
        f"false alarms over {ran} healthy programs", "-", str(len(alarms)), "", "0", not alarms, "; ".join(alarms)
    )


# -- what it costs -----------------------------------------------------------------------------------------------

MOST_PERCENT, MOST_MB = 0.5, 20
PRINTS = "import time\nwhile True:\n    print('step 12 loss 0.693 lr 3e-4 tokens/s 12345')\n    time.sleep(0.1)\n"
SILENT = "import time\nwhile True:\n    sum(range(2000))\n    time.sleep(0.02)\n"


def measure_cpu(plan: Plan) -> Iterator[Row]:
    for what, text in (("prints", PRINTS), ("is silent", SILENT)):
        folder = plan.place(f"cpu-{what.replace(' ', '-')}")
        script = folder / "child.py"
        script.write_text(text)
        env = zoo.environment(folder)
        viewer = subprocess.Popen(
            [*JACKLINE, "run", "--name", "cpu", "--", sys.executable, str(script)],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            state_file = folder / "runs" / "cpu" / "supervisor.json"
            while not state_file.exists():
                time.sleep(0.1)
            state = json.loads(state_file.read_text())
            pids = [state["supervisor"]["pid"], state["keeper"]["pid"]]
            time.sleep(5)
            before, viewer_before, start_s = cpu_s(pids), cpu_s([viewer.pid]), time.monotonic()
            time.sleep(10 if plan.is_quick else 40)
            passed_s = time.monotonic() - start_s
            percent = 100 * (cpu_s(pids) - before) / passed_s
            viewer_percent = 100 * (cpu_s([viewer.pid]) - viewer_before) / passed_s
            own, resident = memory_mb(pids[0])
        finally:
            end_marked(env[MARK])
            viewer.wait()
        yield Row(
            f"supervisor, keeper and py-spy while the child {what}",
            "0 %",
            f"{percent:.2f} % of a core",
            "",
            f"{MOST_PERCENT} %",
            percent <= MOST_PERCENT,
            f"the viewer, while one watches: {viewer_percent:.2f} %",
        )
        yield Row(
            f"memory of the supervisor while the child {what}",
            "0 MB",
            f"{own:.1f} MB",
            "",
            f"{MOST_MB} MB",
            own <= MOST_MB,
            f"shared pages counted by their share (PSS); {resident:.1f} MB with all of Python's own (RSS)",
        )


def memory_mb(pid: int) -> tuple[float, float]:
    """(PSS, RSS). The training maps Python's program and libraries too, so that only PSS is what we add."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {name: int(rest.split()[0]) * 1024 / 1e6 for name, _, rest in (line.partition(":") for line in lines)}
    return found["Pss"], found["Rss"]


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of the processes and of their children that have ended."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(fields[index]) for index in (11, 12, 13, 14))
    return total / TICKS_PER_S


# Besides its CPU and wall time the child tells for how long it was frozen: neither on a CPU nor waiting for one.
BURNS = """
import time
def schedule():
    ran_ns, waited_ns, _ = open("/proc/self/schedstat").read().split()
    return (int(ran_ns) + int(waited_ns)) / 1e9
start, before, cpu = time.perf_counter(), schedule(), time.process_time()
total = 0
for number in range({rounds}):
    total += number * number % 7
wall = time.perf_counter() - start
print(time.process_time() - cpu, wall, wall - (schedule() - before))
"""


def measure_slow_down(plan: Plan) -> Iterator[Row]:
    """Whole runs, bare and supervised in turn. On a shared machine the times of whole runs spread by tens of percent,
    so the promise is held to the time in which the child was frozen, which spreads least."""
    folder = plan.place("slow-down")
    script = folder / "burns.py"
    script.write_text(BURNS.format(rounds=15_000_000 if plan.is_quick else 40_000_000))
    env = zoo.environment(folder)
    bare: list[list[float]] = []
    ours: list[list[float]] = []
    for number in range(7 if plan.is_quick else 9):
        pair = [
            (bare, [sys.executable, str(script)]),
            (ours, [*JACKLINE, "run", "--name", f"burn-{number}", "--", sys.executable, str(script)]),
        ]
        for results, command in pair if number % 2 else reversed(pair):
            done = subprocess.run(command, env=env, cwd=folder, capture_output=True, stdin=subprocess.DEVNULL)
            results.append([float(word) for word in done.stdout.split()])
    for index, name in ((0, "CPU time"), (1, "wall time")):
        yield _paired_row(name, [entry[index] for entry in bare], [entry[index] for entry in ours])
    shares = [[100 * entry[2] / entry[1] for entry in runs] for runs in (bare, ours)]
    more = statistics.fmean(shares[1]) - statistics.fmean(shares[0])
    spread = max(shares[0]) - min(shares[0])
    yield Row(
        "slow-down of a CPU-bound child, time frozen",
        f"{statistics.fmean(shares[0]):.2f} % ({min(shares[0]):.2f}-{max(shares[0]):.2f})",
        f"{statistics.fmean(shares[1]):.2f} % ({min(shares[1]):.2f}-{max(shares[1]):.2f})",
        f"{more:+.2f} %",
        "0.5 %",
        # A machine that freezes bare runs by more than that cannot tell.
        True if more <= 0.5 else None if spread > 0.5 else False,
        f"of {sum(entry[1] for entry in ours):.0f} s; beside it the supervisor's CPU, above",
    )


def _paired_row(name: str, plain: list[float], watched: list[float]) -> Row:
    ratio = statistics.median(watched) / statistics.median(plain)
    paired = sorted(after / before for before, after in zip(plain, watched, strict=True))
    return Row(
        f"slow-down of a CPU-bound child, {name}",
        f"{statistics.median(plain):.3f} s ({min(plain):.3f}-{max(plain):.3f})",
        f"{statistics.median(watched):.3f} s ({min(watched):.3f}-{max(watched):.3f})",
        f"{100 * (ratio - 1):+.2f} %",
        note=f"{len(paired)} interleaved pairs, {100 * (paired[0] - 1):+.1f} % to {100 * (paired[-1] - 1):+.1f} %;"
        f" least against least {100 * (min(watched) / min(plain) - 1):+.2f} %",
    )


def measure_burst(plan: Plan) -> Iterator[Row]:
    folder = plan.place("burst")
    count = 200_000 if plan.is_quick else 1_000_000
    script = folder / "burst.py"
    script.write_text(f"for number in range({count}):\n    print('step', number, 'loss 0.6931 tokens/s 12345.6')\n")
    env = {**zoo.environment(folder), "PYTHONUNBUFFERED": "1"}
    start_s = time.monotonic()
    with open(folder / "bare.log", "wb") as file:
        subprocess.run([sys.executable, str(script)], env=env, stdout=file, check=True)
    bare_s = time.monotonic() - start_s
    start_s = time.monotonic()
    with open(folder / "seen.log", "wb") as file:
        words = [*JACKLINE, "run", "--name", "burst", "--", sys.executable, str(script)]
        subprocess.run(words, env=env, cwd=folder, stdout=file, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    ours_s = time.monotonic() - start_s
    lines = (folder / "runs" / "burst" / "out.log").read_text().splitlines()
    logged = [line.split(" ", 1)[1] for line in lines if " [jackline] " not in line]
    wanted = (folder / "bare.log").read_text().splitlines()
    seen = (folder / "seen.log").read_text().splitlines()
    is_whole = logged == wanted and seen == wanted
    yield Row(
        f"{count:,} lines in a burst",
        f"{len(wanted):,} lines, {bare_s:.1f} s",
        f"{len(logged):,} logged, {len(seen):,} shown, {ours_s:.1f} s",
        f"{ours_s / bare_s:.2f} times the wall time",
        "all, in order",
        is_whole,
    )


def measure_commands(plan: Plan) -> Iterator[Row]:
    folder = plan.place("commands")
    env = zoo.environment(folder)
    subprocess.run([*JACKLINE, "run", "--name", "done", "--", "true"], env=env, cwd=folder, capture_output=True)
    empty_ms = min(command_cpu_ms([sys.executable, "-c", "pass"], env, folder) for _ in range(7))
    for words in (("--help",), ("status", "--json")):
        found = [command_cpu_ms([*JACKLINE, *words], env, folder) for _ in range(7)]
        yield Row(
            f"jackline {' '.join(words)}",
            f"{empty_ms:.0f} ms CPU (empty Python)",
            f"{min(found):.0f} ms CPU",
            f"{min(found) / empty_ms:.1f} times",
            "150 ms",
            min(found) <= 150,
            f"least of 7; up to {max(found):.0f} ms",
        )


def command_cpu_ms(command: list[str], env: dict[str, str], folder: Path) -> float:
    process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return 1000 * (usage.ru_utime + usage.ru_stime)


# -- what it brings ----------------------------------------------------------------------------------------------


def measure_memory_warning(plan: Plan) -> Iterator[Row]:
    program = zoo.read_program(zoo.PROGRAMS / "eats_memory_in_cgroup.py")
    program = replace(program, expect={**program.expect, "memory_limit": "2G"})
    leads: list[float] = []
    for number in range(1 if plan.is_quick else 3):
        try:
            outcome = zoo.run_program(program, plan.place(f"memory-{number}") / "run")
        except Unavailable as error:
            yield Row("OOM warning before the kill at 200 MB/s", "none", "not measured", "", "2 s", None, str(error))
            return
        told = [event["at_s"] for event in outcome.events if event["event"] == "memory"]
        leads.append(outcome.exit["ended_at_s"] - told[0] if told else 0.0)
    yield Row(
        f"OOM warning before the kill at 200 MB/s, limit {program.expect['memory_limit']}",
        "none",
        f"{min(leads):.1f} s",
        "",
        "2 s",
        min(leads) >= 2.0,
        "each: " + ", ".join(f"{lead:.1f} s" for lead in leads),
    )


PARTS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "delay": measure_delay,
    "silence": measure_silence,
    "cpu": measure_cpu,
    "slow-down": measure_slow_down,
    "burst": measure_burst,
    "commands": measure_commands,
    "memory": measure_memory_warning,
    "alarms": measure_false_alarms,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short form of every row")
    parser.add_argument("--only", default="", help=f"some of: {','.join(PARTS)}")
    chosen = parser.parse_args()
    names = [name for name in PARTS if name in chosen.only.split(",")] if chosen.only else list(PARTS)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}\n")
    print("| what | bare | with jackline | ratio | at most / at least | kept | |")
    print("|---|---|---|---|---|---|---|")
    broken = 0
    with tempfile.TemporaryDirectory(prefix="jackline-bench-", ignore_cleanup_errors=True) as folder:
        for name in names:
            for row in PARTS[name](Plan(Path(folder), chosen.quick)):
                kept = {True: "yes", False: "NO", None: "not told" if row.promise else ""}[row.is_kept]
                broken += row.is_kept is False
                cells = (row.what, row.bare, row.ours, row.ratio, row.promise, kept, row.note)
                print("| " + " | ".join(cells) + " |", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
