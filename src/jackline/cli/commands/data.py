"""`jackline data prepare|show|bench SOURCE`: the data engine, called directly.

Only turns options into a request; the work is done by `python -m jackline.data`, a child process that may import
numpy and other packages.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jackline.cli.options import json_option
from jackline.errors import UsageError
from jackline.extras import require
from jackline.units import parse_bytes


@click.group()
def command() -> None:
    """The data engine by hand: tokenise into a cache, look at it, measure the loader alone.

    SOURCE is a file, folder or glob, http(s)://..., hf://datasets/OWNER/NAME/..., or python-stdlib.
    """


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of all three commands: the sources and everything that determines the tokens."""
    for option in reversed(_SOURCE_OPTIONS):
        function = option(function)
    return function


_SPLIT_BY = "lines: divide a text file between the splits; auto: where it is the only file."
_SOURCE_OPTIONS = [
    click.argument("sources", nargs=-1, required=True, metavar="SOURCE..."),
    click.option("--tokenizer", default="gpt2", show_default=True, help="gpt2, bytes, train, or a tokenizer.json."),
    click.option("--vocab-size", default=8192, show_default=True, help="Size of a tokenizer that is trained."),
    click.option("--eos", default="auto", show_default=True, help="The token between documents, or none."),
    click.option("--format", "container", default="auto", help="txt, jsonl, csv, tsv or parquet; else by name."),
    click.option(
        "--documents",
        type=click.Choice(["file", "line", "block"]),
        default="file",
        help="What one document is in a txt file.",
    ),
    click.option("--text-column", help="Column of jsonl, csv and parquet with the text; found when it is clear."),
    click.option("--weights", help="Shares of a mixture: one number a source, such as 0.7,0.3."),
    click.option(
        "--split",
        type=click.Choice(["all", "train", "validation"]),
        default="all",
        show_default=True,
        help="Which part of the documents, as --validation-fraction divides them.",
    ),
    click.option(
        "--validation-fraction", default=0.0, show_default=True, help="Share of the documents for validation."
    ),
    click.option("--min-chars", default=0, help="Leave out shorter documents."),
    click.option("--strip", is_flag=True, help="Take white space off both ends of documents."),
    click.option("--max-examples", type=int, help="Stop after so many documents."),
    click.option("--max-tokens", type=int, help="Stop after so many tokens."),
    click.option("--split-by", type=click.Choice(["auto", "document", "lines"]), default="auto", help=_SPLIT_BY),
    click.option(
        "--encoding", default="auto", show_default=True, help="Encoding of text files, such as utf-8 or cp1252."
    ),
    click.option("--max-damaged", type=float, help="Share of text and documents that may be lost; default: 0.01."),
    click.option("--cache-dir", type=click.Path(), help="Default: $JACKLINE_DATA or ~/.cache/jackline/data."),
    click.option("--max-cache-bytes", help="Such as 20G; default: a fifth of the free disk."),
]


@command.command()
@source_options
@click.option("--rebuild", is_flag=True, help="Remove what is there and begin anew.")
@json_option
def prepare(rebuild: bool, as_json: bool, **options: Any) -> None:
    """Tokenise SOURCE into its cache. Stop it at any time: the same command resumes from there."""
    _run("prepare", {**_request(options), "rebuild": rebuild, "as_json": as_json})


@command.command()
@source_options
@click.option("--verify", is_flag=True, help="Read every byte and compare it with the ledger.")
@json_option
def show(verify: bool, as_json: bool, **options: Any) -> None:
    """What the cache of SOURCE holds; SOURCE may also be a cache folder."""
    _run("show", {**_request(options), "verify": verify, "as_json": as_json})


@command.command()
@source_options
@click.option("--seq-len", default=1024, show_default=True, help="Tokens in a window.")
@click.option("--batch-size", default=8, show_default=True, help="Windows in a batch.")
@click.option("--threads", default=2, show_default=True, help="Threads that read batches ahead.")
@click.option("--seconds", default=5.0, show_default=True, help="How long to measure.")
@json_option
def bench(seq_len: int, batch_size: int, threads: int, seconds: float, as_json: bool, **options: Any) -> None:
    """The loader alone: how long the first batch takes and how fast they come, without a model in the way."""
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds must be above 0 and finite, not {seconds}")
    loader = {"seq_len": seq_len, "batch_size": batch_size, "num_threads": threads}
    _run("bench", {**_request(options), "loader": loader, "seconds": seconds, "as_json": as_json})


def _request(options: dict[str, Any]) -> dict[str, Any]:
    sources: tuple[str, ...] = options["sources"]
    settings = {"root": options["cache_dir"] or _default_root()}
    if options["max_damaged"] is not None:
        _check_share(options["max_damaged"])
        settings["max_damaged_fraction"] = options["max_damaged"]
    if options["max_cache_bytes"]:
        settings["max_cache_bytes"] = parse_bytes(options["max_cache_bytes"])
    if len(sources) == 1 and (Path(sources[0]) / "ledger.jsonl").is_file():
        return {"folder": sources[0], "spec": None, "settings": settings}
    common = {
        "format": options["container"],
        "documents": options["documents"],
        "text_column": options["text_column"],
        "encoding": options["encoding"],
        "split_by": options["split_by"],
    }
    weights = _weights(options["weights"], len(sources))
    spec = {
        "sources": [{"url": url, "weight": weight, **common} for url, weight in zip(sources, weights, strict=True)],
    }
    same = ("tokenizer", "vocab_size", "eos", "split", "validation_fraction", "min_chars", "strip")
    spec |= {name: options[name] for name in (*same, "max_examples", "max_tokens")}
    return {"folder": None, "spec": spec, "settings": settings}


def _check_share(value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"--max-damaged must be from 0 to 1, not {value}", hint="0.1 allows a tenth")


def _weights(text: str | None, num_sources: int) -> list[float]:
    if text is None:
        return [1.0] * num_sources
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != num_sources:
        raise UsageError(f"--weights '{text}' does not give {num_sources} numbers", hint="write --weights 0.7,0.3")
    return weights


def _default_root() -> str:
    named = os.environ.get("JACKLINE_DATA")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return named or str(home / "jackline" / "data")


def _run(name: str, request: dict[str, Any]) -> None:
    require(f"`jackline data {name}`", "train", ("numpy",))
    argv = [sys.executable, "-m", "jackline.data", name, "-"]
    # Ctrl-C reaches the child too. The child handles and reports it, so this process only waits.
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        # Passed through a pipe: an argument may have at most 128 KiB, and a mixture of long paths can be longer.
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt), child.stdin:
            child.stdin.write(json.dumps(request).encode())
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:
                continue
    raise click.exceptions.Exit(code if code >= 0 else 128 - code)
