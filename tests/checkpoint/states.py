"""Small real training states, and their fingerprints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jackline.checkpoint.format.hashing import best_algorithm
from jackline.checkpoint.format.header import build_header, lay_out
from jackline.checkpoint.format.manifest import STATE, Manifest, Name
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.checkpoint.writer.commit import Draft
from jackline.checkpoint.writer.disk import Disk


def make_state(seed: int = 0, width: int = 16) -> dict[str, Any]:
    """A model with a tie, a buffer and dropout, its optimizer, schedule and counters."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, width, bias=False)
    )
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    counters = {"step": 0, "seen": 0}
    return {
        "model": model,
        "optim": optimizer,
        "schedule": schedule,
        "random": ProcessRandom(),
        "counters": counters,
    }


def train_step(state: dict[str, Any], before_change: Any = lambda: None) -> float:
    """One step of training on chance data; returns the loss."""
    model, optimizer = state["model"], state["optim"]
    width = model[0].weight.shape[0]
    loss = model(torch.randn(8, width)).square().mean()
    loss.backward()
    before_change()
    optimizer.step()
    optimizer.zero_grad()
    state["schedule"].step()
    state["counters"]["step"] += 1
    state["counters"]["seen"] += 8
    return float(loss.detach())


def fingerprint(state: dict[str, Any]) -> str:
    """Of every bit that training depends on."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif hasattr(value, "state_dict"):
            add(value.state_dict())
        elif isinstance(value, bytes):
            digest.update(value)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()


def write_small(
    folder: Path,
    step: int,
    *,
    disk: Disk | None = None,
    content: bytes = b"",
    metrics: dict[str, float] | None = None,
) -> Path:
    """A whole checkpoint without torch: one tensor file, one state, through the real commit."""
    tensors = lay_out([("w", "F32", (3, 5)), ("n", "I64", ())])
    body = build_header(tensors) + (content or bytes([step % 256])) * 68
    data = body[: len(build_header(tensors)) + 68]
    draft = Draft(folder, Name(step), best_algorithm(), disk or Disk())
    try:
        file = draft.open_file("model.safetensors", len(data))
        draft.write(file, memoryview(data), 0)
        entries = [draft.finish_file(file), draft.add_small(STATE, b'{"step":%d}' % step)]
        manifest = Manifest(step, 1.0, best_algorithm(), tuple(entries), metrics=metrics or {})
        return draft.commit(manifest)
    except OSError as problem:
        if type(problem).__name__ != "Unacknowledged":
            draft.discard()
        raise
