"""Which device a config means, and its name for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from jackline import accelerator
from jackline.errors import UsageError
from jackline.trainer.startup.parallel import local_device

if TYPE_CHECKING:
    from jackline.trainer.config import TrainConfig


def choose_device(config: TrainConfig) -> torch.device:
    return local_device(accelerator.choose() if config.device == "auto" else torch.device(config.device))


def usable_device(config: TrainConfig) -> torch.device:
    """The device, once torch can use it; raises UsageError where it cannot."""
    device = choose_device(config)
    if not accelerator.is_gpu(device):
        return device
    seen = accelerator.count() if accelerator.is_available() else 0
    if (device.index or 0) < seen:
        return device
    sees = f"sees {seen} {'GPU' if seen == 1 else 'GPUs'}" if seen else "sees no GPU"
    build = "; this is torch's CPU build" if "+cpu" in torch.__version__ else ""
    raise UsageError(
        f"device={config.device}, but torch {torch.__version__} {sees} here{build}",
        hint="device=auto takes what is there; `jackline doctor` shows the GPUs of this machine",
    )


def device_name(device: torch.device) -> str:
    if accelerator.is_gpu(device):
        return accelerator.name(device)
    return f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
