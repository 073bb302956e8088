"""Chunks of tokens out of a live stream: documents are accumulated until a step's worth is there, and it says so.

    source = open_chunks(spec, console)
    loader = ChunkLoader(source, ChunkSettings(seq_len=512, num_sequences=8))
    next(loader).tokens                         # [8, 513]; the last token is the first of the next chunk
    loader.state(), loader.seek(state)          # the exact document, and how far into its tokens

Owns the accumulation, its words and its position; has the face of data.loader.Loader. Reading and tokenising is
data.live's. Counts are exact: tokens of the tokenizer, documents by the source's own records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from jackline.data.cache.state import Counts, Cursor
from jackline.data.loader.live import End, Live, LiveTokens, Piece, open_live
from jackline.data.loader.loader import Batch
from jackline.data.sources.bytefile import Patience
from jackline.data.spec import DataSpec
from jackline.errors import CannotResume
from jackline.session.phase import Phase, phase
from jackline.session.stopping import NoMoreWaiting, Stopped
from jackline.trainer.config import TrainConfig
from jackline.trainer.report.console import Console

SAY_EVERY_SAMPLES = 100
SAY_CHUNK_EVERY_S = 1.0  # a GPU may do fifty chunks a second; more lines than that are noise
_LOOK_EVERY_S = 0.2
_PHASE_AFTER_S = 1.0


@dataclass(frozen=True)
class ChunkSettings:
    """`num_sequences` of `seq_len` tokens are a chunk."""

    seq_len: int
    num_sequences: int
    epochs: int = 1
    num_threads: int = 1
    is_verbose: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_len


@dataclass(frozen=True)
class ChunkFacts:
    """What a chunk is made of: samples begun in it, samples skipped on the way (empty, too short or damaged)."""

    number: int
    samples: int = 0
    skipped: int = 0
    tokens: int = 0
    seconds: float = 0.0
    is_told: bool = True

    @property
    def text(self) -> str:
        return f"{self.samples:,} samples, {self.skipped:,} skipped, {self.tokens:,} tokens"


@dataclass(frozen=True)
class ChunkSource:
    """An opened stream and whom to tell."""

    live: Live
    console: Console

    @property
    def vocab_size(self) -> int:
        return self.live.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Chunks are not separated by it."""
        return None

    def make_loader(self, config: TrainConfig, device: torch.device) -> ChunkLoader:
        settings = ChunkSettings(
            seq_len=config.seq_len,
            num_sequences=config.batch_size,
            epochs=max(1, config.epochs),
            num_threads=config.num_threads,
            is_verbose=config.verbose,
        )
        return ChunkLoader(self, settings)

    def first_text(self, first: Batch) -> str:
        return self.live.tokenizer.decode(first.tokens[0])

    def tokenizer_json(self) -> str | None:
        return self.live.tokenizer.json

    def close(self) -> None:
        """Files belong to the loader's thread."""


def open_chunks(spec: DataSpec, console: Console) -> ChunkSource:
    url = spec.sources[0].url
    with console.phase("data", f"opening the stream {url}, usually 1 to 30 s"), phase("data: opening the stream"):
        began_s = time.monotonic()
        live = open_live(spec, Patience(), console.now)
        column = f", text in '{live.spec.sources[0].text_column}'" if live.spec.sources[0].text_column else ""
        console.say(
            f"stream open after {time.monotonic() - began_s:.1f} s{column}; read as it comes, nothing is cached"
        )
    return ChunkSource(live, console)


