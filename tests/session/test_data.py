"""Whatever the data come from, a killed run sees the same samples with the same augmentation as one that was not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from jackline.session.feeds.choose import choose_feed
from jackline.session.feeds.feed import MapFeed
from jackline.session.settings import Settings
from tests.session.nursery import Nursery

LOOP = Path(__file__).with_name("data_loop.py")
STEPS = 25  # nearly three epochs of nine batches
MAP_STYLE = [
    "shuffled", "droplast", "sequential", "persistent", "unbatched", "together", "collate", "own",
    "weighted", "replacement", "subset", "distributed", "buckets", "restless", "batches",
    "noise-none", "noise-torch", "noise-numpy", "noise-python", "noise-all", "noise-own", "noise-late",
]  # fmt: skip
# Told apart by nothing that another mode does not have: noise-all draws from all three generators, and each of these
# samplers is in tests/session/test_samplers.py too.
ALIKE = (
    "droplast",
    "sequential",
    "replacement",
    "subset",
    "noise-none",
    "noise-torch",
    "noise-numpy",
    "noise-python",
    "distributed",
    "batches",
)
STREAMS = ["stream", "blind", "self", "list"]


def read_seen(folder: Path) -> dict[int, tuple[list[float], list[str]]]:
    """What each step saw; a step that was repeated must have seen the same."""
    found: dict[int, tuple[list[float], list[str]]] = {}
    for line in (folder / "seen.txt").read_text().splitlines():
        record = json.loads(line)
        saw = (record["ids"], record["noise"])
        assert found.setdefault(record["step"], saw) == saw, f"step {record['step']} was repeated with other data"
    return found


def last_line(output: str) -> str:
    line = [line for line in output.splitlines() if line.startswith("weights")][-1]
    assert "nan" not in line
    return line


def run_whole(nursery: Nursery, mode: str, workers: int, folder: Path) -> tuple[dict, str]:
    folder.mkdir()
    ended = nursery.run(LOOP, [mode, str(STEPS), "--workers", str(workers), "--name", "whole"], folder)
    assert ended.code == 0, ended.output
    return read_seen(folder), last_line(ended.output)


def run_killed(nursery: Nursery, mode: str, workers: list[int], folder: Path) -> tuple[dict, str, str]:
    """Killed at steps 4 and 17; each attempt with another number of workers."""
    for count, kill_at in zip(workers, ["4", "17", ""], strict=True):
        ended = nursery.run(
            LOOP, [mode, str(STEPS), "--workers", str(count), "--name", "killed"], folder, {"KILL_AT": kill_at}
        )
        assert ended.code == (-9 if kill_at else 0), ended.output
    return read_seen(folder), last_line(ended.output), ended.output


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if mode in ALIKE else ()) for mode in MAP_STYLE]
)
def test_map_style_data_go_on_with_any_number_of_workers(mode: str, nursery: Nursery, tmp_path: Path) -> None:
    wanted, weights = run_whole(nursery, mode, 0, tmp_path / "whole")
    found, found_weights, output = run_killed(nursery, mode, [2, 0, 1], tmp_path)
    assert found == wanted
    assert found_weights == weights
    assert "is not bit-exact" not in output
    if mode in ("shuffled", "noise-all", "weighted"):
        check_that_epochs_differ(mode, wanted)


def test_a_stream_saved_with_its_epochs_last_ragged_batch_does_not_begin_it_again() -> None:
    """Such a dataset says "at the beginning" as soon as it has ended, which is within that batch."""
    from torch.utils.data import DataLoader, IterableDataset

    from jackline.session.feeds.feed import END
    from jackline.session.feeds.streams import StreamFeed

    class Stream(IterableDataset):
        position = 0

        def __iter__(self):
            while self.position < 20:
                self.position += 1
                yield torch.tensor([float(self.position), torch.rand(()).item()])
            self.position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    first = StreamFeed(DataLoader(Stream(), batch_size=8), seed=3)
    first.open(0, 0)
    batches = [first.take() for _ in range(3)]
    assert len(batches[-1]) == 4
    second = StreamFeed(DataLoader(Stream(), batch_size=8), seed=3)
    second.restore(json.loads(json.dumps(first.state())))
    second.open(0, len(batches))
    assert second.take() is END
    first.open(1, 0)
    second.open(1, 0)
    assert torch.equal(first.take(), second.take())


@pytest.mark.parametrize("mode", STREAMS)
def test_other_data_go_on_without_workers(mode: str, nursery: Nursery, tmp_path: Path) -> None:
    wanted, weights = run_whole(nursery, mode, 0, tmp_path / "whole")
    found, found_weights, output = run_killed(nursery, mode, [0, 0, 0], tmp_path)
    assert found == wanted
    assert found_weights == weights
    is_read_over = re.search(r"the data cannot be positioned: skipping \d batches, about [\d.]+ s\n", output)
    assert bool(is_read_over) == (mode in ("blind", "list"))


@pytest.mark.parametrize("mode", ["stream", "blind"])
def test_iterable_data_go_on_with_the_same_workers(mode: str, nursery: Nursery, tmp_path: Path) -> None:
    wanted, weights = run_whole(nursery, mode, 2, tmp_path / "whole")
    found, found_weights, _ = run_killed(nursery, mode, [2, 2, 2], tmp_path)
    assert found == wanted
    assert found_weights == weights


def test_an_iterable_dataset_refuses_another_number_of_workers(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(LOOP, ["stream", "25", "--workers", "2", "--name", "killed"], tmp_path, {"KILL_AT": "4"})
    ended = nursery.run(LOOP, ["stream", "25", "--workers", "1", "--name", "killed"], tmp_path)
    assert ended.code == 1
    assert (
        "error: the data were read by 2 workers and are read by 1 now\n"
        "hint: set num_workers=2: the position in a stream belongs to the worker that reads it" in ended.output
    )


def check_that_epochs_differ(mode: str, seen: dict[int, tuple[list[float], list[str]]]) -> None:
    """Every epoch has an order and a noise of its own."""
    ids = [[tuple(seen[step][0]) for step in range(first, first + 9)] for first in (1, 10)]
    assert ids[0] != ids[1]
    if mode != "weighted":
        assert sorted(sample for batch in ids[0] for sample in batch) == list(range(70))
    noise = {value for _, values in seen.values() for value in values}
    # Noise is keyed by epoch and sample: one drawn twice in an epoch (weighted, with replacement) has the same.
    draws = {((step - 1) // 9, sample) for step, (samples, _) in seen.items() for sample in samples}
    assert len(noise) == len(draws)


def begin_worker(number: int) -> None:
    """A worker_init_fn."""


def test_a_rebuilt_loader_keeps_everything_but_the_order() -> None:
    options = {
        "num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "pin_memory": True, "timeout": 7.0,
        "worker_init_fn": begin_worker, "multiprocessing_context": "spawn",
    }  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(10, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True, collate_fn=list, **options)
    feed = choose_feed(loader, Settings(), print)
    assert isinstance(feed, MapFeed)
    for word in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "timeout", "worker_init_fn"):
        assert getattr(feed.loader, word) == getattr(loader, word) == options[word], word
    assert feed.loader.multiprocessing_context is loader.multiprocessing_context
    samples = feed.loader.collate_fn((0, [1, 4]))  # what a worker is asked for
    assert type(samples) is list and [sample[0].tolist() for sample in samples] == [[2.0, 3.0], [8.0, 9.0]]
