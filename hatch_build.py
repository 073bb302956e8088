"""Puts uPlot, which draws the charts of `jackline dash`, into the wheel while it is built.

uPlot (MIT licence) is downloaded from the registry that `npm` is set to, compared with the hash below and never kept
in this repository. Where that fails or there is no npm, the wheel is built without it, with a warning: the page then
draws simple lines of its own. An editable install gets the files beside the source, in a folder that git ignores;
`python hatch_build.py` does only that.

    JACKLINE_UPLOT=uplot-1.6.32.tgz pip install .    with the package from a file, where there is no network
    JACKLINE_UPLOT=off pip install .                 without it
    npm_config_registry=https://... pip install .    from this registry
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, or by a test
    BuildHookInterface = object

VERSION = "1.6.32"
SHA256 = "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d"
FOLDER = "jackline/dashboard/uplot"
# What of the package is kept, and under which name.
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.js",
    "package/dist/uPlot.min.css": "uPlot.css",
    "package/LICENSE": "LICENSE",
}
MAX_BYTES = 4 << 20
WAIT_S = 20.0


class CannotFetch(Exception):
    pass


def fetch(source: str, *, sha256: str = SHA256, wait_s: float = WAIT_S) -> dict[str, bytes]:
    """The files of the package at `source`, an address or a path. Raises CannotFetch."""
    try:
        if source.startswith(("https://", "http://")):
            with urllib.request.urlopen(source, timeout=wait_s) as answer:
                packed = answer.read(MAX_BYTES)
        else:
            packed = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        raise CannotFetch(f"{source} cannot be read: {error}") from error
    found = hashlib.sha256(packed).hexdigest()
    if found != sha256:
        raise CannotFetch(f"{source} is another file than uPlot {VERSION}: its SHA-256 is {found}")
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        return {name: archive.extractfile(member).read() for member, name in FILES.items()}


def source_of(env: dict[str, str]) -> str:
    """Where the package comes from; empty when it is not wanted. Raises CannotFetch when nobody knows."""
    asked = env.get("JACKLINE_UPLOT", "")
    if asked:
        return "" if asked == "off" else asked
    registry = env.get("npm_config_registry") or _npm_registry()
    if not registry:
        raise CannotFetch("no registry is known; npm has one, or npm_config_registry, or JACKLINE_UPLOT=FILE")
    return f"{registry.rstrip('/')}/uplot/-/uplot-{VERSION}.tgz"


def _npm_registry() -> str:
    npm = shutil.which("npm")
    if npm is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [npm, "config", "get", "registry"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout.strip()
        return found if found.startswith(("https://", "http://")) else ""
    return ""


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_bytes(contents)
        os.replace(temporary, folder / name)


def is_complete(folder: Path) -> bool:
    """Whether the files of this version are in `folder` already."""
    try:
        return f"(v{VERSION})".encode() in (folder / "uPlot.js").read_bytes()[:200] and all(
            (folder / name).stat().st_size for name in FILES.values()
        )
    except OSError:
        return False


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        is_editable = version == "editable"
        folder = Path(self.root, "src", FOLDER) if is_editable else Path(self.directory, "uplot")
        if os.environ.get("JACKLINE_UPLOT") == "off":
            return
        try:
            if not (is_editable and is_complete(folder)):
                put(folder, fetch(source_of(dict(os.environ))))
        except (CannotFetch, OSError, tarfile.TarError, KeyError) as error:
            self.app.display_warning(f"built without uPlot, the page draws simple lines: {error}")
            return
        if not is_editable:
            build_data["force_include"].update({str(folder / name): f"{FOLDER}/{name}" for name in FILES.values()})
            self._made = folder

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "_made", None):
            for name in FILES.values():
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


if __name__ == "__main__":
    place = Path(__file__).parent / "src" / FOLDER
    try:
        if not is_complete(place) and (wanted := source_of(dict(os.environ))):
            put(place, fetch(wanted))
    except CannotFetch as reason:
        sys.exit(f"error: {reason}")
    print(f"uPlot {VERSION}: {place}" if is_complete(place) else "JACKLINE_UPLOT=off: nothing was done")
