"""Where a protein language model is, and what identifies it: a commit of the hub or the bytes of a local folder.

Owns the short names, reading `config.json` without loading anything, and the revision that keys the cache: all
vectors of a second call are found without weights, network or `transformers`. Does not own encoding.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from jackline.data.sources.listing import local_path
from jackline.errors import JacklineError, UsageError
from jackline.machine.reach import hub_trouble, no_network
from jackline.rundir.atomic import read_json, write_json

PIP_LINE = "pip install 'jackline[bio]'"
_ESM2 = {
    "8M": "t6_8M",
    "35M": "t12_35M",
    "150M": "t30_150M",
    "650M": "t33_650M",
    "3B": "t36_3B",
    "15B": "t48_15B",
}
SHORT_NAMES = {"igt5": "Exscientia/IgT5"} | {
    f"esm2-{size.lower()}": f"facebook/esm2_{layers}_UR50D" for size, layers in _ESM2.items()
}
_WIDTHS = {"esm": "hidden_size", "t5": "d_model"}
_READ_BYTES = 8 << 20
# What changes the vectors; a README or a licence does not.
_ENDINGS = (".json", ".txt", ".model", ".safetensors", ".bin")


@dataclass(frozen=True)
class Weights:
    """A model that can be loaded from `source` at `commit` (None for a folder)."""

    name: str
    source: str
    commit: str | None
    revision: str
    kind: str  # "esm" or "t5"
    width: int


def find_weights(name: str, memo: Path) -> Weights:
    """`igt5`, `esm2-650m`, OWNER/NAME[@REVISION] or a folder. `memo` remembers the hashes of folders."""
    path = Path(local_path(name))
    if path.is_dir():
        config = read_json(path / "config.json")
        kind, width = _kind(config, name)
        return Weights(path.name, str(path), None, _folder_hash(path, memo), kind, width)
    check_name(name)
    repo, _, wanted = SHORT_NAMES.get(name.lower(), name).partition("@")
    commit = _hub_commit(repo, wanted or None)
    kind, width = _kind(_hub_config(repo, commit), name)
    return Weights(repo, repo, commit, commit, kind, width)


def check_name(name: str) -> None:
    """Without looking at the hub; cheap enough for settings that are only read."""
    repo = SHORT_NAMES.get(name.lower(), name).partition("@")[0]
    is_hub = repo.count("/") == 1 and not repo.startswith((".", "/", "~"))
    if name != "embedded" and not is_hub and not Path(local_path(name)).is_dir():
        raise UsageError(
            f"there is no encoder '{name}'",
            hint=f"it is embedded, {', '.join(SHORT_NAMES)}, a model of the hub (OWNER/NAME) or a local folder",
        )


def _kind(config: Any, name: str) -> tuple[str, int]:
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _WIDTHS:
        raise UsageError(
            f"'{name}' is not an encoder that can be used: its config.json says model_type={kind}",
            hint="ESM-2 (model_type esm) and T5 encoders like IgT5 (t5) can",
        )
    return kind, int(config[_WIDTHS[kind]])


def _hub_commit(repo: str, wanted: str | None) -> str:
    """The commit on this machine's disk if there is one, else the hub's newest: an upload changes no run."""
    hub = _hub()
    found = hub.try_to_load_from_cache(repo, "config.json", revision=wanted)
    if isinstance(found, str):
        return Path(found).parent.name
    if (trouble := hub_trouble()) is not None:
        raise _unavailable(repo, no_network(trouble))
    try:
        return str(hub.HfApi().model_info(repo, revision=wanted).sha)
    except Exception as error:  # the hub's client has its own tree of errors, different in every version
        raise _unavailable(repo, _first_line(error)) from error


def _hub_config(repo: str, commit: str) -> Any:
    try:
        return read_json(Path(_hub().hf_hub_download(repo, "config.json", revision=commit)))
    except Exception as error:
        raise _unavailable(repo, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unavailable(repo: str, reason: str) -> JacklineError:
    return JacklineError(
        f"cannot get {repo} from the hub: {reason}",
        hint="check the name and the network, or give a local folder with its files; `embedded` needs no download",
    )


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError("a model of the hub needs the package huggingface_hub", hint=PIP_LINE) from error
    return huggingface_hub


def _folder_hash(folder: Path, memo: Path) -> str:
    """Of all files that make the vectors. Gigabytes are read once; later size and time of writing vouch for them."""
    known = read_json(memo)
    known = known if isinstance(known, dict) else {}
    made, fresh = xxhash.xxh3_128(), {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(_ENDINGS)):
        stat = path.stat()
        stamp = f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        if stamp not in known:
            fresh[stamp] = _file_hash(path)
        made.update(f"{path.name} {known.get(stamp) or fresh[stamp]}\n".encode())
    if fresh:
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, dict(list((known | fresh).items())[-1000:]))
    return f"folder-{made.hexdigest()}"


def _file_hash(path: Path) -> str:
    made = xxhash.xxh3_128()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while data := os.read(fd, _READ_BYTES):
            made.update(data)
    finally:
        os.close(fd)
    return str(made.hexdigest())
