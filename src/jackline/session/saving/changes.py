"""Whether this is still the program that was saved: data, code, arguments, schedule, versions; before training.

Each kind of change has a verdict: refuse, warn or continue. Owns the fingerprint that goes into every checkpoint and
its comparison. It reads no data: a dataset is identified by its type, length and attributes. Also owns the text that
a resumed run prints first: what was restored, what not, and what changed.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from jackline.checkpoint.format.catalogue import list_left_behind, list_rewinds
from jackline.checkpoint.state.dtypes import plain_bytes
from jackline.checkpoint.state.load import Receipt
from jackline.errors import CannotResume, UsageError
from jackline.rundir.command import plain_command
from jackline.session.feeds.feed import Feed
from jackline.session.settings import Verdict
from jackline.session.stepping import find_optimizers
from jackline.units import format_bytes, format_duration

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


def compare_programs(saved: Any, now: Fingerprint, *, used: Collection[str] = ()) -> list[Change]:
    """What differs, by kind of change. A checkpoint without a fingerprint is not compared.

    `used`: settings of optimizers of which the new value is wanted, so that it is no news.
    """
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
            if kind == "schedule" and " group " in name and name.rpartition(" ")[2] in used:
                continue
            if kind in _GROWING and (name not in before or name not in values):
                continue
            if before.get(name) != values.get(name):
                found.append(Change(kind, _word(kind, name, before, values)))
    return found


def copy_group_settings(state: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The settings of all optimizers as the program gives them, before the saved ones replace them."""
    return [
        [{word: _plain(value) for word, value in group.items() if word != "params"} for group in one.param_groups]
        for one in find_optimizers(state)
    ]


def use_new_settings(
    state: Mapping[str, Any], words: set[str], saved: Any, now: Fingerprint, given: list[list[dict[str, Any]]]
) -> list[str]:
    """Put the program's values of `words` in place of the restored ones, where the program has changed them.

    A value that a schedule has moved is scaled by new / old, and so is what the schedule starts from. Returns texts.
    """
    before, after = (saved or {}).get("schedule", {}), now["schedule"]
    texts = []
    for number, optimizer in enumerate(find_optimizers(state)):
        for place, group in enumerate(optimizer.param_groups):
            for word in sorted(words & set(group)):
                name = f"optimizer {number} group {place} {word}"
                if name not in before or before[name] == after.get(name):
                    continue
                value, how = _new_value(before[name], given[number][place][word], _plain(group[word]))
                _set_setting(group, word, value)
                if word == "lr":
                    _move_schedule(state, optimizer, place, given[number][place], value)
                texts.append(
                    f"{name}: {before[name]} -> {after[name]}, used: it is {_describe_value(value)} now{how}"
                )
    return texts


def refuse_unknown_settings(words: set[str], state: Mapping[str, Any]) -> None:
    known = {word for one in find_optimizers(state) for group in one.param_groups for word in group} - {"params"}
    for word in sorted(words - known):
        there = ", ".join(map(repr, sorted(known))) or "none is attached"
        raise UsageError(f"on_change: no optimizer has a setting '{word}'", hint=f"the optimizers have {there}")


def _new_value(old: Any, new: Any, current: Any) -> tuple[Any, str]:
    numbers = [one for one in (old, new, current) if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) < 3 or not old or current == old:
        return new, ""
    return current * (new / old), f" ({current:g} by its schedule, times {new / old:g})"


def _move_schedule(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, place: int, given: Mapping[str, Any], rate: Any
) -> None:
    """Schedulers compute from the rate they were built with."""
    group = optimizer.param_groups[place]
    for word in ("initial_lr", "max_lr", "min_lr"):
        if word in group and word in given:
            _set_setting(group, word, given[word])
    for scheduler in _find_schedulers(list(state.values())):
        if getattr(scheduler, "optimizer", None) is not optimizer:
            continue
        if "initial_lr" in given and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs[place] = given["initial_lr"]
        if getattr(scheduler, "_last_lr", None):
            scheduler._last_lr[place] = rate


