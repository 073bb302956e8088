"""Tokenizers with one interface: bytes in, one flat array of ids and the length of each text out.

Owns: `gpt2`, any `tokenizer.json` (a file, a folder, a hub name), `bytes`, and a BPE trained on the corpus; the
faster engine (gigatoken), used only after its ids were checked against those of `tokenizers`; the token between
documents; ids within the vocabulary. Text never becomes a special token, whatever it contains. Does not own packing
(encode.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from jackline.data.tokenise import gpt2_files
from jackline.errors import UsageError
from jackline.extras import install_line
from jackline.machine.reach import hub_trouble, no_network

BYTES_EOS = 256
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]", "<end>")
TRAIN_SAMPLE_BYTES = 8 << 20
# What tokenizer engines may disagree on: spaces at ends, contractions, digits, scripts, joiners, surrogate pairs,
# Unicode normal forms, control characters, and text that looks like a special token.
SELF_CHECK_TEXTS = (
    "Hello world", " leading", "trailing ", "two  spaces", "\n\n\nlines\r\n\r\n", "\ttabs\t\t x",
    "don't WE'LL it's I'D", "3.14159 1,000,000 ²³", "naïve café cafe\u0301 ﬁ", "日本語のテキスト", "한국어",
    "العربية עברית", "हिन्दी ไทย", "👩\u200d👩\u200d👧 🇯🇵 👍🏽", "\u00a0nbsp\u2003em\u3000wide", "a\u200bb\ufeffc",
    "\x00\x01\x7f\x85", "<|endoftext|> </s> <s>", "_under_score__ CamelCase x=1;y+=2", "'" * 70, "a" * 300,
    "https://example.org/?q=1&r=%20#frag", "\U0010ffff\ue000", "",
)  # fmt: skip


class NoTokenizer(UsageError):
    """The tokenizer that was asked for is not available; no fault of the data."""


class Encoded(NamedTuple):
    """The ids of several texts, concatenated, and the number of ids of each text."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


