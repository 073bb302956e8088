"""The weights that a training begins with (`init_from`), and which of them stay as they are (`frozen`).

Owns where such weights are found (a run, a checkpoint, a .safetensors file, a folder of transformers), that they fit
the model, and the words where they do not. Nothing is taken from a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jackline.errors import JacklineError, UsageError
from jackline.models.gpt import GPT
from jackline.rundir.access.reading import read_whole
from jackline.rundir.layout import RunDir
from jackline.trainer.network import shape_of
from jackline.trainer.trained.stored import MAX_TOKENIZER_BYTES, find_checkpoint, read_config, read_weights
from jackline.units import count_of

if TYPE_CHECKING:
    from jackline.trainer.config import TrainConfig

# Our modules and what GPT-2 in transformers calls them.
BLOCK = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "projection": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
TURNED = ("qkv", "projection", "up", "down")  # GPT-2 in transformers keeps the matrices of these transposed
END = "<|endoftext|>"

_INDEX = "model.safetensors.index.json"
_HINT = "a run's name or folder, a checkpoint's folder, a .safetensors file, or a folder that from_pretrained loads"
_ROUNDED = 64  # rows that a vocabulary may have been rounded up by
_SHOWN = 3


@dataclass(frozen=True)
class Found:
    """`vocabulary` is None where nothing tells which tokens the weights are for; `num_heads` 0 likewise."""

    weights: Mapping[str, Tensor]
    vocabulary: Mapping[str, int] | None = None
    num_heads: int = 0


def begin_with(model: nn.Module, config: TrainConfig, tokenizer: str | None = None) -> str:
    """Copy the weights of `init_from` into the model; returns a sentence about it. `tokenizer`: tokenizer.json of
    this training, None for plain bytes. All weights must fit unless `init_partial` says otherwise."""
    source = config.init_from
    found = find_weights(source)
    if isinstance(model, GPT):
        _check_tokens(source, found, tokenizer)
        if found.num_heads and found.num_heads != model.shape.num_heads:
            raise UsageError(
                f"init_from={source} has {found.num_heads} heads, this model {model.shape.num_heads}",
                hint="model=... must name the size that it has",
            )
    fitting = _fit(model, _to_gpt(found.weights) if isinstance(model, GPT) else found.weights)
    if not fitting.taken or (fitting.wrong and not config.init_partial):
        raise UsageError(
            f"init_from={source} does not fit this model: {_listed(fitting.wrong)}",
            hint="give the settings of the model that it has; init_partial=true takes what fits",
        )
    for own, value in fitting.taken:
        own.copy_(value)
    kept = f"; as initialised: {_listed(fitting.wrong)}" if fitting.wrong else ""
    return f"begins with {count_of(len(fitting.taken), 'tensor')} of {source}{kept}"


def freeze(model: nn.Module, patterns: str) -> None:
    """Of names with these patterns nothing is trained."""
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"frozen={pattern} is no parameter of this model", hint=f"its first ones: {', '.join([*names][:4])}"
            )
        for name in matched:
            names[name].requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in names.values()):
        raise UsageError(f"frozen={patterns} leaves nothing to train", hint="name fewer parts")


def find_weights(source: str) -> Found:
    path = Path(source).expanduser()
    try:
        if path.is_file():
            return Found(load_file(path))
        if (path / "config.json").is_file():
            return _of_transformers(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"init_from={source} cannot be read: {error}", hint=_HINT) from None
    return _of_run(source, path)


def _of_run(source: str, path: Path) -> Found:
    if "/" in source and not path.exists():
        raise UsageError(f"init_from={source}: there is no such file or folder", hint=_HINT)
    try:
        run, folder = find_checkpoint(source, "best", None)
        weights = read_weights(folder)
    except JacklineError as error:
        raise UsageError(f"init_from={source} cannot be used: {error.message}", hint=error.hint or _HINT) from None
    if not run.config_file.exists():
        return Found(weights)
    config = read_config(run)
    if not config.is_language:
        return Found(weights)
    heads = shape_of(config, 64).num_heads
    return Found(weights, _vocabulary_of(run, config), heads)


def _of_transformers(folder: Path) -> Found:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (folder / _INDEX).is_file():
        names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    else:
        names = {"model.safetensors"}
    if not all((folder / name).is_file() for name in names):
        raise UsageError(
            f"init_from={folder} has no {', '.join(sorted(names))}",
            hint="only safetensors are read: model.save_pretrained(folder) of transformers writes them",
        )
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        weights |= load_file(folder / name)
    heads = settings.get("n_head", settings.get("num_attention_heads", 0))
    return Found(weights, _vocabulary_in(folder), heads if isinstance(heads, int) else 0)


def _vocabulary_in(folder: Path) -> Mapping[str, int] | None:
    if (folder / "tokenizer.json").is_file():
        return vocabulary_of((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if (folder / "vocab.json").is_file():
        found: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        return found
    return None


def _vocabulary_of(run: RunDir, config: TrainConfig) -> Mapping[str, int] | None:
    if run.tokenizer_file.exists():
        return vocabulary_of(read_whole(run.tokenizer_file, MAX_TOKENIZER_BYTES).decode("utf-8", "replace"))
    return vocabulary_of(None) if config.tokenizer == "bytes" else None


def vocabulary_of(text: str | None) -> Mapping[str, int]:
    """The tokens of a tokenizer.json with their ids; None is plain bytes."""
    parsed = byte_tokenizer() if text is None else json.loads(text)
    vocabulary = parsed.get("model", {}).get("vocab", {})
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return {**tokens, **{one["content"]: one["id"] for one in parsed.get("added_tokens", ())}}


def _check_tokens(source: str, found: Found, tokenizer: str | None) -> None:
    if found.vocabulary is None:
        return
    ours = vocabulary_of(tokenizer)
    other = [token for token, number in found.vocabulary.items() if ours.get(token) != number]
    if other:
        raise UsageError(
            f"init_from={source} was trained with another tokenizer: {count_of(len(other), 'token')} of its"
            f" {len(found.vocabulary):,} {'has' if len(other) == 1 else 'have'} another number here",
            hint="tokenizer=PATH of its tokenizer.json, or gpt2, or bytes",
        )


def _to_gpt(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names and layout of GPT-2 in transformers as ours; others stay as they are."""
    if not any(name.removeprefix("transformer.").startswith("h.0.") for name in weights):
        return weights
    outer = {"wte": "tokens", "wpe": "positions", "ln_f": "norm", "lm_head": "head"}
    inner = {theirs: own for own, theirs in BLOCK.items()}
    found = {}
    for name, value in weights.items():
        module, _, last = name.removeprefix("transformer.").rpartition(".")
        if module in outer:
            found[f"{outer[module]}.{last}"] = value
        elif module.startswith("h."):
            _, number, part = module.split(".", 2)
            own = inner.get(part)
            if own is not None:  # the causal masks that old files have are no weights
                is_turned = own in TURNED and last == "weight"
                found[f"blocks.{number}.{own}.{last}"] = value.t() if is_turned else value
    return found


