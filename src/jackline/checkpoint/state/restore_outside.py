"""Restores what torch keeps outside `state_dict`: frozen parameters, modes, hidden buffers, changed attributes.

What differs from the program is noted for the receipt of the resume. Owns the restore; outside.py
describes the node.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jackline.checkpoint.format.regions import SHARDED
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.state.attributes import Root, find_hidden_buffers, is_live, named_parts
from jackline.checkpoint.state.fitting import Fitting
from jackline.checkpoint.state.outside import clean_name, join_names

Fit = Callable[[Any, Any, str], Any]  # (node, live value, where) -> the value that belongs there


def fit_outside(node: Any, root: Root, where: str, fitting: Fitting, fit: Fit) -> None:
    """Prepare the restore of `describe_outside`'s node; what differs from the program is noted."""
    if not isinstance(node, dict):
        return  # the checkpoint was written before there was such a node
    if isinstance(root, nn.Module):
        _fit_flags(node, root, where, fitting)
        _fit_buffers(node, root, where, fitting)
    parts: dict[str, Any] = named_parts(root) if isinstance(root, nn.Module) else {"": root}
    for owner, attributes in node.get("attributes", {}).items():
        for path, part in attributes.items():
            holder, name = _resolve(parts.get(owner), path)
            at = join_names(where, owner, path)
            if holder is None:
                fitting.notes.append(f"{at} was saved, but the program has no place for it: not restored")
            else:
                _fit_attribute(part, (holder, name), at, fitting, fit)
    for path, why in node.get("unsaved", {}).items():
        at = join_names(where, path)
        fitting.notes.append(f"{at} had changed and could not be saved ({why}): it is as the program made it")


def _fit_flags(node: dict[str, Any], module: nn.Module, where: str, fitting: Fitting) -> None:
    frozen, resting = set(node.get("frozen", ())), set(node.get("eval", ()))
    turned = []
    for name, parameter in module.named_parameters():
        wanted = clean_name(name) not in frozen
        if parameter.requires_grad != wanted:
            turned.append(clean_name(name))
            fitting.then.append(partial(_set_grad, parameter, wanted))
    modes = [name for name, part in named_parts(module).items() if part.training == (name in resting)]
    for name, part in named_parts(module).items():
        fitting.then.append(partial(_set_mode, part, name not in resting))
    if turned:
        fitting.notes.append(f"{where}: requires_grad is as it was saved, other than in the program: {_some(turned)}")
    if modes:
        names = _some([name or "the whole" for name in modes])
        fitting.notes.append(f"{where}: train or eval mode is as it was saved, other than in the program: {names}")


def _fit_buffers(node: dict[str, Any], module: nn.Module, where: str, fitting: Fitting) -> None:
    live = find_hidden_buffers(named_parts(module))
    parts = named_parts(module)
    for name, part in node.get("buffers", {}).items():
        owner, _, short = name.rpartition(".")
        if owner not in parts:
            fitting.notes.append(f"{where}.{name} was saved, but the program has no place for it: not restored")
            continue
        existing = live[name][2] if name in live else None
        value = _fit_tensor(part, existing, f"{where}.{name}", fitting, _device_of(module))
        fitting.then.append(partial(_set_buffer, parts[owner], short, value))
    for name, saved in node.get("unchanged", {}).items():
        if name not in live or fitting.hash_frozen(live[name][2].detach()) != saved:
            fitting.notes.append(
                f"{where}.{name} (persistent=False) is not the one of the saved run; training had not changed it, so "
                "it was not stored: it is as the program made it"
            )


def _fit_tensor(node: dict[str, Any], existing: Any, where: str, fitting: Fitting, device: Any) -> Tensor:
    """Into the existing tensor where it has the same shape and dtype, so that its views and aliases stay valid."""
    if isinstance(existing, Tensor) and existing.grad_fn is None and not existing.is_inference():
        is_dense = 0 not in [step for step, size in zip(existing.stride(), existing.shape, strict=True) if size > 1]
        if is_dense and fitting.fits(node, existing):
            return fitting.tensor(node, where, existing)
    on_device = node.get("device", "cpu") != "cpu"
    return fitting.tensor(node, where, None, device if on_device else "cpu")


def _set_grad(parameter: nn.Parameter, wanted: bool) -> None:
    parameter.requires_grad_(wanted)


def _set_mode(part: nn.Module, is_training: bool) -> None:
    part.training = is_training  # not train(): it changes all parts below, and people override it


def _set_buffer(owner: nn.Module, name: str, value: Tensor) -> None:
    if owner._buffers.get(name) is not value:
        owner._buffers[name] = value
        owner._non_persistent_buffers_set.add(name)


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _fit_attribute(node: Any, place: tuple[Any, str], where: str, fitting: Fitting, fit: Fit) -> None:
    holder, name = place
    existing = holder.__dict__.get(name)
    if isinstance(node, dict) and node.get(KIND) in ("tensor", SHARDED):
        value: Any = _fit_tensor(node, existing, where, fitting, existing.device if _is_tensor(existing) else "cpu")
    elif isinstance(node, dict) and node.get(KIND) in ("module", "optimizer", "stateful") and not is_live(existing):
        fitting.notes.append(f"{where} was a {node.get('class')} when it was saved and is missing now: not restored")
        return
    else:
        value = fit(node, existing, where)
    if value is not existing:
        fitting.then.append(partial(holder.__dict__.__setitem__, name, value))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _resolve(root: Any, path: str) -> tuple[Any, str]:
    """The object that has the attribute at the end of `path`; None when the way there does not exist."""
    *way, name = path.split(".")
    for word in way:
        root = getattr(root, "__dict__", {}).get(word)
    return (root if isinstance(getattr(root, "__dict__", None), dict) else None), name


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
