"""What `jackline data` does, in the process that may import numpy: prepare, show, bench.

Owns the text and the progress lines of these commands. `cli/commands/data.py` only passes a request on as JSON, so
that it imports little. Data goes to stdout, progress and remarks go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jackline.data.build.builder import cache_folder, cache_path, empty_cache, run_builder
from jackline.data.build.choose import Full
from jackline.data.build.supply import Data, open_cache, open_data
from jackline.data.cache.directory import Cache, era_path, read_meta
from jackline.data.cache.windows import EraFiles, read_windows
from jackline.data.cache.writer import hash_file
from jackline.data.loader.loader import Loader, LoaderSettings
from jackline.data.progress import Progress, Reporter, describe
from jackline.data.sources.damage import damage_lines
from jackline.data.spec import CacheSettings, DataSpec
from jackline.data.tokenise.tokenizer import from_json, load_tokenizer
from jackline.errors import JacklineError
from jackline.units import count_of, format_bytes, format_duration

_TERMINAL_EVERY_S = 0.5
_PIPE_EVERY_S = 2.0
_SHOWN_TOKENS = 200


def run_request(name: str, request: dict[str, Any]) -> None:
    """`request` has the spec, the settings, and the command's own options."""
    settings = CacheSettings.from_json(request["settings"])
    COMMANDS[name](request, settings)


def prepare(request: dict[str, Any], settings: CacheSettings) -> None:
    """Build the whole cache, or as much as fits."""
    named = request.get("folder")
    if named:
        folder = Path(named)
    else:
        spec = DataSpec.from_json(request["spec"])
        folder, settings = cache_folder(spec, settings), settings.limited_by(spec)
    if request["rebuild"]:
        empty_cache(folder)
    began_s = time.monotonic()
    reporter = terminal_reporter()
    outcome = None
    while outcome is None:
        outcome = run_builder(folder, settings, reporter, for_readers=False)
        if outcome is None:
            _say(f"another process builds this cache; waiting for it ({folder})")
            time.sleep(_PIPE_EVERY_S)
    facts = describe_cache(folder)
    if request["as_json"]:
        print(json.dumps(facts))
        return
    _end_line()
    _print_facts(facts)
    if isinstance(outcome, Full):
        _say("the cache is full; training streams the rest and recycles what was read (--max-cache-bytes)")
    _say(f"ready in {format_duration(time.monotonic() - began_s)}")


def show(request: dict[str, Any], settings: CacheSettings) -> None:
    """Print what is in a cache; with `verify`, check that every byte is still what was written."""
    folder = _folder(request, settings)
    facts = describe_cache(folder)
    if request["verify"]:
        facts["damaged_eras"] = damaged_eras(folder)
    if request["as_json"]:
        print(json.dumps(facts))
    else:
        _print_facts(facts)
        print(f"begins    {first_text(folder)!r}")
    if facts.get("damaged_eras"):
        raise JacklineError(
            f"{len(facts['damaged_eras'])} eras of {folder} are damaged: {facts['damaged_eras']}",
            hint="remove their era-*.tok files; they are built again from the source",
        )


def bench(request: dict[str, Any], settings: CacheSettings) -> None:
    """Measure the loader alone, without a model: how fast batches come and how long the first one takes."""
    began_s = time.monotonic()
    reporter = terminal_reporter()
    loader_settings = LoaderSettings(**request["loader"])
    data = _open(request, settings, reporter)
    with Loader(data, loader_settings) as loader:
        next(loader)
        first_s = time.monotonic() - began_s
        _end_line()
        _say(f"first batch after {format_duration(first_s)}")
        facts = _measure(loader, request["seconds"], reporter)
    facts["first_batch_s"] = round(first_s, 3)
    if request["as_json"]:
        print(json.dumps(facts))
        return
    _end_line()
    for name, value in facts.items():
        print(f"{name:20} {value:,}" if isinstance(value, int | float) else f"{name:20} {value}")


Command = Callable[[dict[str, Any], CacheSettings], None]
COMMANDS: dict[str, Command] = {"prepare": prepare, "show": show, "bench": bench}


def describe_cache(folder: Path) -> dict[str, Any]:
    """Everything about a cache that a person or a program may want to know."""
    meta = read_meta(folder)
    if meta is None:
        raise JacklineError(f"{folder} is not a token cache yet", hint="`jackline data prepare SOURCE` makes one")
    cache = Cache(folder, meta)
    records = cache.ledger.records
    newest = records[max(records)] if records else None
    counts = newest.ends_at.state.counts if newest else None
    return {
        "folder": str(folder),
        "fingerprint": meta.fingerprint,
        "sources": [source.url for source in meta.spec.sources],
        "split": meta.spec.split,
        "tokenizer": meta.spec.tokenizer,
        "engine": meta.engine,
        "note": meta.note,
        "vocab_size": meta.vocab_size,
        "eos_id": meta.eos_id,
        "dtype": meta.dtype.name,
        "is_finished": cache.ledger.is_sealed,
        "tokens": sum(record.tokens for record in records.values()),
        "eras": len(records),
        "documents": newest.ends_at.documents if newest else 0,
        "empty": counts.empty if counts else 0,
        "short": counts.short if counts else 0,
        "other_split": counts.other_split if counts else 0,
        "damaged": counts.damaged if counts else {},
        "damage": counts.lost.to_json() if counts else {},
        "damage_lines": damage_lines(counts.lost, counts.damaged) if counts and counts.damaged else [],
        "encodings": counts.encodings if counts else {},
        "split_by": [source.split_by for source in meta.spec.sources],
        "bytes_on_disk": cache.bytes_on_disk(),
    }


