"""`plan --fit "A100-80 x2, 24 h"`: what GPUs can train in that time; and what ranks keep, send and offload."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.memory.fitting.change import Request, candidate_of, one_sample
from jackline.memory.fitting.reach import Goal, reach, reach_json, reach_text
from jackline.memory.plan.choose import Plan, Room, plan
from jackline.memory.plan.gpus import GpuModel, find_gpu_and_time
from jackline.memory.plan.target import load_candidates

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.xdist_group("transformers"),  # imported by one worker
]
MIB = 2**20
HOUR = 3600.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
}
LINEARS = 2 * (4 * 256 * 256 + 3 * 256 * 768)
HEAD = 4000 * 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def gpus(count: int = 1) -> GpuModel:
    return GpuModel("test", 4000 * MIB, 80, 0, count=count)


def made(folder: Path, *words: str, count: int = 1) -> Plan:
    (candidate,) = load_candidates(str(folder), gpus(count), ["seq_len=256", *words])
    return plan(candidate.job, gpus(count))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A100-80 x2, 24 h", ("A100-80 x2", 24 * HOUR)),
        ("24h, 2xT4", ("2xT4", 24 * HOUR)),
        ("RTX 4090 for 3 days", ("RTX 4090", 72 * HOUR)),
        ("L4", ("L4", 0.0)),
        ("90 min", ("", 1.5 * HOUR)),
        ("23.5 GiB; 1 week", ("23.5 GiB", 7 * 24 * HOUR)),
    ],
)
def test_gpus_and_time_are_read_as_people_write_them(text: str, found: tuple[str, float]) -> None:
    assert find_gpu_and_time(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("T4, 0 h", "the time is above 0 and at most 10 years, not '0 h'"),
        ("T4, -3 h", "the time is above 0 and at most 10 years, not '-3 h'"),
        ("T4, 900 weeks", "the time is above 0 and at most 10 years, not '900 weeks'"),
        ("T4, 1 h, 2 h", "has two times"),
        ("T4, L4, 1 h", "has 2 GPUs: T4 and L4"),
        ("T4 24 parrots", "there is no GPU 'T4 24 parrots' in the table"),
        ("A100-80 x0, 1 h", "there is no GPU 'A100-80 x0' in the table"),
    ],
)
def test_nonsense_is_a_usage_error(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        find_gpu_and_time(text)
    assert said in error.value.message


def test_what_is_reached_fits_and_one_more_does_not(folder: Path) -> None:
    """Largest batch and longest sample of each way are those of a trace of their own."""
    request = Request(str(folder), gpus(), Room(600 * MIB), ("seq_len=256",))
    found = reach(request, lambda _: None)
    assert [one.name for one in found] == ["as given", "--gradient-checkpointing"]
    for one in found:
        longest = candidate_of(request, (*one.words, "--seq-len", str(one.longest)))
        assert one_sample(longest, request)[1] == "fits"
        longer = candidate_of(request, (*one.words, "--seq-len", str(one.longest * 5 // 4)))
        assert one_sample(longer, request)[1] != "fits"
        batch = candidate_of(request, (*one.words, "--batch-size", str(one.largest_batch)))
        assert plan(batch.job, request.gpu, room=request.room).accumulation == 1
        larger = candidate_of(request, (*one.words, "--batch-size", str(one.largest_batch * 5 // 4 + 1)))
        assert plan(larger.job, request.gpu, room=request.room).accumulation == 2
    assert found[1].longest > found[0].longest > 256
    goal = Goal(gpus(), 24 * HOUR, price_an_hour=2.0)
    told = reach_text(found, "small", goal)
    assert told.startswith("small on test in 24 h\n\nas given, 0.00")
    assert f"  longest sample: {found[0].longest:,} tokens, one at a time" in told
    assert "cost: 48.00 for 24 h" in told
    as_json = reach_json(found, "small", goal)
    assert as_json["ways"][0]["units"] == pytest.approx(found[0].samples_a_s * 256 * 24 * HOUR)


def test_where_nothing_fits_adapters_are_tried_and_then_it_is_said(folder: Path) -> None:
    tried: list[str] = []
    found = reach(Request(str(folder), gpus(2), Room(MIB), ("seq_len=256",)), tried.append)
    assert found == []
    assert "nothing fits" in reach_text(found, "small", Goal(gpus(2), 0.0))
    assert tried[:3] == ["the settings as given", "--gradient-checkpointing", "--parallel fsdp"]
    assert tried[-1].endswith("--quantize nf4")


def test_an_offloaded_training_keeps_its_state_on_the_host(folder: Path) -> None:
    kept, offloaded = made(folder), made(folder, "--offload")
    state = kept.prediction.parts["weights"] + kept.prediction.parts["optimizer"]
    assert offloaded.prediction.parts.get("weights", 0) == offloaded.prediction.parts.get("optimizer", 0) == 0
    assert offloaded.prediction.peak_allocated_bytes < kept.prediction.peak_allocated_bytes - state // 2
    (note,) = (note for note in offloaded.notes if note.startswith("offload: "))
    # Weights, gradients and two moments, four bytes each: 3.8M weights.
    assert " 57.3 MiB of RAM for a rank; 43.0 MiB a step between host and GPU" in note
    assert offloaded.time is not None and offloaded.time.bound == "the host"
    two = made(folder, "--offload", count=2)
    assert any(" 28.6 MiB of RAM for a rank, 57.3 MiB for all 2; " in note for note in two.notes)


def test_a_tensor_parallel_rank_has_its_part_of_every_layer(folder: Path) -> None:
    whole, part = made(folder), made(folder, "--parallel", "tp", count=2)
    divided = 4 * (LINEARS + HEAD)  # the embedding and the norms stay whole
    assert part.prediction.parts["weights"] == pytest.approx(
        whole.prediction.parts["weights"] - divided // 2, rel=0.01
    )
    assert part.samples_a_step == whole.samples_a_step == 8
    # Two sums forward in bf16, five backward (q, k, v, gate, up) in float32, each sent twice by half; of the head its
    # input's gradient and half of the logits.
    values = 8 * 256 * 256 * 2
    expected = 2 * (2 + 5 * 2) * values + 2 * values + 8 * 256 * 4000 * 2 // 2
    (note,) = (note for note in part.notes if note.startswith("figures are for one of 2 tensor-parallel ranks"))
    assert f" and sends {expected / MIB:.1f} MiB (" in note


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        (("--parallel", "tp"), 3, "num_attention_heads=4 cannot be divided by 3 GPUs"),
        (("--parallel", "tp", "--lora", "r=4"), 2, "--parallel tp is not planned with --lora or --quantize"),
        (("--parallel", "tp", "--offload"), 2, "--offload is FSDP2's: it does not go with --parallel tp"),
    ],
)
def test_what_ranks_cannot_do_is_said(folder: Path, words: tuple[str, ...], count: int, said: str) -> None:
    with pytest.raises(UsageError) as error:
        made(folder, *words, count=count)
    assert said in error.value.message
