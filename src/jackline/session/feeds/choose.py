"""Which feed suits a loader, decided only from the loader itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from jackline.errors import UsageError
from jackline.session.feeds.batches import OnDifference, ReplayedBatches, refuse_difference
from jackline.session.feeds.feed import CountingFeed, Feed, MapFeed, Say, StatefulFeed, length_of
from jackline.session.feeds.keyed import KeyedDataset
from jackline.session.feeds.seekable import SeekableBatches
from jackline.session.feeds.skipping import SkippingFeed
from jackline.session.feeds.streams import StreamFeed
from jackline.session.metrics.reporting import say as say_line
from jackline.session.settings import Settings

_MASK = (1 << 64) - 1


_WHOLE_BATCHES = "gives_whole_batches"


def whole_batches(loader: Any) -> Any:
    """Mark a loader that gives every rank the whole batch; whoever uses it takes the rank's own rows."""
    setattr(loader, _WHOLE_BATCHES, True)
    return loader


def choose_feed(loader: Any, settings: Settings, say: Say, ranks: Any = None, *, is_per_rank: bool = False) -> Feed:
    """The feed for `loader`. Nothing is read from it yet. Of several ranks each gets its share of every batch.

    `is_per_rank`: the batch size is that of one rank, as frameworks take it.
    """
    feed = _choose(loader, settings, say) if ranks is None else _shared(loader, settings, ranks, is_per_rank)
    feed_settings: Any = feed
    if hasattr(feed, "on_difference"):
        feed_settings.on_difference, feed_settings.say = judge_difference(settings, say), say
    if isinstance(feed, MapFeed) and isinstance(feed.batches, ReplayedBatches):
        feed.batches.on_difference = judge_difference(settings, say)
    return feed


def judge_difference(settings: Settings, say: Say) -> OnDifference:
    """What happens when the data of a resumed run are not those of before: on_change's verdict for 'data'."""
    verdict = str(settings.verdicts()["data"])
    if verdict == "refuse":
        return refuse_difference
    return (lambda text: say(f"{text}; resuming all the same")) if verdict == "warn" else lambda _: None


def _choose(loader: Any, settings: Settings, say: Say) -> Feed:
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
        return _map_feed(loader, settings, seed, loader.sampler)
    if _is_stateful(loader):
        return StatefulFeed(loader)
    if type(loader) is DataLoader and _is_stateful(loader.dataset):
        return StreamFeed(loader, seed=seed)
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"loader is a {type(loader).__name__}, which cannot be iterated")
    return SkippingFeed(loader, seed=seed, say=say)


def _shared(loader: Any, settings: Settings, ranks: Any, is_per_rank: bool) -> Feed:
    """The position in the run decides which samples a batch has, not the rank: with any number of ranks the batches
    are the same. A plain loader describes the batch of all ranks; with torch's DistributedSampler, as in torch, the
    batch of one rank."""
    if loader is None:
        return CountingFeed()
    if getattr(loader, _WHOLE_BATCHES, False):
        return _choose(loader, settings, lambda text: None)
    own = loader.make_feed() if callable(getattr(loader, "make_feed", None)) else None
    if isinstance(own, MapFeed) and isinstance(own.batches, SeekableBatches) and own.batches.batch_size is not None:
        is_per_rank = getattr(loader, "is_per_rank", is_per_rank)  # of a loader that Accelerate has prepared
        own.batches.seed = _common_seed(own.batches.seed, ranks)
        own.batches.divide(ranks.rank, ranks.size, is_per_rank=is_per_rank)  # jackline.Loader
        return own
    sampler: Any = getattr(loader, "sampler", None)
    is_divided = type(sampler) is DistributedSampler and sampler.dataset is loader.dataset
    is_divided = is_divided and type(loader.batch_sampler) is BatchSampler
    is_map = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    is_plain = is_map and is_plain_order(loader.dataset, loader.batch_sampler, sampler)
    if not is_map or not (is_plain or is_divided) or loader.batch_sampler is None:
        raise UsageError(
            f"{type(loader).__name__} cannot be divided among {ranks.size} ranks by Jackline",
            hint="a DataLoader with batch_size= over map-style data; or attach(loader=None): `run.steps()` gives "
            "the number of the batch and you read your rank's samples yourself",
        )
    seed = sampler.seed if is_divided and settings.seed is None else choose_seed(loader, settings)
    is_shuffled = sampler.shuffle if is_divided else _is_shuffle(sampler)
    feed = _seekable_feed(loader, settings, _common_seed(seed, ranks), is_shuffled=is_shuffled)
    assert isinstance(feed.batches, SeekableBatches)
    feed.batches.divide(ranks.rank, ranks.size, is_per_rank=is_divided or is_per_rank)
    return feed