class ChunkLoader:
    """An iterator over chunks. State is what was given out, never what is being accumulated."""

    def __init__(self, source: ChunkSource, settings: ChunkSettings) -> None:
        self.settings = settings
        self.waited_s = 0.0
        self.is_exhausted = False
        self.last = ChunkFacts(0)
        self.total_samples = self.total_skipped = 0
        self.should_stop: Callable[[], bool] = lambda: False
        self._live, self._console = source.live, source.console
        self._stream = self._make_stream()
        self._num_chunks = 0
        self._held: Piece | None = None  # the piece that was begun
        self._skip = 0  # of its tokens that are behind
        self._told_s = float("-inf")
        self._console.say(
            f"one chunk is one step: {settings.num_tokens:,} tokens, {settings.num_sequences:,} sequences of "
            f"{settings.seq_len:,}; documents are packed, none is cut short",
            "data",
        )

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.is_exhausted:
            raise StopIteration
        began_s = time.monotonic()
        if not self._stream.is_started:
            self._stream.start(0, None)
        try:
            pieces = self._accumulate(began_s)
        finally:
            self.waited_s += time.monotonic() - began_s
        epoch, first = (self._held or pieces[0]).epoch, self._num_chunks * self.settings.num_tokens
        tokens = self._cut(pieces)
        self._num_chunks += 1
        windows = first + np.arange(self.settings.num_sequences, dtype=np.int64) * self.settings.seq_len
        return Batch(tokens, epoch, (self._num_chunks - 1) * self.settings.num_sequences, windows)

    @property
    def num_chunks(self) -> int:
        """Given out since the run began, in all attempts."""
        return self._num_chunks

    @property
    def total_tokens(self) -> int:
        return self._num_chunks * self.settings.num_tokens

    def state(self) -> dict[str, Any]:
        """Where the next chunk begins: the state of the source before the piece that was begun, the tokens of that
        piece that are behind, and a hash that verifies the piece when it is gone back to."""
        held = self._held
        cursor = Cursor(held.block.before, self._skip, self.total_samples) if held else None
        return {
            **self._identity(),
            "epoch": held.epoch if held else 0,
            "position": self._num_chunks,
            "cursor": cursor.to_json() if cursor else None,
            "piece_hash": _hash(held) if held else None,
            "urls": [source.url for source in self._live.spec.sources],
            "samples": self.total_samples,
            "skipped": self.total_skipped,
            "is_exhausted": self.is_exhausted,
        }

    def seek(self, state: dict[str, Any]) -> None:
        """To the document and token of a state; refuses one of other data. The piece there must be what it was."""
        for key, now in self._identity().items():
            if state[key] != now:
                raise CannotResume(
                    f"the data of this checkpoint is not the data of this run: {key} was {state[key]}, is {now}",
                    hint="give the same source, tokenizer and sequence length, or start a new run",
                )
        self.is_exhausted = bool(state["is_exhausted"])
        self._num_chunks = int(state["position"])
        self.total_samples, self.total_skipped = state["samples"], state["skipped"]
        self._held, self._skip = None, 0
        if state["cursor"] is None:
            return
        cursor = Cursor.from_json(state["cursor"])
        # A hub's data set continues at the commit it was begun with, whatever was uploaded since.
        self._live = self._live.at(state["urls"])
        self._stream.close()
        self._stream = self._make_stream()
        self._stream.start(int(state["epoch"]), cursor.state)
        self._console.now("going back to the document where the last chunk ended")
        self._held, self._skip = self._piece_again(state["piece_hash"]), cursor.skip_tokens

    def stop_when(self, is_asked: Callable[[], bool]) -> None:
        """A wish to end is heard while data is waited for."""
        self.should_stop = is_asked

    def num_windows(self) -> int | None:
        """How much is to come is not known."""
        return None

    def close(self) -> None:
        self._stream.close()

    # -- accumulation ------------------------------------------------------------------------------------------------

    def _accumulate(self, began_s: float) -> list[Piece]:
        """Pieces that together with what is held make a chunk and the one token after it."""
        settings, number = self.settings, self._num_chunks + 1
        facts = _Filling(number, settings.num_tokens, self._held_tokens(), settings.is_verbose)
        is_told = settings.is_verbose or number == 1 or began_s - self._told_s >= SAY_CHUNK_EVERY_S
        if is_told:
            self._told_s = began_s
            self._console.say(
                f"accumulating chunk {number:,}: {settings.num_tokens:,} tokens before the step", "data"
            )
        # When the chunk is there, the sign of life tells again what the training does with it.
        with self._console.during(f"accumulating chunk {number:,}"):
            pieces = self._gather(facts, began_s)
        self.total_samples += facts.samples
        self.total_skipped += facts.skipped
        seconds = time.monotonic() - began_s
        is_told = is_told or seconds >= SAY_CHUNK_EVERY_S
        self.last = ChunkFacts(number, facts.samples, facts.skipped, settings.num_tokens, seconds, is_told)
        if is_told:
            self._console.say(
                f"chunk {number:,} complete after {seconds:.1f} s: {self.last.text}; training on it", "data"
            )
        return pieces

    def _gather(self, facts: _Filling, began_s: float) -> list[Piece]:
        pieces: list[Piece] = []
        bar: Phase | None = None
        try:
            while not facts.is_full:
                if bar is None and time.monotonic() - began_s >= _PHASE_AFTER_S:
                    bar = _entered(facts.number, self.settings.num_tokens)
                piece = self._next_piece(facts)
                pieces.append(piece)
                if line := facts.add(piece, self._stream.file_name):
                    self._console.say(line, "data")
                if bar is not None:
                    bar.update(facts.tokens)
        finally:
            if bar is not None:
                bar.__exit__(None, None, None)
        return pieces

    def _next_piece(self, facts: _Filling) -> Piece:
        while True:
            waiting = f"; {self._stream.waiting_for}" if self._stream.waiting_for else ""
            where = f", {self._stream.file_name}" if self._stream.file_name else ""
            self._console.now(f"accumulating chunk {facts.number:,}: {facts.text()}{where}{waiting}")
            found = self._stream.take(_LOOK_EVERY_S)
            if isinstance(found, Piece):
                return found
            if isinstance(found, End):
                self.is_exhausted = True
                self._console.say(
                    f"the data ended after {self._num_chunks:,} chunks; {facts.tokens:,} tokens are left over: less "
                    "than a chunk",
                    "data",
                )
                raise StopIteration
            if self.should_stop():
                raise NoMoreWaiting

    def _held_tokens(self) -> int:
        return len(self._held.block.tokens) - self._skip if self._held else 0

    def _cut(self, pieces: list[Piece]) -> NDArray[Any]:
        """The chunk as rows that share one token each; what is left of the last piece is held."""
        settings = self.settings
        wanted = settings.num_tokens + 1
        parts = [self._held.block.tokens[self._skip :]] if self._held else []
        parts += [piece.block.tokens for piece in pieces]
        flat = np.concatenate(parts) if len(parts) != 1 else parts[0]
        num_left = len(flat) - settings.num_tokens
        # A chunk is full with the token after it, and that one is in the last piece: all others are used up.
        self._held = pieces[-1] if pieces else self._held
        assert self._held is not None
        self._skip = len(self._held.block.tokens) - num_left
        rows = np.lib.stride_tricks.sliding_window_view(flat[:wanted], settings.seq_len + 1)
        return np.ascontiguousarray(rows[:: settings.seq_len])

    def _make_stream(self) -> LiveTokens:
        return LiveTokens(self._live, epochs=self.settings.epochs, num_threads=self.settings.num_threads)

    # -- position ----------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self._live.fingerprint, "seq_len": self.settings.seq_len}

    def _piece_again(self, expected: str) -> Piece:
        while (found := self._stream.take(_LOOK_EVERY_S)) is None:
            if self.should_stop():
                raise Stopped("asked to end while the stream was gone back to; nothing new to save")
        if isinstance(found, Piece) and _hash(found) == expected:
            return found
        raise CannotResume(
            f"the document at which this run stopped is not what it was: {self._stream.file_name}",
            hint="put the source back as it was, or start a new run with --new",
        )


