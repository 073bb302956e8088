"""The checkpoint of a Lightning run as one `.ckpt` file that Lightning alone can load.

    python -m jackline.checkpoint.state.ckpt FOLDER TARGET

A program of its own: it needs torch, and the command line (format/export.py) does not. Needs no Lightning.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from jackline.checkpoint.state.restore import restore_checkpoint

KEY = "checkpoint"  # Lightning's own dict, in a checkpoint of a Lightning run


def export_ckpt(folder: Path, target: Path) -> None:
    """Read and verify everything, then write under a temporary name first."""
    into: dict[str, Any] = {KEY: None}
    restore_checkpoint(folder, into, hash_frozen=lambda tensor: "")
    write_ckpt(into[KEY], target)


def write_ckpt(checkpoint: dict[str, Any], target: Path) -> None:
    """A `.ckpt` file, whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    export_ckpt(Path(sys.argv[1]), Path(sys.argv[2]))
