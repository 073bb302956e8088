"""Embeddings in the run's mirror: fetched before anything is encoded, copied out while it is encoded and after.

Owns when; how a shard is copied is data.affinity.mirrored's. Fails open: a mirror that cannot be written is told,
and what it does not have is encoded again on the next machine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jackline.data.affinity.mirrored import copy_in, copy_out
from jackline.data.affinity.prepared import AffinitySettings, cache_keys
from jackline.trainer.voice import Voice

COPY_EVERY_S = 60.0


@contextlib.contextmanager
def mirrored_embeddings(place: str, settings: AffinitySettings, voice: Voice) -> Iterator[None]:
    """Around the encoding. The last copy goes on beside the training, in a thread that nobody waits for."""
    mirror = mirror_folder(place)
    if mirror is None:
        if place:
            voice.say(f"embeddings are mirrored into folders only, and {place} is none", "data")
        yield
        return
    keys = cache_keys(settings)
    with voice.phase("data", f"embeddings that {mirror} has"):
        fetched = sum(_try(partial(copy_in, mirror, key, settings.cache_dir, voice.say), voice) for key in set(keys))
        voice.say(f"{fetched} files fetched", "data")
    is_encoded = threading.Event()
    copier = threading.Thread(
        target=_copy_until, args=(is_encoded, keys, mirror, settings.cache_dir, voice), daemon=True, name="mirror"
    )
    copier.start()
    try:
        yield
    finally:
        is_encoded.set()


def mirror_folder(mirror: str) -> Path | None:
    """None for none, and for a place that is no folder (gs://, s3://)."""
    return Path(mirror).expanduser() if mirror and "://" not in mirror else None


def _copy_until(
    is_encoded: threading.Event, keys: tuple[str, str], mirror: Path, root: Path | None, voice: Voice
) -> None:
    is_last = False
    while not is_last:
        is_last = is_encoded.wait(COPY_EVERY_S)
        copied = sum(_try(partial(copy_out, key, mirror, root, voice.say), voice) for key in set(keys))
        if copied:
            voice.say(f"{copied} files of embeddings copied to {mirror / 'embeddings'}", "data")


def _try(copy: Callable[[], int], voice: Voice) -> int:
    try:
        return copy()
    except OSError as error:
        voice.say(f"the mirror of the embeddings does not work: {error}", "data")
        return 0
