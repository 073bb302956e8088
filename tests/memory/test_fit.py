"""`plan --fit` names the smallest change of settings with which a training fits, and keeps what a person has set."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.memory.__main__ import main
from jackline.memory.fitting.change import Fitted, Request, Tried, find_fit, fit_text
from jackline.memory.plan.choose import Room, plan
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.target import load_candidates

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.xdist_group("transformers"),  # imported by one worker
]
MIB = 2**20
GPU = GpuModel("test", 4000 * MIB, 80, 0)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 8000,
}
MINE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    return model, torch.zeros(4, 1024), lambda model, batch: model(batch).sum()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def fitted(folder: Path | str, num_mib: float, *words: str, count: int = 1) -> Fitted:
    gpu = GpuModel("test", 4000 * MIB, 80, 0, count=count)
    request = Request(str(folder), gpu, Room(int(num_mib * MIB)), words)
    return find_fit(request, lambda _: None)


def test_the_first_change_that_fits_is_the_smallest(folder: Path) -> None:
    """What was tried before it does not fit, and the answer is what a plan of it says."""
    everything = fitted(folder, 1, "seq_len=512")
    assert everything.made.fit == "no"
    assert "nothing that Jackline knows makes it fit" in fit_text(everything, str(folder), (), "test")
    needed = {one.words: one.reserved_bytes for one in everything.tried}
    assert list(needed)[:3] == [
        (),
        ("--gradient-checkpointing",),
        ("--gradient-checkpointing", "--optimizer", "adamw8bit"),
    ]
    assert everything.words[-2:] == ("--seq-len", "256")
    for words in (("--gradient-checkpointing",), ("--lora", "r=16,targets=all-linear")):
        num_mib = max(needed[words] / MIB / 0.96, needed[words] / MIB + 40) + 2
        found = fitted(folder, num_mib, "seq_len=512")
        *before, last = found.tried
        assert all(one.fit != "fits" for one in before)
        assert last.fit == found.made.fit == "fits"
        assert last.reserved_bytes == min(one.reserved_bytes for one in found.tried)
        typed = load_candidates(str(folder), GPU, ["seq_len=512", *found.words])[-1]
        again = plan(typed.job, GPU, room=Room(int(num_mib * MIB)))
        assert (again.micro_batch, again.fit) == (found.made.micro_batch, "fits")


def test_what_a_person_has_set_stays(folder: Path) -> None:
    found = fitted(folder, 1, "--lora", "r=4,targets=q_proj", "seq-len=256", "--gradient-checkpointing")
    assert [one.words for one in found.tried] == [
        (),
        ("--optimizer", "adamw8bit"),
        ("--optimizer", "paged-adamw8bit"),
        ("--optimizer", "adamw8bit", "--precision", "bf16-pure"),
        ("--quantize", "nf4"),
    ]


def test_several_gpus_may_share_the_weights(folder: Path) -> None:
    found = fitted(folder, 1, "seq_len=256", count=4)
    assert ("--parallel", "fsdp") in [one.words for one in found.tried]
    assert ("--parallel", "fsdp", "--gradient-checkpointing") in [one.words for one in found.tried]


def test_where_it_fits_the_longest_sample_is_told(folder: Path) -> None:
    found = fitted(folder, 600, "seq_len=256")
    assert (found.words, found.made.fit) == ((), "fits")
    assert found.longest > 256
    text = fit_text(found, str(folder), (), "test")
    assert text.endswith(f"no change is needed\nsamples of up to {found.longest:,} tokens fit, one at a time")


def test_the_answer_can_be_copied(folder: Path) -> None:
    tried = (
        Tried((), (), 900 * MIB, "no"),
        Tried(("--gradient-checkpointing",), ("about a third more time",), 500 * MIB, "fits"),
    )
    candidate = load_candidates(str(folder), GPU, ["seq_len=64"])[0]
    made = plan(candidate.job, GPU)
    text = fit_text(Fitted(tried, candidate, made), "hf:org/model", ("--seq-len", "1024"), "L4")
    assert text.splitlines()[-4:] == [
        "the change that fits, and what it costs:",
        "  --gradient-checkpointing: about a third more time",
        "settings: --gradient-checkpointing",
        "to see more: jackline plan hf:org/model --gpu L4 --seq-len 1024 --gradient-checkpointing --explain",
    ]


def test_a_function_and_a_recipe_have_changes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    found = fitted(f"{tmp_path}/mine.py:make", 1)
    assert [one.words for one in found.tried] == [
        (),
        ("--precision", "bf16"),
        ("--optimizer", "adamw8bit"),
        ("--optimizer", "paged-adamw8bit"),
    ]
    recipe = fitted("jackline.recipes.demo.recipe", 1, "model=nano", "seq_len=512", "data=x.txt", "vocab_size=512")
    assert [one.words for one in recipe.tried][-1] == ("loss_chunk_rows=2048", "recompute=true", "seq_len=256")
    with pytest.raises(UsageError):
        fitted("jackline.recipes.demo.recipe", 1, "modle=nano")


def test_the_command_answers_in_words_and_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = {"target": str(folder), "typed_target": "small", "gpu": "0.75", "words": ["--seq-len", "512"]}
    assert main([json.dumps({**request, "is_fitting": True, "output": "json"})]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] == "fits"
    assert [one["fit"] for one in found["tried"]][-1] == "fits"
    words = [*request["words"], *found["changed"]]
    assert main([json.dumps({**request, "words": words, "is_fitting": True, "output": "text"})]) == 0
    assert "what one sample at a time would reserve:\n" in capsys.readouterr().out
