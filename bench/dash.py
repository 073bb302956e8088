"""What the page of `jackline dash` costs: its weight, a run with a million steps, 200 runs, a change of state; and
what a report of a run with 100,000 steps costs.

    .venv/bin/python bench/dash.py [--steps 1000000] [--runs 200]

Starts the real server on made run folders and asks it as the page does. CPU time is the server's, from /proc.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "format1-finished"
STATIC = ("", "app.css", "app.js", "charts.js", "plots.js", "uplot.js", "uplot.css", "icon.svg")


class Server:
    """`jackline dash`, and the CPU time that it has used."""

    def __init__(self, runs: Path, state: Path) -> None:
        env = {**os.environ, "XDG_STATE_HOME": str(state)}
        command = [sys.executable, "-m", "jackline", "dash", "--port", "0", "--runs-dir", str(runs)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
        )
        assert self.process.stdout is not None
        self.base, _, self.token = self.process.stdout.readline().strip().partition("#token=")
        for _ in range(600):
            try:
                self.get("icon.svg")
                return
            except OSError:
                time.sleep(0.05)

    def get(self, path: str) -> bytes:
        headers = {"X-Jackline-Token": self.token, "Accept-Encoding": "gzip"}
        with urllib.request.urlopen(urllib.request.Request(self.base + path, headers=headers), timeout=60) as answer:
            body: bytes = answer.read()
            self.is_packed = answer.headers.get("Content-Encoding") == "gzip"
        return body

    def json(self, path: str) -> Any:
        body = self.get(path)
        return json.loads(gzip.decompress(body) if self.is_packed else body)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096 / 2**20

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def make_run(path: Path, steps: int, seed: int) -> None:
    shutil.copytree(GOLDEN, path)
    rng = random.Random(seed)
    contents = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**contents, "name": path.name}))
    with open(path / "metrics-0.jsonl", "w") as file:
        for step in range(steps):
            loss = 3 * math.exp(-step / steps * 4) + 0.9 + rng.gauss(0, 0.03) + (9 if step == steps * 2 // 3 else 0)
            lr = 3e-4 * (1 - step / steps)
            file.write(f'{{"step":{step},"at_s":{1.79e9 + step * 0.1:.1f},"loss":{loss:.5f},"lr":{lr:.6g}}}\n')


def timed(server: Server, what: str, limit: str, call: Any) -> Any:
    before, began = server.cpu_s(), time.monotonic()
    found = call()
    wall_s, cpu_s = time.monotonic() - began, server.cpu_s() - before
    print(f"{what:<58} {wall_s:6.2f} s wall  {cpu_s:5.2f} s CPU of the server   {limit}")
    return found


def open_run(server: Server, key: str) -> Any:
    for part in ("", "/events", "/log"):
        server.get(f"api/runs/{key}{part}")
    return server.json(f"api/runs/{key}/curves")


def read_whole(server: Server, key: str, cursor: str) -> Any:
    while True:
        found = server.json(f"api/runs/{key}/curves?since={cursor}")
        if found["is_whole"]:
            return found
        cursor = found["cursor"]


def state_change(server: Server, runs: Path, key: str) -> float:
    """From the moment in which exit.json says it failed until a page that asks every two seconds knows it."""
    exit_file = next((runs / "run-000" / "attempts").glob("*/exit.json"))
    record = json.loads(exit_file.read_text())
    server.get(f"api/runs/{key}")
    time.sleep(0.3)
    exit_file.write_text(json.dumps({**record, "exit_code": 1, "cause": "own_exception", "is_stopped": False}))
    began = time.monotonic()
    while server.json(f"api/runs/{key}")["told"]["state"] != "dead":
        time.sleep(2.0)
    return time.monotonic() - began + 2.0  # at worst it had asked just before


def report(folder: Path, steps: int, rounds: int) -> None:
    """The whole command, as a person types it. The least of some rounds, and how busy the machine was."""
    make_run(folder / "runs" / "reported", steps, 0)
    out = folder / "report.html"
    command = [sys.executable, "-m", "jackline", "report", "reported", "--out", str(out)]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "JACKLINE_RUNS": str(folder / "runs")}
    walls, cpus = [], []
    for _ in range(rounds):
        began, before = time.monotonic(), os.times()
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        after = os.times()
        walls.append(time.monotonic() - began)
        cpus.append(sum(after[2:4]) - sum(before[2:4]))
    print(
        f"report of {steps:,} steps: {out.stat().st_size / 1e3:.0f} KB, {min(walls):.2f} s wall (at most "
        f"{max(walls):.2f}), {min(cpus):.2f} s CPU, load {os.getloadavg()[0]:.1f}   <= 1 MB, 3 s"
    )


WORK = """
import sys, time
steps, limit = [], time.time() + float(sys.argv[1])
while time.time() < limit:
    began = time.process_time()
    sum(place * place for place in range(100_000))
    steps.append((time.time(), time.process_time() - began))
    print(f"step {len(steps)} loss {1 / len(steps):.4f}", flush=True)
