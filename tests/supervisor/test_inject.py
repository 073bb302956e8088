"""The injected file and the environment that brings it in: real interpreters, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.machine.proc import catches_signal
from jackline.supervisor.child.environment import INJECT_FOLDER, STACK_SIGNAL, child_environment, stack_signal
from tests.supervisor.hanging import hanging, wait_until

ROOT = Path(__file__).parents[2]
PYENV = Path.home() / ".pyenv" / "versions"
OTHER_PYTHONS = ("2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.12", "3.13", "3.14")


def environment(stacks: Path, **more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JACKLINE"))}
    stacks.mkdir(exist_ok=True)
    return child_environment(
        {**plain, **more}, stacks=stacks, inject=True, stdbuf=None, surface_is_terminal=False, columns=80
    )


def run(stacks: Path, code: str, *, python: str = sys.executable, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code],
        env=environment(stacks, **more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
    )


# -- the environment ------------------------------------------------------------------------------------------------


def make(environ: dict[str, str], **options: object) -> dict[str, str]:
    settings = {"stacks": Path("/s"), "inject": True, "stdbuf": None, "surface_is_terminal": False, "columns": 99}
    return child_environment(environ, **{**settings, **options})  # type: ignore[arg-type]


def test_a_bare_environment_gets_everything_a_quiet_pipe_needs() -> None:
    assert make({"HOME": "/h"}) == {
        "HOME": "/h",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(INJECT_FOLDER),
        "JACKLINE_STACKS": "/s",
        "JACKLINE_STACK_SIGNAL": "61",
        "JACKLINE_LINE_BUFFERING": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_jackline_off_leaves_the_environment_alone() -> None:
    assert make({"JACKLINE": "off"}, stdbuf="/lib/libstdbuf.so") == {"JACKLINE": "off"}


def test_no_inject_leaves_the_interpreter_alone_but_not_its_buffering() -> None:
    assert make({}, inject=False) == {"PYTHONUNBUFFERED": "1"}


def test_our_folder_comes_first_once_and_the_persons_path_stays() -> None:
    once = make({"PYTHONPATH": "/mine::/other"})
    assert once["PYTHONPATH"] == f"{INJECT_FOLDER}:/mine::/other"
    assert make(once)["PYTHONPATH"] == once["PYTHONPATH"]


def test_what_a_person_set_himself_is_kept() -> None:
    mine = {"PYTHONUNBUFFERED": "x", "TTY_COMPATIBLE": "0", "COLUMNS": "200", "_STDBUF_O": "0"}
    child = make(mine, surface_is_terminal=True, stdbuf="/lib/libstdbuf.so")
    assert {name: child[name] for name in mine} == mine
    assert "LD_PRELOAD" not in child
    assert "JACKLINE_LINE_BUFFERING" not in child


def test_the_allocator_is_a_persons_own_choice() -> None:
    child = make({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert child["PYTORCH_CUDA_ALLOC_CONF"] == child["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_ALLOC_CONF" not in make({}, inject=False)


def test_libstdbuf_joins_an_existing_preload() -> None:
    child = make({"LD_PRELOAD": "/lib/a.so /lib/b.so"}, stdbuf="/lib/libstdbuf.so")
    assert child["LD_PRELOAD"] == "/lib/a.so /lib/b.so:/lib/libstdbuf.so"
    assert child["_STDBUF_O"] == "L"
    assert make(child, stdbuf="/lib/libstdbuf.so")["LD_PRELOAD"] == child["LD_PRELOAD"]


def test_rich_is_told_of_a_terminal_only_where_there_is_one() -> None:
    child = make({}, surface_is_terminal=True)
    assert (child["TTY_COMPATIBLE"], child["TTY_INTERACTIVE"], child["COLUMNS"]) == ("1", "1", "99")
    assert "TTY_COMPATIBLE" not in make({})


@pytest.mark.parametrize("word", ["", "x", "9", "15", "65"])
def test_a_stack_signal_that_is_not_real_time_is_not_used(word: str) -> None:
    assert stack_signal({"JACKLINE_STACK_SIGNAL": word}) == STACK_SIGNAL
    assert stack_signal({"JACKLINE_STACK_SIGNAL": "62"}) == 62


# -- the injected file ----------------------------------------------------------------------------------------------


def test_every_process_has_its_own_dump_file_spawned_and_forked(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
spawned = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
print(os.getpid(), child, spawned.stdout)
"""
    done = run(tmp_path / "s", code)
    assert done.stderr == ""
    assert {f"fh.{pid}" for pid in done.stdout.split()} == {path.name for path in (tmp_path / "s").iterdir()}


