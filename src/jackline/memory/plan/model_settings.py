"""The settings of `jackline plan` for a model that is not a recipe: `--seq-len 2048 --lora r=16,targets=q_proj`.

Owns their names, their parsing and their errors. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from jackline.errors import UsageError
from jackline.memory.plan.gpus import Precision

Quantized = Literal["nf4", "fp4", "int8"]
AttentionKind = Literal["sdpa", "eager", "flash"]
Parallel = Literal["ddp", "fsdp", "tp"]
Algorithm = Literal["adamw", "adamw8bit", "paged-adamw8bit", "adafactor", "muon", "sgd", "lion"]


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters as `peft` makes them. `targets` are the last parts of module names, or 'all-linear'."""

    rank: int = 16
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelSettings:
    """None and 0 mean: as the model or the GPU has it."""

    seq_len: int = 0
    batch_size: int = 0
    lora: Lora | None = None
    quantize: Quantized | None = None
    freeze: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    optimizer: Algorithm = "adamw"
    precision: Precision | None = None
    attention: AttentionKind = "sdpa"
    longest: int = 0
    image_size: int = 0
    steps: int = 0
    parallel: Parallel = "ddp"
    offload: bool = False


_FLAGS = frozenset({"gradient_checkpointing", "offload"})
_ALIASES = {"attn_implementation": "attention", "flash_attention_2": "flash"}


def parse_model_settings(words: Sequence[str], target: str) -> ModelSettings:
    """'--seq-len 2048', '--seq_len=2048' and 'seq_len=2048' mean the same."""
    found = ModelSettings()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        key = _ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
        if key not in _PARSERS:
            raise _unknown(name, target)
        if not equals and key not in _FLAGS:
            if not rest:
                raise UsageError(f"{word} needs a value", hint=_EXAMPLES.get(key, f"--{name} VALUE"))
            value = rest.pop(0)
        old = getattr(found, key)
        made = _PARSERS[key](value, key)
        changed: dict[str, Any] = {key: (*old, *made) if isinstance(old, tuple) else made}
        found = replace(found, **changed)
    _check_together(found)
    return found


def _check_together(found: ModelSettings) -> None:
    if found.parallel == "tp" and (found.lora is not None or found.quantize is not None):
        raise UsageError("--parallel tp is not planned with --lora or --quantize", hint="--parallel fsdp")
    if found.parallel == "tp" and found.offload:
        raise UsageError("--offload is FSDP2's: it does not go with --parallel tp", hint="--offload alone")


def _unknown(name: str, target: str) -> UsageError:
    near = difflib.get_close_matches(name.replace("-", "_"), _PARSERS, n=1)
    known = ", ".join(_PARSERS)
    return UsageError(
        f"unknown setting '{name}' for {target}",
        hint=f"did you mean '{near[0]}'? known settings: {known}" if near else f"known settings: {known}",
    )


def _number(text: str, key: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{key} is a whole number above 0, not '{text}'")
    return int(text)


def _one_of(kind: Any) -> Callable[[str, str], Any]:
    def parse(text: str, key: str) -> Any:
        wanted = _ALIASES.get(text, text)
        if wanted not in get_args(kind):
            raise UsageError(f"{key} is one of {', '.join(get_args(kind))}, not '{text}'")
        return wanted

    return parse


def _flag(text: str, key: str) -> bool:
    if text.lower() not in ("", "true", "false", "1", "0", "yes", "no"):
        raise UsageError(f"{key} is true or false, not '{text}'")
    return text.lower() in ("", "true", "1", "yes")


def _patterns(text: str, key: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _lora(text: str, key: str) -> Lora:
    """'r=16,targets=q_proj,v_proj,dropout=0.05': a part without '=' belongs to the one before it."""
    found: dict[str, list[str]] = {}
    last = ""
    for part in text.split(","):
        name, equals, value = part.partition("=")
        last = name if equals else last
        if last not in ("r", "rank", "targets", "dropout"):
            raise UsageError(f"--lora has no part '{part}'", hint=_EXAMPLES["lora"])
        found.setdefault(last, []).append(value if equals else part)
    rank = found.get("r", found.get("rank", ["16"]))[0]
    try:
        dropout = float(found.get("dropout", ["0"])[0])
    except ValueError:
        raise UsageError(f"the dropout of --lora is a number, not '{found['dropout'][0]}'") from None
    return Lora(_number(rank, "the rank of --lora"), tuple(found.get("targets", Lora.targets)), dropout)


_EXAMPLES = {
    "lora": "--lora r=16,targets=q_proj,v_proj",
    "quantize": "--quantize nf4",
    "freeze": "--freeze 'model.embed*'",
}
_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "seq_len": _number,
    "batch_size": _number,
    "lora": _lora,
    "quantize": _one_of(Quantized),
    "freeze": _patterns,
    "gradient_checkpointing": _flag,
    "optimizer": _one_of(Algorithm),
    "precision": _one_of(Precision),
    "attention": _one_of(AttentionKind),
    "longest": _number,
    "image_size": _number,
    "steps": _number,
    "parallel": _one_of(Parallel),
    "offload": _flag,
}
