"""The builder process: one at a time for each cache, started by any reader that needs tokens, safe to kill any time.

Owns: the folder of a spec, the lock, `meta.json` and `tokenizer.json`, `builder.json` (what the builder does, or why
it stopped). Does not own what is built (fill.py) or who waits for it (supply.py).

A thread adds up the sizes of all files beside the work, so that a percentage and an ETA appear without delaying the
first document. Neither is shown until the sum is known.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jackline.data.build.choose import Enough, Full
from jackline.data.build.fill import Interrupted, Workshop, build
from jackline.data.cache.directory import Cache, EraRecord, Ledger, Meta, folder_trouble, read_meta
from jackline.data.cache.state import begin
from jackline.data.cache.writer import record_era
from jackline.data.progress import Board, Progress, Reporter, ticking
from jackline.data.sources.bytefile import Patience
from jackline.data.sources.damage import check_damage
from jackline.data.sources.documents import Surroundings, find_text_columns, read_blocks
from jackline.data.sources.hub import pin_hub_url
from jackline.data.sources.identities import FileBook, check_first_files
from jackline.data.sources.listing import list_files
from jackline.data.spec import CacheSettings, DataSpec
from jackline.data.tokenise.tokenizer import (
    Tokenizer,
    engine_and_version,
    from_json,
    give_memory_back,
    load_tokenizer,
    tokenizer_identity,
    train_bpe,
)
from jackline.errors import JacklineError, UsageError
from jackline.rundir.atomic import read_json, write_json, write_whole
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import identify

_CHECK_BYTES = 1 << 18


def cache_path(spec: DataSpec, settings: CacheSettings) -> Path:
    """The path of this spec's cache, whether or not it exists."""
    spec = spec.located()
    return _path_of(spec, settings, _fingerprint(spec))