class _Filling:
    """Counts of a chunk under way."""

    def __init__(self, number: int, num_tokens: int, held_tokens: int, is_verbose: bool) -> None:
        self.number, self.tokens = number, held_tokens
        self.samples = self.skipped = 0
        self._wanted, self._is_verbose, self._said_samples = num_tokens, is_verbose, 0

    @property
    def is_full(self) -> bool:
        return self.tokens > self._wanted  # one more: the last target

    def add(self, piece: Piece, file_name: str = "") -> str:
        """Returns the line that is due now, if any."""
        before, after = piece.block.before.counts, piece.block.after.counts
        samples, skipped, tokens = after.documents - before.documents, _skipped(after) - _skipped(before), self.tokens
        self.samples += samples
        self.skipped += skipped
        self.tokens += len(piece.block.tokens)
        if self._is_verbose and (samples or skipped):
            what = f"{samples:,} samples" if samples > 1 else f"sample {after.records:,}"
            fate = f"{self.tokens - tokens:,} tokens" if samples else "skipped"
            return f"{what} of {file_name}: {fate}; chunk {self.number:,} at {self.tokens:,} of {self._wanted:,}"
        if self.samples + self.skipped - self._said_samples >= SAY_EVERY_SAMPLES:
            self._said_samples = self.samples + self.skipped
            return f"accumulating chunk {self.number:,}: {self.text()}"
        return ""

    def text(self) -> str:
        skipped = f", {self.skipped:,} skipped" if self.skipped else ""
        return f"{self.samples:,} samples{skipped}, {min(self.tokens, self._wanted):,} of {self._wanted:,} tokens"


def _skipped(counts: Counts) -> int:
    return counts.empty + counts.short + counts.num_damaged


def _hash(piece: Piece) -> str:
    return str(xxhash.xxh3_64_hexdigest(np.ascontiguousarray(piece.block.tokens).tobytes()))


def _entered(number: int, total: int) -> Phase:
    """Only for a chunk that takes its time: the supervisor then shows how far it is."""
    return phase(f"accumulate chunk {number}", total=total, unit="tokens").__enter__()
