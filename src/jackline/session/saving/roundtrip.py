"""Before step 1: save, load and compare the real objects, so that a value that is lost is found in seconds.

Leaves no trace: the loaded values are the saved ones, and the RNG states are restored. Owns the comparison. The
checkpoint of step 0 that remains is useful: a run killed early then resumes from exactly the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from jackline.checkpoint.engine import CheckpointEngine
from jackline.checkpoint.state.frozen import hash_tensor
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.errors import JacklineError

HINT = "attach(verify=False) continues regardless"
UNFILLED = "attach a list, dict, array, tensor or an object with state_dict(); plain values live in run.values"
OURS = ("session", "random", "values")  # entries of a state that are not the caller's


class Unverified(JacklineError):
    """Saved values were not restored, or could not be saved."""


def verify(
    engine: CheckpointEngine, state: MutableMapping[str, Any], step: int, together: Callable[[bool], bool] = bool
) -> None:
    """Raises Unverified with the names of what was lost. `state` is what the run will save from now on.

    `together`: whether a thing is done on every rank that saves a part of it.
    """
    rng_state = ProcessRandom()
    ours = {**state, "random": rng_state}
    if engine.settings.team is not None and not engine.settings.team.is_first:
        ours = {word: value for word, value in state.items() if word not in OURS}  # those of rank 0 are saved
    before = fingerprint(engine, ours)
    engine.save_number += 1
    ticket = engine.save(ours, step=step, wait="writer")
    if not together(ticket.wait()):
        raise Unverified(f"this run cannot be saved: {ticket.why or ticket.outcome}", hint=HINT)
    engine.load_newest(ours, step=step)
    rng_state.reapply()
    refuse_replaced(state, ours)
    differences = compare(before, fingerprint(engine, ours))
    if differences:
        raise Unverified(
            "what was saved does not come back the same",
            detail=tuple(differences[:8]),
            hint=f"its state_dict() and load_state_dict() do not match; {HINT}",
        )


def refuse_replaced(given: Mapping[str, Any], filled: Mapping[str, Any]) -> None:
    """Raise if a restore replaced an object: the caller's own variable still has the old contents."""
    for name, value in filled.items():
        if name not in OURS and value is not given[name]:
            raise Unverified(
                f"{name} is a {type(given[name]).__name__}: it cannot be restored in your own variable", hint=UNFILLED
            )


def find_unattached(engine: CheckpointEngine, state: MutableMapping[str, Any]) -> str:
    """Text when an optimizer trains a parameter that no save holds: a resume would start it over."""
    held = {_storage(source.tensor) for source in engine.capture(state).sources}
    for word, optimizer in state.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        loose = [one for one in parameters if one.requires_grad and (at := _storage(one)) and at not in held]
        if loose:
            shapes = ", ".join(str(list(one.shape)) for one in loose[:3])
            return (
                f"{word} trains {len(loose)} of its {len(parameters)} parameters (of shape {shapes}) that are in no "
                "attached object, so they are in no checkpoint. Attach them too: attach(name=parameter)"
            )
    return ""


def _storage(tensor: torch.Tensor) -> int:
    """Its memory; 0 where it has none of its own (sparse, meta, lazy, empty)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def fingerprint(engine: CheckpointEngine, state: MutableMapping[str, Any]) -> dict[str, Any]:
    """Every value of the state by name; tensors by their hash."""
    captured = engine.capture(state)
    found = {f"{source.key}.{source.name}": hash_tensor(source.tensor) for source in captured.sources}
    for key, node in captured.tree.items():
        _flatten(node, key, found)
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """'ema.decay: 0.99 -> 0.9' for what differs."""
    names = sorted(set(before) | set(after))
    return [
        f"{name}: {_shown(before, name)} -> {_shown(after, name)}"
        for name in names
        if before.get(name) != after.get(name) or (name in before) != (name in after)
    ]


def _flatten(node: Any, name: str, found: dict[str, Any]) -> None:
    if isinstance(node, dict):
        for word, part in node.items():
            _flatten(part, f"{name}.{word}", found)
    elif isinstance(node, list):
        for number, part in enumerate(node):
            _flatten(part, f"{name}.{number}", found)
    else:
        found.setdefault(name, node)


def _shown(values: dict[str, Any], name: str) -> str:
    text = str(values[name]) if name in values else "(gone)"
    return text if len(text) <= 60 else text[:57] + "..."
