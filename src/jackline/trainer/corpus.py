"""The data of a config: training and validation split, opened with signs of life, and the words when it fails.

Owns the way from config to data engine. Nothing is substituted: a source that cannot be reached is an error that
says how to give another. Imports torch only for the loader: the trainer starts tokenising before it loads torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jackline import accelerator
from jackline.data.build.builder import cache_folder, run_builder
from jackline.data.build.choose import Enough, Full
from jackline.data.build.supply import Data, begin_data, open_data
from jackline.data.cache.eras import WindowShape
from jackline.data.command_line import describe_cache, encodings_text, first_text
from jackline.data.progress import Progress, Reporter, describe
from jackline.data.sources.listing import list_files
from jackline.data.sources.sections import enough_bytes
from jackline.data.spec import CacheSettings, DataSpec, Source, Split, default_cache_root, is_remote, sources_in
from jackline.data.tokenise.tokenizer import NoTokenizer
from jackline.errors import JacklineError, UsageError
from jackline.rundir.layout import RunDir
from jackline.session.phase import phase
from jackline.trainer.config import Resolved, TrainConfig
from jackline.trainer.recipe import RecipeHooks
from jackline.trainer.report.console import Console
from jackline.units import count_of, format_bytes

if TYPE_CHECKING:
    import torch

    from jackline.data.loader.loader import Batch
    from jackline.trainer.own.samples import SampleSet
    from jackline.trainer.task import BatchSource

_LOOK_AGAIN_S = 0.5
_FIRST_PATIENCE_S = 45.0


class TrainText(Protocol):
    """Text to train on, opened: windows of a cache, or what a recipe reads in its own way."""

    @property
    def vocab_size(self) -> int:
        """The tokenizer's own."""

    @property
    def eos_id(self) -> int | None:
        """The token between documents."""

    def make_loader(self, config: TrainConfig, device: torch.device) -> BatchSource: ...

    def first_text(self, first: Batch) -> str:
        """How it begins, for people; `first` is the first batch of it."""

    def tokenizer_json(self) -> str | None:
        """The file it can be rebuilt from; None for plain bytes."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class CachedText:
    """Windows of a cache of tokens, which is built beside the training."""

    data: Data

    @property
    def vocab_size(self) -> int:
        return self.data.cache.meta.vocab_size

    @property
    def eos_id(self) -> int | None:
        return self.data.cache.meta.eos_id

    def make_loader(self, config: TrainConfig, device: torch.device) -> BatchSource:
        from jackline.data.loader.loader import Loader, LoaderSettings

        settings = LoaderSettings(
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            seed=config.seed,
            num_threads=config.num_threads,
            pin_memory=accelerator.is_gpu(device),
        )
        return Loader(self.data, settings)

    def first_text(self, first: Batch) -> str:
        return first_text(self.data.cache.folder)

    def tokenizer_json(self) -> str | None:
        path = self.data.cache.folder / "tokenizer.json"
        return path.read_text(encoding="utf-8") if path.exists() else None

    def close(self) -> None:
        self.data.close()


@dataclass(frozen=True)
class Corpus:
    """`validation` is None with val_fraction=0, and where a recipe reads its text in its own way."""

    train: TrainText
    validation: Data | None
    held: SampleSet | None = None  # the validation of conversations

    def close(self) -> None:
        self.train.close()
        if self.validation is not None:
            self.validation.close()


def spec_of(config: TrainConfig, split: Split) -> DataSpec:
    if config.val_fraction == 0:
        split = "all"
    spec = DataSpec(
        sources=tuple(
            Source(
                url,
                weight=weight,
                documents=config.documents,
                text_column=config.text_column or None,
                encoding=config.encoding,
                split_by=config.split_by,
            )
            for url, weight in sources_in(config.data)
        ),
        tokenizer=config.tokenizer,
        split=split,
        validation_fraction=config.val_fraction,
        min_chars=config.min_chars,
        max_damaged_fraction=config.max_damaged,
        max_examples=(config.max_val_examples if split == "validation" else config.max_train_examples) or None,
    )
    if split == "validation" and config.val_tokens:
        return replace(spec, max_tokens=config.val_tokens)
    return spec


def settle_split(resolved: Resolved, run: RunDir | None) -> Resolved:
    """The same with a decision in place of split_by=auto. It stays that of the run's first attempt: a run from before
    there was this setting continues without it, and a file that is added to a folder changes nothing."""
    config = resolved.config
    if config.split_by != "auto" or not config.is_language or config.chat:
        return resolved
    before = _split_before(run)
    with _explained(config):
        chosen = before or spec_of(config, "train").located().sources[0].split_by
    made: TrainConfig = replace(config, split_by=chosen)  # type: ignore[arg-type]
    origin = "as in the attempt before" if before else "auto, by the number of files"
    return Resolved(made, {**resolved.origins, "split_by": origin})


def _split_before(run: RunDir | None) -> str:
    """Of the run's saved config; empty if there is none yet."""
    if run is None or not run.config_file.exists():
        return ""
    import yaml

    found = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
    return str(found.get("split_by", "document")) if isinstance(found, dict) else ""


