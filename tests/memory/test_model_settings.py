"""The settings of a plan for a model from a config: every spelling, and errors that say what is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.memory.plan.hub import find_config, is_config_target, read_config
from jackline.memory.plan.model_settings import Lora, ModelSettings, parse_model_settings


@pytest.mark.parametrize(
    "words",
    [["--seq-len", "512", "--batch-size=4"], ["seq_len=512", "batch_size=4"], ["--seq_len=512", "--batch_size", "4"]],
)
def test_every_spelling_means_the_same(words: list[str]) -> None:
    assert parse_model_settings(words, "x") == ModelSettings(seq_len=512, batch_size=4)


def test_all_settings_of_a_fine_tuning() -> None:
    words = ["--lora", "r=8,targets=q_proj,v_proj,dropout=0.05", "--quantize", "nf4", "--gradient-checkpointing"]
    words += ["--freeze", "embed*", "--freeze", "norm,head", "--optimizer", "adamw8bit", "--precision", "bf16-pure"]
    words += ["--attn_implementation", "flash_attention_2"]
    found = parse_model_settings(words, "x")
    assert found.lora == Lora(8, ("q_proj", "v_proj"), 0.05)
    assert (found.quantize, found.gradient_checkpointing, found.freeze) == ("nf4", True, ("embed*", "norm", "head"))
    assert (found.optimizer, found.precision, found.attention) == ("adamw8bit", "bf16-pure", "flash")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seq-length", "5"], "unknown setting 'seq-length' for hf:a/b"),
        (["--seq-len"], "--seq-len needs a value"),
        (["--seq-len", "many"], "seq_len is a whole number above 0, not 'many'"),
        (["--quantize", "int3"], "quantize is one of nf4, fp4, int8, not 'int3'"),
        (["--lora", "rank=2,alpha=3"], "--lora has no part 'alpha=3'"),
        (["--lora", "r=two"], "the rank of --lora is a whole number above 0, not 'two'"),
        (["--lora", "dropout=x"], "the dropout of --lora is a number, not 'x'"),
        (["gradient_checkpointing=maybe"], "gradient_checkpointing is true or false, not 'maybe'"),
    ],
)
def test_a_wrong_setting_is_a_usage_error(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_model_settings(words, "hf:a/b")
    assert caught.value.message == text


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(UsageError) as caught:
        parse_model_settings(["--batchsize", "5"], "hf:a/b")
    assert caught.value.hint is not None and caught.value.hint.startswith(
        "did you mean 'batch_size'? known settings: "
    )


def test_a_config_is_found_in_a_file_and_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert is_config_target(str(tmp_path)) and is_config_target("./mine.json") and is_config_target("hf:a/b")
    assert not is_config_target("demo")
    found = find_config(str(tmp_path))
    assert (found.name, read_config(found)) == (tmp_path.name, {"model_type": "llama"})


def test_a_file_that_is_no_config_says_so(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(UsageError) as caught:
        read_config(find_config(str(path)))
    assert caught.value.message == f"{path} has no model_type"
    with pytest.raises(UsageError) as caught:
        find_config(str(tmp_path / "missing.json"))
    assert caught.value.message == f"there is no file '{tmp_path / 'missing.json'}'"


def test_a_model_of_the_hub_comes_from_the_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_config(find_config("hf:org/name")) == {"model_type": "gpt2"}
