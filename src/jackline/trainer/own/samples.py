"""Samples of a person's own data: batches in a shuffled order that can be seeked, and the validation set.

    samples = Samples(config.train_data(), config.collate, seed=0)
    loader = SampleLoader(samples, Order(batch_size=64, seed=0, num_workers=2))
    batch = next(loader)                      # batch.given: what the recipe's loss gets, on the host
    loader.state(), loader.seek(state)        # epoch and place in it; O(1)

Owns which objects are data, the order of an epoch and the position in it. Every sample comes once in an epoch, so the
last batch may be short. Random augmentation depends on (seed, epoch, sample) alone: session/feeds/keyed.py.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from jackline.data.loader.order import Blocks, Permutation, mix
from jackline.errors import CannotResume, UsageError
from jackline.memory.guard.step_state import seeded
from jackline.session.feeds.keyed import KeyedDataset
from jackline.trainer.sentinels.floor import Floor

Collate = Callable[[Sequence[Any]], Any]
_VALIDATION_SEED = 1  # never the run's own, so that two runs are validated alike
_KINDS = "a tuple or dict of tensors with one row a sample, or a dataset with len() and [index]"


class Columns:
    """Tensors with one row a sample, read many rows at a time."""

    def __init__(self, data: Any, name: str) -> None:
        self._data = _tensors_of(data)
        sizes = {len(part) for part in _parts(self._data)}
        if len(sizes) != 1:
            found = ", ".join(map(str, sorted(sizes)))
            raise UsageError(f"the tensors of {name} have different numbers of rows: {found}", hint=_KINDS)
        self._length = sizes.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        rows = torch.as_tensor(indices, dtype=torch.long)
        return _mapped(self._data, lambda part: part[rows])


class Samples:
    """A person's data, whatever it is. `read` is the same in every process and leaves all generators as they were."""

    def __init__(self, data: Any, collate: Collate, *, name: str, seed: int = 0) -> None:
        is_columns = _is_columns(data)
        dataset = Columns(data, name) if is_columns else _checked(data, name)
        self._length = len(dataset)
        if not self._length:
            raise UsageError(f"{name} has no samples")
        self.keyed = KeyedDataset(
            dataset, _as_it_is if is_columns else collate, seed=seed, is_keyed=True, is_batched=True
        )

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Sequence[int]) -> Any:
        return self.keyed.collate((0, list(indices)))

    def first(self, count: int) -> Any:
        """As many as asked for; repeated where there are fewer."""
        return self.read([index % self._length for index in range(count)])


@dataclass(frozen=True)
class Order:
    """`epochs` is for people alone; 0: not known."""

    batch_size: int
    seed: int
    num_workers: int = 0
    epochs: int = 0


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """`windows` are the indices of its samples in the data."""

    given: Any
    epoch: int
    windows: Sequence[int]