def _common_seed(seed: int, ranks: Any) -> int:
    """Rank 0's: many scripts seed each rank differently, for dropout, and the ranks divide one order of the data."""
    return int(ranks.from_first(str(seed)))


def choose_seed(loader: Any, settings: Settings, sampler: Any = None) -> int:
    """The user's seed, else that of the loader's or the sampler's generator, else torch's own."""
    if settings.seed is not None:
        return settings.seed & _MASK
    sampler = sampler or getattr(loader, "sampler", None)
    for owner in (sampler, loader):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()


def is_plain_order(dataset: Any, batch_sampler: Any, sampler: Any) -> bool:
    """Whether this is torch's own sampler over all of `dataset`, each sample once, in standard batches or none.

    Only this may be replaced by our order: another class, another source or another number of samples is a user's
    decision about what to train on.
    """
    num_samples = length_of(dataset)
    if num_samples is None:
        return False  # only its sampler knows which samples there are
    if batch_sampler is not None and (
        type(batch_sampler) is not BatchSampler or batch_sampler.sampler is not sampler
    ):
        return False
    if getattr(sampler, "data_source", None) is not dataset:
        return False
    if type(sampler) is SequentialSampler:
        return True
    return _is_shuffle(sampler) and not sampler.replacement and sampler.num_samples == num_samples


def _is_shuffle(sampler: Any) -> bool:
    """Whether it is torch's own shuffle, or accelerate's replacement: the same with a seed for each epoch."""
    kind = type(sampler)
    return kind is RandomSampler or (kind.__module__, kind.__name__) == (
        "accelerate.data_loader",
        "SeedableRandomSampler",
    )


def divide_prepared(loader: Any, settings: Settings, ranks: Any) -> MapFeed:
    """This rank's feed for a loader that accelerate has divided among several ranks."""
    feed = feed_of_prepared(loader, settings) if _is_divided_by_accelerate(loader) else None
    if feed is None or not isinstance(feed.batches, SeekableBatches):
        raise UsageError(
            f"{type(loader).__name__} of {type(loader.dataset).__name__} cannot be divided among {ranks.size} ranks",
            hint="a DataLoader over map-style data with batch_size=, shuffle= and no sampler of its own; without "
            "dispatch_batches",
        )
    feed.batches.divide(ranks.rank, ranks.size, is_per_rank=not loader.batch_sampler.split_batches)
    return feed


def _is_divided_by_accelerate(loader: Any) -> bool:
    kind = type(loader.batch_sampler)
    return (kind.__module__, kind.__name__) == ("accelerate.data_loader", "BatchSamplerShard")


def feed_of_prepared(loader: Any, settings: Settings) -> MapFeed | None:
    """The feed for a loader that a framework has wrapped (accelerate's are no plain DataLoaders).

    None for iterable data. A plain order is replaced by ours; the indices of any other sampler are replayed. Of a
    loader for one of several ranks it is the feed of all ranks together.
    """
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__"):
        return None
    # A wrapped loader was built with a batch sampler only; the `sampler` it shows is not used.
    batch_sampler = loader.batch_sampler
    if _is_divided_by_accelerate(loader):
        batch_sampler = batch_sampler.batch_sampler
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    seed = choose_seed(loader, settings, sampler)
    if settings.seekable and is_plain_order(loader.dataset, batch_sampler, sampler):
        return _seekable_feed(loader, settings, seed, is_shuffled=_is_shuffle(sampler))
    feed = _map_feed(loader, settings, seed, sampler)
    if isinstance(feed.batches, ReplayedBatches):
        feed.batches.on_difference = judge_difference(settings, say_line)
    return feed


def _map_feed(loader: Any, settings: Settings, seed: int, sampler: Any) -> MapFeed:
    if settings.seekable and is_plain_order(loader.dataset, loader.batch_sampler, sampler):
        return _seekable_feed(loader, settings, seed, is_shuffled=_is_shuffle(sampler))
    is_batched = loader.batch_sampler is not None
    dataset = KeyedDataset(
        loader.dataset, loader.collate_fn, seed=seed, is_keyed=settings.keyed_random, is_batched=is_batched
    )
    source = loader.batch_sampler if is_batched else sampler
    return MapFeed(loader, ReplayedBatches(source, seed=seed, data=loader.dataset), dataset)


def _seekable_feed(loader: Any, settings: Settings, seed: int, *, is_shuffled: bool) -> MapFeed:
    batch_sampler = loader.batch_sampler
    is_batched = batch_sampler is not None
    dataset = KeyedDataset(
        loader.dataset, loader.collate_fn, seed=seed, is_keyed=settings.keyed_random, is_batched=is_batched
    )
    batches = SeekableBatches(
        loader.dataset,
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
