"""What torch keeps outside `state_dict`, in a checkpoint: frozen parameters, modes, hidden buffers, attributes.

Its tensors go into a file of their own, KEY.outside.safetensors, so that KEY.safetensors can still be loaded into the
module by plain PyTorch. Checkpoints without this part are restored as before. Owns the node "outside" of modules and
optimizers. Which attributes belong to it is decided in attributes.py; restore_outside.py restores it.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from jackline.checkpoint.format.tree import CannotSave
from jackline.checkpoint.state.attributes import (
    MAX_TENSOR_BYTES,
    Baseline,
    Found,
    Parts,
    Root,
    find_hidden_buffers,
    named_parts,
)
from jackline.errors import JacklineError


class Encoding(Protocol):
    """What is needed of a capture under way (capture.py). Both store tensors in the file of what is outside."""

    baseline: Baseline
    unsaved: list[str]

    def outside_tensor(self, tensor: Tensor, where: str) -> dict[str, Any]: ...

    def outside_value(self, value: Any, where: str) -> Any: ...


def describe_outside(root: Root, where: str, encoding: Encoding) -> dict[str, Any]:
    """The node "outside" of a module or an optimizer; parts of it that are empty are left out."""
    found: dict[str, Any] = {}
    parts = named_parts(root) if isinstance(root, nn.Module) else None
    if isinstance(root, nn.Module) and parts is not None:
        found["frozen"] = [
            join_names(owner, name)
            for owner, part in parts.items()
            for name, value in part._parameters.items()
            if value is not None and not value.requires_grad
        ]
        found["eval"] = [name for name, part in parts.items() if not part.training]
        found |= _describe_buffers(root, parts, where, encoding)
    attributes: dict[str, dict[str, Any]] = {}
    unsaved: dict[str, str] = {}
    for attribute in encoding.baseline.changed(root, parts):
        at = join_names(where, attribute.owner, attribute.path)
        try:
            node = _encode(attribute, at, encoding)
        except JacklineError as problem:
            unsaved[join_names(attribute.owner, attribute.path)] = why = _reason(attribute.value, problem)
            encoding.unsaved.append(f"{at} ({why})")
            continue
        attributes.setdefault(attribute.owner, {})[attribute.path] = node
    found |= {"attributes": attributes, "unsaved": unsaved}
    return {word: part for word, part in found.items() if part}


def _encode(found: Found, where: str, encoding: Encoding) -> Any:
    value = found.value
    if isinstance(value, Tensor):
        if value.numel() * value.element_size() > MAX_TENSOR_BYTES:
            raise CannotSave("too large")
        return encoding.outside_tensor(value.detach(), where)
    if isinstance(value, dict) and any(isinstance(key, Tensor) or _is_address(key) for key in value):
        raise CannotSave("keyed by objects")
    return encoding.outside_value(value, where)


def _is_address(key: Any) -> bool:
    """An id(...) as key means nothing in another process. Counts of 2**40 are rare."""
    return type(key) is int and key > 1 << 40


def _reason(value: Any, problem: JacklineError) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {list(value.shape)}"
    if problem.message == "keyed by objects":
        return f"a {type(value).__name__} whose keys are tensors or addresses"
    return f"a {type(value).__name__}"


def _describe_buffers(module: nn.Module, parts: Parts, where: str, encoding: Encoding) -> dict[str, Any]:
    """Changed buffers as they are; the others by their hash, because the program makes them again."""
    stored: dict[str, Any] = {}
    unchanged: dict[str, str] = {}
    for name, (_, _, buffer) in find_hidden_buffers(parts).items():
        try:
            if encoding.baseline.is_changed_buffer(module, name, buffer):
                stored[name] = encoding.outside_tensor(buffer.detach(), join_names(where, name))
            else:
                unchanged[name] = encoding.baseline.hashes(buffer.detach())
        except (JacklineError, RuntimeError, TypeError, NotImplementedError):  # sparse or without values
            encoding.unsaved.append(f"{join_names(where, name)} (a non-persistent buffer without plain bytes)")
    return {"buffers": stored, "unchanged": unchanged}


def clean_name(name: str) -> str:
    """A tensor's name without the prefixes that compiled blocks add."""
    return name.replace("_orig_mod.", "")


def join_names(*words: str) -> str:
    return ".".join(word for word in words if word)
