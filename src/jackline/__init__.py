"""Jackline keeps a training run visible, within memory, alive and resumable.

The public names are loaded on first use, so that `import jackline` costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "attach": "jackline.session.attach",
    "load": "jackline.trainer.trained.load",
    "peek": "jackline.session.peek",
    "phase": "jackline.session.phase",
    "Loader": "jackline.session.feeds.loader",
    "Recipe": "jackline.trainer.own.recipe",
    "Stopped": "jackline.session.stopping",
}

_PARTS = ("notebook",)

__all__ = ["__version__", *_HOME, *_PARTS]


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"jackline.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jackline' has no attribute '{name}'")
    from jackline.extras import explained

    with explained(f"jackline.{name}"):
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