class Engine(Protocol):
    """Turns texts into ids."""

    name: str

    def encode(self, texts: list[bytes]) -> Encoded: ...


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer ready for use. `eos_id` is None if there is no token between documents."""

    engine: Engine
    reference: Engine
    hash: str
    vocab_size: int
    eos_id: int | None
    json: str | None  # the tokenizer.json it can be rebuilt from
    note: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    def decode(self, ids: NDArray[Any]) -> str:
        if self.json is None:
            return bytes(ids[ids < BYTES_EOS].astype(np.uint8)).decode("utf-8", "replace")
        text: str = _tokenizers().Tokenizer.from_str(self.json).decode(ids.tolist(), skip_special_tokens=False)
        return text

    def checked_on(self, texts: list[bytes]) -> Tokenizer:
        """This tokenizer, with the plain engine if the fast one gives other ids for these texts."""
        if self.engine is self.reference or _agree(self.engine, self.reference, texts):
            return self
        note = f"{self.engine.name} gave other ids than tokenizers on this corpus, so tokenizers is used"
        return replace(self, engine=self.reference, note=note)

    def alone(self) -> Tokenizer:
        """The tokenizer without the engine it was checked against: 25 MB that are no longer needed."""
        return replace(self, reference=self.engine)


def engine_and_version(tokenizer: Tokenizer) -> str:
    """For example 'tokenizers 0.23.3'. It is recorded, because another version may give other ids."""
    name = tokenizer.engine.name
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name


def tokenizer_identity(name: str, vocab_size: int) -> str:
    """What identifies the tokenizer in a fingerprint, without loading it."""
    if name == "bytes":
        return "bytes:257"
    if name == "train":
        return f"train:{vocab_size}:{TRAIN_SAMPLE_BYTES}"
    if name == "gpt2":
        return gpt2_files.IDENTITY
    return f"json:{xxhash.xxh3_128_hexdigest(_read_json(name).encode())}"


def load_tokenizer(name: str, *, eos: str = "auto", use_fast: bool = True) -> Tokenizer:
    """`name` is `gpt2`, `bytes`, or the location of a tokenizer.json. A trained tokenizer is loaded from the file it
    was saved to."""
    if name == "bytes":
        if eos not in ("auto", "none"):
            raise UsageError(
                f"the tokenizer has no token '{eos}'", hint="the bytes tokenizer knows eos=auto and eos=none"
            )
        engine = ByteEngine()
        return Tokenizer(engine, engine, "bytes:257", 257, None if eos == "none" else BYTES_EOS, None)
    text = _gpt2_json() if name == "gpt2" else _read_json(name)
    return from_json(text, eos=eos, use_fast=use_fast)


def from_json(text: str, *, eos: str = "auto", use_fast: bool = True) -> Tokenizer:
    library = _tokenizers()
    try:
        plain = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"this tokenizer.json cannot be read: {error}") from error
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    vocab_size = max(plain.get_vocab(with_added_tokens=True).values()) + 1
    reference = TokenizersEngine(plain)
    engine, note = _fast_engine(text, reference) if use_fast else (None, "")
    found_hash = str(xxhash.xxh3_128_hexdigest(text.encode()))
    eos_id = _eos_id(plain, eos)
    return Tokenizer(engine or reference, reference, found_hash, vocab_size, eos_id, text, note)


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> str:
    """A byte-level BPE trained on the first few MiB of `texts`, as tokenizer.json; a few seconds on two cores."""
    library = _tokenizers()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise UsageError(f"vocab_size must be above {len(alphabet)} for a byte-level BPE, not {vocab_size}")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    made.train_from_iterator(_sample(texts), trainer)
    return str(made.to_str())


class ByteEngine:
    """UTF-8 bytes as ids."""

    name = "bytes"

    def encode(self, texts: list[bytes]) -> Encoded:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return Encoded(np.frombuffer(b"".join(texts), np.uint8), lengths)


class TokenizersEngine:
    """The reference: the `tokenizers` package, which uses all cores for the texts of one call."""

    name = "tokenizers"

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def encode(self, texts: list[bytes]) -> Encoded:
        found = self._plain.encode_batch_fast([text.decode("utf-8") for text in texts], add_special_tokens=False)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        # One iterator over all lists: 70 ns a token, against 100 for an array per text.
        ids = np.fromiter(chain.from_iterable(item.ids for item in found), np.uint32, int(lengths.sum()))
        return Encoded(ids, lengths)


class GigatokenEngine:
    """The same ids about twenty times faster, where the package is installed.

    It caches every word it has seen and never evicts one: 10 MB for each MB of text without repeated words, 5 GB
    after 400 MB (measured, 0.10). So it is created again whenever the process has grown by its allowance.
    """

    name = "gigatoken"
    ALLOWANCE_BYTES = 64 << 20
    WARM_AFTER_BYTES = 8 << 20

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = make()
        self._turn = threading.Condition()
        self._num_inside = 0
        self._allowance_bytes = self.ALLOWANCE_BYTES
        self._num_bytes = 0
        self._is_warm = False
        self._base_bytes: int | None = None  # least resident memory, after a few MiB of text (all buffers in use)
        self._full_bytes: int | None = None  # resident memory when the engine was last dropped

    def encode(self, texts: list[bytes]) -> Encoded:
        with self._turn:
            self._turn.wait_for(lambda: self._made is not None)
            self._num_inside += 1
        try:
            layout = self._made.encode_batch(texts, parallel=True).layout
            offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
        finally:
            with self._turn:
                self._num_inside -= 1
                self._turn.notify_all()
        self._forget_when_grown(sum(map(len, texts)))
        return Encoded(ids[offsets[0] : offsets[-1]], np.diff(offsets))

    def _forget_when_grown(self, num_bytes: int) -> None:
        with self._turn:
            self._num_bytes += num_bytes
            if self._num_bytes < self.WARM_AFTER_BYTES or self._made is None:
                return
            now = _resident_bytes()
            if not self._is_warm:
                self._is_warm = True
                # The minimum over all engines, not the value of this one: a rising base would raise the peak with it.
                self._base_bytes = now if self._base_bytes is None else min(now, self._base_bytes)
                self._judge_the_last_time(now)
            if self._base_bytes is None or now - self._base_bytes < self._allowance_bytes:
                return
            # Dropped before it is created again: both at once would be the peak that this avoids.
            self._made, self._num_bytes, self._is_warm, self._full_bytes = None, 0, False, now
            self._turn.wait_for(lambda: self._num_inside == 0)
            give_memory_back()
            self._made = self._make()
            self._turn.notify_all()

    def _judge_the_last_time(self, now: int) -> None:
        """If dropping the engine freed almost nothing, something else has grown: allow more, so that the engine is
        not dropped again and again.

        This is decided after the new engine has worked for a while: creating it takes 60 MB that are freed a second
        later.
        """
        if self._full_bytes is None:
            return
        is_fruitless = self._full_bytes - now < self.ALLOWANCE_BYTES // 4
        self._allowance_bytes = 2 * self.ALLOWANCE_BYTES if is_fruitless else self.ALLOWANCE_BYTES


def _fast_engine(text: str, reference: Engine) -> tuple[Engine | None, str]:
    try:
        import gigatoken
    except ImportError:
        return None, ""
    try:
        plain_json = _without_special_tokens(text)
        engine = GigatokenEngine(lambda: gigatoken.Tokenizer.from_json(plain_json))
        if _agree(engine, reference, [sample.encode() for sample in SELF_CHECK_TEXTS]):
            return engine, ""
        return None, "gigatoken gave other ids than tokenizers in the self-check, so tokenizers is used"
    except Exception as error:  # this young package is only an optimisation and must never stop a run
        return None, f"gigatoken cannot be used ({type(error).__name__}: {error}), so tokenizers is used"


def give_memory_back() -> None:
    """Return freed memory to the system at once; glibc would keep it for later."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl does not have it and does not need it
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * 4096


