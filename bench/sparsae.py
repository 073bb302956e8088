"""The sparse recipe beside what the field uses, and what its masks cost. Made for one H200.

    python bench/sparsae.py --text FILE            all of it, about 12 minutes on an H200 (FILE: WikiText-2, say)
    python bench/sparsae.py --only search,speed    the cost of mask updates; throughput against dense
    python bench/sparsae.py --only memory          RAM of all processes on text as large as WikiText-103
    python bench/sparsae.py --small                the same on a CPU with tiny settings: does it run

report: dense, static, SET, RigL and ES at 80 %, the same tokens, batch and rate, several seeds, loss on the whole
validation set; runs of one seed go side by side. search: one mask update at 162M weights: seconds, extra memory for a
candidate, share of the time at the default interval. speed: tokens/s with masks against sparsity=0. memory: the tiny
model through 20 steps on 540 MB of made-up text, all of it tokenised; what its processes hold at most, each shared
page counted once, less what Python with torch holds. Held is what only swapping could take away: anonymous and shared
memory. Unchanged pages of files (libraries, tokens) are the kernel's cache; they are printed apart, and so is the
least there can be: on a GPU the copy that a save makes, on a CPU also weights, gradients, moments and teacher.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
METHODS = ("dense", "static", "set", "rigl", "es")
DEFAULT_INTERVAL = 1000


def main() -> int:
    options = _parse()
    if options.child:
        _child(json.loads(options.child))
        return 0
    work = Path(options.work or tempfile.mkdtemp(prefix="bench-sparsae-"))
    rows: dict[str, Any] = {}
    for name in options.only.split(","):
        parts = {"report": report, "search": search, "speed": speed, "memory": memory}
        rows[name] = parts[name](options, work)
        if out := os.environ.get("OUT"):
            (Path(out) / "sparsae.json").write_text(json.dumps(rows, indent=1))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="search,speed,report")
    parser.add_argument("--text", action="append", default=[], help="a text file as a second corpus")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--work", default="")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the parent ----------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    found = []
    steps = 20 if options.small else options.steps
    # Seed by seed, so that an early end has as many of the one corpus as of the other.
    for seed in range(1 if options.small else options.seeds):
        for data in ["python-stdlib", *options.text]:
            asked = [_request("train", work, data=data, method=m, seed=seed, steps=steps) for m in METHODS]
            if seed == 0:
                _start(asked[0] | {"steps": 1}, options).wait()  # so that the tokens exist before five want them
            children = [(one, _start(one, options)) for one in asked]
            for one, child in children:
                child.wait()
                found.append(_answer(one))
                print(f"  {data[-30:]} {one['method']:8} seed {seed}: {_short(found[-1])}", flush=True)
    _print_report(found)
    return found


def _print_report(found: list[dict[str, Any]]) -> None:
    print(f"{'corpus':28}{'method':10}{'val loss':>10}{'least..most':>18}{'less dense':>12}{'mask share %':>14}")
    for data in dict.fromkeys(row["data"] for row in found):
        rows = {m: [row for row in found if row["data"] == data and row["method"] == m] for m in METHODS}
        losses = {m: [row["val_loss"] for row in rows[m] if row.get("val_loss")] for m in METHODS}
        for method in METHODS:
            if not losses[method]:
                print(f"{data[-26:]:28}{method:10}   failed: {rows[method][:1]}")
                continue
            middle = statistics.mean(losses[method])
            spread = f"{min(losses[method]):.4f}..{max(losses[method]):.4f}"
            over = middle - statistics.mean(losses["dense"]) if losses["dense"] else float("nan")
            share = statistics.mean(100 * row.get("mask_share", 0.0) for row in rows[method])
            print(f"{data[-26:]:28}{method:10}{middle:10.4f}{spread:>18}{over:+12.4f}{share:14.2f}")


def search(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    found = []
    print(
        f"{'mask update':14}{'weights M':>10}{'seconds':>9}{'bytes a weight and candidate':>30}{'% of the time':>15}"
    )
    for method in ("set", "rigl", "es"):
        asked = _request("search", work, method=method, data="python-stdlib", seed=0, steps=0)
        _start(asked, options).wait()
        row = _answer(asked)
        found.append(row)
        if "error" in row:
            print(f"{method:14} {row['error']}")
            continue
        per = row["extra_bytes"] / row["weights"] / row["candidates"]
        share = 100 * row["update_s"] / (row["update_s"] + DEFAULT_INTERVAL * row["step_s"])
        print(f"{method:14}{row['weights'] / 1e6:10.1f}{row['update_s']:9.3f}{per:30.2f}{share:15.2f}", flush=True)
    print("  promised: at most 2 s, 1 byte, 5 %")
    return found


def speed(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    found = []
    for turn in range(1 if options.small else 2):
        for sparsity in (0.0, 0.8) if turn % 2 == 0 else (0.8, 0.0):
            asked = _request("speed", work, data="python-stdlib", method="static", seed=0, sparsity=sparsity, steps=0)
            _start(asked, options).wait()
            found.append(_answer(asked))
            print(f"  sparsity {sparsity}: {_short(found[-1])}", flush=True)
    rates = {
        s: [row["tokens_per_s"] for row in found if row.get("sparsity") == s and "error" not in row]
        for s in (0.0, 0.8)
    }
    if all(rates.values()):
        ratio = statistics.median(rates[0.8]) / statistics.median(rates[0.0])
        print(f"masks / dense: {ratio:.3f} (promised at least 0.9)")
    return found


def memory(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    work.mkdir(parents=True, exist_ok=True)
    text = work / "large.txt"
    size = _write_text(text, (20 if options.small else 540) << 20)
    bare = subprocess.Popen([sys.executable, "-c", "import torch; torch.zeros(1); print(flush=True); input()"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert bare.stdout is not None
    bare.stdout.readline()
    bare_held = _held_by(bare.pid)
    torch_bytes, torch_cached = _total(bare_held), _total(bare_held, "cached")
    bare.communicate(b"\n")
    asked = _request("memory", work, data=str(text), method="es", seed=0, steps=20)
    child, most, then = _start(asked, options), {}, ""
    while child.poll() is None:
        now = _held_by(child.pid)
        if _total(now) > _total(most):
            most, then = now, _last_words(asked)
        time.sleep(0.5)  # a look walks through all pages, which the process itself waits for
    held = {"held_bytes": _total(most), "cached_bytes": _total(most, "cached"), "torch_bytes": torch_bytes}
    row = _answer(asked) | held | {"text_bytes": size, "most": most, "then": then}
    print(f"  {size / 1e6:.0f} MB of text, {row.get('took_s', 0):.0f} s, {row.get('error', 'finished')}")
    print(f"  {'at most, GB':16}{'anonymous':>10}{'shared':>8}{'cached, not counted':>21}    at: {then}")
    for name, kinds in most.items():
        words = "".join(f"{kinds[kind] / 1e9:{width}.2f}" for kind, width in zip(_KINDS, (10, 8, 21), strict=True))
        print(f"  {name:16}{words}")
    above, cached = (row["held_bytes"] - torch_bytes) / 1e9, (row["cached_bytes"] - torch_cached) / 1e9
    print(f"  least there can be: {_least_bytes(row) / 1e9:.2f} GB")
    print(f"  above Python with torch ({torch_bytes / 1e9:.2f} GB): {above:.2f} GB (promised at most 2 GB);"
          f" with the kernel's cache of files {above + cached:.2f} GB")  # fmt: skip
    return [row]


_KINDS = ("anon", "shared", "cached")


def _total(held: dict[str, dict[str, int]], *kinds: str) -> int:
    return sum(of_one[kind] for of_one in held.values() for kind in kinds or ("anon", "shared"))


def _last_words(request: dict[str, Any]) -> str:
    lines = (Path(request["work"]) / f"{request['name']}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:70] if lines else "the start"


def _least_bytes(row: dict[str, Any]) -> int:
    """Of a run: a save's copy of the state, and on a CPU the state itself and its gradients."""
    own = 0 if row.get("is_on_card") else 5 * 4 * int(row.get("weights", 0))  # weight, gradient, moments, teacher
    return int(row.get("save_bytes", 0)) + own


