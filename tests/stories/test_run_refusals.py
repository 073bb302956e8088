"""Input that cannot be meant: a clear error with a hint, exit code 2, and nothing half-made on disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import Unavailable, small_disk
from tests.shell import Done, Shell

pytestmark = pytest.mark.zoo
ELSEWHERE = "hint: choose another place with --runs-dir PATH\n"


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(shell: Shell, done: Done, text: str) -> None:
    """Exit code 2, these very words, and no trace on disk."""
    assert (done.code, done.out, done.err) == (2, "", text)
    assert not shell.runs.exists() or files_under(shell.runs) == []
    assert not (shell.folder / "state").exists()
    assert shell.left_over() == []


@pytest.mark.parametrize("words", [("run",), ("run", "--"), ("run", "--name", "x", "--")])
def test_no_command_after_the_dashes(shell: Shell, words: tuple[str, ...]) -> None:
    text = "error: there is no command to run\nhint: write it after two dashes: jackline run -- python train.py\n"
    refused(shell, shell.jackline(*words), text)


def test_a_command_that_does_not_exist(shell: Shell) -> None:
    text = "error: there is no command 'pyhton'\nhint: did you mean 'python'?\n"
    refused(shell, shell.jackline("run", "--", "pyhton", "train.py"), text)


def test_a_script_that_may_not_be_executed(shell: Shell) -> None:
    script = shell.script("train.py", "print(1)")
    text = (
        f"error: cannot run '{script}'\n"
        f"       '{script}' is a file that may not be executed\n"
        f"hint: python {script}, or chmod +x {script}\n"
    )
    refused(shell, shell.jackline("run", "--", script), text)


def test_a_file_that_the_kernel_will_not_execute(shell: Shell) -> None:
    """Executable by its mode, but no program: only the start itself can tell."""
    script = shell.script("model.bin", "\x7fELF but not really")
    Path(script).chmod(0o755)
    done = shell.jackline("run", "--name", "noexec", "--", script)
    assert done.code == 2, done
    assert done.err.startswith("error: ") and "hint: " in done.err
    assert not (shell.runs / "noexec").exists()
    assert shell.left_over() == []


@pytest.mark.parametrize("name", ["a/b", "..", "../x", "a..b", "", ".hidden", "-x", "x" * 81, "a b", "a\nb"])
def test_a_name_that_cannot_be_a_folder(shell: Shell, name: str) -> None:
    text = (
        f"error: '{name}' cannot be a run name\n"
        "hint: use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 80\n"
    )
    refused(shell, shell.jackline("run", f"--name={name}", "--", "true"), text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--time-limit", "soon"), "error: 'soon' is not a duration\nhint: write 90, 90s, 15m, 1h30m or 2d\n"),
        (
            ("--resume-arg", "--go {checkpoint}"),
            "error: --resume-arg needs --checkpoints\nhint: --checkpoints 'out/checkpoint-*'\n",
        ),
        (
            ("--stuck-after", "0"),
            "error: --stuck-after must be more than 0, not 0\nhint: `jackline run --help` shows its options\n",
        ),
    ],
)
def test_wrong_values_of_options(shell: Shell, words: tuple[str, ...], text: str) -> None:
    refused(shell, shell.jackline("run", *words, "--", "true"), text)


def test_an_unknown_option_is_refused(shell: Shell) -> None:
    done = shell.jackline("run", "--restrat", "3", "--", "true")
    assert done.code == 2
    assert done.err.startswith("error: ") and "--restart" in done.err
    assert not shell.runs.exists()


def test_a_runs_folder_that_cannot_be_written(shell: Shell) -> None:
    folder = shell.work / "guarded"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:  # root may write everywhere but on a disk that is read-only
            try:
                stack.enter_context(small_disk(folder, "64K"))
            except Unavailable as error:
                pytest.skip(str(error))
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        folder_is = "Read-only file system" if os.geteuid() == 0 else "Permission denied"
        if os.geteuid() != 0:
            folder.chmod(0o555)
        done = shell.jackline("run", "--runs-dir", str(folder), "--", "true")
        refused(shell, done, f"error: cannot make a run in {folder}: {folder_is}\n{ELSEWHERE}")
        assert list(folder.iterdir()) == []


def test_a_runs_folder_that_is_a_file(shell: Shell) -> None:
    place = shell.work / "occupied"
    place.write_text("a file")
    done = shell.jackline("run", "--runs-dir", str(place), "--", "true")
    text = f"error: cannot make a run in {place}: Not a directory\n{ELSEWHERE}"
    refused(shell, done, text)
    assert place.read_text() == "a file"


def test_a_working_folder_that_is_gone(shell: Shell) -> None:
    words = [sys.executable, "-m", "jackline", "run", "--", "true"]
    (shell.work / "gone").mkdir()
    done = shell.call(["sh", "-c", 'cd gone && rmdir ../gone && exec "$0" "$@"', *words])
    assert done.code == 2, done
    assert done.err.startswith("error: ") and "hint: " in done.err
    assert not shell.runs.exists() or files_under(shell.runs) == []


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_harm(shell: Shell, closing: str) -> None:
    words = [
        sys.executable,
        "-m",
        "jackline",
        "run",
        "--name",
        "closed",
        "--",
        "sh",
        "-c",
        "echo done > proof; exit 4",
    ]
    done = shell.call(["sh", "-c", f'"$0" "$@" {closing}', *words])
    assert done.code == 4, done
    assert (shell.work / "proof").read_text() == "done\n"


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk_is_refused_before_anything_is_made(shell: Shell) -> None:
    shell.runs.mkdir()
    try:
        with small_disk(shell.runs, "64K"):
            fill(shell.runs / "filler")
            before = files_under(shell.runs)
            done = shell.jackline("run", "--name", "full", "--", "true")
            assert done.code == 2, done
            assert done.err == f"error: cannot make a run in {shell.runs}: No space left on device\n{ELSEWHERE}"
            assert files_under(shell.runs) == before
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("command", ["status", "why", "stop", "resume", "logs", "watch"])
def test_an_unknown_run(shell: Shell, command: str) -> None:
    done = shell.jackline(command, "nothing")
    text = (
        f"error: there is no run 'nothing' in {shell.runs}\nhint: `jackline runs` lists the runs that can be found\n"
    )
    refused(shell, done, text)


def test_a_run_name_with_a_slip_gets_the_nearest(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "pretrain", "--", "true").code == 0
    done = shell.jackline("status", "pretrian")
    assert done.code == 2
    assert done.err == f"error: there is no run 'pretrian' in {shell.runs}\nhint: did you mean 'pretrain'?\n"


DAMAGE = {
    "no JSON": (b"{not json", "is damaged: it is not JSON"),
    "empty": (b"", "is damaged: it is not JSON"),
    "other format": (b'{"format": 99}', "has format 99; this Jackline reads format 1"),
    "fields missing": (b'{"format": 1}', "is damaged: it has no 'name'"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_run_directory_is_named_and_left_alone(shell: Shell, how: str) -> None:
    assert shell.jackline("run", "--name", "broken", "--", "false").code == 1
    damage, words = DAMAGE[how]
    path = shell.runs / "broken" / "run.json"
    path.write_bytes(damage)
    before = files_under(shell.runs)
    for words_typed in (("run", "--name", "broken", "--", "false"), ("resume", "broken")):
        done = shell.jackline(*words_typed)
        assert done.code == 2, done
        assert done.err.startswith(f"error: {path} {words}"), done
        assert "hint: " in done.err
    assert path.read_bytes() == damage
    assert files_under(shell.runs) == before
