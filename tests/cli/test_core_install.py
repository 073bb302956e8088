"""After `pip install jackline` alone: every command works, or says in two lines which extra it needs."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jackline
from jackline.diagnosis.preflight.check import OtherPython, ask_python, compare_environments
from jackline.extras import EXTRAS, MissingPackage, explained, install_line, require
from tests.core_install import ROOT, make_core_install
from tests.deadline import HANGS_S
from tests.test_packaging import import_name, name_of

NEEDS_TORCH = "needs torch, numpy and safetensors, which are not installed in"


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `jackline` of an environment without extras; one for all tests of a worker."""
    return make_core_install(tmp_path_factory.mktemp("core") / "env")


def call(program: Path, *words: str, cwd: Path) -> tuple[int, str, str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(program), *words],
        cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANGS_S,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("train demo --quick", f"recipe 'demo' {NEEDS_TORCH}"),
        ("plan sparsae --gpu T4", f"`jackline plan` {NEEDS_TORCH}"),
        ("doctor demo", f"recipe 'demo' {NEEDS_TORCH}"),
        ("data prepare a.txt", "`jackline data prepare` needs numpy, which is not installed in"),
        ("data show a.txt", "`jackline data show` needs numpy, which is not installed in"),
        ("data bench a.txt", "`jackline data bench` needs numpy, which is not installed in"),
        ("mcp", "`jackline mcp` needs mcp, which is not installed in"),
        ("dash", "`jackline dash` needs starlette and uvicorn, which are not installed in"),
        ("sample some-run hello", f"`jackline sample` {NEEDS_TORCH}"),
        ("export some-run", f"`jackline export` {NEEDS_TORCH}"),
        ("demo", f"`jackline demo` {NEEDS_TORCH}"),
        ("run --mirror s3://bucket/x -- true", "the mirror s3://bucket/x needs fsspec, which is not installed in"),
    ],
)
def test_a_command_that_needs_more_names_the_extra(core: Path, tmp_path: Path, words: str, what: str) -> None:
    (tmp_path / "a.txt").write_text("some text\n")
    code, out, err = call(core, *words.split(), cwd=tmp_path)
    env = core.parents[1]
    extra = words if words in EXTRAS else "train"
    hint = f"hint: uv pip install --python {env}/bin/python 'jackline[{extra}]'\n"
    assert (code, out, err) == (2, "", f"error: {what} {env}\n{hint}")
    assert not (tmp_path / "runs").exists()  # no run is left behind that could never have worked


@pytest.mark.parametrize(
    "words",
    ["--version", "--help", "runs", "doctor", "train demo --show", "train demo --help-settings"],
)
def test_the_other_commands_work_without_extras(core: Path, tmp_path: Path, words: str) -> None:
    code, out, err = call(core, *words.split(), cwd=tmp_path)
    assert code == 0, err
    assert "Traceback" not in out + err


def test_attach_without_the_extra_says_so_in_the_script_and_under_supervision(core: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jackline\n\nwith jackline.attach(model=None) as run:\n    pass\n")
    env = core.parents[1]
    error = f"error: jackline.attach needs numpy, which is not installed in {env}"
    hint = f"hint: uv pip install --python {env}/bin/python 'jackline[train]'"
    code, _, err = call(env / "bin" / "python", str(script), cwd=tmp_path)
    assert code == 1
    assert err.splitlines()[-2:] == [f"jackline.extras.MissingPackage: {error}", hint]
    code, _, err = call(core, "run", "--name", "bare", "--", str(env / "bin" / "python"), str(script), cwd=tmp_path)
    assert code == 1
    assert f"[jackline] {error}\n" in err and f"[jackline] {hint}\n" in err
    assert f"[jackline]        {script}:3: with jackline.attach(model=None) as run:\n" in err


def test_a_script_in_an_environment_without_jackline_is_told_what_to_install(core: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jackline\n")
    python = tmp_path / "plain" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "plain")], check=True, timeout=HANGS_S
    )
    code, out, err = call(core, "doctor", "--", str(python), str(script), cwd=tmp_path)
    assert code == 1, err
    assert f"hint: {python} -m pip install 'jackline[train]'" in out
    assert f"jackline runs in {core.parents[1]}, your scripts run with {python}, which has no jackline" in out


def test_the_same_environment_is_no_news() -> None:
    assert compare_environments(ask_python(sys.executable)) is None
    assert compare_environments(None) is None


def test_another_version_in_the_scripts_environment_is_named() -> None:
    found = compare_environments(OtherPython("/env", "/env/bin/python", "0.0.1"))
    assert found is not None
    text, hint = found
    assert text.endswith(f"your scripts run with /env/bin/python: versions {jackline.__version__} and 0.0.1")
    assert hint.startswith("use one version: /env/bin/python -m pip install ")


def test_the_extras_named_in_errors_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = project["optional-dependencies"]
    other = {"google": "protobuf"}  # protobuf's package is named so
    for extra, names in EXTRAS.items():
        packages = {import_name(name_of(requirement)) for requirement in asked[extra]}
        assert {other.get(name, name) for name in names} == packages, extra
    assert set(EXTRAS) == set(asked) - {"dev"}


@pytest.mark.parametrize(
    ("origin", "pip"),
    [
        ("", "'jackline[train]'"),
        (
            '{"url": "https://example.org/jackline", "vcs_info": {"vcs": "git", "commit_id": "0" }}',
            "'jackline[train] @ git+https://example.org/jackline'",
        ),
        ('{"url": "file:///w/j.whl", "archive_info": {}}', "'jackline[train] @ file:///w/j.whl'"),
        ('{"url": "file:///home/me/clone", "dir_info": {"editable": true}}', "-e '/home/me/clone[train]'"),
        ("not json", "'jackline[train]'"),
    ],
)
def test_the_hint_installs_from_where_jackline_came(monkeypatch: pytest.MonkeyPatch, origin: str, pip: str) -> None:
    class Found:
        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return origin

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Found())
    assert install_line("train") == f"{sys.executable} -m pip install {pip}"


@pytest.mark.parametrize(
    ("file", "begin"), [("uv-receipt.toml", "uv tool install"), ("pipx_metadata.json", "pipx install --force")]
)
def test_the_hint_uses_the_tool_that_installed_jackline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, begin: str
) -> None:
    (tmp_path / file).write_text("")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_line("train").startswith(f"{begin} ")


def test_a_late_import_of_an_extra_becomes_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "train", ("no_such_thing",))
    with (
        pytest.raises(MissingPackage, match="this data needs no_such_thing, which is not") as found,
        explained("this data"),
    ):
        import no_such_thing.inside  # noqa: F401
    assert found.value.exit_code == 2


def test_an_import_that_is_not_ours_passes_unchanged() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_thing") as found, explained("this training"):
        import no_such_thing  # noqa: F401
    assert not isinstance(found.value, MissingPackage)


def test_what_is_installed_is_not_called_missing() -> None:
    require("a test", "train", ("click",))
    with pytest.raises(MissingPackage) as found:
        require("a test", "train", ("click", "no_such_thing"))
    assert isinstance(found.value, ImportError)
    assert str(found.value).startswith("error: a test needs no_such_thing, which is not installed in ")
