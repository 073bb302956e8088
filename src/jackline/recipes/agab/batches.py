"""Pairs in a shuffled order that can be seeked, and their features gathered from the cached embeddings.

    loader = PairLoader(data, PairSettings(batch_size=256, seed=42), device)
    batch = next(loader)                        # batch.rows: numbers of pairs, on the device
    loader.state(), loader.seek(state)          # epoch and place in it; O(1)
    features, wanted = pairs.gather(batch.rows)

Owns the order of an epoch and the position in it; has the face of data.loader.Loader. Every pair comes once in an
epoch, the last batch may be short. The order depends on (seed, epoch) alone. Embeddings are data/prepared.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jackline import accelerator
from jackline.data.loader.order import Permutation, mix
from jackline.errors import CannotResume
from jackline.recipes.agab.data.prepared import AffinityData

Rows = NDArray[np.int64]
Tell = Callable[[str], None]

_SHARE_OF_FREE = 0.5  # of the GPU's memory for embeddings; a head needs next to nothing
_COPY_ROWS = 1 << 16
_CHANGED = "the table has changed since this run was started, or the split, or an encoder's weights"
BIN_PKD = 1.0  # width of a bin of the stratified order


@dataclass(frozen=True, slots=True)
class PairBatch:
    """`windows` are the same numbers on the host: they name the batch when it must be looked up."""

    rows: Tensor
    epoch: int
    position: int
    windows: Rows


@dataclass(frozen=True)
class PairSettings:
    batch_size: int
    seed: int
    is_stratified: bool = False
    epochs: int = 0  # 0: not known; for people alone


class PairLoader:
    """An iterator over batches that never ends, unless `end_here` was called. State is what was given out."""

    def __init__(
        self, data: AffinityData, settings: PairSettings, device: torch.device, tell: Tell = lambda text: None
    ) -> None:
        """Of the training pairs; `tell` hears of embeddings that are no longer the same in every bit."""
        rows: Rows = data.parts["train"]
        self.settings, self._data, self._tell = settings, data, tell
        self.waited_s = 0.0  # nothing is waited for: what a step needs is in memory or mapped
        self.is_exhausted = False
        self.steps_per_epoch = -(-len(rows) // settings.batch_size)
        self._rows, self._device = rows, device
        self._bins = _bins_of(data.pkd[rows]) if settings.is_stratified else [np.arange(len(rows))]
        self._epoch = self._position = 0
        self._open_epoch = -1
        self._order: Rows = rows
        self._on_device = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[PairBatch]:
        return self

    def __next__(self) -> PairBatch:
        if self.is_exhausted:
            raise StopIteration
        if self._open_epoch != self._epoch:
            self._open(self._epoch)
        begin, epoch = self._position, self._epoch
        end = min(begin + self.settings.batch_size, len(self._order))
        self._epoch, self._position = (epoch + 1, 0) if end == len(self._order) else (epoch, end)
        return PairBatch(self._on_device[begin:end], epoch, begin, self._order[begin:end])

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, and what verifies that it is the same data in the same order."""
        return {
            **self._identity(),
            "fingerprint": self._data.fingerprint,
            "epoch": self._epoch,
            "position": self._position,
            "is_exhausted": self.is_exhausted,
        }

    def seek(self, state: dict[str, Any]) -> None:
        for key, now in self._identity().items():
            if state[key] != now:
                what = "the pairs are others" if key == "identity" else f"{key} was {state[key]}, is {now}"
                raise CannotResume(
                    f"the data of this checkpoint is not the data of this run: {what}",
                    detail=_CHANGED if key in ("num_pairs", "identity") else (),
                    hint="give the same file, encoders, split and seed, or start a new run with --new",
                )
        if state["fingerprint"] != self._data.fingerprint:
            self._tell(
                "warning: the embeddings were computed anew and differ in some bits; it continues, not bit-exactly"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self.is_exhausted = bool(state["is_exhausted"])

    def place(self) -> dict[str, int]:
        """Of the batch given out last: which epoch, which batch of how many. For people."""
        done = self._epoch * self.steps_per_epoch + -(-self._position // self.settings.batch_size)
        epoch, batch = divmod(max(0, done - 1), self.steps_per_epoch)
        place = {"epoch": epoch + 1, "batch": batch + 1 if done else 0, "num_batches": self.steps_per_epoch}
        return {**place, "epochs": self.settings.epochs} if self.settings.epochs else place

    def pairs_until(self, step: int) -> int:
        """In the first `step` batches; the last of an epoch may be short."""
        epochs, batches = divmod(step, self.steps_per_epoch)
        return epochs * len(self._rows) + batches * self.settings.batch_size

    def end_here(self) -> None:
        """No further batch: the run is complete after this step, and stays so after a resume."""
        self.is_exhausted = True

    def num_windows(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        """Nothing is open."""

    def _identity(self) -> dict[str, Any]:
        settings = self.settings
        return {  # what a person can make something of comes first
            "num_pairs": len(self._rows),
            "batch_size": settings.batch_size,
            "seed": settings.seed,
            "is_stratified": settings.is_stratified,
            "identity": self._data.identity,
        }

    def _open(self, epoch: int) -> None:
        """The whole order at once: 20 ns a pair, against a step's milliseconds."""
        self._open_epoch = epoch
        shuffled = [
            self._rows[places[Permutation(len(places), mix(self.settings.seed, epoch, number)).take(0, len(places))]]
            for number, places in enumerate(self._bins)
        ]
        self._order = shuffled[0] if len(shuffled) == 1 else _spread(shuffled)
        self._on_device = torch.from_numpy(self._order).to(self._device)


def _bins_of(pkd: NDArray[np.float32]) -> list[Rows]:
    """Places by pKd, in bins of one unit."""
    number = np.floor(pkd / BIN_PKD).astype(np.int64)
    return [np.flatnonzero(number == one) for one in np.unique(number)]


def _spread(parts: list[Rows]) -> Rows:
    """Merged so that each part is spread evenly: every stretch has the same mixture, to within one of each."""
    at = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    merged: Rows = np.concatenate(parts)[np.argsort(at, kind="stable")]
    return merged


class Pairs:
    """All pairs with their embeddings: on the device when they fit, else mapped from the cache and gathered there."""

    def __init__(self, data: AffinityData, device: torch.device, *, is_resident: bool | None = None) -> None:
        """`is_resident`: None decides by the GPU's free memory."""
        self.data, self.device = data, device
        self.num_inputs = int(data.antibody.shape[1] + data.antigen.shape[1])
        self.is_resident = fits_on(data, device) if is_resident is None else is_resident
        if self.is_resident:
            self._antibody, self._antigen = _on_device(data.antibody, device), _on_device(data.antigen, device)
            self._antibody_row = torch.from_numpy(np.array(data.antibody_row, np.int64)).to(device)
            self._antigen_row = torch.from_numpy(np.array(data.antigen_row, np.int64)).to(device)
            self._pkd = torch.from_numpy(np.array(data.pkd, np.float32)).to(device)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features [n, inputs] and pKd [n] of these pairs, float32 on the device."""
        if self.is_resident:
            antibody, antigen = self._antibody[self._antibody_row[rows]], self._antigen[self._antigen_row[rows]]
            return torch.cat((antibody, antigen), dim=1).float(), self._pkd[rows]
        data, chosen = self.data, rows.cpu().numpy()
        width = data.antibody.shape[1]
        made = np.empty((len(chosen), self.num_inputs), np.float32)
        made[:, :width] = data.antibody[data.antibody_row[chosen]]
        made[:, width:] = data.antigen[data.antigen_row[chosen]]
        wanted = np.asarray(data.pkd[chosen], np.float32)
        return torch.from_numpy(made).to(self.device), torch.from_numpy(wanted).to(self.device)


def fits_on(data: AffinityData, device: torch.device) -> bool:
    if not accelerator.is_gpu(device):
        return False  # a map of the page cache is memory enough
    needed = data.antibody.nbytes + data.antigen.nbytes
    return needed < _SHARE_OF_FREE * accelerator.free_bytes(device)


def _on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """In pieces: a whole copy in host memory may be more than there is."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    made = torch.empty(array.shape, dtype=dtype, device=device)
    for begin in range(0, len(array), _COPY_ROWS):
        part = np.array(array[begin : begin + _COPY_ROWS])
        made[begin : begin + len(part)].copy_(torch.from_numpy(part))
    return made
