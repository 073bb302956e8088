"""Tokens of documents in the order of their source, as they arrive: no cache, no eras, no waiting for either.

    live = open_live(spec, Patience(...))
    stream = LiveTokens(live, epochs=1)
    stream.start(epoch=0, at=None)             # or at the state before a piece that was returned earlier
    stream.take(timeout_s=0.2)                 # a Piece, None if none has arrived yet, or an End

Owns the reading thread and how far it may read ahead. For sources that are read once and are too large or too slow to
be tokenised ahead; data that is trained on several times belongs in a cache (builder.py, loader.py). A piece names
the place before it, so reading can resume at any document.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jackline.data.cache.state import ReadState, begin
from jackline.data.sources.bytefile import ByteFile, Patience
from jackline.data.sources.documents import Surroundings, find_text_columns, read_blocks
from jackline.data.sources.hub import pin_hub_url
from jackline.data.sources.walk import Found
from jackline.data.spec import DataSpec
from jackline.data.tokenise.encode import PackedBlock, Packing, packed_blocks, put_if_wanted
from jackline.data.tokenise.tokenizer import Tokenizer, load_tokenizer, tokenizer_identity
from jackline.errors import JacklineError, UsageError
from jackline.units import format_duration

LEAD_PIECES = 32
FIRST_PATIENCE_S = 45.0
_FRESH_S = 1.0  # a waiting reader reports it several times a second
_STILL_S = 5.0


class Piece(NamedTuple):
    """A run of documents (for jsonl a single one): its tokens, and the states of the source before and after it."""

    epoch: int
    block: PackedBlock


class End:
    """All epochs are over."""


@dataclass(frozen=True)
class Live:
    """A source whose first document was read. `spec` has a pinned revision and a known text column."""

    spec: DataSpec
    tokenizer: Tokenizer
    fingerprint: str
    patience: Patience

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def at(self, urls: list[str]) -> Live:
        """The same source with the addresses that a checkpoint recorded."""
        pairs = zip(self.spec.sources, urls, strict=True)
        sources = tuple(replace(source, url=url) for source, url in pairs)
        return replace(self, spec=replace(self.spec, sources=sources))


def open_live(spec: DataSpec, patience: Patience, on_phase: Callable[[str], None]) -> Live:
    """Read up to the first record. It gives up sooner here than later, because a failure before the first record is
    most often a mistake of the user.

    `on_phase` is called with what is done next, or waited for.
    """
    if spec.tokenizer == "train":
        raise UsageError("a stream cannot train its tokenizer", hint="--tokenizer gpt2, bytes, or a tokenizer.json")
    spec = spec.located()
    fingerprint = spec.fingerprint(tokenizer_identity(spec.tokenizer, spec.vocab_size))
    on_phase(f"loading tokenizer {spec.tokenizer}")
    tokenizer = load_tokenizer(spec.tokenizer, eos=spec.eos, use_fast=False).alone()
    urls = [source.url for source in spec.sources]
    on_phase(f"asking for the first document of {', '.join(urls)}")
    pinned = tuple(
        replace(source, url=pin_hub_url(source.url)) if source.url.startswith("hf://") else source
        for source in spec.sources
    )
    impatient = replace(patience, give_up_after_s=min(FIRST_PATIENCE_S, patience.give_up_after_s), on_wait=on_phase)
    spec = find_text_columns(replace(spec, sources=pinned), Surroundings(impatient))
    return Live(spec, tokenizer, fingerprint, patience)


class LiveTokens:
    """One reading thread at a time. `file_name` is the file it reads."""

    def __init__(self, live: Live, *, epochs: int = 1, num_threads: int = 1) -> None:
        self._live, self._epochs, self._num_threads = live, epochs, num_threads
        self._ready: queue.Queue[Piece | End | BaseException] = queue.Queue(maxsize=LEAD_PIECES)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: tuple[float, str] = (float("-inf"), "")
        self._came_s = time.monotonic()
        self.file_name = ""

    def start(self, epoch: int, at: ReadState | None) -> None:
        """Read from `at` on; what was read before is dropped."""
        self.close()
        self._ready, self._stop = queue.Queue(maxsize=LEAD_PIECES), threading.Event()
        self._came_s = time.monotonic()
        work = (epoch, at, self._ready, self._stop)
        self._thread = threading.Thread(target=self._read, args=work, name="jackline-live", daemon=True)
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def waiting_for(self) -> str:
        """What the network code has just reported, else how long nothing has arrived; "" while documents arrive."""
        now_s = time.monotonic()
        told_s, text = self._told
        if now_s - told_s < _FRESH_S:
            return text
        still_s = now_s - self._came_s
        return f"nothing has arrived for {format_duration(still_s)}" if still_s >= _STILL_S else ""

    def take(self, timeout_s: float) -> Piece | End | None:
        """The next piece; None if none arrived in time. Raises the error that stopped the reading."""
        try:
            item = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread. If it is blocked in a stalled read, it ends with the process: it is a daemon and owns
        nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _read(self, epoch: int, at: ReadState | None, ready: queue.Queue[object], stop: threading.Event) -> None:
        last: object = End()
        try:
            while epoch < self._epochs and not stop.is_set():
                if not self._read_epoch(epoch, at, ready, stop):
                    return
                epoch, at = epoch + 1, None
        except BaseException as error:
            last = error
        put_if_wanted(ready, last, stop)

    def _read_epoch(
        self, epoch: int, at: ReadState | None, ready: queue.Queue[object], stop: threading.Event
    ) -> bool:
        """False once no more is wanted."""
        spec = self._live.spec
        patience = replace(self._live.patience, on_wait=self._on_wait)
        around = Surroundings(patience, self._on_open, is_live=True)
        blocks = read_blocks(spec, at or begin(len(spec.sources)), around)
        packed = packed_blocks(blocks, Packing(self._live.tokenizer), max(1, self._num_threads))
        num_tokens = 0
        try:
            for block in packed:
                self._came_s = time.monotonic()
                num_tokens += len(block.tokens)
                if not put_if_wanted(ready, Piece(epoch, block), stop):
                    return False
        finally:
            packed.close()
        if at is None and not num_tokens:
            raise JacklineError(
                f"{spec.sources[0].url} holds no document with text", hint="check the path, the pattern and min_chars"
            )
        return True

    def _on_wait(self, text: str) -> None:
        self._told = (time.monotonic(), text)

    def _on_open(self, index: int, found: Found, file: ByteFile) -> None:
        self.file_name = found.name.rsplit("/", 1)[-1]