def _held_by(pid: int) -> dict[str, dict[str, int]]:
    """Of a process and its children, by command: bytes of each kind, each shared page by its share."""
    held: dict[str, dict[str, int]] = {}
    waiting = [pid]
    while waiting:
        one = Path(f"/proc/{waiting.pop()}")
        try:
            waiting += [int(word) for word in (one / "task" / one.name / "children").read_text().split()]
            lines = (one / "smaps_rollup").read_text().splitlines()
            words = (one / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        parts = {"jackline.data": "data builder", "jackline.checkpoint": "writer", "--child": "trainer"}
        name = next((part for word, part in parts.items() if word in words), words[:40])
        pages = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines[1:]}
        anon, shared = pages["Pss_Anon"], pages["Pss_Shmem"]
        unsaved = max(0, pages.get("Pss_Dirty", 0) - anon - shared)  # of a file, and to be written before it can go
        found = {"anon": anon, "shared": shared + unsaved, "cached": pages["Pss"] - anon - shared - unsaved}
        before = held.setdefault(name, dict.fromkeys(_KINDS, 0))
        held[name] = {kind: before[kind] + found[kind] for kind in _KINDS}
    return held


def _write_text(path: Path, size: int) -> int:
    """Paragraphs of made-up words, as often as words of a language are, one paragraph a line."""
    import numpy as np

    rng_state = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(letters[rng_state.geometric(0.12, n) % 26]) for n in rng_state.integers(2, 11, 50_000)])
    written = 0
    with open(path, "w") as file:
        while written < size:
            drawn = words[np.minimum(rng_state.zipf(1.3, 100_000) - 1, len(words) - 1)]
            lines = [" ".join(drawn[at : at + 60]) for at in range(0, len(drawn), 60)]
            written += file.write("\n".join(lines) + "\n")
    return written


