"""A config.json: in a folder, in a file, or of a model on the Hugging Face Hub. No torch, no transformers.

Owns finding it. The network is used only when the file is not on this machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.errors import UsageError
from jackline.machine.reach import hub_trouble, no_network

PREFIX = "hf:"
_FILE = "config.json"


@dataclass(frozen=True)
class ConfigFile:
    """`name` is what a person calls the model."""

    path: Path
    name: str


def is_config_target(target: str) -> bool:
    return target.startswith(PREFIX) or target.endswith(".json") or (Path(target) / _FILE).is_file()


def find_config(target: str) -> ConfigFile:
    if target.startswith(PREFIX):
        return ConfigFile(_from_hub(target.removeprefix(PREFIX)), target.removeprefix(PREFIX))
    path = Path(target) / _FILE if Path(target).is_dir() else Path(target)
    if not path.is_file():
        raise UsageError(
            f"there is no file '{path}'", hint="jackline plan hf:Qwen/Qwen2.5-7B or ./folder/config.json"
        )
    return ConfigFile(path, path.parent.resolve().name if path.name == _FILE else path.stem)


def read_config(file: ConfigFile) -> dict[str, Any]:
    try:
        found = json.loads(file.path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file.path} cannot be read: {error}") from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise UsageError(f"{file.path} has no model_type", hint="it must be the config.json of a transformers model")
    return found


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise UsageError(f"hf:{name} needs the package huggingface_hub", hint="pip install huggingface_hub") from None
    if name.count("/") > 1 or not name:
        raise UsageError(f"hf:{name} is not the name of a model", hint="hf:ORG/NAME, as in hf:Qwen/Qwen2.5-7B")
    cached = try_to_load_from_cache(name, _FILE)
    if isinstance(cached, str):
        return Path(cached)
    if (trouble := hub_trouble()) is not None:
        raise UsageError(
            f"the config of {name} is not on this machine: {no_network(trouble)}",
            hint="give its config.json: jackline plan ./config.json",
        )
    try:
        return Path(hf_hub_download(name, _FILE, etag_timeout=5))
    except Exception as error:  # the package has a dozen types of errors, and all mean the same here
        raise UsageError(
            f"the config of {name} is not on this machine and cannot be fetched: {_reason(error)}",
            hint="give its config.json: jackline plan ./config.json"
            if "gated" not in str(error).lower()
            else "it is gated: `hf auth login` first, or give its config.json: jackline plan ./config.json",
        ) from error


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
