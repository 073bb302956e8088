"""Which device a config means, and its name for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from jackline import accelerator

if TYPE_CHECKING:
    from jackline.trainer.config import TrainConfig


def choose_device(config: TrainConfig) -> torch.device:
    if config.device == "auto":
        return accelerator.choose()
    return torch.device(config.device)


def device_name(device: torch.device) -> str:
    if accelerator.is_gpu(device):
        return accelerator.name(device)
    return f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