def _request(kind: str, work: Path, **more: Any) -> dict[str, Any]:
    words = "-".join(str(value).replace("/", "_")[-20:] for value in more.values())
    return {"kind": kind, "work": str(work), "name": f"{kind}-{words}", **more}


def _start(request: dict[str, Any], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    work = Path(request["work"])
    work.mkdir(parents=True, exist_ok=True)
    given = json.dumps(request | {"is_small": options.small})
    with open(work / f"{request['name']}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--child", given], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["work"]) / f"{request['name']}.json"
    if path.exists():
        answer: dict[str, Any] = json.loads(path.read_text())
        return request | answer
    log = (Path(request["work"]) / f"{request['name']}.log").read_text(errors="replace").strip().splitlines()
    return request | {"error": log[-1][:200] if log else "no output"}


def _short(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))


# -- one row, in a process of its own ------------------------------------------------------------------------------


def _child(request: dict[str, Any]) -> None:
    answer = {"train": _train, "memory": _train, "search": _search, "speed": _speed}[request["kind"]](request)
    (Path(request["work"]) / f"{request['name']}.json").write_text(json.dumps(answer))


def _words(request: dict[str, Any]) -> list[str]:
    is_small = request["is_small"]
    sparsity = request.get("sparsity", 0.0 if request["method"] == "dense" else 0.8)
    method = "static" if request["method"] == "dense" else request["method"]
    documents = "file" if not request["data"].endswith(".txt") else "line" if request["kind"] == "memory" else "block"
    words = [f"data={request['data']}", f"documents={documents}", f"data_dir={request['work']}/cache"]
    words.append(f"seed={request['seed']}")
    words += [f"sparsity={sparsity}", f"mask_update={method}", "compile=off", "rehearse=no", "min_chars=0"]
    words += ["model=tiny", "tokenizer=train", "seq_len=64" if is_small else "seq_len=256"]
    if request["kind"] != "train" and not is_small:
        words.append("vocab_size=50257")  # the seeds' own sizes
    batch_size = 4 if is_small else 2 if request["kind"] == "memory" else 32
    num_judged = 64 if request["kind"] == "memory" else 0
    return [*words, f"batch_size={batch_size}", "max_train_examples=0", f"max_val_examples={num_judged}"]


