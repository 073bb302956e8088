"""A mirror that only a client of its own can read is looked into by a child, never by the training's process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.checkpoint.mirror.apart import ApartStore, opened
from jackline.checkpoint.mirror.store import FolderStore, StoreTrouble
from jackline.errors import UsageError
from jackline.rundir.process_id import read_state
from tests.deadline import HANGS_S

TRAINING = """
import sys, threading
from pathlib import Path
import torch
from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.rundir.layout import RunDir
state = {"model": torch.nn.Linear(3, 3)}
engine = CheckpointEngine(RunDir(Path(sys.argv[1])), EngineSettings(mirror=sys.argv[2], mirror_every_s=0.1))
receipt = engine.load_newest(state)
print("resumed", receipt and receipt.step, "fsspec" in sys.modules)
if receipt is None:
    assert engine.save(state, step=5).wait(100)
engine.close()
print([thread.name for thread in threading.enumerate() if not thread.name.startswith(("MainThread", "jackline-"))])
"""


@pytest.fixture
def far(tmp_path: Path) -> str:
    """A place for which fsspec is needed, on this machine's disk."""
    (tmp_path / "far").mkdir()
    return f"simplecache::file://{tmp_path / 'far'}"


def test_the_calls_of_a_store_are_made_in_a_child(far: str, tmp_path: Path) -> None:
    with opened(far) as store:
        assert isinstance(store, ApartStore) and store.names("a") == [] and store.size("a/one") is None
        store.put_bytes(b"\x00\xff two\n", "a/one")
        (tmp_path / "big").write_bytes(b"x" * 300_000)
        store.put(tmp_path / "big", "a/big")
        assert store.names("a") == ["big", "one"] and store.size("a/big") == 300_000
        assert store.read("a/one") == b"\x00\xff two\n" and store.checksum("a/one") is None
        store.get("a/big", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == b"x" * 300_000
        with pytest.raises(FileNotFoundError):
            store.read("a/none")
        store.delete("a")
        assert store.names("a") == []
    with opened(str(tmp_path / "far")) as near, opened(f"file://{tmp_path / 'far'}") as also:
        assert isinstance(near, FolderStore) and isinstance(also, FolderStore)


def test_a_place_that_nothing_can_read_is_told_as_here() -> None:
    with opened("s4://bucket/x") as store, pytest.raises(UsageError, match=r"mirror s4://bucket/x cannot be used: "):
        store.names("")


def test_a_store_that_nobody_answers_for_is_told_as_here() -> None:
    with (
        opened("ftp://127.0.0.1:1/x") as store,
        pytest.raises(StoreTrouble, match="ConnectionRefusedError") as raised,
    ):
        store.names("")
    assert raised.value.place == "ftp://127.0.0.1:1/x"


def test_a_child_that_is_killed_or_hangs_holds_nobody(far: str) -> None:
    store = ApartStore(far)
    assert store.names("a") == []
    assert store._process is not None
    os.kill(store._process.pid, signal.SIGSTOP)
    hanging = store._process
    while read_state(hanging.pid) != "T":
        time.sleep(0.01)
    store.close()
    assert hanging.poll() == -signal.SIGKILL
    assert store.names("a") == []  # by another child
    os.kill(store._process.pid, signal.SIGKILL)
    with pytest.raises(OSError, match="has ended"):
        store.names("a")
    store.close()


def test_a_training_has_no_client_of_its_mirror_and_resumes_from_it(far: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"

    def train() -> list[str]:
        command = [sys.executable, "-c", TRAINING, str(run), far]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert train() == ["resumed None False", "[]"]
    until_s = time.monotonic() + HANGS_S
    while not list((tmp_path / "far").glob("r/checkpoints/step-00000005-*/manifest.json")):
        assert time.monotonic() < until_s, "the upload did not come"
        time.sleep(0.05)
    shutil.rmtree(run)
    assert train() == ["resumed 5 False", "[]"]