def cache_settings(config: TrainConfig) -> CacheSettings:
    return CacheSettings(
        root=Path(config.data_dir).expanduser() if config.data_dir else default_cache_root(),
        max_cache_bytes=config.max_cache_bytes or None,
        max_damaged_fraction=config.max_damaged,
    )


def begin_corpus(config: TrainConfig) -> None:
    """Start tokenising before torch is imported: a tokenizer that is trained takes as long as torch takes to load.

    Whatever is wrong with the data is left for `open_corpus` to say, in its place.
    """
    has_own_text = type(config).open_text is not RecipeHooks.open_text
    if not config.is_language or config.chat or has_own_text or str(config.model) == "auto" or is_remote(config.data):
        return  # nothing is tokenised, or what is may depend on the GPU or on an answer from elsewhere
    with contextlib.suppress(JacklineError, OSError):
        refuse_empty(config)
        begin_data(spec_of(config, "train"), cache_settings(config))


def open_corpus(config: TrainConfig, console: Console) -> Corpus:
    """Returns once the vocabulary is known; training may begin while the rest is being tokenised."""
    settings = cache_settings(config)
    # A source that fails in the middle of a run is waited for; one that fails before it has begun is a mistake.
    impatient = replace(settings, give_up_after_s=_FIRST_PATIENCE_S)
    with _explained(config):
        if (own := config.open_text(console)) is not None:
            return Corpus(own, None)
        if config.chat:
            return _open_chat(config, console)
        refuse_empty(config)
        with _told(console, "training data") as report:
            train = open_data(spec_of(config, "train"), settings, report)
        if config.val_fraction == 0:
            console.say(size_line("training data", train, config.seq_len), "data")
            return Corpus(CachedText(train), None)
        with contextlib.ExitStack() as opened, _told(console, "validation data") as report:
            opened.callback(train.close)  # its tokenising process is at work by now
            folder = cache_folder(spec_of(config, "validation"), settings)
            # The whole of it, here and now: a validation on what happens to be ready would be another each time.
            build_whole(folder, impatient, report)
            validation = open_data(spec_of(config, "validation"), settings, report)
            opened.pop_all()
    corpus = Corpus(CachedText(train), validation)
    try:
        _check_validation(config, validation)
    except BaseException:
        corpus.close()
        raise
    console.say(size_line("training data", train, config.seq_len), "data")
    console.say(size_line("validation data", validation, config.seq_len), "data")
    for line in notes(validation.cache.folder):
        console.say(line, "data")
    return corpus


def _open_chat(config: TrainConfig, console: Console) -> Corpus:
    from jackline.trainer.chat import open_chat

    with console.phase("data", f"conversations of {config.data}"):
        text, held = open_chat(config, lambda words: console.say(words, "data"))
    return Corpus(text, None, held)


def refuse_empty(config: TrainConfig) -> None:
    """Raise where all files of the data are empty, before anything is tokenised or rehearsed. Local files only: the
    first one with a byte in it ends the search."""
    if is_remote(config.data):
        return
    count = 0
    for url, _ in sources_in(config.data):
        for file in list_files(url, needs_known_ending=True):
            count += 1
            if file.size != 0:
                return
    if count:
        files = "1 file of 0 B matches" if count == 1 else f"{count:,} files of 0 B match"
        raise UsageError(f"it is empty: {files} {config.data}", hint="was the download or the export complete?")