def damaged_eras(folder: Path) -> list[int]:
    meta = read_meta(folder)
    records = Cache(folder, meta).ledger.records if meta else {}
    return [
        era
        for era, record in sorted(records.items())
        if record.tokens and era_path(folder, era).exists() and hash_file(era_path(folder, era)) != record.hash
    ]


def first_text(folder: Path) -> str:
    """The first tokens of the cache, as text."""
    meta = read_meta(folder)
    assert meta is not None
    cache = Cache(folder, meta)
    count = min(_SHOWN_TOKENS, cache.num_tokens(0) or 0)
    if not count or not era_path(folder, 0).exists():
        return ""
    import numpy as np

    tokens = np.empty((1, count), meta.dtype)
    files = EraFiles(cache)
    read_windows(files.fd(0), np.zeros(1, np.uint64), tokens)
    files.close()
    own = folder / "tokenizer.json"
    if own.exists():
        return from_json(own.read_text(encoding="utf-8"), eos=meta.spec.eos, use_fast=False).decode(tokens[0])
    return load_tokenizer(meta.spec.tokenizer, eos=meta.spec.eos).decode(tokens[0])


def terminal_reporter() -> Reporter:
    """One line that is rewritten on a terminal; elsewhere a line at most every two seconds."""
    is_terminal = sys.stderr.isatty()
    last_s = float("-inf")

    def report(progress: Progress) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s < (_TERMINAL_EVERY_S if is_terminal else _PIPE_EVERY_S * 0.9):
            return
        last_s = now_s
        text = describe(progress)
        if is_terminal:
            # A terminal whose size was never set reports 0 columns.
            width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            print("\r" + text[:width].ljust(width), end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    return report


def _measure(loader: Loader, seconds: float, reporter: Reporter) -> dict[str, Any]:
    began_s, waited_s, num_batches, num_tokens = time.perf_counter(), loader.waited_s, 0, 0
    elapsed_s = 0.0
    for batch in loader:
        num_batches += 1
        num_tokens += batch.tokens.size
        elapsed_s = time.perf_counter() - began_s
        if num_batches % 64 == 0:
            reporter(Progress("pack", elapsed_s, seconds, "s", detail=f"{num_tokens / elapsed_s:,.0f} tokens/s"))
        if elapsed_s >= seconds:
            break
    elapsed_s = max(elapsed_s, 1e-9)
    return {
        "batches": num_batches,
        "batches_per_s": round(num_batches / elapsed_s, 1),
        "tokens_per_s": round(num_tokens / elapsed_s),
        "waiting_percent": round(100 * (loader.waited_s - waited_s) / elapsed_s, 1),
        "threads": loader.settings.num_threads,
    }


def _folder(request: dict[str, Any], settings: CacheSettings) -> Path:
    if request.get("folder"):
        return Path(request["folder"])
    return cache_path(DataSpec.from_json(request["spec"]), settings)


def _open(request: dict[str, Any], settings: CacheSettings, reporter: Reporter) -> Data:
    if request.get("folder"):
        return open_cache(Path(request["folder"]), settings, reporter)
    return open_data(DataSpec.from_json(request["spec"]), settings, reporter)


def _print_facts(facts: dict[str, Any]) -> None:
    damaged = ", ".join(f"{count:,} x {reason}" for reason, count in facts["damaged"].items()) or "none"
    left_out = f"{facts['empty']:,} empty, {facts['short']:,} too short, {facts['other_split']:,} of the other split"
    state = "finished" if facts["is_finished"] else "growing"
    print(f"cache     {facts['folder']} ({state}, {format_bytes(facts['bytes_on_disk'])})")
    print(f"sources   {', '.join(facts['sources'])} (split: {facts['split']})")
    eras, documents = count_of(facts["eras"], "era"), count_of(facts["documents"], "document")
    print(f"tokens    {facts['tokens']:,} in {eras}, {documents}")
    print(f"left out  {left_out}; damaged: {damaged}")
    for line in facts["damage_lines"][len(facts["damaged"]) :]:
        print(f"          {line}")
    if facts["encodings"]:
        print(f"encoding  {encodings_text(facts['encodings'])}; all other files are UTF-8")
    print(f"tokenizer {facts['tokenizer']}, vocabulary {facts['vocab_size']:,}, made by {facts['engine']}")
    if facts["note"]:
        print(f"note      {facts['note']}")


def encodings_text(encodings: dict[str, int]) -> str:
    """Files that are not UTF-8: 'Windows-1252 (Latin-1) (2 files)'."""
    return ", ".join(f"{name} ({count:,} {'file' if count == 1 else 'files'})" for name, count in encodings.items())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_line() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
