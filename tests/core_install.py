"""A virtual environment with what `pip install jackline` brings and nothing else, made in a tenth of a second.

Packages are symbolic links to those of the environment that runs the tests: nothing is downloaded or copied.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.deadline import HANGS_S

ROOT = Path(__file__).parents[1]


def make_core_install(folder: Path, *, more: tuple[str, ...] = ()) -> Path:
    """Returns the path of its `jackline`. `more`: further packages, each without its own dependencies."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=HANGS_S)
    packages = next((folder / "lib").glob("python3*")) / "site-packages"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in (*project["dependencies"], *more):
        found = re.match(r"[\w.-]+", requirement)
        assert found is not None
        _link(found[0], packages, folder / "bin")
    (packages / "jackline.pth").write_text(f"{ROOT / 'src'}\n")
    own = packages / f"jackline-{project['version']}.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jackline\nVersion: {project['version']}\n")
    command = folder / "bin" / "jackline"
    command.write_text(f"#!{folder / 'bin' / 'python'}\nfrom jackline.cli.main import main\n\nmain()\n")
    command.chmod(0o755)
    return command


def _link(package: str, packages: Path, programs: Path) -> None:
    """Link every top-level entry of an installed package, and its programs."""
    distribution = importlib.metadata.distribution(package)
    for file in distribution.files or ():
        head = file.parts[0]
        if head == "..":
            source, target = Path(os.fspath(distribution.locate_file(file))).resolve(), programs / file.name
        else:
            source, target = Path(os.fspath(distribution.locate_file(head))), packages / head
        if head != "__pycache__" and not target.is_symlink() and source.exists():
            target.symlink_to(source)