def test_the_first_signal_writes_the_main_thread_alone(tmp_path: Path) -> None:
    code = """
import os, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.kill(os.getpid(), 61)
print("continued")
"""
    done = run(tmp_path / "s", code)
    (dump,) = (tmp_path / "s").iterdir()
    assert (done.returncode, done.stdout) == (0, "continued\n")
    assert dump.read_text() == 'Stack (most recent call first):\n  File "<string>", line 4 in <module>\n'


def test_the_second_signal_writes_all_threads_and_changes_nothing_else(tmp_path: Path) -> None:
    code = """
import os, signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.kill(os.getpid(), 62)
print("continued")
"""
    done = run(tmp_path / "s", code)
    (dump,) = (tmp_path / "s").iterdir()
    assert (done.returncode, done.stdout) == (0, "continued\n")
    assert dump.read_text().count("(most recent call first):") == 2
    assert 'File "<string>", line 4 in <module>' in dump.read_text()


def test_a_forked_child_dumps_into_its_own_file(tmp_path: Path) -> None:
    code = """
import os
child = os.fork()
if child == 0:
    os.kill(os.getpid(), 61)
    os._exit(0)
os.waitpid(child, 0)
print(os.getpid(), child)
"""
    parent, child = run(tmp_path / "s", code).stdout.split()
    assert (tmp_path / "s" / f"fh.{parent}").read_text() == ""
    assert 'File "<string>", line 5 in <module>' in (tmp_path / "s" / f"fh.{child}").read_text()


def test_a_segfault_leaves_its_python_line(tmp_path: Path) -> None:
    done = run(tmp_path / "s", "import ctypes\n\nctypes.string_at(0)")
    (dump,) = (tmp_path / "s").iterdir()
    assert done.returncode == -signal.SIGSEGV
    assert dump.read_text().startswith("Fatal Python error: Segmentation fault\n")
    assert 'File "<string>", line 3 in <module>' in dump.read_text()


def test_a_faulthandler_the_person_enables_stays_theirs_also_in_a_forked_child(tmp_path: Path) -> None:
    code = """
import faulthandler, os, ctypes
mine = open("mine", "w")
faulthandler.enable(mine)
child = os.fork()
if child == 0:
    ctypes.string_at(0)
os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path / "s"),
        capture_output=True,
        timeout=240,
    )
    assert done.stderr == b""
    assert "Segmentation fault" in (tmp_path / "mine").read_text()
    assert all(path.stat().st_size == 0 for path in (tmp_path / "s").iterdir())


def test_python_s_own_faulthandler_option_keeps_writing_to_stderr(tmp_path: Path) -> None:
    done = run(tmp_path / "s", "import ctypes; ctypes.string_at(0)", PYTHONFAULTHANDLER="1")
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_a_signal_number_in_use_is_left_to_its_user(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import signal; signal.signal(61, lambda *_: print('mine'))")
    code = "import os; os.kill(os.getpid(), 61); print('done')"
    done = run(tmp_path / "s", code, PYTHONPATH=str(folder))
    assert done.stdout == "mine\ndone\n"


def test_the_persons_own_sitecustomize_runs_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('theirs', __name__, __file__); value = 7")
    done = run(tmp_path / "s", "import sitecustomize; print(sitecustomize.value)", PYTHONPATH=str(folder))
    assert done.stdout == f"theirs sitecustomize {folder / 'sitecustomize.py'}\n7\n"
    assert done.stderr == ""


def test_an_error_in_the_persons_sitecustomize_is_told_as_python_tells_it(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("raise ValueError('of theirs')")
    with_us = run(tmp_path / "s", "print('runs')", PYTHONPATH=str(folder))
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JACKLINE"))}
    without = subprocess.run(
        [sys.executable, "-c", "print('runs')"],
        env={**plain, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert with_us.stdout == without.stdout == "runs\n"
    assert with_us.stderr == without.stderr != ""


def test_a_missing_stacks_folder_and_a_bad_signal_do_no_harm(tmp_path: Path) -> None:
    env = {**environment(tmp_path / "s"), "JACKLINE_STACKS": str(tmp_path / "gone"), "JACKLINE_STACK_SIGNAL": "abc"}
    done = subprocess.run([sys.executable, "-c", "print(1)"], env=env, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("1\n", "")
    env["JACKLINE_STACKS"] = str(tmp_path / "s")
    done = subprocess.run([sys.executable, "-c", "print(1)"], env=env, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_printed_line_is_one_write(tmp_path: Path) -> None:
    # A pipe in packet mode gives back what each write was.
    reader, writer = os.pipe2(os.O_DIRECT)
    code = "import sys; print('step', 1); print('loss', 0.5, file=sys.stderr); print('part', end='', flush=True)"
    subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path / "s"), stdout=writer, stderr=writer, timeout=240
    )
    os.close(writer)
    packets = []
    while packet := os.read(reader, 4096):
        packets.append(packet)
    os.close(reader)
    assert packets == [b"step 1\n", b"loss 0.5\n", b"part"]


def test_a_program_that_closes_all_descriptors_finds_no_dump_in_its_own_files(tmp_path: Path) -> None:
    code = """
