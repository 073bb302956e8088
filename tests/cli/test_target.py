"""What a command line runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jackline.diagnosis.preflight.target import Target, read_command_line
from jackline.errors import UsageError

PYTHON = sys.executable


def make_program(folder: Path, name: str, first_line: str) -> str:
    path = folder / name
    path.write_text(first_line + "\n")
    path.chmod(0o755)
    return str(path)


def test_a_script_with_its_arguments_and_interpreter_options() -> None:
    argv = (PYTHON, "-u", "-W", "ignore", "train.py", "--lr", "1")
    found = read_command_line(argv)
    assert found == Target(argv, PYTHON, PYTHON, ("-u", "-W", "ignore"), script="train.py", arguments=("--lr", "1"))


def test_a_module_and_a_line_of_code() -> None:
    assert read_command_line((PYTHON, "-m", "pkg.train", "x")).module == "pkg.train"
    assert read_command_line((PYTHON, "-c", "print(1)")).code == "print(1)"


def test_a_folder_runs_its_main_file(tmp_path: Path) -> None:
    assert read_command_line((PYTHON, str(tmp_path))).script == str(tmp_path / "__main__.py")


def test_a_script_on_standard_input_and_a_bare_interpreter_have_no_file() -> None:
    assert read_command_line((PYTHON, "-")).script is None
    assert read_command_line((PYTHON,)).script is None


@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_a_launcher_module_is_looked_through(module: str) -> None:
    found = read_command_line((PYTHON, "-m", module, "--nproc_per_node", "2", "train.py", "--lr", "1"))
    assert (found.script, found.module, found.arguments) == ("train.py", None, ("--lr", "1"))


def test_a_launcher_program_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(tmp_path, "torchrun", f"#!{PYTHON}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = read_command_line(("torchrun", "--standalone", "train.py", "--lr", "1"))
    assert (found.interpreter, found.script, found.arguments) == (PYTHON, "train.py", ("--lr", "1"))
    assert read_command_line(("torchrun", "-m", "pkg.train")).module == "pkg.train"


def test_a_program_whose_first_line_names_a_python_is_a_script(tmp_path: Path) -> None:
    program = make_program(tmp_path, "train", f"#!{PYTHON}")
    found = read_command_line((program, "x"))
    assert (found.interpreter, found.script, found.arguments) == (PYTHON, program, ("x",))
    by_env = make_program(tmp_path, "train2", "#!/usr/bin/env -S python3 -u")
    assert read_command_line((by_env,)).script == by_env


def test_a_wrapper_is_looked_through() -> None:
    found = read_command_line(("env", "A=1", PYTHON, "train.py"))
    assert (found.interpreter, found.script) == (PYTHON, "train.py")


def test_a_shell_script_and_a_program_of_another_kind() -> None:
    assert read_command_line(("sh", "launch.sh", "x")).shell_script == "launch.sh"
    assert read_command_line(("sh", "-c", "echo x")).shell_script is None
    assert read_command_line(("sleep", "1")).interpreter is None


def test_a_command_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError) as caught:
        read_command_line(("pyhton", "train.py"))
    assert str(caught.value) == ("error: there is no command 'pyhton'\nhint: did you mean 'python'?")


def test_a_file_that_may_not_be_executed_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(UsageError) as caught:
        read_command_line((str(script),))
    assert str(caught.value) == (
        f"error: cannot run '{script}'\n"
        f"       '{script}' is a file that may not be executed\n"
        f"hint: python {script}, or chmod +x {script}"
    )