print("steps", *(f"{at:.3f}:{1e6 * cpu_s:.0f}" for at, cpu_s in steps))
"""
WINDOW_S = 2.0
TIMES_AS_OFTEN = 20  # as a browser's page asks, which is every 2 s


def effect(runs: Path, state: Path, rounds: int) -> None:
    """CPU time of a step of one supervised training, in windows of 2 s: alternately nobody looks, and a page asks for
    everything twenty times as often as a browser does. A browser's page costs a twentieth of what is found."""
    env = {**os.environ, "XDG_STATE_HOME": str(state)}
    length_s = 2 * rounds * WINDOW_S
    command = [sys.executable, "-m", "jackline", "run", "--name", "work", "--runs-dir", str(runs)]
    server = Server(runs, state)
    training = subprocess.Popen(
        [*command, "--", sys.executable, "-c", WORK, str(length_s + 6)], stdout=subprocess.PIPE, env=env
    )
    time.sleep(3)
    key = next(row["key"] for row in server.json("api/runs")["runs"])
    windows: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        windows[bool(number % 2)].append(began := time.time())
        while time.time() < began + WINDOW_S:
            for part in ("", "/events", "/log", "/curves") if number % 2 else ():
                server.get(f"api/runs/{key}{part}")
            time.sleep(2 / TIMES_AS_OFTEN)
    text = training.communicate()[0].decode().rpartition("steps ")[2]
    server.close()
    steps = [(float(at), float(us)) for at, _, us in (step.partition(":") for step in text.split())]

    def median_us(began: float) -> float:
        return median(us for at, us in steps if began + 0.1 < at < began + WINDOW_S)

    ratios = [median_us(watched) / median_us(alone) - 1 for alone, watched in zip(*windows.values(), strict=True)]
    error = stdev(ratios) / math.sqrt(len(ratios))
    share = 100 / TIMES_AS_OFTEN
    print(
        f"CPU time of a training's step with a page open: {share * mean(ratios):+.3f} % +- {share * error:.3f} %"
        f"   <= 0.1 %\n  (asked {TIMES_AS_OFTEN} times as often: {100 * mean(ratios):+.2f} % +- {100 * error:.2f} %,"
        f" {len(ratios)} pairs of windows, {len(steps)} steps)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(
        "--rounds", type=int, default=15, help="pairs of windows of 2 s: nobody looks, a page is open"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        make_run(runs / "long", asked.steps, 0)
        for number in range(asked.runs - 1):
            make_run(runs / f"run-{number:03d}", 2000, number)
        size_mb = (runs / "long" / "metrics-0.jsonl").stat().st_size / 1e6
        server = Server(runs, Path(folder) / "state")
        try:
            listed = timed(
                server, f"list of {asked.runs} runs, first answer", "<= 1 s, 0.5 s", lambda: server.json("api/runs")
            )
            while not listed["is_whole"]:
                listed = timed(server, "  the rest of its curves and goodput", "", lambda: server.json("api/runs"))
            timed(server, "  asked again", "", lambda: server.json("api/runs"))
            keys = {row["name"]: row["key"] for row in listed["runs"]}
            title = f"open a run with {asked.steps:,} steps ({size_mb:.0f} MB)"
            first = timed(server, title, "<= 1 s, 0.5 s", lambda: open_run(server, keys["long"]))
            whole = first
            if not first["is_whole"]:
                title = "  until every line is read (samples are shown before)"
                whole = timed(server, title, "", lambda: read_whole(server, keys["long"], first["cursor"]))
            peak = max(
                max(curve.get("high") or curve["last"]) for curve in whole["curves"] if curve["name"] == "loss"
            )
            print(f"  the spike of one step among {asked.steps:,} is shown: {peak > 9}")
            again = f"api/runs/{keys['long']}/curves?since={whole['cursor']}"
            timed(server, "  asked again", "", lambda: server.json(again))
            weight = sum(len(server.get(name)) for name in STATIC)
            data = sum(
                len(server.get(f"api/runs/{keys['long']}{part}")) for part in ("", "/events", "/log", "/curves")
            )
            print(f"page weight, compressed: {weight / 1e3:.1f} KB page + {data / 1e3:.1f} KB data   <= 150 KB")
            print(
                f"a state change is shown after at most {state_change(server, runs, keys['run-000']):.1f} s   <= 3 s"
            )
            print(f"memory of the server: {server.rss_mib():.0f} MiB")
        finally:
            server.close()
        report(Path(folder) / "report", asked.steps // 10, 3)
        if asked.rounds:
            effect(Path(folder) / "watched", Path(folder) / "state", asked.rounds)


if __name__ == "__main__":
    main()
