"""Embeddings in the run's mirror: fetched before anything is encoded, copied out while it is encoded and after.

Owns when; how a shard is copied is data/mirrored.py. Fails open: a mirror that cannot be written is told,
and what it does not have is encoded again on the next machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jackline.recipes.agab.data.mirrored import copy_in, copy_out
from jackline.recipes.agab.data.prepared import AffinitySettings, cache_keys
from jackline.trainer.report.console import Console

COPY_EVERY_S = 60.0
LAST_COPY_S = 600.0


class EmbeddingMirror:
    """`fetch` before the encoding, `begin` with it, `encoded` after it; the last copy continues beside the training,
    in a thread that only a complete run waits for."""

    def __init__(self, place: str, settings: AffinitySettings, console: Console) -> None:
        """`place`: empty for none. What is no folder (gs://, s3://) is told and left."""
        self._folder = Path(place).expanduser() if place and "://" not in place else None
        if place and self._folder is None:
            console.say(f"embeddings are mirrored into folders only, and {place} is none", "data")
        self._root, self._console = settings.cache_dir, console
        self._keys = sorted(set(cache_keys(settings))) if self._folder else []
        self._is_encoded = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="jackline-embeddings")

    def fetch(self) -> None:
        if self._folder is None:
            return
        with self._console.phase("data", f"embeddings that {self._folder} has"):
            fetched = sum(
                self._try(partial(copy_in, self._folder, key, self._root, self._console.say)) for key in self._keys
            )
            self._console.say(f"{fetched} files fetched", "data")

    def begin(self) -> None:
        if self._folder is not None:
            self._thread.start()

    def encoded(self) -> None:
        self._is_encoded.set()

    def wait(self) -> None:
        """For the last copy, but not for a place that hangs."""
        if self._thread.is_alive():
            self._console.say(f"waiting for the last copy of the embeddings to {self._folder}", "data")
            self._thread.join(LAST_COPY_S)

    def _copy(self) -> None:
        assert self._folder is not None
        is_last = False
        while not is_last:
            is_last = self._is_encoded.wait(COPY_EVERY_S)
            copied = sum(
                self._try(partial(copy_out, key, self._folder, self._root, self._console.say)) for key in self._keys
            )
            if copied:
                self._console.say(f"{copied} files of embeddings copied to {self._folder / 'embeddings'}", "data")

    def _try(self, copy: Callable[[], int]) -> int:
        try:
            return copy()
        except OSError as error:
            self._console.say(f"the mirror of the embeddings does not work: {error}", "data")
            return 0
