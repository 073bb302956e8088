"""attach() on every rank of DDP: the same batches with any number of ranks, one step for a stop, one checkpoint."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from jackline.errors import UsageError
from jackline.session.feeds.choose import choose_feed
from jackline.session.feeds.loader import Loader
from jackline.session.feeds.seekable import SeekableBatches
from jackline.session.ranks import join_ranks, settings_for
from jackline.session.settings import Settings
from jackline.session.stopping import StopRequest
from tests.session.nursery import Nursery
from tests.session.ranks_torture import IMPORTS, Crew, digests, losses, start, steps_saved, torment


def fake_rank(rank: int, of_first: str = "") -> Any:
    """One of two ranks; `of_first`: what rank 0 says instead of the same as this one."""
    return SimpleNamespace(rank=rank, size=2, from_first=lambda text: of_first or text)


def batches_of(rank: int, size: int, **more: Any) -> list[list[int]]:
    batches = SeekableBatches(range(24), 8, is_shuffled=True, drop_last=False, seed=3)
    batches.divide(rank, size, is_per_rank=False)
    batches.seek(more.get("epoch", 0), more.get("start", 0))
    return [indices for _, indices in batches]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_together_get_the_batches_that_one_process_gets(size: int) -> None:
    shares = [batches_of(rank, size, epoch=2, start=1) for rank in range(size)]
    together = [[index for share in parts for index in share] for parts in zip(*shares, strict=True)]
    assert together == batches_of(0, 1, epoch=2, start=1)


def test_a_batch_that_cannot_be_shared_equally_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch has 8 samples, which 3 ranks cannot share equally"):
        batches_of(0, 3)
    odd = SeekableBatches(range(25), 8, is_shuffled=True, drop_last=False, seed=3)
    with pytest.raises(UsageError, match="the last batch of an epoch has 1 samples, which 2 ranks cannot"):
        odd.divide(0, 2, is_per_rank=False)


def test_a_distributed_sampler_means_a_batch_size_for_each_rank() -> None:
    data: Any = torch.arange(32)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=9)
    feed: Any = choose_feed(DataLoader(data, batch_size=4, sampler=sampler), Settings(), print, fake_rank(1))
    assert (feed.kind, feed.batches.batch_size, feed.num_batches) == ("seekable", 8, 4)
    assert [len(indices) for _, indices in feed.batches] == [4, 4, 4, 4]


def test_a_loader_of_ours_is_divided_too() -> None:
    feed: Any = choose_feed(Loader(range(16), batch_size=4), Settings(), print, fake_rank(1))
    assert [indices for _, indices in feed.batches][:2] == [[2, 3], [6, 7]]


def test_ranks_that_are_seeded_differently_divide_one_order() -> None:
    """Many scripts say torch.manual_seed(seed + rank), for dropout."""
    orders = []
    for rank in (0, 1):
        torch.manual_seed(100 + rank)
        loader = DataLoader(torch.arange(16), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        feed: Any = choose_feed(loader, Settings(), print, fake_rank(rank, of_first="100"))
        orders.append([index for _, indices in feed.batches for index in indices])
    assert sorted(orders[0] + orders[1]) == list(range(16))


def test_data_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UsageError, match="generator cannot be divided among 2 ranks"):
        choose_feed((one for one in [1]), Settings(), print, fake_rank(0))


def test_a_stop_of_one_rank_counts_once_all_ranks_know_of_it() -> None:
    stop = StopRequest()
    stop.is_shared = True
    stop.ask("SIGTERM")
    assert not stop.is_made
    stop.is_agreed = True
    assert stop.is_made


def test_slurms_warning_is_a_stop_request_unless_the_program_handles_it() -> None:
    former = signal.getsignal(signal.SIGUSR1)
    stop, own = StopRequest(), StopRequest()
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        stop.listen()
        for _ in range(2):  # Slurm may repeat it
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.by == "SIGUSR1 (Slurm's warning)"
        stop.stop_listening()
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        own.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert own.by == ""
    finally:
        stop.stop_listening()
        own.stop_listening()
        signal.signal(signal.SIGUSR1, former)


def test_ranks_without_a_process_group_are_told_what_is_missing() -> None:
    assert join_ranks({}, {}) is None
    with pytest.raises(UsageError, match="one of 4 ranks, and they cannot talk") as found:
        join_ranks({"WORLD_SIZE": "4"}, {})
    assert "init_process_group" in (found.value.hint or "")


def test_the_numbers_of_rank_0_choose_the_best() -> None:
    wanted = Settings(keep_best="loss")
    first, other = (SimpleNamespace(is_first=one, is_sharded=False) for one in (True, False))
    assert settings_for(first, wanted).keep_best == "loss"  # type: ignore[arg-type]
    assert settings_for(other, wanted).keep_best is None  # type: ignore[arg-type]


def test_one_rank_runs_out_of_memory_and_all_shrink_together(tmp_path: Path) -> None:
    job = start(tmp_path, 2, 3, SAFE="1", WHO="1", AT="2")
    assert job.wait() == [0, 0], job.text
    shrunk = sorted(line for line in job.text.splitlines() if line.startswith("SHRUNK"))
    assert shrunk == ["SHRUNK 0 2 2", "SHRUNK 1 2 2"]
    assert len(digests(job)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_gradients_of_safe_step_are_those_of_one_process(tmp_path: Path, mode: str) -> None:
    found = []
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        job = start(tmp_path / str(size), size, 4, SAFE="1", MODE=mode)
        assert job.wait() == [0] * size, job.text
        found.append(losses(job))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
def test_sigterm_on_one_rank_stops_all_at_one_step_and_one_process_resumes(tmp_path: Path) -> None:
    job = start(tmp_path, 2, 6, SIGNAL="SIGTERM", WHO="1", AT="3")
    assert job.wait() == [75, 75], job.text
    assert sorted(losses(job)) == [1, 2, 3]
    assert "stopped at step 3, saved" in job.outputs[0]
    assert "stopped at step 3, saved" in job.outputs[1]
    assert steps_saved(tmp_path)[-1] == 3

    alone = start(tmp_path, 1, 6)
    assert alone.wait() == [0], alone.text
    assert sorted(losses(alone)) == [4, 5, 6]

    whole = tmp_path / "whole"
    whole.mkdir()
    reference = start(whole, 1, 6)
    assert reference.wait() == [0], reference.text
    found = {**losses(job), **losses(alone)}
    assert found == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.parametrize(
    ("size", "mode", "kills"), [(4, "ddp", ((0, 3), (3, 1))), (2, "fsdp", ((0, 1), (1, 0), (6, 1)))]
)
def test_five_kills_of_ranks_change_nothing(
    tmp_path: Path, size: int, mode: str, kills: tuple[tuple[int, int], ...]
) -> None:
    """Killed before the first step, after the first save, later; `scripts/torture ranks` does it at random."""
    nursery = Nursery(*IMPORTS)
    try:
        words = {"MODE": mode, "DROPOUT": "0.1"}
        for name in ("whole", "cut"):
            (tmp_path / name).mkdir()
        whole = start(tmp_path / "whole", size, 8, nursery, **words)
        assert whole.wait() == [0] * size, whole.text
        for at, who in kills:
            job = start(tmp_path / "cut", size, 8, nursery, SIGNAL="SIGKILL", AT=str(at), WHO=str(who), **words)
            assert job.wait()[who] == -9, job.text
        job = start(tmp_path / "cut", size, 8, nursery, **words)
        assert job.wait() == [0] * size, job.text
    finally:
        nursery.close()
    assert digests(job) == digests(whole)
    assert losses(job).items() <= losses(whole).items()


@pytest.mark.slow
def test_killed_ranks_resume_bit_equal(tmp_path: Path) -> None:
    crew = Crew(total=300)
    wanted = crew.undisturbed(tmp_path / "whole")
    assert torment(crew, tmp_path / "cut", wanted, random.Random(1), kills=5)[1] == ""


@pytest.mark.slow
def test_one_two_four_and_one_rank_again(tmp_path: Path) -> None:
    found: dict[int, float] = {}
    for size, total in ((1, 3), (2, 6), (4, 9), (1, 12)):
        job = start(tmp_path, size, total)
        assert job.wait() == [0] * size, job.text
        found.update(losses(job))
    whole = tmp_path / "whole"
    whole.mkdir()
    reference = start(whole, 1, 12)
    assert reference.wait() == [0], reference.text
    assert found == pytest.approx(losses(reference), rel=1e-5)
