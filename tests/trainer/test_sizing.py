"""model=auto: the largest size that a GPU can train, and the same size for every attempt of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jackline.memory.plan.gpus import find_gpu
from jackline.rundir.layout import RunDir
from jackline.trainer.config import resolve, save_config
from jackline.trainer.report.console import Console
from jackline.trainer.startup.sizing import choose_size, settle_size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpu", "free_gib", "size", "batch"),
    [("8", 6.5, "small", 8)],
)
def test_the_size_goes_with_the_gpu_and_brings_batch_and_data(
    gpu: str, free_gib: float, size: str, batch: int
) -> None:
    chosen = choose_size(
        resolve("sparsae", ["model_size=auto"]), find_gpu(gpu), int(free_gib * GIB), Console()
    ).config

    assert (chosen.model, chosen.batch_size) == (size, batch)
    assert chosen.max_train_examples == {"medium": 100_000, "small": 50_000, "tiny": 30_000}[size]  # type: ignore[attr-defined]


def test_the_size_is_one_for_the_memory_that_a_person_allows(capsys: pytest.CaptureFixture[str]) -> None:
    asked = resolve("sparsae", ["model_size=auto", "max_gpu_bytes=6G"])

    assert choose_size(asked, find_gpu("80"), 79 * GIB, Console()).config.model == "small"


def test_what_a_person_set_stays(capsys: pytest.CaptureFixture[str]) -> None:
    asked = resolve("sparsae", ["model_size=auto", "batch_size=6"])

    chosen = settle_size(asked, None, torch.device("cpu"), Console())

    assert (chosen.config.model, chosen.config.batch_size) == ("tiny", 6)
    assert capsys.readouterr().out == "[plan] model=auto: tiny, the smallest, because there is no GPU here\n"
    explicit = resolve("sparsae", ["model_size=medium"])
    assert settle_size(explicit, None, torch.device("cpu"), Console()) is explicit


def test_a_later_attempt_keeps_the_size_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path)
    save_config(run, resolve("sparsae", ["model_size=medium"]))

    chosen = settle_size(resolve("sparsae", ["model_size=auto"]), run, torch.device("cpu"), Console())

    assert (chosen.config.model, chosen.config.batch_size) == ("medium", 16)
    assert capsys.readouterr().out == "[plan] model=auto: medium, as in the attempt before\n"