class _Places:
    """(epoch, indices) of each batch from a sample of the epoch on, for the DataLoader."""

    def __init__(self, num_samples: int, order: Order) -> None:
        self._num_samples, self._order = num_samples, order
        self.epoch = self.begin = 0

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        epoch = self.epoch
        blocks = Blocks(Permutation(self._num_samples, mix(self._order.seed, epoch)))
        for begin in range(self.begin, self._num_samples, self._order.batch_size):
            count = min(self._order.batch_size, self._num_samples - begin)
            yield epoch, blocks.take(begin, count).tolist()

    def __len__(self) -> int:
        return -(-(self._num_samples - self.begin) // self._order.batch_size)


class SampleLoader:
    """Batches without end, unless `end_here` was called. State is what was given out."""

    def __init__(self, samples: Samples, order: Order, *, pin_memory: bool = False) -> None:
        self.order, self._samples = order, samples
        self.waited_s = 0.0
        self.is_exhausted = False
        self.steps_per_epoch = -(-len(samples) // order.batch_size)
        self._places = _Places(len(samples), order)
        self._generator = torch.Generator()
        wrapped: Any = samples.keyed
        places: Any = self._places
        self._loader: DataLoader[Any] = DataLoader(
            wrapped,
            batch_sampler=places,
            collate_fn=wrapped.collate,
            generator=self._generator,
            num_workers=order.num_workers,
            pin_memory=pin_memory,
        )
        self._epoch = self._position = 0
        self._open: Iterator[Any] | None = None
        self._indices: Iterator[tuple[int, list[int]]] = iter(())

    def __iter__(self) -> Iterator[SampleBatch]:
        return self

    def __next__(self) -> SampleBatch:
        if self.is_exhausted:
            raise StopIteration
        began_s = time.monotonic()
        if self._open is None:
            self._open_epoch()
        assert self._open is not None
        given, (epoch, indices) = next(self._open), next(self._indices)
        self._position += len(indices)
        if self._position == len(self._samples):
            self._epoch, self._position, self._open = epoch + 1, 0, None
        self.waited_s += time.monotonic() - began_s
        return SampleBatch(given, epoch, indices)

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, and what tells that it is the same data in the same order."""
        return {
            "num_samples": len(self._samples),
            "seed": self.order.seed,
            "epoch": self._epoch,
            "position": self._position,
            "is_exhausted": self.is_exhausted,
        }

    def seek(self, state: dict[str, Any]) -> None:
        for key, now in (("num_samples", len(self._samples)), ("seed", self.order.seed)):
            if state[key] != now:
                raise CannotResume(
                    f"the data of this checkpoint is not the data of this run: {key} was {state[key]}, is {now}",
                    hint="train_data() must return the same samples in every attempt; or start a new run with --new",
                )
        self._epoch, self._position, self._open = int(state["epoch"]), int(state["position"]), None
        self.is_exhausted = bool(state["is_exhausted"])

    def place_text(self) -> str:
        """Of the batch given out last, for people."""
        epoch, position = (self._epoch, self._position) if self._position else (self._epoch - 1, len(self._samples))
        of = f"/{self.order.epochs}" if self.order.epochs else ""
        batch = -(-position // self.order.batch_size)
        return f"(epoch {max(0, epoch) + 1}{of}, batch {batch:,}/{self.steps_per_epoch:,})"

    def samples_until(self, step: int) -> int:
        """In the first `step` batches; the last of an epoch may be short."""
        epochs, batches = divmod(step, self.steps_per_epoch)
        return epochs * len(self._samples) + batches * self.order.batch_size

    def end_here(self) -> None:
        """No further batch: the run is complete after this step, and stays so after a resume."""
        self.is_exhausted = True

    def num_windows(self) -> int:
        return len(self._samples)

    def close(self) -> None:
        self._open = None  # ends its workers

    def _open_epoch(self) -> None:
        self._places.epoch, self._places.begin = self._epoch, self._position
        self._generator.manual_seed(mix(self.order.seed, self._epoch, 1) >> 1)  # workers take their seeds from it
        self._indices = iter(self._places)
        self._open = iter(self._loader)


class Stream:
    """Samples that a generator of a person makes, in its order; a pass of it is an epoch. What is drawn for a sample
    depends on (seed, epoch, number) alone and leaves all generators as they were."""

    def __init__(self, make: Callable[[], Any], collate: Collate, *, seed: int) -> None:
        self._make, self._collate, self.seed = make, collate, seed

    def open(self, epoch: int) -> Iterator[Any]:
        with seeded(mix(self.seed, epoch) >> 1):
            samples = iter(self._make())
        for number in itertools.count():
            with seeded(mix(self.seed, epoch, number) >> 1):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            yield sample

    def gather(self, samples: Iterator[Any], count: int) -> tuple[Any, int]:
        """A batch of the next samples and how many there were; 0 at the end."""
        found = list(itertools.islice(samples, count))
        return (self._collate(found) if found else None), len(found)

    def first(self, count: int) -> Any:
        """As many as asked for; repeated where there are fewer."""
        found = list(itertools.islice(self.open(0), count))
        if not found:
            raise UsageError("train_data() yielded no sample")
        return self._collate([found[index % len(found)] for index in range(count)])


class StreamLoader:
    """Batches of a generator, pass after pass. After a resume it is run again from the beginning of the pass, and the
    samples that were trained on are left out."""

    steps_per_epoch = 0  # not known

    def __init__(self, stream: Stream, order: Order) -> None:
        self._stream, self.order = stream, order
        self.waited_s = 0.0
        self.is_exhausted = False
        self._epoch = self._position = self._num_samples = 0
        self._open: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[SampleBatch]:
        return self

    def __next__(self) -> SampleBatch:
        if self.is_exhausted:
            raise StopIteration
        began_s = time.monotonic()
        if self._open is None:
            self._open = self._stream.open(self._epoch)
            if sum(1 for _ in itertools.islice(self._open, self._position)) < self._position:
                raise CannotResume(
                    f"train_data() yields fewer than the {self._position:,} samples that were trained on",
                    hint="it must yield the same samples in every attempt; or start a new run with --new",
                )
        given, size = self._stream.gather(self._open, self.order.batch_size)
        if not size:
            if not self._position:
                raise UsageError("train_data() yielded no sample")
            self._epoch, self._position, self._open = self._epoch + 1, 0, None
            return next(self)
        begin, self._position = self._position, self._position + size
        self._num_samples += size
        self.waited_s += time.monotonic() - began_s
        return SampleBatch(given, self._epoch, range(begin, begin + size))

    def state(self) -> dict[str, Any]:
        return {
            "seed": self.order.seed,
            "epoch": self._epoch,
            "position": self._position,
            "num_samples": self._num_samples,
            "is_exhausted": self.is_exhausted,
        }

    def seek(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.order.seed:
            raise CannotResume(f"the seed of the data was {state['seed']}, is {self.order.seed}")
        self._epoch, self._position, self._open = int(state["epoch"]), int(state["position"]), None
        self._num_samples, self.is_exhausted = int(state["num_samples"]), bool(state["is_exhausted"])

    def place_text(self) -> str:
        return f"(epoch {self._epoch + 1}, sample {self._position:,})"

    def samples_until(self, step: int) -> int:
        return step * self.order.batch_size

    def end_here(self) -> None:
        """No further batch: the run is complete after this step, and stays so after a resume."""
        self.is_exhausted = True

    def num_windows(self) -> None:
        """Nobody knows before the end."""

    def close(self) -> None:
        self._open = None


class SampleSet:
    """A validation set: the same samples in the same order each time (`validate.evaluate.ValidationSet`)."""

    unit = "samples"
    tokens_each = 1
    why_empty = ""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.num_windows = len(samples)

    def read(self, batch_size: int, count: int, device: torch.device) -> Iterator[tuple[Any, int]]:
        indices = Permutation(self.num_windows, _VALIDATION_SEED).take(0, count).astype(np.int64).tolist()
        for begin in range(0, count, batch_size):
            part = indices[begin : begin + batch_size]
            yield move(self._samples.read(part), device), len(part)

    def floor(self) -> Floor | None:
        """Nothing is known about how low a person's own loss may be."""
        return None


def move(value: Any, device: torch.device) -> Any:
    """Every tensor of a batch on the device; what is no tensor stays as it is."""
    return _mapped(value, lambda part: part.to(device, non_blocking=True))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(part, change) for part in value)
    return value


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else [value]


def _is_columns(data: Any) -> bool:
    """A list is a list of samples, never of columns."""
    return bool(_parts(data)) and all(isinstance(part, Tensor | np.ndarray) and part.ndim for part in _parts(data))


def _tensors_of(data: Any) -> Any:
    def tensor(part: Any) -> Tensor:
        return part if isinstance(part, Tensor) else torch.as_tensor(part)

    if isinstance(data, dict):
        return {key: tensor(part) for key, part in data.items()}
    return tuple(map(tensor, data)) if isinstance(data, tuple) else tensor(data)


def _checked(data: Any, name: str) -> Any:
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{name} returned a DataLoader", hint="return its dataset: batch_size, seed and num_workers are settings"
        )
    if inspect.isgenerator(data):
        raise UsageError(
            f"{name} is a generator; only train_data() may be one", hint=f"return list(...), or {_KINDS}"
        )
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, tuple | dict | str):
        raise UsageError(f"{name} returned {type(data).__name__}, which cannot be trained on", hint=_KINDS)
    return data


def _as_it_is(batch: Any) -> Any:
    return batch
