"""Would a stranger's command start? Real interpreters, real scripts; nothing of them may run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jackline.diagnosis.packages import install_hint
from jackline.diagnosis.preflight import check as preflight
from jackline.diagnosis.preflight.check import Check, check_command
from jackline.diagnosis.preflight.target import read_command_line
from jackline.rundir.process_id import read_start_ticks
from tests.machine.conftest import wait_until

PYTHON = sys.executable


def check(*argv: str, cpus: float = 4, has_gpu: bool = False, tries_help: bool = False) -> dict[str, Check]:
    found = check_command(read_command_line(argv), cpus=cpus, has_gpu=has_gpu, tries_help=tries_help)
    return {item.name + ("" if item.state != "note" else " note"): item for item in found}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_script_passes_and_does_not_run(folder: Path) -> None:
    (folder / "model.py").write_text("open('ran', 'w')\nimport math\n")
    (folder / "train.py").write_text("open('ran', 'w')\nimport json, model\nfrom os.path import join\n")
    found = check(PYTHON, "train.py")
    assert {item.state for item in found.values()} == {"ok"}
    assert found["script"].text == "train.py compiles, and 1 of its own modules"
    assert found["imports"].text == "every import can be found"
    version = ".".join(map(str, sys.version_info[:3]))
    assert found["interpreter"].text.startswith(f"Python {version}, {PYTHON}")
    assert not (folder / "ran").exists()


def test_missing_imports_are_listed_with_the_command_that_installs_them(folder: Path) -> None:
    (folder / "train.py").write_text("import yaml_not_here.x\nimport cv2\nfrom no_such_thing import a\n")
    found = check(PYTHON, "train.py")
    if "cv2" not in found["imports"].text:
        pytest.skip("OpenCV is installed here")
    assert found["imports"] == Check(
        "imports",
        "problem",
        "not found: cv2 (train.py:2), no_such_thing (train.py:3), yaml_not_here (train.py:1)",
        f"{PYTHON} -m pip install opencv-python; {install_hint('no_such_thing')}",
    )


def test_imports_that_may_fail_are_no_problem(folder: Path) -> None:
    (folder / "train.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "try:\n    import no_such_thing\nexcept ImportError:\n    import no_such_fallback\n"
        "if TYPE_CHECKING:\n    import no_such_type\n"
    )
    assert check(PYTHON, "train.py")["imports"].state == "ok"


def test_an_import_inside_a_function_is_noted_because_it_fails_late(folder: Path) -> None:
    (folder / "train.py").write_text("def save():\n    import no_such_thing\n")
    assert check(PYTHON, "train.py")["imports note"] == Check(
        "imports",
        "note",
        "not found, imported only when that code is reached: no_such_thing (train.py:2)",
        install_hint("no_such_thing"),
    )


def test_missing_imports_of_ones_own_modules_are_found_too(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "data.py").write_text("import no_such_thing\n")
    (folder / "train.py").write_text("from pkg.data import x\nimport pkg.gone\n")
    found = check(PYTHON, "train.py")["imports"]
    assert found.text == "not found: no_such_thing (pkg/data.py:1), pkg.gone (train.py:2)"


def test_a_package_beside_the_scripts_folder_needs_the_path(folder: Path) -> None:
    (folder / "scripts").mkdir()
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "scripts" / "train.py").write_text("import pkg\n")
    found = check(PYTHON, "scripts/train.py")["imports"]
    assert found.text == "not found: pkg (scripts/train.py:1)"
    assert found.hint == f"'pkg' is in {folder}: put PYTHONPATH=. before the command"


def test_the_environment_decides_what_can_be_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "extra.py").write_text("")
    (folder / "train.py").write_text("import extra\n")
    assert check(PYTHON, "train.py")["imports"].state == "problem"
    monkeypatch.setenv("PYTHONPATH", str(folder / "lib"))
    assert check(PYTHON, "train.py")["imports"].state == "ok"
    assert check(PYTHON, "-E", "train.py")["imports"].state == "problem"


def test_a_relative_import_in_a_script_is_a_problem(folder: Path) -> None:
    (folder / "train.py").write_text("from . import model\n")
    assert check(PYTHON, "train.py")["imports"] == Check(
        "imports",
        "problem",
        "train.py:1: a script cannot import from its own package",
        "start it as a module: python -m package.module",
    )


def test_a_syntax_error_is_shown_with_its_line(folder: Path) -> None:
    (folder / "train.py").write_text("x = 1\nreturn x\n")
    found = check(PYTHON, "train.py")["script"]
    assert (found.state, found.text) == ("problem", "train.py:2: 'return' outside function")
    (folder / "train.py").write_text("for x in y\n    pass\n")
    found = check(PYTHON, "train.py")["script"]
    assert found == Check("script", "problem", "train.py:1: expected ':'", "for x in y")


def test_a_syntax_error_in_an_own_module_is_found_before_the_start(folder: Path) -> None:
    (folder / "model.py").write_text("def f(:\n")
    (folder / "train.py").write_text("import model\n")
    assert check(PYTHON, "train.py")["script"].text.startswith("model.py:1: ")


def test_a_missing_script_names_the_nearest_file(folder: Path) -> None:
    (folder / "train.py").write_text("")
    assert check(PYTHON, "trian.py")["script"] == Check(
        "script", "problem", "there is no file 'trian.py'", "did you mean 'train.py'?"
    )
    assert check(PYTHON, "zzz/q.py")["script"].hint == f"looked in {folder}"


def test_modules_are_found_or_not(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "__main__.py").write_text("from . import x\nimport no_such_thing\n")
    found = check(PYTHON, "-m", "pkg")
    assert found["module"].text == f"pkg, {folder / 'pkg' / '__main__.py'}"
    assert found["imports"].text == "not found: no_such_thing (pkg/__main__.py:2)"
    assert check(PYTHON, "-m", "no_such_pkg")["module"].text == "there is no module 'no_such_pkg'"
    assert check(PYTHON, "-m", "json.tool")["module"].state == "ok"


def test_code_on_the_command_line_is_checked(folder: Path) -> None:
    assert check(PYTHON, "-c", "import no_such_thing")["imports"].state == "problem"
    assert check(PYTHON, "-c", "x = (")["script"].state == "problem"


def test_more_workers_than_cpus_are_noted_from_source_and_from_arguments(folder: Path) -> None:
    (folder / "train.py").write_text("loader = Loader(data, num_workers=16)\n")
    assert check(PYTHON, "train.py", cpus=2)["workers note"] == Check(
        "workers", "note", "16 data workers (train.py:1) on 2 usable CPUs", "num_workers=2 or less is as fast"
    )
    assert "workers note" not in check(PYTHON, "train.py", cpus=16)
    given = check(PYTHON, "train.py", "--dataloader_num_workers", "32", cpus=16)
    assert given["workers note"].text == "32 data workers (--dataloader_num_workers) on 16 usable CPUs"


def test_questions_to_the_keyboard_and_debuggers_are_noted(folder: Path) -> None:
    (folder / "train.py").write_text("import pdb\nname = input('who? ')\n")
    assert check(PYTHON, "train.py")["input note"].text == "train.py:2 asks for keyboard input"
    (folder / "train.py").write_text("import pdb\npdb.set_trace()\nmodel.input(1)\n")
    assert check(PYTHON, "train.py")["input note"].text == "train.py:2 stops in the debugger"


def test_a_file_that_hides_a_standard_module_is_noted_and_not_run(folder: Path) -> None:
    (folder / "json.py").write_text("open('ran', 'w')\n")
    (folder / "train.py").write_text("import json\n")
    found = check(PYTHON, "train.py")
    assert found["names note"].text == "json.py in the script's folder hides Python's own module of that name"
    assert not (folder / "ran").exists()


def test_help_is_tried_only_where_arguments_are_parsed(folder: Path) -> None:
    (folder / "plain.py").write_text("import argparse\nopen('ran', 'w')\n")
    assert "--help" not in check(PYTHON, "plain.py", tries_help=True)
    assert not (folder / "ran").exists()
    (folder / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser(prog='train')\n"
        "for n in ('--lr', '--steps', '--out_dir'): p.add_argument(n)\n"
        "p.parse_args()\nopen('ran', 'w')\n"
    )
    found = check(PYTHON, "train.py", "--stps", "5", "--out-dir=x", "--st", "1", tries_help=True)
    assert found["--help"].text.splitlines()[0].startswith("usage: train [-h] [--lr LR]")
    assert found["options note"] == Check("options", "note", "--help does not list --stps", "did you mean '--steps'?")
    assert not (folder / "ran").exists()
    assert "--help" not in check(PYTHON, "train.py", tries_help=False)


def test_a_script_whose_help_fails_is_a_problem(folder: Path) -> None:
    (folder / "train.py").write_text("def f(p): p.parse_args()\nraise RuntimeError('no licence')\n")
    assert check(PYTHON, "train.py", tries_help=True)["--help"] == Check(
        "--help", "problem", "exit code 1: RuntimeError: no licence"
    )


def test_a_script_that_hangs_in_help_is_ended_with_its_children(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over as soon as the script has its child, however long the machine takes to start Python."""
    communicate = subprocess.Popen.communicate

    def has_no_time_left(process: Any, *more: Any, timeout: float | None = None) -> Any:
        if timeout == preflight.HELP_TIMEOUT_S:
            wait_until(lambda: (folder / "child").exists() and (folder / "child").read_text(), "the script's child")
            raise subprocess.TimeoutExpired(process.args, timeout)
        return communicate(process, *more, timeout=timeout)

    monkeypatch.setattr(preflight, "HELP_TIMEOUT_S", 5.125)
    monkeypatch.setattr(subprocess.Popen, "communicate", has_no_time_left)
    (folder / "train.py").write_text(
        "import os, time\ndef f(p): p.parse_args()\n"
        "if os.fork() == 0: open('child', 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    found = check(PYTHON, "train.py", tries_help=True)["--help note"]
    assert found.text == "no answer within 5 s"
    child = int((folder / "child").read_text())
    wait_until(lambda: read_start_ticks(child) is None, "the child to be gone")


def test_a_torch_without_cuda_on_a_machine_with_a_gpu_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    papers = folder / "lib" / "torch-2.0.0+cpu.dist-info"
    papers.mkdir(parents=True)
    (papers / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0+cpu\n")
    monkeypatch.setenv("PYTHONPATH", str(folder / "lib"))
    (folder / "train.py").write_text("")
    assert check(PYTHON, "train.py", has_gpu=False)["interpreter"].state == "ok"
    found = check(PYTHON, "train.py", has_gpu=True)["interpreter note"]
    assert found.hint == "this torch is built without CUDA: the GPU will not be used"


def test_shell_scripts_are_parsed_and_not_run(folder: Path) -> None:
    (folder / "good.sh").write_text("touch ran\n")
    (folder / "bad.sh").write_text("if true; then\n")
    assert check("sh", "good.sh")["script"] == Check("script", "ok", "good.sh parses")
    assert check("sh", "bad.sh")["script"].state == "problem"
    assert check("sh", "gone.sh")["script"].text == "there is no file 'gone.sh'"
    assert not (folder / "ran").exists()


def test_other_programs_are_only_found() -> None:
    sleep = shutil.which("sleep")
    assert check("sleep", "1") == {
        "program": Check("program", "ok", f"{sleep} (not a Python command: nothing more can be checked)")
    }


def test_an_interpreter_that_cannot_run_is_a_problem(folder: Path) -> None:
    broken = folder / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    (folder / "train.py").write_text("")
    assert check(str(broken), "train.py")["interpreter"] == Check(
        "interpreter", "problem", f"{broken} cannot run even a line of code", f"try: {broken} -c 'print(1)'"
    )


def test_an_interpreter_too_old_to_be_asked_is_said_to_be(folder: Path) -> None:
    old = folder / "python"
    old.write_text('#!/bin/sh\ncase "$2" in "import sys; print"*) echo 2.7.18 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    (folder / "train.py").write_text("print 'x'\n")
    found = check(str(old), "train.py")["interpreter note"]
    assert found.text == f"Python 2.7.18, {old}: too old for a look into the script"


def test_every_python_from_3_7_on_can_be_asked(folder: Path) -> None:
    (folder / "train.py").write_text("import json, no_such_thing\n")
    asked = []
    for minor in range(7, 15):
        program = shutil.which(f"python3.{minor}")
        if program is None or subprocess.run([program, "-c", ""], capture_output=True).returncode:
            continue
        found = check(program, "train.py")
        assert found["interpreter"].text.startswith(f"Python 3.{minor}.")
        assert found["imports"].text == "not found: no_such_thing (train.py:1)"
        asked.append(minor)
    if not asked:
        pytest.skip("no program named python3.7 to python3.14 is on the path")
    print("asked: Python 3." + ", 3.".join(map(str, asked)))
