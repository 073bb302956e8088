"""Whether this is still the program that was saved: data, code, arguments, schedule, versions; before training.

Each kind of change has a verdict: refuse, warn or continue. Owns the fingerprint that goes into every checkpoint and
its comparison. It reads no data: a dataset is identified by its type, length and attributes.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from jackline.rundir.command import plain_command
from jackline.session.settings import Verdict
from jackline.session.stepping import find_optimizers

_SAMPLED = 1024  # values of a tensor that go into the fingerprint
_MAX_FILES = 200
# Less may be known at `attach` than at the save: modules imported later, `total`.
_GROWING = ("code", "schedule")
Fingerprint = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Change:
    """One thing that has changed. `kind` is a key of settings.DEFAULT_VERDICTS."""

    kind: str
    text: str


def describe_program(
    state: Mapping[str, Any], loader: Any, argv: list[str], schedule: Mapping[str, Any]
) -> Fingerprint:
    """The fingerprint compared at resume. Taken at `attach`, before anything was restored."""
    return {
        "data": describe_data(loader),
        "code": describe_code(),
        "arguments": {"argv": _arguments(argv)},
        "schedule": {**_describe_optimizers(state), **schedule},
        "versions": {"python": platform.python_version()},
    }


def compare_programs(saved: Any, now: Fingerprint) -> list[Change]:
    """What differs, by kind of change. A checkpoint without a fingerprint is not compared."""
    found: list[Change] = []
    if not isinstance(saved, dict):
        return found
    for kind, described in now.items():
        before, values = saved.get(kind), described
        if not isinstance(before, dict):
            continue
        if kind == "arguments":  # older checkpoints have the command as it was typed
            before, values = _plain_arguments(before), _plain_arguments(described)
        for name in sorted(set(before) | set(values)):
            if kind in _GROWING and (name not in before or name not in values):
                continue
            if before.get(name) != values.get(name):
                found.append(Change(kind, _word(kind, name, before, values)))
    return found


def judge(changes: list[Change], verdicts: Mapping[str, Verdict]) -> dict[Verdict, list[Change]]:
    sorted_out: dict[Verdict, list[Change]] = {"refuse": [], "warn": [], "go on": []}
    for change in changes:
        sorted_out[verdicts[change.kind]].append(change)
    return sorted_out


def describe_data(loader: Any) -> dict[str, Any]:
    if loader is None:
        return {}
    found: dict[str, Any] = {"loader": type(loader).__name__}
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return found
    found["dataset"] = type(dataset).__name__
    with contextlib.suppress(TypeError, NotImplementedError):
        found["length"] = len(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        found[f"dataset.{name}"] = _describe_value(value)
    batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return {**found, "batch_size": batch_size if isinstance(batch_size, int) else None}


def describe_code() -> dict[str, str]:
    """A hash of the main script and of every module in the same folder: the user's own code."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        return {}
    folder = Path(main).resolve().parent
    ours, installed = f"{folder}/", str(Path(sysconfig.get_paths()["purelib"]).resolve())
    files = [Path(main).resolve()]
    for module in list(sys.modules.values()):
        # Not getattr on the module: some import many others when any attribute is read.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.startswith(ours) and not file.startswith(installed):
            files.append(Path(file))
    found = {}
    for path in sorted(set(files))[:_MAX_FILES]:
        try:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except (OSError, ValueError):
            continue
    return found


def _plain_arguments(saved: Mapping[str, Any]) -> dict[str, str]:
    return {name: _arguments(["python", *str(text).split()]) for name, text in saved.items()}


def _arguments(argv: list[str]) -> str:
    """The script's file name and its arguments: the same for every spelling of the command, in every folder."""
    words = plain_command(argv, str(Path.cwd()))[1:]
    return " ".join([Path(words[0]).name, *words[1:]]) if words else ""


def _describe_optimizers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the program gives them; at resume those of the checkpoint replace them."""
    found = {}
    for number, optimizer in enumerate(find_optimizers(state)):
        found[f"optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            for word, value in group.items():
                if word not in ("params", "fused", "foreach", "capturable"):
                    found[f"optimizer {number} group {place} {word}"] = _describe_value(value)
    return found


def _describe_value(value: Any) -> Any:
    """Small values as they are; large ones by size and a sample; anything else by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return _describe_array(value)
    if isinstance(value, list | tuple | dict | set):
        return f"{type(value).__name__} of {len(value)} {_hash_ends(value)}"
    return type(value).__name__


def _describe_array(value: Any) -> str:
    shape, kind = list(value.shape), str(value.dtype).removeprefix("torch.")
    flat = value.reshape(-1)
    sample = flat[:: max(1, len(flat) // _SAMPLED)] if len(flat) else flat
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().contiguous()
        data = sample.view(torch.uint8).numpy().tobytes() if len(sample) else b""
    else:
        data = sample.tobytes()
    return f"{kind}{shape} {hashlib.sha256(data).hexdigest()[:12]}"


def _hash_ends(value: Any) -> str:
    """A hash of the first and last few entries, when they are plain."""
    items = list(value.items()) if isinstance(value, dict) else value
    ends = [*items[:3], *items[-3:]] if isinstance(items, list | tuple) else []
    plain = [
        str(_describe_value(item)) if not isinstance(item, tuple) else str([*map(_describe_value, item)])
        for item in ends
    ]
    return hashlib.sha256("\n".join(plain).encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _word(kind: str, name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if kind == "code":
        return f"{name} was edited"
    return f"{name}: {before.get(name, '(not set)')} -> {now.get(name, '(not set)')}"
