"""To compile or not: the decision, its reason in words, and where the compiled code is kept between attempts.

Owns the choice and the in-place compilation of a model. The cache folder lies in the run, so that an attempt after a
kill starts with what the first one compiled; attention kernels are part of its name, because torch's own key does
not hold them. What is in it is executed, and a run's folder may come from anybody. So its name also has a mark that
nobody else can compute, and that a copy of the run does not have.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from jackline import accelerator
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_whole
from jackline.trainer.startup.process import own_cache

Mode = Literal["auto", "on", "off"]
# Measured on an H200 with a GPT-2 of 124M (bench/throughput.py); smaller models compile as slowly.
COLD_S = 20.0
WARM_S = 4.0
GAIN = 0.35  # share of an eager step that compiling saves
_FIRST_GPU = 7  # Triton needs sm_70
_SECRET_BYTES = 32


@dataclass(frozen=True)
class Decision:
    """Whether, and the sentence a person reads."""

    is_compiled: bool
    reason: str


def decide(
    mode: Mode, *, has_gpu: bool, can_compile: str, steps_left: int, eager_step_s: float, is_warm: bool
) -> Decision:
    """`can_compile` is empty, or why not. Pure."""
    if mode == "off":
        return Decision(False, "not compiled: compile=off")
    if can_compile:
        return Decision(False, f"not compiled: {can_compile}")
    if mode == "on":
        return Decision(True, "compiled: compile=on")
    if not has_gpu:
        return Decision(False, "not compiled: on a CPU it saves little; compile=on does it all the same")
    cost_s = WARM_S if is_warm else COLD_S
    saved_s = steps_left * eager_step_s * GAIN
    cache = "with the code of an earlier one" if is_warm else "for the first time"
    if saved_s > cost_s:
        return Decision(True, f"compiled: about {cost_s:.0f} s {cache}, saves about {_span(saved_s)} in all")
    return Decision(
        False, f"not compiled: about {cost_s:.0f} s {cache} would save only {_span(saved_s)} of what is left"
    )


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else "hours"


def why_not(device: torch.device) -> str:
    """Empty when this machine can compile."""
    if accelerator.is_gpu(device):
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        if accelerator.capability(device)[0] < _FIRST_GPU:
            return f"Triton does not know {accelerator.name(device)}"
    if not any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang")):
        return "there is no C compiler on this machine"
    return ""


def cache_folder(run_folder: Path, attention: str) -> Path:
    return run_folder.absolute() / "compiled" / f"{attention}-{_own_mark(run_folder)}"


def _own_mark(run_folder: Path) -> str:
    """The same for this person and this very folder, wherever it is moved; another one for a copy."""
    try:
        inode = run_folder.stat().st_ino
    except OSError:
        inode = 0  # not made yet: nobody can have put anything there
    return hmac.digest(_secret(), str(inode).encode(), "sha256").hex()[:16]


@functools.cache
def _secret() -> bytes:
    """This person's own, made once. Where no private place is found: of this process, so that nothing is reused."""
    made = secrets.token_bytes(_SECRET_BYTES)
    root = own_cache("marks")
    if root is None:
        return made
    path, draft = root / "compiled", root / f".{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        atomic.write_whole(draft, made)
        try:
            os.link(draft, path)  # the first of several that start at once wins
        except FileExistsError:
            made = read_whole(path, _SECRET_BYTES)
        finally:
            draft.unlink(missing_ok=True)
    return made


def is_warm(folder: Path) -> bool:
    """Whether a whole graph was compiled; single kernels of ours are there long before."""
    return any(folder.glob("fxgraph/*"))


def use_cache(folder: Path, kernels: Path | None = None) -> None:
    """What a person has set is kept. Before torch's compiler is imported: that sets the variable to a folder in /tmp.

    So it was, and runs shared one folder whatever their attention, and found nothing after the machine's restart.
    `kernels` is for Triton's, whose key holds all that they are made of; None: in the run as well.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(kernels or folder / "triton"))


def compile_in_place(model: nn.Module) -> None:
    """`model(...)` is compiled from now on; `model.forward(...)`, names and state_dict stay as they are.

    The shape is fixed: a second one (the ragged last slice, a shrunk micro-batch) compiles anew, which is announced
    by whoever causes it.
    """
    model.compile(dynamic=False)  # `models.stack` compiles it in parts
