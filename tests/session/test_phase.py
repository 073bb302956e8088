"""jackline.phase speaks under `jackline run`, and is never the reason that work stops."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.session.phase import Phase
from jackline.supervisor.output.progress import Progress, parse_protocol
from tests.deadline import HANGS_S


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """raw.out of attempt 1 of a run, as under `jackline run`."""
    attempt = tmp_path / "run" / "attempts" / "001"
    attempt.mkdir(parents=True)
    (attempt / "raw.out").touch()
    return attempt / "raw.out"


def run_script(script: str, raw: Path, *, out: Path | None = None, **env: str) -> bytes:
    """Run `script` with fd 1 and 2 on raw.out (fd 1 on `out` if given); returns what raw.out holds."""
    environment = {**os.environ, "JACKLINE_RUN_DIR": str(raw.parents[2]), "JACKLINE_ATTEMPT": "1", **env}
    with open(raw, "ab") as both, open(out or raw, "ab") as first:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=first, stderr=both, env=environment, timeout=HANGS_S
        )
    assert done.returncode == 0, raw.read_bytes().decode()
    return raw.read_bytes()


def reports(data: bytes) -> list[Progress]:
    lines = data.decode().replace("\r", "\n").split("\n")
    found = [parse_protocol(line) for line in lines if line.startswith("::jackline")]
    assert None not in found, data
    return [progress for progress in found if progress is not None]


WITH_BLOCK = """
import jackline
with jackline.phase("tokenise", total=1000, unit="docs") as p:
    for _ in range(1000):
        p.advance(1)
"""


def test_first_and_last_are_said_and_little_in_between(raw: Path) -> None:
    found = reports(run_script(WITH_BLOCK, raw))
    assert found[0] == Progress("tokenise", 0, 1000, "docs", None, None, "protocol")
    assert found[-1].done == 1000
    assert len(found) < 50  # a thousand steps take milliseconds; five a second are allowed


def test_torch_is_not_imported(raw: Path) -> None:
    data = run_script("import sys, jackline; jackline.phase('x').advance(); print('torch' in sys.modules)", raw)
    assert data.endswith(b"False\n")


def test_a_wrapped_iterable_counts_itself(raw: Path) -> None:
    script = "import jackline\nprint(sum(jackline.phase('add', [1, 2, 3], unit='numbers')))"
    data = run_script(script, raw)
    assert data.endswith(b"6\n")
    assert [(found.done, found.total, found.unit) for found in reports(data)] == [
        (0, 3, "numbers"),
        (3, 3, "numbers"),
    ]


def test_a_generator_has_no_total(raw: Path) -> None:
    found = reports(run_script("import jackline\nfor x in jackline.phase('read', iter('abc')): pass", raw))
    assert (found[-1].done, found[-1].total) == (3, None)


def test_at_most_five_lines_a_second_are_written(raw: Path) -> None:
    """A second by a clock that the script drives: how many lines fit into one does not depend on the machine."""
    script = (
        "import jackline, jackline.session.phase as module, types\nnow = [0.0]\n"
        "module.time = types.SimpleNamespace(monotonic=lambda: now[0])\np = jackline.phase('spin')\n"
        "for _ in range(1000):\n    p.advance()\n    now[0] += 0.001\n"
    )
    assert len(reports(run_script(script, raw))) == 5


def test_a_line_stands_alone_though_a_bar_is_in_progress(raw: Path) -> None:
    script = (
        "import sys, jackline\nprint('\\r 45%|####', end='', flush=True)\n"
        "jackline.phase('save', total=2).advance()\nprint('\\r 46%|####', flush=True)"
    )
    assert run_script(script, raw) == b"\r 45%|####\r::jackline phase=save done=1 total=2\n\r 46%|####\n"


def test_a_file_the_person_redirects_to_gets_no_protocol(raw: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    found = reports(run_script(WITH_BLOCK + "print('data')", raw, out=data))
    assert data.read_bytes() == b"data\n"
    assert found[-1].done == 1000  # stderr still leads to the supervisor


@pytest.mark.parametrize("env", [{"JACKLINE": "off"}, {"RANK": "3"}, {"JACKLINE_RUN_DIR": ""}], ids=str)
def test_switched_off_another_rank_and_a_bare_start_are_silent(raw: Path, env: dict[str, str]) -> None:
    assert run_script(WITH_BLOCK, raw, **env) == b""


def test_closed_descriptors_and_a_lost_run_do_not_stop_the_work(raw: Path, tmp_path: Path) -> None:
    script = (
        "import os, jackline\nos.close(1); os.close(2)\n"
        "with jackline.phase('x', total=3) as p:\n    for i in range(3): p.update(i)\n"
        f"open({str(tmp_path / 'worked')!r}, 'w').write('yes')\n"
    )
    run_script(script, raw)
    assert (tmp_path / "worked").read_text() == "yes"
    assert run_script(WITH_BLOCK, raw, JACKLINE_RUN_DIR="/nowhere/at/all") == b""


def test_a_forked_child_is_silent_even_if_the_lock_was_held(raw: Path) -> None:
    script = (
        "import os, jackline\np = jackline.phase('work', total=10)\np.update(1)\np._lock.acquire()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    p.advance(5); p.update(9); p.__exit__(None, None, None); os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "p._lock.release()\np.__exit__(None, None, None)\nprint(p.done)\n"
    )
    data = run_script(script, raw)
    assert [found.done for found in reports(data)] == [1]
    assert data.endswith(b"1.0\n")


def test_threads_lose_no_count(raw: Path) -> None:
    script = (
        "import threading, jackline\nwith jackline.phase('count', total=40000) as p:\n"
        "    threads = [threading.Thread(target=lambda: [p.advance() for _ in range(10000)]) for _ in range(4)]\n"
        "    [t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    assert reports(run_script(script, raw))[-1].done == 40000


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), Phase("x", None, total=None, unit=""):
        _ = 1 / 0


@pytest.mark.parametrize("name", ["plain", "two words", 'a "quoted" \\ name', "line\nbreak", "a=b", "", "日本"])
def test_any_name_survives_the_protocol(name: str) -> None:
    line = Phase(name, None, total=2.5, unit="the docs").protocol_line()
    found = parse_protocol(line)
    assert found is not None
    assert (found.phase, found.total, found.unit) == (name.replace("\n", " "), 2.5, "the docs")


def read_all(master: int) -> bytes:
    """All that came to a terminal whose other end is closed: it arrives in pieces."""
    found = b""
    with contextlib.suppress(OSError), open(master, "rb", buffering=0) as stream:
        while piece := stream.read(65536):
            found += piece
    return found


def test_bare_on_a_terminal_it_draws_a_bar(raw: Path) -> None:
    master, slave = os.openpty()
    try:
        environment = {**os.environ}
        subprocess.run([sys.executable, "-c", WITH_BLOCK], stdout=slave, stderr=slave, env=environment, check=True)
    finally:
        os.close(slave)
    shown = read_all(master).decode()
    assert "::jackline" not in shown
    assert shown.rstrip().endswith("tokenise [####################] 1000/1000 docs\x1b[K")
