"""Checkpoints in formats that only torch writes: a `.ckpt` file of a Lightning run, a folder of DCP.

    python -m jackline.checkpoint.state.ckpt FOLDER TARGET
    python -m jackline.checkpoint.state.ckpt --dcp TARGET FILE.safetensors ...

A program of its own: it needs torch, and the command line (format/export.py) does not. Needs no Lightning.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
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


def write_dcp(files: list[Path], target: Path) -> None:
    """A folder of torch.distributed.checkpoint with one top-level key for each safetensors file, whole or absent."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict_saver import save

    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is only one process, which is what we want
            save({file.stem: load_file(file) for file in files}, checkpoint_id=draft, no_dist=True)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "--dcp":
        write_dcp([Path(word) for word in sys.argv[3:]], Path(sys.argv[2]))
    else:
        export_ckpt(Path(sys.argv[1]), Path(sys.argv[2]))
