"""Restores an optimizer's state into a live optimizer, exactly.

Does not use its load_state_dict: that casts the state to the parameter's dtype (fp32 moments of bf16 weights would be
rounded), replaces tensors that a captured CUDA graph points at, and overwrites how the user wants it computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jackline.checkpoint.format.regions import SHARDED
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.shards import empty_beside, is_distributed
from jackline.checkpoint.state.fitting import HINT, Fitting
from jackline.errors import CannotResume

_HOW = ("fused", "foreach", "capturable", "differentiable")  # how it computes, not what it computes
Fit = Callable[[Any, Any, str], Any]


def fit_optimizer(
    node: dict[str, Any], optimizer: torch.optim.Optimizer, where: str, fitting: Fitting, fit: Fit
) -> None:
    """Map every saved tensor to the live state; create state that does not exist yet where it belongs."""
    require_same_class(node, optimizer, where)
    _require_same_shape(node, optimizer, where)
    order: list[tuple[Tensor, dict[str, Any]]] = []
    for group, saved in zip(optimizer.param_groups, node["groups"], strict=True):
        known = {id(parameter) for parameter, _ in order}
        order += [(parameter, group) for parameter in group["params"] if id(parameter) not in known]
        _fit_settings(saved["settings"], group, f"{where}.groups", fitting, fit)
    state: dict[Tensor, Any] = {}
    for number, saved in node["state"].items():
        parameter, group = order[int(number)]
        live = optimizer.state.get(parameter, {})
        at = f"{where}.state.{number}"
        if not isinstance(saved, dict) or KIND in saved:
            state[parameter] = fit(saved, live, at)
            continue
        state[parameter] = {
            word: _fit_value(part, live.get(word), f"{at}.{word}", (word, parameter, group), (fitting, fit))
            for word, part in saved.items()
        }
    fitting.then.append(lambda: _replace_state(optimizer, state))


def _fit_value(
    node: Any, live: Any, where: str, owner: tuple[str, Tensor, dict[str, Any]], tools: tuple[Fitting, Fit]
) -> Any:
    word, parameter, group = owner
    fitting, fit = tools
    if not isinstance(node, dict) or node.get(KIND) not in ("tensor", SHARDED):
        return fit(node, live, where)
    if live is None and word != "step" and is_distributed(parameter):
        live = empty_beside(parameter, *fitting.shape_of(node, where), node)
    device = state_device(node, word, parameter, group)
    is_usable = isinstance(live, Tensor) and live.device.type == torch.device(device).type
    return fitting.tensor(node, where, live if is_usable else None, device)


def state_device(node: dict[str, Any], word: str, parameter: Tensor, group: dict[str, Any]) -> torch.device:
    """Step counters are on the host unless the kernels read them; the rest is on its parameter's device."""
    if word == "step":
        return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    was_beside = node.get("device", "cpu") != "cpu" or parameter.device.type == "cpu"
    return parameter.device if was_beside or len(parameter.shape) else torch.device("cpu")


def _fit_settings(saved: dict[str, Any], group: dict[str, Any], where: str, fitting: Fitting, fit: Fit) -> None:
    for word, node in saved.items():
        live = group.get(word)
        if word in _HOW and word in group:
            if node != live:
                fitting.notes.append(
                    f"{where}: {word} is {live} now and was {node}; results may differ in the last bit"
                )
            continue
        value = fit(node, live, f"{where}.{word}")
        fitting.then.append(partial(_set, group, word, value, live))


def _set(group: dict[str, Any], word: str, value: Any, live: Any) -> None:
    """A learning rate may be a number or a tensor; a captured graph refers to the tensor, so that one is kept."""
    if isinstance(live, Tensor) and not isinstance(value, Tensor):
        with torch.no_grad():
            live.fill_(value)
    elif isinstance(value, Tensor) and isinstance(live, int | float):
        group[word] = type(live)(value.item())
    else:
        group[word] = value


def _replace_state(optimizer: torch.optim.Optimizer, state: dict[Tensor, Any]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)


def require_same_class(node: dict[str, Any], optimizer: torch.optim.Optimizer, where: str) -> None:
    """The moments of one algorithm mean nothing to another."""
    before, now = node.get("class"), type(optimizer).__name__
    if isinstance(before, str) and before != now:
        raise CannotResume(
            f"{where} was {before} when it was saved and is {now} now: one cannot use the other's state",
            hint=f"resume with {before}; or export the weights (jackline checkpoints export) and train them in a new "
            f"run with {now}",
        )


def _require_same_shape(node: dict[str, Any], optimizer: torch.optim.Optimizer, where: str) -> None:
    live = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    saved, position = [], 0
    for group in node["groups"]:
        count = len(group["params"])
        saved.append(node["shapes"][position : position + count])
        position += count
    if saved == live:
        return
    counts = [len(group) for group in saved], [len(group) for group in live]
    if counts[0] != counts[1]:
        text = f"it has parameter groups of {counts[1]} tensors, the checkpoint {counts[0]}"
    else:
        text = "its parameters come in another order or shape"
    raise CannotResume(f"{where} is not the optimizer that was saved: {text}", hint=HINT)