@dataclass(frozen=True)
class _Fitting:
    taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def _fit(model: nn.Module, found: Mapping[str, Tensor]) -> _Fitting:
    made, own = _Fitting(), model.state_dict()
    filled = set()
    for name, value in own.items():
        given = found.get(name)
        if given is None:
            continue
        place = _place(model, name, value, given)
        if place is None:
            made.wrong.append(f"{name} is {_shape(given)} there, {_shape(value)} here")
        else:
            made.taken.append((place, given[: len(place)] if place.dim() else given))
        filled.add(value.data_ptr())
    # A tied head is stored once: the other name is the same memory.
    made.wrong.extend(f"{name} is not there" for name, value in own.items() if value.data_ptr() not in filled)
    made.wrong.extend(f"{name} is not here" for name in found if name not in own and not _is_tied(model, name))
    return made


def _place(model: nn.Module, name: str, value: Tensor, given: Tensor) -> Tensor | None:
    """The part of a weight that is filled; of GPT's vocabulary rows may be missing, of its positions too many."""
    if value.shape == given.shape:
        return value
    if not isinstance(model, GPT) or value.dim() != given.dim() or value.shape[1:] != given.shape[1:]:
        return None
    if name == "positions.weight" and len(given) > len(value):
        return value
    is_rounded = name in ("tokens.weight", "head.weight", "head.bias") and 0 < len(value) - len(given) < _ROUNDED
    return value[: len(given)] if is_rounded else None


def _is_tied(model: nn.Module, name: str) -> bool:
    return isinstance(model, GPT) and model.shape.is_tied and name == "head.weight"


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "one number"


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


def byte_tokenizer() -> dict[str, Any]:
    """Plain bytes as a tokenizer.json."""
    vocabulary = {char: byte for byte, char in enumerate(_byte_chars())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**vocabulary, END: 256},
            "merges": [],
        },
    }


def _byte_chars() -> list[str]:
    """The visible character by which byte-level tokenizers write each byte."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