def _find_schedulers(values: list[Any]) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            found += [value, *_find_schedulers(list(getattr(value, "_schedulers", ())))]
        elif isinstance(value, dict):
            found += _find_schedulers(list(value.values()))
        elif isinstance(value, list | tuple):
            found += _find_schedulers(list(value))
    return found


def _set_setting(group: dict[str, Any], word: str, value: Any) -> None:
    """A captured graph refers to a rate's tensor, so that one is kept."""
    if isinstance(group[word], torch.Tensor):
        with torch.no_grad():
            group[word].fill_(value)
    else:
        group[word] = value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else copy.copy(value)


def judge(changes: list[Change], verdicts: Mapping[str, Verdict]) -> dict[Verdict, list[Change]]:
    sorted_out: dict[Verdict, list[Change]] = {"refuse": [], "warn": [], "continue": []}
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
                    found[f"optimizer {number} group {place} {word}"] = _describe_value(_plain(value))
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
    shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
    flat = value.reshape(-1)
    sample = flat[:: max(1, len(flat) // _SAMPLED)] if len(flat) else flat
    if isinstance(sample, torch.Tensor):
        data = plain_bytes(sample)
    else:
        data = sample.tobytes()
    return f"{dtype}{shape} {hashlib.sha256(data).hexdigest()[:12]}"


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
    if kind == "schedule" and name.startswith("optimizer ") and " group " in name:
        word = name.rpartition(" ")[2]
        stays = f"the saved one stays in use (on_change={{'{word}': 'use new'}} takes the new one)"
        return f"{name}: {before.get(name, '(not set)')} -> {now.get(name, '(not set)')} in the program; {stays}"
    return f"{name}: {before.get(name, '(not set)')} -> {now.get(name, '(not set)')}"


OURS = ("session", "random", "values")


def receipt_lines(receipt: Receipt, feed: Feed, session: dict[str, Any]) -> list[str]:
    """The whole receipt, first line first."""
    restored = receipt.restored
    keys = [key for key in restored.keys if key not in OURS]
    lines = [
        f"resuming from {receipt.name}: {', '.join([*keys, 'all random generators'])}; "
        f"{format_bytes(restored.manifest.size_bytes)}, checksums verified, in {format_duration(receipt.took_s)}"
    ]
    lines += [f"  {refusal.name} is not whole and was passed over: {refusal.why}" for refusal in receipt.refused]
    lines += _left_behind_lines(receipt)
    lines += [f"  not restored: {what}" for what in restored.not_restored if not what.startswith(OURS)]
    lines += [f"  {note}" for note in restored.notes if not note.startswith(OURS)]
    if feed.kind != "none":
        of = f" of {feed.num_batches}" if feed.num_batches is not None else ""
        lines.append(f"  data: epoch {session['epoch']}, batch {session['batch']}{of}; {'; '.join(feed.describe())}")
    return lines


def _left_behind_lines(receipt: Receipt) -> list[str]:
    """Printed only by an attempt that starts at the step a user went back to."""
    folder = receipt.path.parent
    if not any(rewind.step == receipt.step for rewind in list_rewinds(folder)):
        return []
    names = [str(name) for name in list_left_behind(folder) if name.step > receipt.step]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"  left behind: {names[0]}{more}; numbers of later steps stay in metrics-0.jsonl, the new ones follow"]


def start_lines(feed: Feed, how_often: str) -> list[str]:
    """What a new run prints."""
    data = f"; data: {'; '.join(feed.describe())}" if feed.kind != "none" else ""
    return [f"saving {how_often}{data}"]


def announce_changes(changes: list[Change], verdicts: dict[str, Verdict], tell: Callable[[str], None]) -> None:
    """Report changes since the checkpoint; raise CannotResume if one forbids resuming."""
    found = judge(changes, verdicts)
    for change in found["warn"]:
        tell(f"{change.kind} changed since it was saved: {change.text}")
    if found["refuse"]:
        kinds = sorted({change.kind for change in found["refuse"]})
        settings = ", ".join(f"'{kind}': 'warn'" for kind in kinds)
        raise CannotResume(
            f"{' and '.join(kinds)} changed since it was saved",
            detail=tuple(change.text for change in found["refuse"][:8]),
            hint=f"attach(new=True) starts another run, on_change={{{settings}}} continues this one",
        )
