"""Which feed suits a loader, told from what it is and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from jackline.errors import UsageError
from jackline.session.feeds.batches import ReplayedBatches, SeekableBatches
from jackline.session.feeds.feed import CountingFeed, Feed, MapFeed, Say, SkippingFeed, StatefulFeed, length_of
from jackline.session.feeds.keyed import KeyedDataset
from jackline.session.feeds.streams import StreamFeed
from jackline.session.settings import Settings

_MASK = (1 << 64) - 1


def choose_feed(loader: Any, settings: Settings, say: Say) -> Feed:
    """The feed for `loader`. Nothing is read from it yet."""
    if loader is None:
        return CountingFeed()
    if isinstance(loader, dict | list | tuple) and any(isinstance(part, DataLoader) for part in _parts(loader)):
        raise UsageError("loader is a collection of loaders", hint="attach one loader; keep the others outside")
    seed = choose_seed(loader, settings)
    make_feed = getattr(loader, "make_feed", None)
    if callable(make_feed):  # jackline.Loader
        feed: Feed = make_feed()
        return feed
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
        return _map_feed(loader, settings, seed)
    if _is_stateful(loader):
        return StatefulFeed(loader)
    if type(loader) is DataLoader and _is_stateful(loader.dataset):
        return StreamFeed(loader, seed=seed)
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"loader is a {type(loader).__name__}, which cannot be iterated")
    return SkippingFeed(loader, seed=seed, say=say)


def choose_seed(loader: Any, settings: Settings) -> int:
    """The person's, else that of the loader's or the sampler's generator, else torch's own."""
    if settings.seed is not None:
        return settings.seed & _MASK
    sampler = getattr(loader, "sampler", None)
    for owner in (sampler, loader):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()


def is_plain_order(loader: Any) -> bool:
    """Exactly a RandomSampler without replacement or a SequentialSampler, in the standard batches or none."""
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    num_samples = length_of(loader.dataset)
    if num_samples is None:
        return False  # only its sampler knows what there is
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return False
    if batch_sampler is not None and batch_sampler.sampler is not sampler:
        return False
    source = getattr(sampler, "data_source", None)
    if source is not loader.dataset:
        return False
    if type(sampler) is SequentialSampler:
        return True
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == num_samples


def seekable_feed(loader: Any, settings: Settings) -> MapFeed | None:
    """For a loader that a framework has wrapped (accelerate's are no plain DataLoaders): its data in our order.

    None for iterable data and for samplers of an unknown kind: those stay as they are.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    for name in ("batch_sampler", "sampler"):  # out of the wrappers of a sampler, down to what draws
        batch_sampler = (
            getattr(batch_sampler, name, None) if not hasattr(batch_sampler, "drop_last") else batch_sampler
        )
    sampler = getattr(batch_sampler, "sampler", sampler)
    is_map = hasattr(loader.dataset, "__len__") and not isinstance(loader.dataset, IterableDataset)
    is_known = isinstance(sampler, SequentialSampler | RandomSampler) and not getattr(sampler, "replacement", False)
    if not is_map or not is_known or not isinstance(getattr(batch_sampler, "batch_size", None), int):
        return None
    return _seekable_feed(loader, batch_sampler, isinstance(sampler, RandomSampler), settings)


def _map_feed(loader: Any, settings: Settings, seed: int) -> MapFeed:
    if settings.seekable and is_plain_order(loader):
        is_shuffled = type(loader.sampler) is RandomSampler
        return _seekable_feed(loader, loader.batch_sampler, is_shuffled, replace(settings, seed=seed))
    is_batched = loader.batch_sampler is not None
    dataset = KeyedDataset(
        loader.dataset, loader.collate_fn, seed=seed, is_keyed=settings.keyed_random, is_batched=is_batched
    )
    sampler = loader.batch_sampler if is_batched else loader.sampler
    return MapFeed(loader, ReplayedBatches(sampler, seed=seed), dataset)


def _seekable_feed(loader: Any, batch_sampler: Any, is_shuffled: bool, settings: Settings) -> MapFeed:
    seed = choose_seed(loader, settings)
    is_batched = batch_sampler is not None
    dataset = KeyedDataset(
        loader.dataset, loader.collate_fn, seed=seed, is_keyed=settings.keyed_random, is_batched=is_batched
    )
    batches = SeekableBatches(
        len(loader.dataset),
        batch_sampler.batch_size if is_batched else None,
        is_shuffled=is_shuffled,
        drop_last=batch_sampler.drop_last if is_batched else False,
        seed=seed,
    )
    return MapFeed(loader, batches, dataset)


def _is_stateful(loader: Any) -> bool:
    pairs = (("state_dict", "load_state_dict"), ("state", "seek"))
    return any(all(callable(getattr(loader, word, None)) for word in pair) for pair in pairs)


def _parts(loader: Any) -> list[Any]:
    return list(loader.values()) if isinstance(loader, dict) else list(loader)
