"""One damaged or forged run: a line of words about it, and all other runs are shown."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.rundir import atomic, registry
from jackline.rundir.access import patience
from jackline.rundir.layout import RunDir
from tests.cli.fuzz import COMMANDS, GOLDEN, HEALTHY, SERVED, VICTIM, ask_inside, make_base, run_inside
from tests.deadline import HANGS_S

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs folder with a healthy run and one that has every file a run can have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    bases = make_base(tmp_path / "base")
    folder = tmp_path / "runs"
    folder.mkdir(exist_ok=True)
    shutil.copytree(bases[0], folder / HEALTHY)
    shutil.copytree(bases[-1], folder / VICTIM)
    return folder


def read_all(runs: Path) -> str:
    """All commands on the damaged run; each must answer without a traceback. Returns what `runs` printed."""
    listed = ""
    for words in COMMANDS:
        said, trouble = run_inside([*words, "--runs-dir", str(runs)])
        assert not trouble, f"jackline {' '.join(words)}\n{trouble}"
        listed = said if words == ["runs"] else listed
    return listed


JSON_FILES = ("run.json", "supervisor.json", "session-0.json", "attempts/001/exit.json", "attempts/001/start.json")


@pytest.mark.parametrize("contents", [b"[1]", b"NaN", b'{"at_s": NaN, "attempt": 1e999, "supervisor": [1]}', b'{"a'])
def test_a_damaged_record_takes_nobody_down(runs: Path, contents: bytes) -> None:
    for name in JSON_FILES:
        (runs / VICTIM / name).write_bytes(contents)
    assert HEALTHY in read_all(runs)


@pytest.mark.parametrize("what", ["fifo", "/dev/zero"])
def test_a_fifo_or_a_device_in_place_of_a_file_hangs_nobody(runs: Path, what: str) -> None:
    files = [path for path in (runs / VICTIM).rglob("*") if path.is_file()]
    for path in files:
        path.unlink()
        os.mkfifo(path) if what == "fifo" else path.symlink_to(what)
    assert HEALTHY in read_all(runs)


def test_files_of_ten_gigabytes_are_read_in_part(runs: Path) -> None:
    for path in [path for path in (runs / VICTIM).rglob("*") if path.is_file()]:
        os.truncate(path, 10 << 30)
    assert HEALTHY in read_all(runs)


def test_a_folder_named_like_an_attempt_is_passed_over(runs: Path) -> None:
    for name in ("٣", "9999999999999999999999", "2", "x", "²"):
        (runs / VICTIM / "attempts" / name).mkdir()
    (runs / VICTIM / "attempts" / "003").write_text("a file")
    (runs / VICTIM / "attempts" / "004").symlink_to("/")
    (runs / VICTIM / "attempts" / "001" / "incident-x.txt").touch()
    assert HEALTHY in read_all(runs)
    said, _ = run_inside(["status", VICTIM, "--runs-dir", str(runs)])
    assert "in attempt 1" in said


def test_the_log_of_a_stranger_names_what_is_in_its_place(runs: Path) -> None:
    (runs / VICTIM / "out.log").unlink()
    (runs / VICTIM / "out.log").symlink_to("/dev/zero")
    said, trouble = run_inside(["logs", VICTIM, "--runs-dir", str(runs)])
    assert not trouble
    assert said.startswith(f"error: cannot use {runs / VICTIM / 'out.log'}: ")


def test_a_damaged_case_of_a_verdict_is_kept_and_half_a_character_reaches_the_page(runs: Path) -> None:
    (runs / VICTIM / "attempts" / "001" / "case.json").write_text('{"samples": true}')
    with open(runs / VICTIM / "events-supervisor.jsonl", "ab") as file:
        file.write(b'{"at_s": 1.0, "event": "note", "text": "half \xe6"}\n')
    said, trouble = run_inside(["why", VICTIM, "--save-case", "kept.json", "--runs-dir", str(runs)])
    assert not trouble, trouble
    assert "wrote kept.json: 0 samples" in said
    said, trouble = ask_inside(SERVED["dash"], runs)
    assert not trouble, trouble
    assert "half ?" in said


def test_a_number_beyond_all_sense_takes_neither_wait_nor_the_list_of_mcp_down(runs: Path) -> None:
    with open(runs / VICTIM / "metrics-printed.jsonl", "a") as file:
        file.write(f'{{"at_s": 1.0, "step": 3, "acc": {10**400}, "loss": 0.25}}\n')
    said, trouble = run_inside(["wait", VICTIM, "--timeout", "0s", "--runs-dir", str(runs)])
    assert not trouble, trouble
    assert '"loss": 0.25' in said or '"loss":0.25' in said
    said, trouble = ask_inside(SERVED["mcp"], runs)
    assert not trouble, trouble
    assert HEALTHY in said


@pytest.mark.timeout(HANGS_S * 3 + 60)
def test_40_mutations_of_run_files_are_survived_by_all_commands(tmp_path: Path) -> None:
    """The first of the 10,000 of `scripts/torture fuzz`; in a process of its own, which is measured."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.fuzz", "--cases", "40"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANGS_S * 3,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert GOLDEN.exists() and "40 mutations" in done.stdout


@pytest.fixture
def stuck_mount(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system whose server never answers, as a network mount after its server is gone."""
    folder = tmp_path / "mnt"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("this machine has no /dev/fuse, so no mount can be made that hangs")
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"stuck", bytes(folder), b"fuse", 0, options) != 0:
        os.close(fd)
        pytest.skip("this process may not mount anything")
    yield folder
    os.close(fd)  # everybody who waits is released
    libc.umount2(bytes(folder), 2)


def test_a_run_on_a_mount_that_hangs_does_not_hide_the_others(
    runs: Path, stuck_mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience.ask_each, "__defaults__", (0.5,))
    entry = registry.RegistryEntry(str(stuck_mount / "far"), 1.0, registry.NOT_VOUCHED)
    assert registry.register(RunDir(runs / HEALTHY), vouched=False)
    atomic.write_json(registry.state_folder() / "runs" / "far.json", entry.to_json())
    said, trouble = run_inside(["runs", "--runs-dir", str(runs)])
    assert not trouble
    assert HEALTHY in said and VICTIM in said
    assert f"{stuck_mount / 'far'} does not answer: its disk or mount hangs" in said
