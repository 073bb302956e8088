"""`jackline doctor`: the machine's report and a command's preflight, as a person sees them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jackline.cli.commands import doctor
from jackline.cli.commands.doctor import (
    Machine,
    check_machine,
    command,
    gpu_lines,
    read_machine,
    report_lines,
    to_json,
)
from jackline.errors import UsageError
from jackline.machine.disk import DiskReading
from jackline.machine.net import find_listener
from jackline.machine.readings import (
    GpuProcess,
    GpuReading,
    MemoryLimit,
    MemoryReading,
    Protection,
)
from tests.deadline import HANGS_S

GIB = 2**30
PYTHON = sys.executable
CARD = GpuReading(
    0, "NVIDIA H200", 140 * GIB, 130 * GIB, 100, 20, 690.0, (GpuProcess(42, 129 * GIB), GpuProcess(7, None))
)
HOST = {
    "kernel": "6.1.0", "architecture": "x86_64", "distribution": "Debian GNU/Linux 12 (bookworm)", "cpu_count": 8,
    "effective_cpus": 2.0, "ram_bytes": 64 * GIB, "memory_limit_bytes": 12 * GIB, "memory_limit_source": "cgroup /x",
    "notebook": "colab", "container": "docker", "job": None, "python": "3.11.7",
}  # fmt: skip
MACHINE = Machine(
    host=HOST,
    memory=MemoryReading(0.0, 3 * GIB, MemoryLimit(12 * GIB, "cgroup /x"), GIB),
    shm_free_bytes=6 * GIB,
    runs_folder="/",
    disk=DiskReading("/", 50 * GIB, 100 * GIB, "ext4", False),
    gpus=(),
    gpu_commands={},
    protections=(
        Protection("py-spy", True, "/usr/bin/py-spy"),
        Protection("ptrace", False, "kernel.yama.ptrace_scope is 1", "stacks come through a signal instead"),
        Protection("pss", True, "x"),
    ),
    port_holder=None,
)


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words, catch_exceptions=True)


def test_the_report_on_a_machine_reads_as_a_table_with_a_verdict_and_the_next_command() -> None:
    assert report_lines(MACHINE, [], ()) == [
        "machine       Debian GNU/Linux 12 (bookworm), kernel 6.1.0, x86_64, in docker, in colab",
        "cpus          2 usable of 8",
        "memory        3.0 GiB used of 12.0 GiB (cgroup /x)",
        "/dev/shm      6.0 GiB free",
        "disk          50.0 GiB free of 100 GiB, ext4, for runs in /",
        "gpu           none",
        "on            py-spy, pss",
        "off           ptrace: kernel.yama.ptrace_scope is 1",
        "              hint: stacks come through a signal instead",
        "",
        "verdict: this machine is ready",
        "start it with: jackline run -- python train.py",
    ]


def test_every_process_on_a_gpu_is_shown_with_the_command_that_ends_it() -> None:
    machine = replace(MACHINE, gpus=(CARD,), gpu_commands={42: "python train.py --lr 1", 7: ""})
    assert gpu_lines(machine) == [
        "gpu 0         NVIDIA H200: 130 GiB used, 10.0 GiB free of 140 GiB",
        "                pid 42 (129 GiB): python train.py --lr 1; end it with: kill 42",
        "                pid 7 (unknown size) is not visible from here: outside this container, or just ended",
    ]
    value = to_json(machine, [], ())["gpus"][0]["processes"]
    assert list(value) == [
        {"pid": 42, "used_bytes": 129 * GIB, "command": "python train.py --lr 1", "end_with": "kill 42"},
        {"pid": 7, "used_bytes": None, "command": None, "end_with": None},
    ]
    assert [check.text for check in check_machine(machine)] == ["GPU 0 has only 10.0 GiB free"]


def test_a_remote_full_or_unwritable_place_for_runs_is_said(tmp_path: Path) -> None:
    remote = replace(MACHINE, disk=DiskReading("/", 50 * GIB, 100 * GIB, "fuse.drive", True))
    (check,) = check_machine(remote)
    assert (check.state, check.text) == ("note", "/ is on fuse.drive: a kill there can lose what was already written")
    assert check.hint == "keep runs on a local disk, and this path as --mirror"
    little = replace(MACHINE, disk=DiskReading("/", 2 * GIB, 100 * GIB, "ext4", False))
    assert [(check.state, check.text) for check in check_machine(little)] == [("note", "2.0 GiB free for runs in /")]
    full = replace(MACHINE, disk=DiskReading("/", 1000, 100 * GIB, "ext4", False))
    assert [(check.state, check.text) for check in check_machine(full)] == [("problem", "1000 B free for runs in /")]
    unreachable = replace(MACHINE, disk=None)
    assert [check.text for check in check_machine(unreachable)] == ["/ cannot be reached"]
    assert "verdict: this machine is not ready: 1 problem (disk)" in report_lines(full, check_machine(full), ())


def test_little_memory_is_noted() -> None:
    tight = replace(MACHINE, memory=MemoryReading(0.0, 11 * GIB, MemoryLimit(12 * GIB, "MemTotal"), GIB))
    assert [check.text for check in check_machine(tight)] == ["only 1.0 GiB of 12.0 GiB RAM are free"]


def test_a_left_over_process_on_torchs_port_is_named_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "MEETING_PORT", port)
        assert find_listener(port) == os.getpid()
        (check,) = check_machine(replace(MACHINE, port_holder=os.getpid()))
        assert check.text.startswith(f"port {port}, where torchrun's processes meet, is taken by pid {os.getpid()}, ")
        assert check.hint == f"kill {os.getpid()}"
    assert find_listener(port) is None
    (check,) = check_machine(replace(MACHINE, port_holder=0))
    assert check.hint == "--master_port 29501"


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "runs")
    assert machine.disk is not None
    assert machine.memory.limit.limit_bytes > 0
    assert not (tmp_path / "runs").exists()


def test_the_command_prints_the_machine_and_exits_0() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("machine       ")
    assert "verdict: this machine is ready" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_good_command_is_ready_and_told_how_to_start(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.write_text("import json\n")
    result = run("--", PYTHON, str(script), "--lr", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"start it with: jackline run -- {PYTHON} '{script}' --lr 1"
    assert result.stdout.splitlines()[-2].startswith("verdict: this command is ready")


def test_a_command_with_a_problem_exits_1_and_says_which(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_thing\n")
    result = run("--", PYTHON, str(script))
    assert result.exit_code == 1
    assert f"problem imports       not found: no_such_thing ({script}:1)\n" in result.stdout
    assert "                      hint: is 'no_such_thing' a file of your own?" in result.stdout
    assert "pip install no" not in result.stdout
    assert result.stdout.endswith(
        "verdict: this command is not ready: 1 problem (imports)\n"
        f"once that is fixed, start it with: jackline run -- {PYTHON} {script}\n"
    )


def test_json_holds_the_same_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_thing\n")
    result = run("--json", "--", PYTHON, str(script))
    value = json.loads(result.stdout)
    assert (result.exit_code, value["is_ready"], value["command"]) == (1, False, [PYTHON, str(script)])
    assert value["start"] == f"start it with: jackline run -- {PYTHON} {script}"
    assert [check["name"] for check in value["checks"] if check["state"] == "problem"] == ["imports"]
    assert value["memory"]["limit"]["limit_bytes"] > 0
    assert {"name", "is_on", "why", "hint"} == set(value["protections"][0])


def test_a_command_that_is_not_there_is_a_usage_error() -> None:
    result = run("--", "no-such-command-here")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == (
        "error: there is no command 'no-such-command-here'\nhint: check the spelling and the active environment"
    )


@pytest.mark.parametrize(
    ("words", "code"), [(["doctor"], 0), (["doctor", "--json"], 0), (["doctor", "--", "no-such-command-here"], 2)]
)
def test_as_a_real_process(words: list[str], code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jackline", *words], capture_output=True, text=True, timeout=HANGS_S, cwd=tmp_path
    )
    assert done.returncode == code, done.stdout + done.stderr
    if code == 2:
        assert done.stdout == ""
        assert done.stderr.startswith("error: there is no command 'no-such-command-here'\n")
    assert not any(tmp_path.glob("runs")), "a look at the machine leaves nothing behind"


# -- a recipe


def examine(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JACKLINE_DATA": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "jackline", "doctor", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=folder, env=env)


def test_a_recipe_is_examined_on_stdout_with_talk_on_stderr_and_ends_with_the_command(tmp_path: Path) -> None:
    done = examine(tmp_path, "demo", "--quick", "--runs-dir", "my runs")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("machine       ")
    assert any(line.startswith("ok      step          loss ") for line in lines)
    assert any(line.startswith("ok      saving        ") for line in lines)
    assert lines[-2].startswith("verdict: recipe 'demo' is ready")
    assert lines[-1] == "start it with: jackline train demo --quick --runs-dir 'my runs'"
    assert "[doctor] importing torch" in done.stderr and "[doctor]" not in done.stdout
    assert not (tmp_path / "my runs").exists(), "nothing stays but the data cache"


def test_a_recipes_problem_is_exit_code_1_and_the_same_as_json(tmp_path: Path) -> None:
    done = examine(tmp_path, "demo", "--quick", "data=nowhere.txt", "--json")
    assert done.returncode == 1, done.stderr
    value = json.loads(done.stdout)
    assert [check["name"] for check in value["checks"] if check["state"] == "problem"] == ["data"]
    assert value["verdict"] == "recipe 'demo' is not ready: 1 problem (data)"
    assert value["start"] == "start it with: jackline train demo --quick data=nowhere.txt"
    assert value["is_ready"] is False


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["dmo"], "error: there is no recipe and no command 'dmo'\n       known recipes: "),
        (["demo", "lr=fast"], "error: lr=fast is not a number\n"),
        (["demo", "lerning_rate=1"], "error: unknown setting 'lerning_rate' for recipe 'demo'\nhint: did you mean "),
        (["nowhere.py:recipe"], "error: there is no file 'nowhere.py'\n"),
        (["demo", "--runs-dir"], "error: --runs-dir needs a path\n"),
    ],
)
def test_what_cannot_be_meant_is_exit_code_2_and_nothing_else_is_said(
    words: list[str], text: str, tmp_path: Path
) -> None:
    done = examine(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(text)


def test_behind_dashes_a_recipes_name_is_a_command(tmp_path: Path) -> None:
    done = examine(tmp_path, "--", "demo")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no command 'demo'\n")


def test_a_check_that_dies_is_a_problem_and_not_a_verdict_of_ready(tmp_path: Path) -> None:
    own = "import os, signal\ndef recipe():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "own.py").write_text(own)
    done = examine(tmp_path, "own.py:recipe")
    assert done.returncode == 1, done.stderr
    line = "problem check         the check itself ended with signal 9 (SIGKILL)\n"
    assert line in done.stdout
    assert "verdict: recipe 'own.py:recipe' is not ready: 1 problem (check)" in done.stdout


def test_ctrl_c_ends_the_child_too_and_is_no_verdict(tmp_path: Path) -> None:
    # A recipe that takes for ever; the reader of its fifo says when it is there.
    os.mkfifo(tmp_path / "fifo")
    own = "def recipe():\n    open('fifo', 'w').write('here')\n    import time\n    time.sleep(600)\n"
    (tmp_path / "own.py").write_text(own)
    argv = [sys.executable, "-m", "jackline", "doctor", "own.py:recipe"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=tmp_path, start_new_session=True, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert (tmp_path / "fifo").read_text() == "here"
        os.killpg(process.pid, signal.SIGINT)
        try:
            output, talk = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # else leaving the block would wait for it
            raise
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in talk
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
