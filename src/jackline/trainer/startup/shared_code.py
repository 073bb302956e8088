"""Compiled code that one run hands to the next of the same model, so that only the first one compiles.

A run keeps its compiled code in its own folder (compiling.py), so that an attempt after a kill starts with exactly
what the first one used. `take` fills that folder from a file in the person's cache, and `give` leaves such a file
there, both in the portable form that torch has for it: copied folders made a training on an H200 crash. A file is
found by a key over all that decides what is compiled: model, precision, batch, kernels and their sources, torch,
Triton, Python, GPU, and torch's own variables. The cache belongs to this person alone, because its content is
executed.
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
from jackline.rundir import atomic
from jackline.trainer.startup.process import own_cache

MAX_KEPT = 12
MAX_KERNELS = 4000  # some hundred a model
MAX_BYTES = 4 << 30
_DIGEST = hashlib.sha256().digest_size
_DECIDING = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "TRITON_")
_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_keys: list[str] = []  # of this process's models: the last one is trained


def key_of(facts: Mapping[str, object], device: torch.device, environ: Mapping[str, str]) -> str:
    """`facts`: what the caller knows of the model and its step."""
    variables = {name: value for name, value in environ.items() if name.startswith(_DECIDING) and name not in _PLACES}
    gpu = (accelerator.name(device), accelerator.capability(device)) if accelerator.is_gpu(device) else ()
    machine = (platform.python_version(), platform.machine(), torch.__version__, torch.version.cuda, _triton(), gpu)
    text = repr((sorted(facts.items()), sorted(variables.items()), machine, _sources()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def take(key: str) -> bool:
    """Fill torch's cache folder, which is the run's, with what an earlier run compiled; False: there is nothing."""
    _keys.append(key)
    with contextlib.suppress(OSError):
        if (root := own_cache("compiled")) is None:
            return False
        found = (root / key).read_bytes()
        if hashlib.sha256(found[_DIGEST:]).digest() != found[:_DIGEST]:
            return False
        os.utime(root / key)  # those that are used stay longest
        return torch.compiler.load_cache_artifacts(found[_DIGEST:]) is not None
    return False


def give() -> None:
    """Leave what this process compiled for the next run. A disk that refuses it stops no training."""
    root = own_cache("compiled") if _keys else None
    made = torch.compiler.save_cache_artifacts() if root is not None else None
    if root is None or made is None:
        return
    with contextlib.suppress(OSError):
        path, content = root / _keys[-1], made[0]
        if path.exists() and path.stat().st_size >= _DIGEST + len(content):
            return  # as much is there already
        atomic.write_whole(path, hashlib.sha256(content).digest() + content)
        thin(root)
        if (kernels := own_cache("kernels")) is not None:
            thin(kernels, max_kept=MAX_KERNELS)


def thin(root: Path, *, max_kept: int = MAX_KEPT) -> None:
    """Delete all but the files, or the folders of files, that were used last, as many as may stay."""
    known = [(path.stat().st_mtime, _size_of(path), path) for path in root.iterdir() if not path.is_symlink()]
    total = 0
    for number, (_, size, path) in enumerate(sorted(known, reverse=True)):
        total += size
        if number >= max_kept or total > MAX_BYTES:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _size_of(path: Path) -> int:
    return sum(part.stat().st_size for part in path.iterdir()) if path.is_dir() else path.stat().st_size


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