import os, time
os.closerange(3, 4096)
log = os.open("mine.log", os.O_WRONLY | os.O_CREAT)
if os.fork() == 0:
    os.write(log, b"child\\n")
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path / "s"),
        capture_output=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "mine.log").read_text() == "child\n"


@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_any_python_starts_as_if_nothing_were_there(version: str, tmp_path: Path) -> None:
    found = sorted(PYENV.glob(f"{version}*/bin/python")) if PYENV.is_dir() else []
    if not found:
        pytest.skip(f"Python {version} is not installed here")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys; sys.stdout.write('theirs\\n')")
    code = "import sys, os; sys.stdout.write('%d\\n' % os.getpid())"
    done = run(tmp_path / "s", code, python=str(found[0]), PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    said, pid = done.stdout.split()
    assert (said, done.stderr, done.returncode) == ("theirs", "", 0)
    dumps = [path.name for path in (tmp_path / "s").iterdir()]
    assert dumps == ([f"fh.{pid}"] if version != "2.7" else [])


def test_the_signal_is_armed_in_a_running_program(tmp_path: Path) -> None:
    with hanging(tmp_path, "import time\ntime.sleep(1000)\n", waits="sleep") as program:
        wait_until(lambda: catches_signal(program.pid, STACK_SIGNAL), "the handler")
        assert (program.stacks / f"fh.{program.pid}").exists()


COUNTED = """
import os, sys
from tests.counted import count_calls
before = set(sys.modules)
number = count_calls(lambda: __import__("sitecustomize"))
print(number, *sorted(set(sys.modules) - before))
"""


def test_a_start_costs_at_most_two_thousand_calls_and_two_small_modules(tmp_path: Path) -> None:
    """Counted, not timed: on a crowded machine the same start takes twice the CPU time. 2,000 calls are less than
    a millisecond. `-S`, so that the file is imported where it can be counted."""
    env = environment(tmp_path / "s", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-S", "-c", COUNTED], env=env, capture_output=True, text=True, timeout=240)
    number, *modules = done.stdout.split()
    assert modules == ["atexit", "faulthandler", "fcntl", "sitecustomize"], done  # atexit is part of Python
    assert int(number) <= 2000


# Garbage that asks for the interpreter's lock when it is collected, at every place where a collection can begin.
COLLECTS = """
import gc, os, signal, sys, threading
def look():
    {look}
stop = threading.Event()
for _ in range(30):
    threading.Thread(target=stop.wait, daemon=True).start()
class Ring:
    def __init__(self):
        self.me = self
    def __del__(self):
        sys._current_frames()
for threshold in range(1, 150):
    gc.collect()
    Ring()
    gc.set_threshold(threshold)
    look()
    gc.set_threshold(700)
print("ended", gc.isenabled())
"""
LOOKS = {
    "at a fork": "os._exit(0) if (pid := os.fork()) == 0 else os.waitpid(pid, 0)",
    "when a report is asked for": "signal.raise_signal(signal.SIGRTMAX - 1)",
    "in a save": "from jackline.machine.waits import thread_frames; thread_frames()",
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_garbage_collection_while_threads_are_looked_at_does_not_hang_the_program(
    name: str, tmp_path: Path
) -> None:
    done = run(tmp_path / "s", COLLECTS.format(look=LOOKS[name]), PYTHONPATH=str(ROOT / "src"))
    assert (done.stdout, done.returncode) == ("ended True\n", 0), done.stderr
    if "report" in name:
        assert list((tmp_path / "s").glob("in.*"))
