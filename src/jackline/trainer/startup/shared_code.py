"""Compiled code that one run hands to the next of the same model, so that only the first one compiles.

A run keeps its compiled code in its own folder (compiling.py), so that an attempt after a kill starts with exactly
what the first one used. `take` fills that folder from a copy in the person's cache, and `give` leaves such a copy
there. Copies, not one folder for all: no run can change or delete what another one uses. A copy is found by a key
over all that decides what is compiled: model, precision, batch, kernels and their sources, torch, Triton, Python,
driver, GPU, and torch's own variables. The cache belongs to this person alone, because its content is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from jackline import accelerator
from jackline.trainer.startup.process import own_cache

MAX_KEPT = 12
MAX_BYTES = 4 << 30
_KEY_FILE = "key"
_DECIDING = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "TRITON_")
_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def key_of(facts: Mapping[str, object], device: torch.device, environ: Mapping[str, str]) -> str:
    """`facts`: what the caller knows of the model and its step."""
    variables = {name: value for name, value in environ.items() if name.startswith(_DECIDING) and name not in _PLACES}
    gpu = (accelerator.name(device), accelerator.capability(device)) if accelerator.is_gpu(device) else ()
    machine = (platform.python_version(), platform.machine(), torch.__version__, torch.version.cuda, _triton(), gpu)
    text = repr((sorted(facts.items()), sorted(variables.items()), machine, _sources()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def take(own: Path, key: str) -> bool:
    """Fill a run's empty folder; returns whether there is compiled code in it now."""
    if any(own.glob("fxgraph/*")):
        return True
    with contextlib.suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
        (own / _KEY_FILE).write_text(key)
        if (root := _root()) is not None and (root / key).is_dir():
            os.utime(root / key)  # those that are used stay longest
            shutil.copytree(root / key, own, dirs_exist_ok=True, symlinks=True)
            return True
    return False


def give(run_folder: Path) -> None:
    """Leave a copy of what the run compiled. A disk that refuses it stops no training."""
    for key_file in (run_folder / "compiled").glob(f"*/{_KEY_FILE}"):
        own = key_file.parent
        with contextlib.suppress(OSError):
            root, key = _root(), key_file.read_text()
            if root is None or not any(own.glob("fxgraph/*")) or _count(own) <= _count(root / key):
                continue
            made = root / f"{key}.{os.getpid()}.new"
            try:
                shutil.copytree(own, made, symlinks=True, ignore=shutil.ignore_patterns(_KEY_FILE))
                shutil.rmtree(root / key, ignore_errors=True)
                made.rename(root / key)
            finally:
                shutil.rmtree(made, ignore_errors=True)
            _thin(root)


def _thin(root: Path) -> None:
    """The copies that were used last, as many as may stay. What a killed process left half-written goes too."""
    found = sorted((path for path in root.iterdir() if path.is_dir()), key=_used_at_s, reverse=True)
    total = 0
    for number, path in enumerate(found):
        total += sum(file.lstat().st_size for file in path.rglob("*"))
        is_left_over = path.name.endswith(".new") and not path.name.endswith(f".{os.getpid()}.new")
        if number >= MAX_KEPT or total > MAX_BYTES or is_left_over:
            shutil.rmtree(path, ignore_errors=True)


def _used_at_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _root() -> Path | None:
    return own_cache("compiled")


def _count(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file() and path.name != _KEY_FILE)


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(getattr(triton, "__version__", ""))


def _sources() -> str:
    """Of the code that is compiled: a change of ours must find no copy."""
    found = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted([*(package / "models").rglob("*.py"), *(package / "trainer" / "optim").glob("*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()
