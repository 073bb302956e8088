"""One measurement of the data engine or a peer in a process of its own: prints JSON. Started by bench/data.py.

A process each, because peak memory and the words a tokenizer remembers must not come from the row before.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def texts_of(path: str, max_bytes: int) -> list[str]:
    texts, total = [], 0
    with open(path, encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            total += len(texts[-1].encode())
            if total >= max_bytes:
                break
    return texts


def plain_tokenizer() -> Any:
    from jackline.data.tokenise.tokenizer import _gpt2_json, _tokenizers

    return _tokenizers().Tokenizer.from_str(_gpt2_json())


def timed(act: Any) -> dict[str, Any]:
    cpu, began = time.process_time(), time.perf_counter()
    found = act()
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, **(found or {})}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tokenizers_only(path: str, max_bytes: int) -> dict[str, Any]:
    """`encode_batch_fast` in batches of 64 documents, ids into a numpy array: nothing read, nothing written."""
    import numpy as np

    made, texts = plain_tokenizer(), texts_of(path, max_bytes)

    def run() -> dict[str, Any]:
        num_tokens = 0
        for at in range(0, len(texts), 64):
            found = made.encode_batch_fast(texts[at : at + 64], add_special_tokens=False)
            num_tokens += sum(len(np.array(item.ids, np.uint16)) for item in found)
        return {"tokens": num_tokens}

    return {"bytes": sum(len(text.encode()) for text in texts), **timed(run)}


def gigatoken_only(path: str, max_bytes: int) -> dict[str, Any]:
    import gigatoken
    import numpy as np

    made = gigatoken.Tokenizer.from_json(plain_tokenizer().to_str())
    texts = [text.encode() for text in texts_of(path, max_bytes)]
    made.encode_batch(["warm up the package, not its memory of words"])

    def run() -> dict[str, Any]:
        num_tokens = 0
        for at in range(0, len(texts), 64):
            ids = np.asarray(made.encode_batch(texts[at : at + 64]).layout.content.data)
            num_tokens += len(ids.astype(np.uint16))
        return {"tokens": num_tokens}

    return {"bytes": sum(map(len, texts)), **timed(run), "peak_mb": peak_mb()}


def datasets_map(path: str, max_bytes: int) -> dict[str, Any]:
    """The usual way: `datasets.map(batched=True)` over the same texts, tokens into its own cache."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    texts = texts_of(path, max_bytes)
    made = Tokenizer.from_file(os.environ["TOKENIZER_JSON"])
    data = datasets.Dataset.from_dict({"text": texts})

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        found = made.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [item.ids for item in found]}

    def run() -> dict[str, Any]:
        done = data.map(encode, batched=True, batch_size=64, remove_columns=["text"], load_from_cache_file=False)
        return {"rows": len(done)}

    return {"bytes": sum(len(text.encode()) for text in texts), **timed(run), "peak_mb": peak_mb()}


def write_tokenizer(path: str) -> dict[str, Any]:
    Path(path).write_text(plain_tokenizer().to_str(), encoding="utf-8")
    return {}


def build(source: str, root: str, tokenizer: str, engine: str) -> dict[str, Any]:
    """Ours: read, tokenise, pack, hash, write, sync, seal. The time of loading the tokenizer is not in it."""
    if engine == "tokenizers":
        sys.modules["gigatoken"] = None  # type: ignore[assignment]
    from jackline.data.build.builder import _open_or_create, cache_folder
    from jackline.data.build.fill import Workshop, build
    from jackline.data.progress import Board, Progress
    from jackline.data.sources.identities import FileBook
    from jackline.data.spec import CacheSettings, DataSpec, Source

    spec = DataSpec((Source(source, text_column="text"),), tokenizer=tokenizer)
    settings = CacheSettings(root=Path(root), max_cache_bytes=1 << 40)
    folder = cache_folder(spec, settings)
    seen: list[tuple[float, float]] = []

    def report(progress: Progress) -> None:
        # The kernel's own peak: tables that double for a few milliseconds are missed by looking now and then.
        seen.append((progress.done, peak_mb()))

    board = Board(report)
    cache, made = _open_or_create(folder, settings, board)
    shop = Workshop(cache, made, settings, board, FileBook(folder))
    from jackline.data.progress import ticking

    def run() -> None:
        with ticking(board, every_s=0.2):
            build(shop, for_readers=False)

    found = timed(run)
    early = max((mb for done, mb in seen if done <= 0.25e9), default=0.0)
    return {
        **found,
        "tokens": cache.total_tokens(),
        "engine": cache.meta.engine,
        "note": cache.meta.note,
        "peak_mb": peak_mb(),
        "peak_until_250_mb": early,
    }


def first_batch(source: str, root: str, tokenizer: str, engine: str) -> dict[str, Any]:
    """From nothing to the first batch, as a trainer does it: own process, builder process, first era, loader."""
    from jackline.data.build.supply import open_data
    from jackline.data.loader.loader import Loader, LoaderSettings
    from jackline.data.spec import CacheSettings, DataSpec, Source

    if engine == "tokenizers":
        os.environ["PYTHONPATH"] = f"{Path(__file__).parent / 'without_gigatoken'}:{os.environ.get('PYTHONPATH', '')}"
    began_s = float(os.environ["BEGAN_S"])
    spec = DataSpec((Source(source, text_column="text"),), tokenizer=tokenizer)
    with (
        open_data(spec, CacheSettings(root=Path(root))) as data,
        Loader(data, LoaderSettings(seq_len=1024, batch_size=8)) as loader,
    ):
        next(loader)
        return {"s": time.time() - began_s, "engine": data.cache.meta.engine}


def main() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    name, *words = sys.argv[1:]
    function = globals()[name]
    print(json.dumps(function(*(int(word) if word.isdigit() else word for word in words))))


if __name__ == "__main__":
    main()
