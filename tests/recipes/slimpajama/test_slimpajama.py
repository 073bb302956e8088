"""The recipe of chunks as real processes, against a far end that stalls, drops and damages what it gives."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from jackline.recipes.slimpajama.recipe import SlimpajamaConfig
from jackline.rundir.layout import RunDir
from tests.data.corpora import jsonl_bytes, make_texts
from tests.data.far_end import FarEnd, serving
from tests.session.nursery import EVERY_SAVE, Child, Ended, Nursery

SCRIPT = Path(__file__).with_name("streaming.py")
SHARDS = "train/chunk1/example_train_{0..59165}.jsonl.zst"
TEXTS = make_texts(96)
NUM_CHUNKS = 28  # ends in the third shard; reading may be in the fourth by then


def frames(texts: list[str]) -> list[bytes]:
    """A frame for each document: cut between two of them, everything before is whole."""
    return [zstandard.compress(jsonl_bytes([text])) for text in texts]


def shards() -> dict[str, bytes]:
    """Four shards: the first is cut off in a frame, the second has an empty text and a broken line."""
    parts = [TEXTS[:12], TEXTS[12:24], TEXTS[24:36], TEXTS[36:]]
    bodies = [b"".join(frames(part)) for part in parts]
    bodies[0] = bodies[0][:-20]
    bodies[1] = zstandard.compress(b'{"text": "broken\n') + b"".join(frames([""])) + bodies[1]
    return {f"train/chunk1/example_train_{k}.jsonl.zst": body for k, body in enumerate(bodies)}


@pytest.fixture
def far_end() -> Iterator[FarEnd]:
    with serving(FarEnd(files=shards())) as made:
        yield made


class Streams:
    """Trainings on the shards of one test."""

    def __init__(self, nursery: Nursery, far_end: FarEnd, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.words = [f"--data={far_end.address(SHARDS)}", f"--max-chunks={NUM_CHUNKS}"]

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self._folder / "runs" / name)

    def start(self, name: str, *words: str, **env: str) -> Child:
        given = [str(self.run_dir(name).path), *self.words, *words]
        return self._nursery.start(SCRIPT, given, self._folder, {**EVERY_SAVE, **env})

    def finish(self, name: str, *words: str) -> Ended:
        ended = self.start(name, *words).wait()
        assert ended.code == 0, ended.output
        return ended

    def parts(self, name: str) -> dict[str, bytes]:
        newest = max(self.run_dir(name).checkpoints.glob("step-*"))
        return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}

    def position(self, name: str) -> object:
        newest = max(self.run_dir(name).checkpoints.glob("step-*"))
        return json.loads((newest / "state.json").read_text())["session"]["feed"]


@pytest.fixture
def streams(nursery: Nursery, far_end: FarEnd, tmp_path: Path) -> Streams:
    return Streams(nursery, far_end, tmp_path)


def test_killed_in_an_update_and_in_an_accumulation_it_ends_bit_equal(streams: Streams, far_end: FarEnd) -> None:
    whole = streams.finish("whole")
    assert {name for name, _ in far_end.requests} <= set(shards())  # of 59,166 names

    ended = streams.start("killed", KILL_AT="7").wait()
    assert ended.code == -signal.SIGKILL, ended.output

    # The first answers say how the text is stored; a request that the killed process had sent may come before them.
    far_end.faults += ["", *["stall:600"] * 6]
    child = streams.start("killed", "num_threads=2")
    child.wait_for("] ... accumulating chunk ")
    child.kill()
    assert child.wait().code == -signal.SIGKILL
    far_end.faults.clear()

    far_end.released.set()
    far_end.faults += ["reset", "", "drop:600"]
    ended = streams.finish("killed")
    assert "resuming from step-" in ended.output
    assert not far_end.faults
    assert streams.parts("killed") == streams.parts("whole")
    assert {"model.safetensors", "optimizer.safetensors", "running_loss.safetensors"} <= set(streams.parts("whole"))
    assert streams.position("killed") == streams.position("whole")
    assert totals(ended) == totals(whole)


def totals(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if re.match(r"\[end\] (chunks|samples) ", line)]


def test_a_document_is_used_as_soon_as_it_has_arrived_and_a_wish_to_end_is_heard_while_waiting(
    streams: Streams, far_end: FarEnd
) -> None:
    sizes = [len(frame) for frame in frames(TEXTS[:8])]
    far_end.faults += ["", f"stall:{sum(sizes)}"]
    child = streams.start("slow")
    num_tokens = sum(len(text.encode()) + 1 for text in TEXTS[:8])
    chunks, rest = divmod(num_tokens - 1, 256)
    child.wait_for(f"] ... accumulating chunk {chunks + 1}: 0 samples, {rest + 1} of 256 tokens, example_train_0")
    child.signal(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 75, ended.output
    assert (
        f"[end] end       SIGTERM: stopped at step {chunks}, saved at step {chunks} of {NUM_CHUNKS}" in ended.output
    )
    assert f"[end] chunks    {chunks} of 256 tokens, {256 * chunks:,} in all, average loss " in ended.output
    assert max(streams.run_dir("slow").checkpoints.glob("step-*")).name == f"step-{chunks:08d}"


@pytest.mark.slow
def test_it_ends_with_the_data_and_says_so_whether_a_limit_was_given_or_not(
    streams: Streams, far_end: FarEnd
) -> None:
    data = far_end.address("train/chunk1/example_train_{2..2}.jsonl.zst")
    num_chunks, rest = divmod(sum(len(text.encode()) + 1 for text in TEXTS[24:36]) - 1, 256)
    ended = streams.finish("limited", f"--data={data}", "--max-chunks=1000")
    told = f"[data] the data ended after {num_chunks} chunks; {rest + 1} tokens are left over: less than a chunk"
    assert told in ended.output
    assert f"[end] end       finished at step {num_chunks} of 1,000, after " in ended.output
    limit = SlimpajamaConfig(seq_len=64, batch_size=4)._whole_steps()
    ended = streams.finish("unlimited", f"--data={data}", f"--max-chunks={limit}")
    assert told in ended.output
    assert "[train] to the end of the data" in ended.output
    assert f"[end] end       finished at step {num_chunks}, after " in ended.output
    assert streams.parts("limited")["model.safetensors"] == streams.parts("unlimited")["model.safetensors"]


def test_without_a_way_to_the_hub_it_says_so_and_how_to_give_other_data(streams: Streams) -> None:
    data = "hf://datasets/cerebras/SlimPajama-627B/train/**/*.jsonl.zst"
    ended = streams.start("away", f"--data={data}", HF_HUB_OFFLINE="1").wait()
    assert ended.code == 1
    message = ended.output[ended.output.index("error:") :]
    assert message.splitlines()[0] == f"error: the data of recipe 'slimpajama' cannot be loaded: {data}"
    assert message.splitlines()[-1] == (
        "hint: --data SOURCE trains on other data: a path, glob, http(s)://, hf://, or python-stdlib"
    )
