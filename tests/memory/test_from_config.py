"""A config is enough to plan: adapters, quantised and frozen weights, recomputation and optimizers included."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from jackline.errors import UsageError
from jackline.memory.plan.choose import add_evaluation, plan
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.plan.target import Candidate, load_candidates
from jackline.memory.predict.step import CannotTrace, Prediction, predict

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.xdist_group("transformers"),  # imported by one worker
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
WEIGHTS = 2 * 64 * 1000 + 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
ADAPTERS = 2 * (64 * 4 + 4 * 64 + 64 * 4 + 4 * 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "small"


def candidate(folder: Path, *words: str) -> Candidate:
    return load_candidates(str(folder), GPU_MODELS["L4"], ["seq_len=128", *words])[0]


def predicted(folder: Path, *words: str) -> Prediction:
    return predict(candidate(folder, *words).job, 2, GPU_MODELS["L4"], is_accumulating=False)


def test_weights_are_trained_in_float32_unless_asked_otherwise(folder: Path) -> None:
    found = candidate(folder)
    assert found.shown == {"parameters": WEIGHTS, "seq_len": 128, "batch_size": 8, "optimizer": "adamw"}
    whole = predicted(folder)
    assert whole.parts["weights"] == pytest.approx(4 * WEIGHTS, rel=0.01)
    assert whole.parts["optimizer"] == pytest.approx(8 * WEIGHTS, rel=0.05)
    assert predicted(folder, "precision=bf16-pure").parts["optimizer"] == pytest.approx(4 * WEIGHTS, rel=0.05)


def test_adapters_are_all_that_is_trained(folder: Path) -> None:
    words = ("--lora", "r=4,targets=q_proj,v_proj")
    found = candidate(folder, *words, "--quantize", "nf4")
    assert (found.shown["parameters"], found.shown["trained"]) == (WEIGHTS + ADAPTERS, ADAPTERS)
    half, packed = predicted(folder, *words), predicted(folder, *words, "--quantize", "nf4", "precision=bf16")
    assert half.parts["optimizer"] < 10 * ADAPTERS * 2
    # The embedding and the head stay whole, in float32.
    assert half.parts["weights"] == pytest.approx(2 * WEIGHTS + 4 * ADAPTERS, rel=0.02)
    blocks = WEIGHTS - 2 * 64 * 1000
    assert packed.parts["weights"] == pytest.approx(4 * 2 * 64 * 1000 + blocks * 0.52 + 4 * ADAPTERS, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_weight"),
    [("adamw8bit", 2.03), ("sgd", 4.0), ("lion", 4.0), ("adafactor", 0.1), ("muon", 4.0)],
)
def test_optimizers_keep_what_they_keep(folder: Path, optimizer: str, bytes_a_weight: float) -> None:
    made = predicted(folder, f"optimizer={optimizer}")
    assert made.parts["optimizer"] == pytest.approx(bytes_a_weight * WEIGHTS, rel=0.6 if bytes_a_weight < 1 else 0.15)


def test_frozen_weights_have_no_gradient_and_no_state(folder: Path) -> None:
    found = candidate(folder, "--freeze", "embed_tokens,lm_head")
    assert found.shown["trained"] == WEIGHTS - 2 * 64 * 1000


def test_recomputation_keeps_less(folder: Path) -> None:
    assert (
        predicted(folder, "--gradient-checkpointing", "seq_len=512").parts.get("activations", 0)
        < predicted(folder, "seq_len=512").parts["activations"]
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lora", "targets=query"], "--lora targets query match no linear layer"),
        (["--freeze", "vision"], "--freeze vision matches no weight"),
        (["--quantize", "nf4"], "no weight is left to train"),
    ],
)
def test_what_cannot_be_is_said(folder: Path, words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        candidate(folder, *words)
    assert caught.value.message == text


def test_an_unknown_type_of_model_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "nobody-knows"}))
    with pytest.raises(UsageError, match="does not know the model type 'nobody-knows'"):
        load_candidates(str(path), GPU_MODELS["L4"], [])


def test_a_weight_that_the_models_own_code_makes_on_the_cpu_is_planned(tmp_path: Path) -> None:
    """`torch.Tensor(n)` ignores the default device; and a classifier without a padding token takes no batch."""
    speech = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "num_hidden_layers": 1, "vocab_size": 32}
    text = {**CONFIG, "architectures": ["LlamaForSequenceClassification"]}
    for name, config in {"speech": speech, "text": text}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert predicted(tmp_path / name).peak_allocated_bytes > 0


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_BERT = {"model_type": "bert", "vocab_size": 500, **_SIZES}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("SiglipForImageClassification", {"model_type": "siglip", "vision_config": {**_SIZES, "image_size": 32}}),
        ("XmodForCausalLM", {"model_type": "xmod", "vocab_size": 500, "is_decoder": True, **_SIZES}),
        ("IBertForSequenceClassification", {"model_type": "ibert", "vocab_size": 500, **_SIZES}),
        ("EncoderDecoderModel", {"model_type": "encoder-decoder", "encoder": _BERT, "decoder": _BERT}),
        ("Wav2Vec2ForCTC", {"model_type": "wav2vec2", "vocab_size": None, **_SIZES}),
        ("LxmertForQuestionAnswering", {"model_type": "lxmert", "vocab_size": 500, **_SIZES}),
    ],
)
def test_a_config_that_leaves_things_out_is_planned(tmp_path: Path, kind: str, config: dict[str, object]) -> None:
    """A padding in words, a language for each sample, values that are asked for, special tokens, pictures besides."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind], **config}))
    assert predicted(tmp_path).peak_allocated_bytes > 0


def test_pictures_that_are_not_planned_are_named(tmp_path: Path) -> None:
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"model_type": "clip_vision_model"}}))
    note = candidate(tmp_path).job.note
    assert note == "text alone, without pixel_values: pictures and sounds need more memory"


def test_any_error_of_the_models_own_code_names_its_line(folder: Path) -> None:
    job = candidate(folder).job

    def broken(*_: object) -> Tensor:
        raise IndexError("list index out of range")

    with pytest.raises(
        CannotTrace, match="cannot be traced without a GPU: IndexError: list index out of range"
    ) as found:
        predict(replace(job, loss=broken), 2, GPU_MODELS["L4"])
    assert "test_from_config.py" in found.value.detail[0]


def test_a_config_that_contradicts_itself_is_refused_with_its_reason(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 7}))
    with pytest.raises(UsageError, match="is no config of a "):
        candidate(folder)


_TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
# Without `architectures`, and with inputs of their own.
OTHERS = {
    "yolos": {**_TINY, "image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 5},
    "siglip2": {
        "text_config": {**_TINY, "vocab_size": 100, "max_position_embeddings": 128},
        "vision_config": {**_TINY, "num_patches": 16, "patch_size": 16},
    },
    "decision_transformer": {"hidden_size": 32, "n_layer": 1, "n_head": 2, "state_dim": 5, "act_dim": 3},
    "patchtst": {"d_model": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 64},
    "jetmoe": {
        **_TINY,
        "vocab_size": 100,
        "num_key_value_heads": 2,
        "kv_channels": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_config_of_any_kind_is_planned_with_its_evaluation(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**OTHERS[kind], "model_type": kind}))
    found = load_candidates(str(tmp_path), GPU_MODELS["L4"], ["seq_len=64", "batch_size=4"])[0]
    made = add_evaluation(found.job, plan(found.job, GPU_MODELS["L4"]))
    assert (made.fit, made.micro_batch) == ("fits", 4)
    assert made.evaluation_bytes > 0