def _agree(one: Engine, other: Engine, texts: list[bytes]) -> bool:
    a, b = one.encode(texts), other.encode(texts)
    return bool(np.array_equal(a.lengths, b.lengths) and np.array_equal(a.ids, b.ids))


def _without_special_tokens(text: str) -> str:
    """Special tokens are never matched in text (`encode_special_tokens`), so the fast engine must not know them."""
    value = json.loads(text)
    value["added_tokens"] = [token for token in value.get("added_tokens") or [] if not token.get("special")]
    value["post_processor"] = value["truncation"] = value["padding"] = None
    return json.dumps(value, ensure_ascii=False)


def _eos_id(plain: Any, eos: str) -> int | None:
    if eos == "none":
        return None
    for name in EOS_NAMES if eos == "auto" else (eos,):
        found: int | None = plain.token_to_id(name)
        if found is not None:
            return found
    what = "none of the usual end-of-document tokens" if eos == "auto" else f"no token '{eos}'"
    raise UsageError(f"the tokenizer has {what}", hint="name one of its tokens: eos=TOKEN, or eos=none for no border")


def _sample(texts: Iterable[bytes]) -> Iterable[str]:
    left = TRAIN_SAMPLE_BYTES
    for text in texts:
        if left <= 0:
            return
        yield text[:left].decode("utf-8", "ignore")
        left -= len(text)


def _gpt2_json(pair: tuple[Path, Path] | None = None) -> str:
    library = _tokenizers()
    vocab, merges = pair or gpt2_files.find_gpt2_files()
    made = library.Tokenizer(library.models.BPE.from_file(str(vocab), str(merges)))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    return str(made.to_str())


def _read_json(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        pair = gpt2_files.files_in(path)
        if pair is not None and not (path / "tokenizer.json").is_file():
            return _gpt2_json(gpt2_files.checked(pair))
        path = path / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if name.count("/") == 1 and not name.endswith(".json"):
        return _hub_json(name)
    raise NoTokenizer(
        f"there is no tokenizer '{name}'", hint="write gpt2, bytes, train, a tokenizer.json, or OWNER/NAME on the hub"
    )


def _hub_json(name: str) -> str:
    trouble = None
    try:
        import huggingface_hub

        # Without a network its client would try for half a minute; a copy in its cache is as good.
        trouble = hub_trouble()
        path = huggingface_hub.hf_hub_download(name, "tokenizer.json", local_files_only=trouble is not None)
        return Path(path).read_text(encoding="utf-8")
    except Exception as error:  # the hub's client has its own tree of errors, different in every version
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = no_network(trouble) if trouble else first
        hint = "check its name; or a tokenizer that needs no network: gpt2, bytes, train, or a tokenizer.json"
        raise NoTokenizer(f"cannot get the tokenizer '{name}' from the hub: {why}", hint=hint) from error


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            "this tokenizer needs the package tokenizers", hint=f"{install_line('train')}, or --tokenizer bytes"
        ) from error
    return tokenizers