def cache_folder(spec: DataSpec, settings: CacheSettings) -> Path:
    """The same path; the folder is created, with the spec inside, if it does not exist."""
    spec = spec.located()
    fingerprint = _fingerprint(spec)
    folder = _path_of(spec, settings, fingerprint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if read_json(folder / "spec.json") is None:
            write_json(folder / "spec.json", {"fingerprint": fingerprint, "spec": spec.to_json()})
    except OSError as error:
        raise JacklineError(
            f"cannot make the token cache {folder}: {error.strerror}",
            hint="--cache-dir or JACKLINE_DATA names another place for it",
        ) from error
    return folder


def _fingerprint(spec: DataSpec) -> str:
    return spec.fingerprint(tokenizer_identity(spec.tokenizer, spec.vocab_size))


def _path_of(spec: DataSpec, settings: CacheSettings, fingerprint: str) -> Path:
    words = re.sub(r"[^A-Za-z0-9]+", "-", spec.sources[0].url.split("://")[-1].rstrip("/*")).strip("-")
    return settings.root / f"{words[-40:].strip('-') or 'data'}-{spec.split}-{fingerprint[:12]}"


def remove_cache(folder: Path) -> None:
    lock = RunLock(folder / "builder.lock")
    if not lock.try_acquire():
        raise JacklineError(
            f"the cache in {folder} is being built by another process", hint="stop that run first, then try again"
        )
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()


def empty_cache(folder: Path) -> None:
    """Delete everything except the spec of the cache."""
    asked = read_json(folder / "spec.json")
    if asked is None:
        raise UsageError(f"{folder} is not a cache", hint="`jackline data prepare SOURCE` makes one")
    remove_cache(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "spec.json", asked)


def run_builder(
    folder: Path,
    settings: CacheSettings,
    reporter: Reporter,
    *,
    for_readers: bool,
    should_stop: Callable[[], bool] = lambda: False,
) -> Enough | Full | None:
    """Build in this process. Returns None when another process holds the lock and is already building."""
    lock = RunLock(folder / "builder.lock")
    try:
        if not lock.try_acquire():
            return None
    except OSError as error:
        raise folder_trouble(folder, error) from error
    board = Board(_both(reporter, folder))
    try:
        with ticking(board):
            cache, tokenizer = _open_or_create(folder, settings, board)
            start_survey(cache.meta.spec, board.set_total)
            shop = Workshop(cache, tokenizer, settings, board, FileBook(folder), should_stop)
            outcome = build(shop, for_readers=for_readers)
            board.set("done")
        return outcome
    except Interrupted:
        return Enough()
    except JacklineError as error:
        _write_error(folder, error)
        raise
    except OSError as error:
        trouble = folder_trouble(folder, error)
        _write_error(folder, trouble)
        raise trouble from error
    finally:
        lock.release()


def adopt_era(folder: Path, state: dict[str, Any]) -> None:
    """Add what a checkpoint knows about the era before its own to the ledger, if the ledger does not have it.

    So a run that resumes where no cache is left reads the source from that era on, not from its beginning.
    """
    era, cursor = int(state["era"]) - 1, state.get("era_cursor")
    lock = RunLock(folder / "builder.lock")
    ledger = Ledger(folder)
    ledger.refresh()
    if era < 0 or cursor is None or era in ledger.records or not lock.try_acquire():
        return
    try:
        ledger.refresh()
        asked = read_json(folder / "spec.json")
        if era not in ledger.records and asked is not None and asked["fingerprint"] == state["fingerprint"]:
            plan = DataSpec.from_json(asked["spec"]).era_plan()
            record_era(folder, EraRecord(era, plan.size(era), state["hash_before"], cursor))
    finally:
        lock.release()


def read_builder_error(folder: Path) -> JacklineError | None:
    """Why the last builder stopped, if it wrote a reason."""
    value = read_json(folder / "builder.json")
    if not isinstance(value, dict) or value.get("state") != "failed":
        return None
    error = JacklineError(
        value["error"]["message"], detail=tuple(value["error"]["detail"]), hint=value["error"]["hint"]
    )
    error.exit_code = value["error"]["exit_code"]
    return error


def _open_or_create(folder: Path, settings: CacheSettings, board: Board) -> tuple[Cache, Tokenizer]:
    around = Surroundings(Patience(settings.give_up_after_s, on_wait=lambda text: board.set("wait", detail=text)))
    meta = read_meta(folder)
    if meta is None:
        meta, tokenizer = _create(folder, around, board, settings)
    else:
        check_first_files(folder)
        judge_damage(Cache(folder, meta), settings)
        tokenizer = _checked(_load(folder, meta.spec), meta.spec, around)
    give_memory_back()
    return Cache(folder, replace(meta, spec=limited(meta.spec, settings))), tokenizer


def limited(spec: DataSpec, settings: CacheSettings) -> DataSpec:
    """The spec with the limit of damage of the present call."""
    limit = settings.max_damaged_fraction
    return spec if limit is None else replace(spec, max_damaged_fraction=limit)


def judge_damage(cache: Cache, settings: CacheSettings) -> None:
    """Raise if the damage that a cache recorded is more than the present call allows."""
    records = cache.ledger.records
    if not records:
        return
    counts = records[max(records)].ends_at.state.counts
    limit = limited(cache.meta.spec, settings).max_damaged_fraction
    check_damage(counts.lost, counts.damaged, counts.records, limit, is_end=cache.ledger.is_sealed)


def _checked(tokenizer: Tokenizer, spec: DataSpec, around: Surroundings) -> Tokenizer:
    """The tokenizer, with the plain engine if the fast one disagrees on the beginning of this corpus."""
    if tokenizer.engine is tokenizer.reference:
        return tokenizer
    return tokenizer.checked_on(list(_first_texts(spec, around, _CHECK_BYTES))).alone()


def _create(folder: Path, around: Surroundings, board: Board, settings: CacheSettings) -> tuple[Meta, Tokenizer]:
    asked = read_json(folder / "spec.json")
    if asked is None:
        raise UsageError(f"{folder} is not a cache", hint="`jackline data prepare SOURCE` makes one")
    spec = limited(DataSpec.from_json(asked["spec"]), settings)
    board.set("list", detail=spec.sources[0].url)
    pinned = tuple(
        replace(source, url=pin_hub_url(source.url)) if source.url.startswith("hf://") else source
        for source in spec.sources
    )
    spec = find_text_columns(replace(spec, sources=pinned), around)
    if spec.tokenizer == "train":
        board.set("tokenise", detail=f"training a tokenizer of {spec.vocab_size:,} tokens")
        write_whole(folder / "tokenizer.json", _trained(spec, around, settings.root), durable=True)
    tokenizer = _checked(_load(folder, spec), spec, around)
    if tokenizer.json is not None:
        write_whole(folder / "tokenizer.json", tokenizer.json.encode(), durable=True)
    if spec.rows is not None and spec.rows.short == "pad" and tokenizer.eos_id is None:
        raise UsageError("padded rows need a token to pad with", hint="eos=TOKEN, or short=drop")
    meta = Meta(
        asked["fingerprint"],
        spec,
        tokenizer.vocab_size,
        tokenizer.eos_id,
        # A trained tokenizer is identified by its content; any other by its name.
        tokenizer.hash if spec.tokenizer == "train" else tokenizer_identity(spec.tokenizer, spec.vocab_size),
        engine_and_version(tokenizer),
        tokenizer.note,
    )
    write_json(folder / "meta.json", meta.to_json(), durable=True)
    return meta, tokenizer


def _trained(spec: DataSpec, around: Surroundings, root: Path) -> bytes:
    """A tokenizer trained on the training split only; the cache of the validation split shares it."""
    split: Any = "all" if spec.split == "all" else "train"
    common = replace(spec, split=split, rows=None, max_tokens=None)
    path = root / "tokenizers" / f"{common.fingerprint('train')}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, train_bpe(_first_texts(common, around, None), spec.vocab_size).encode(), durable=True)
    return path.read_bytes()


def _load(folder: Path, spec: DataSpec) -> Tokenizer:
    """Prefer the cache's own copy: the name may refer to another tokenizer by now."""
    own = folder / "tokenizer.json"
    if own.is_file():
        return from_json(own.read_text(encoding="utf-8"), eos=spec.eos)
    return load_tokenizer(spec.tokenizer, eos=spec.eos)


def _first_texts(spec: DataSpec, around: Surroundings, num_bytes: int | None) -> Iterator[bytes]:
    left = num_bytes
    for block in read_blocks(spec, begin(len(spec.sources)), around):
        for text in block.texts:
            yield text if left is None else text[:left].decode("utf-8", "ignore").encode()
            if left is not None:
                left -= len(text)
                if left <= 0:
                    return


def _both(reporter: Reporter, folder: Path) -> Reporter:
    """A reporter that reports to the caller, and to builder.json for all other processes."""
    process = identify(os.getpid())
    who: dict[str, Any] = process.to_json() if process else {}

    def report(progress: Progress) -> None:
        with contextlib.suppress(OSError):  # a report that cannot be written must not stop the work
            write_json(folder / "builder.json", {"state": "working", "process": who, "progress": progress.to_json()})
        reporter(progress)

    return report


def _write_error(folder: Path, error: JacklineError) -> None:
    told = {
        "message": error.message,
        "detail": list(error.detail),
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    with contextlib.suppress(OSError):  # on a full disk the error itself matters more than its copy
        write_json(folder / "builder.json", {"state": "failed", "error": told})


def start_survey(spec: DataSpec, on_total: Callable[[int], None]) -> threading.Thread:
    """Call `on_total` once with the bytes of all sources; never if one of them does not report sizes."""

    def add_up() -> None:
        total = 0
        try:
            for source in spec.sources:
                for found in list_files(source.url, needs_known_ending=source.format == "auto"):
                    if found.size is None:
                        return
                    total += found.size
        except JacklineError:
            return  # reading the files will fail in the same way and report it
        on_total(total)

    thread = threading.Thread(target=add_up, name="jackline-survey", daemon=True)
    thread.start()
    return thread
