"""Data as people have it, killed in a step: weighted sources, a data set of the hub, conversations, a generator."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from jackline.rundir.layout import RunDir
from tests.data.test_hub import Hub, hub
from tests.session.nursery import EVERY_SAVE, Ended, Nursery

__all__ = ["hub"]
TRAINING, OWN = (Path(__file__).with_name(name) for name in ("training.py", "own_training.py"))
GENERATOR = """
import random
import torch
from torch import nn
import jackline


class Stream(jackline.Recipe):
    batch_size: int = 4
    max_steps: int = 12
    save_every_steps: int = 3
    rehearse: bool = False

    def make_model(self):
        return nn.Linear(3, 1)

    def train_data(self):
        for number in range(17):
            yield torch.randn(3) + random.random() + number

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


def in_equal_bits(nursery: Nursery, script: Path, words: list[str], folder: Path, env: dict[str, str]) -> None:
    """Trains once whole, and once killed in its sixth update."""

    def train(name: str, kill_at: str = "") -> Ended:
        arguments = [str(RunDir(folder / "runs" / name).path), *words]
        return nursery.start(script, arguments, folder, {**EVERY_SAVE, **env, "KILL_AT": kill_at}).wait()

    whole = train("whole")
    assert whole.code == 0, whole.output
    ended = train("killed", "6")
    assert ended.code == -signal.SIGKILL, ended.output
    ended = train("killed")
    assert ended.code == 0 and "resuming from step-" in ended.output, ended.output
    assert last_state(folder, "killed") == last_state(folder, "whole")
    killed, right = losses(folder, "killed"), losses(folder, "whole")
    assert killed.items() <= right.items() and {10, 11, 12} <= set(killed)


def last_state(folder: Path, name: str) -> dict[str, bytes]:
    newest = RunDir(folder / "runs" / name).checkpoints / "step-00000012"
    found = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    assert len(found) >= 2, sorted(newest.iterdir())
    return found


def losses(folder: Path, name: str) -> dict[int, str]:
    lines = map(json.loads, RunDir(folder / "runs" / name).metrics(0).read_text().splitlines())
    return {line["step"]: float(line["loss"]).hex() for line in lines if "loss" in line}


def test_weighted_sources_are_mixed_alike_after_a_kill(nursery: Nursery, corpus: Path, tmp_path: Path) -> None:
    sources = f"data={corpus}/text/0*.txt@0.7,{corpus}/text/[12]*.txt@0.3"
    in_equal_bits(nursery, TRAINING, [str(corpus), sources, "val_fraction=0", "eval_every=0"], tmp_path, {})


def test_a_data_set_of_the_hub_is_trained_on_and_resumed(
    nursery: Nursery, hub: Hub, corpus: Path, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    words = [str(corpus), "data=hf:some/set/data", f"data_dir={tmp_path / 'data'}", "val_fraction=0"]
    in_equal_bits(nursery, TRAINING, [*words, "eval_every=0"], tmp_path, env)
    assert any("/resolve/" in path for path, _ in hub.requests)


def test_conversations_are_resumed_in_equal_bits(nursery: Nursery, corpus: Path, tmp_path: Path) -> None:
    talks = tmp_path / "talks.jsonl"
    lines = ({"prompt": f"What is {n}?", "response": f"It is {n * n}."} for n in range(60))
    talks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [str(corpus), f"data={talks}", "chat=true", "packing=separate", "seq_len=48", "dropout=0.1", "ema=0.9"]
    in_equal_bits(nursery, TRAINING, words, tmp_path, {})


def test_a_generator_is_resumed_in_equal_bits(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "stream.py").write_text(GENERATOR)
    in_equal_bits(nursery, OWN, ["stream.py"], tmp_path, {})
