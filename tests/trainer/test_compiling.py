"""Whether a model is compiled, and the reason a person reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jackline.errors import UsageError
from jackline.trainer.compiling import cache_folder, decide, is_warm, use_cache
from jackline.trainer.precision import autocast, choose_attention, choose_precision, make_scaler

CARD: dict[str, Any] = {"has_card": True, "can_compile": "", "eager_step_s": 0.1, "is_warm": False}


@pytest.mark.parametrize(
    ("mode", "facts", "wanted"),
    [
        ("off", {"steps_left": 10**6}, (False, "not compiled: compile=off")),
        ("on", {"steps_left": 1}, (True, "compiled: compile=on")),
        (
            "on",
            {"steps_left": 1, "can_compile": "there is no C compiler on this machine"},
            (False, "not compiled: there is no C compiler on this machine"),
        ),
        (
            "auto",
            {"steps_left": 10**4},
            (True, "compiled: about 40 s for the first time, saves about 6 min in all"),
        ),
        (
            "auto",
            {"steps_left": 500},
            (False, "not compiled: about 40 s for the first time would save only 18 s of what is left"),
        ),
        (
            "auto",
            {"steps_left": 500, "is_warm": True},
            (True, "compiled: about 8 s with the cache of an earlier attempt, saves about 18 s in all"),
        ),
        (
            "auto",
            {"steps_left": 10**6, "has_card": False},
            (False, "not compiled: on a CPU it saves little; compile=on does it all the same"),
        ),
    ],
)
def test_compiling_must_pay_for_itself(mode: Any, facts: dict[str, Any], wanted: tuple[bool, str]) -> None:
    made = decide(mode, **{**CARD, **facts})
    assert (made.is_compiled, made.reason) == wanted


def test_the_cache_lies_in_the_run_and_apart_for_each_attention(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    folder = cache_folder(tmp_path, "cudnn")
    assert folder != cache_folder(tmp_path, "flash")
    assert not is_warm(folder)
    use_cache(folder)
    import os

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    assert not is_warm(folder)
    (folder / "fxgraph" / "ab").mkdir(parents=True)
    assert is_warm(folder)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def test_a_cpu_trains_in_float32_and_refuses_fp16() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) == "fp32"
    assert choose_precision("bf16-weights", cpu) == "bf16-weights"
    assert choose_attention("auto", cpu) == "plain"
    assert make_scaler("fp32", cpu) is None
    with pytest.raises(UsageError) as caught:
        choose_precision("fp16", cpu)
    assert str(caught.value) == (
        "error: fp16 needs a GPU: its loss scaling is of no use on a CPU\nhint: use fp32 or bf16"
    )
    with autocast("bf16", cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast("fp32", cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