def size_line(what: str, data: Data, seq_len: int) -> str:
    """'training data: 1,204 documents read, 310,000 tokens, 4,843 windows of 64; tokenising continues'."""
    facts = describe_cache(data.cache.folder)
    shape = WindowShape(seq_len + 1, seq_len)
    windows = sum(shape.count_in(record.tokens) for record in data.cache.ledger.records.values())
    documents = count_of(facts["documents"], "document")
    counted = f"{documents} read, {count_of(facts['tokens'], 'token')}, {count_of(windows, 'window')} of {seq_len:,}"
    return f"{what}: {counted}" + ("" if facts["is_finished"] else " so far; tokenising continues")


def _check_validation(config: TrainConfig, validation: Data) -> None:
    """Refuse a text file that is too small to be divided. Whole documents may be distributed that badly by chance."""
    tokens, needed = validation.cache.total_tokens(), config.seq_len + 1
    source = validation.cache.meta.spec.sources[0]
    if source.split_by != "lines" or tokens is None or tokens >= needed:
        return
    size = sum(found.size or 0 for found in list_files(source.url, needs_known_ending=source.format == "auto"))
    bytes_per_token = 1 if config.tokenizer == "bytes" else 4
    enough = max(enough_bytes(config.val_fraction, needed * bytes_per_token), size + 1)
    raise UsageError(
        f"{config.data} has {format_bytes(size)}: too small for validation, val_fraction={config.val_fraction:g}",
        detail=(f"that gives {tokens:,} tokens, and one window has {needed:,}",),
        hint=f"about {format_bytes(enough)} are enough; or a larger val_fraction, a shorter seq_len, or none: "
        "val_fraction=0",
    )


def notes(folder: Path) -> list[str]:
    """What a person must know of a cache: encodings other than UTF-8, what was lost, and a divided file."""
    facts = describe_cache(folder)
    lines = [f"not UTF-8: {encodings_text(facts['encodings'])}"] if facts["encodings"] else []
    if "lines" in facts["split_by"]:
        lines.append(
            f"one text file: {facts['documents']:,} parts of it are kept for validation, spread over the file"
        )
    return lines + [f"damaged: {line}" for line in facts["damage_lines"]]


def build_whole(folder: Path, settings: CacheSettings, report: Reporter) -> Enough | Full:
    """To the corpus' end; while another process builds the same (our own loader's has begun) it is waited for."""
    while (outcome := run_builder(folder, settings, report, for_readers=False)) is None:
        time.sleep(_LOOK_AGAIN_S)
    return outcome


def count_steps(config: TrainConfig, text: TrainText, loader: BatchSource, console: Console) -> int:
    """All steps of the run. In epochs they are known only when the whole corpus is."""
    if config.epochs and config.chat:
        return config.epochs * -(-(loader.num_windows() or 0) // config.batch_size)
    if not config.epochs or not isinstance(text, CachedText):
        return config.max_steps
    settings = cache_settings(config)
    with _told(console, "the whole corpus, because epochs are counted") as report:
        outcome = build_whole(cache_folder(spec_of(config, "train"), settings), settings, report)
    windows = loader.num_windows()
    if isinstance(outcome, Full) or windows is None:
        raise UsageError(
            f"epochs={config.epochs} needs the whole corpus on disk, and it does not fit",
            hint="give max_steps instead, or a larger max_cache_bytes",
        )
    return max(1, config.epochs * (windows // config.batch_size))


@contextlib.contextmanager
def _told(console: Console, what: str) -> Iterator[Reporter]:
    with console.phase("data", what), phase(f"data: {what}") as bar:

        def report(progress: Progress) -> None:
            text = describe(progress)
            console.now(f"{what}: {text}")
            bar.update(progress.done)

        yield report


@contextlib.contextmanager
def _explained(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except NoTokenizer:
        raise  # no fault of the data
    except JacklineError as error:
        advice = (f"there: {error.hint}",) if error.hint else ()
        made = JacklineError(
            f"the data of recipe '{config.recipe}' cannot be loaded: {config.data}",
            detail=(error.message, *error.detail, *advice),
            hint="--data SOURCE trains on other data: a path, glob, http(s)://, hf://, or python-stdlib",
        )
        made.exit_code = error.exit_code
        raise made from error