def _train(request: dict[str, Any]) -> dict[str, Any]:
    from jackline.rundir.layout import RunDir
    from jackline.trainer.config import resolve
    from jackline.trainer.loop import train

    steps = request["steps"]
    every = steps // 2 if request["kind"] == "memory" else max(1, steps // 15)
    words = [*_words(request), f"max_steps={steps}", f"mask_opt_every={every}", "eval_every=0"]
    words += ["full_eval=no"] if request["kind"] == "memory" else []
    words += [f"distill_warmup={steps // 6}", "save_every_steps=1000000", "sentinels=warn"]
    run = RunDir(Path(request["work"]) / "runs" / f"{request['name']}-{steps}")
    began_s = time.monotonic()
    outcome = train(resolve("sparsae", words), run)
    shares = [json.loads(line).get("mask_share") for line in run.metrics(0).read_text().splitlines()]
    known = [share for share in shares if share is not None]
    newest = max(run.checkpoints.glob("step-*"))
    saved = sum(path.stat().st_size for path in newest.iterdir())
    return {
        "save_bytes": saved, "weights": _num_weights(newest / "model.safetensors"), "is_on_card": _has_card(),
        "val_loss": outcome.val_loss, "train_loss": outcome.last_loss, "took_s": time.monotonic() - began_s,
        "mask_share": known[-1] if known else 0.0, "num_taken": _num_taken(run.path / "masks.jsonl"),
    }  # fmt: skip


def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()


def _num_weights(path: Path) -> int:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _num_taken(path: Path) -> int:
    """Updates after which the mask was another one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(one["is_taken"] and one["kind"] != "current" for one in map(json.loads, lines))


def _task_of(request: dict[str, Any], *words: str) -> Any:
    from jackline.trainer.build import build
    from jackline.trainer.config import resolve
    from jackline.trainer.report.console import Console

    size = "tiny" if request["is_small"] else "small"
    batch = "batch_size=4" if request["is_small"] else "batch_size=8"
    given = [*_words(request), f"model={size}", batch, "max_steps=1000", *words]
    folder = Path(request["work"]) / "runs" / request["name"]
    folder.mkdir(parents=True, exist_ok=True)
    return build(resolve("sparsae", given).config, Console(), folder)


def _step_of(task: Any) -> Any:
    import torch

    config = task.config
    window = torch.randint(0, 256, (config.batch_size, config.seq_len + 1), device=task.learner.device)

    def step() -> None:
        task.begin_step(config.distill_warmup)
        total, count = task.loss_sum(window)
        (total / count).backward()
        task.update()

    return step


def _timed(step: Any, count: int) -> float:
    import torch

    for _ in range(3):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / count


def _search(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    task = _task_of(request)
    with task.kernels():
        step_s = _timed(_step_of(task), 3 if request["is_small"] else 20)
        additions = task.additions
        has_gpu = torch.cuda.is_available()
        took, extra = [], 0
        for _ in range(3):
            # A judging pass alone first: its activations are not the search's.
            additions._evaluate(0)
            plain = torch.cuda.max_memory_allocated() if has_gpu else 0
            began_s = time.perf_counter()
            additions.search.update(additions._evaluate, additions._gradients, additions._tensors())
            if has_gpu:
                torch.cuda.synchronize()
                extra = max(extra, torch.cuda.max_memory_allocated() - plain)
                torch.cuda.reset_peak_memory_stats()
            took.append(time.perf_counter() - began_s)
    candidates = additions.search.settings.num_mutants + 1 if request["method"] == "es" else 1
    weights = sum(weight.numel() for weight in task.learner.model.parameters())
    return {
        "update_s": statistics.median(took), "extra_bytes": extra, "weights": weights, "candidates": candidates,
        "step_s": step_s,
    }  # fmt: skip


def _speed(request: dict[str, Any]) -> dict[str, Any]:
    task = _task_of(request)
    with task.kernels():
        step_s = _timed(_step_of(task), 3 if request["is_small"] else 60)
    tokens = task.config.batch_size * task.config.seq_len
    return {"tokens_per_s": tokens / step_s, "sparsity": request["sparsity"]}


if __name__ == "__main__":
    sys.exit(main())
