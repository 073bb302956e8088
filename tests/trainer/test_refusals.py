"""A training that is refused after its data was opened leaves nothing: no process, no thread, no file, no reader."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from jackline.data.build.builder import cache_folder
from jackline.errors import JacklineError, UsageError
from jackline.rundir.layout import RunDir
from jackline.trainer.build import build
from jackline.trainer.config import TrainConfig, resolve
from jackline.trainer.corpus import cache_settings, spec_of
from jackline.trainer.loop import train
from jackline.trainer.report.console import Console
from tests.deadline import HANGS_S


def standing() -> Counter[str]:
    """Child processes, also ended ones nobody asked about; threads; what is open."""
    found: Counter[str] = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    for task in Path("/proc/self/task").iterdir():
        found.update(f"process {pid}" for pid in (task / "children").read_text().split())
    found.update(f"file {path.readlink()}" for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return found


def left(before: Counter[str], folder: Path) -> list[str]:
    """What was not there before, and who is said to read the data. A thread that adds up files' sizes may take a
    moment to end by itself; a process that nobody ended stays, and so does an ended one that nobody asked about."""
    deadline_s = time.monotonic() + HANGS_S
    while True:
        found = [*(standing() - before), *(str(path) for path in (folder / "data").glob("*/readers/*"))]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)


def config_of(corpus: Path, folder: Path, *words: str) -> TrainConfig:
    """With a cache of its own: the tokenising process is at work when the refusal comes."""
    given = ["--quick", "seq_len=16", "batch_size=4", "max_steps=3", f"data={corpus / 'text'}"]
    return resolve("demo", [*given, f"data_dir={folder / 'data'}", *words]).config


def test_one_that_is_refused_for_its_vocabulary_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    before = standing()
    config = config_of(corpus, tmp_path, "val_fraction=0", "vocab_size=128")
    with pytest.raises(UsageError) as caught:
        build(config, Console(), tmp_path / "run")
    assert caught.value.message == "vocab_size=128 is too small for tokenizer 'bytes' with its 257 tokens"
    assert left(before, tmp_path) == []


def test_one_whose_epochs_do_not_fit_on_the_disk_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    before = standing()
    # The run's own word for the end of its steps, from the trainer's own loop.
    config = config_of(corpus, tmp_path, "val_fraction=0.2", "epochs=2", "max_cache_bytes=1", "rehearse=no")
    with pytest.raises(UsageError) as caught:
        train(config, RunDir(tmp_path / "run"))
    assert str(caught.value) == (
        "error: epochs=2 needs the whole corpus on disk, and it does not fit\n"
        "hint: give max_steps instead, or a larger max_cache_bytes"
    )
    assert left(before, tmp_path) == []


def test_one_whose_validation_data_cannot_be_had_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path, "val_fraction=0.2")
    place = cache_folder(spec_of(config, "validation"), cache_settings(config))
    (place / "spec.json").unlink()
    place.rmdir()
    place.write_text("a file where the cache should be")
    before = standing()
    with pytest.raises(JacklineError) as caught:
        build(config, Console(), tmp_path / "run")
    assert caught.value.detail[0] == f"cannot make the token cache {place}: File exists"
    assert left(before, tmp_path) == []
