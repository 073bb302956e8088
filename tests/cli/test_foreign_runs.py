"""A run folder or mirror from somebody else is data: nothing in it is executed, written through or believed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.checkpoint.mirror.bundle import pack_run
from jackline.rundir import registry
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, boot_id, host_name, identify
from jackline.rundir.run_file import read_run_file, write_run_file
from tests.deadline import HANGS_S
from tests.rundir.made import make_run, write_exit, write_start, write_state
from tests.shell import Shell, wait_for


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    person = Shell(tmp_path / "person")
    yield person
    person.close()


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Appears if an instruction of the foreign run is followed."""
    return tmp_path / "executed"


def foreign_run(folder: Path, trap: Path, **facts: Any) -> RunDir:
    """A run as another person made it on this machine, with a command and hooks that do harm."""
    options = {"on_event": f"touch {trap}", "when_done": f"touch {trap}", "checkpoints": "out/*.pt"}
    known = {"argv": ("touch", str(trap)), "options": options, "user": "mallory", "cwd": str(folder.parent)}
    return make_run(folder, **{**known, **facts})


def gone() -> ProcessId:
    return ProcessId(4_000_000, 5, host_name(), boot_id())


def mirror_of(run: RunDir, mirror: Path) -> Path:
    (mirror / run.name).mkdir(parents=True)
    (mirror / run.name / "run-000001.tar.gz").write_bytes(pack_run(run))
    return mirror


def test_resume_from_a_mirror_shows_what_it_would_execute_and_executes_nothing(
    shell: Shell, tmp_path: Path, trap: Path
) -> None:
    run = foreign_run(tmp_path / "theirs" / "gift", trap)
    write_exit(run, 75)
    mirror = mirror_of(run, tmp_path / "mirror")
    done = shell.jackline("resume", str(mirror))
    assert done.code == 2, done
    assert f"it would execute: touch {trap}" in done.err
    assert f"at the end it would execute: touch {trap}" in done.err
    assert "made by 'mallory'" in done.err
    assert "add --trust" in done.err
    assert not trap.exists()
    assert not (shell.runs / "gift").exists()
    assert not list(shell.runs.glob(".*")) if shell.runs.exists() else True


def test_a_mirror_that_is_trusted_is_resumed_and_then_known(shell: Shell, tmp_path: Path, trap: Path) -> None:
    run = foreign_run(tmp_path / "theirs" / "gift", trap, options={})
    write_exit(run, 75)
    done = shell.jackline("resume", str(mirror_of(run, tmp_path / "mirror")), "--trust")
    assert done.code == 0, done
    assert trap.exists()
    again = shell.jackline("resume", "gift", "--from-scratch")
    assert "was not made here" not in again.err


@pytest.mark.parametrize(
    "place", [".bashrc", "train.py", ".git/hooks/post-commit", "out/.hidden.pt", "out/deep/x.pt"]
)
def test_a_mirror_places_nothing_but_checkpoints_where_the_run_keeps_them(
    shell: Shell, tmp_path: Path, trap: Path, place: str
) -> None:
    run = foreign_run(
        tmp_path / "theirs" / "gift", trap, argv=(sys.executable, "-c", "0"), options={"checkpoints": "out/*.pt"}
    )
    write_exit(run, 75)
    mirror = mirror_of(run, tmp_path / "mirror")
    upload = mirror / "gift" / "foreign" / "x-1a2b"
    upload.mkdir(parents=True)
    name = Path(place).name
    (upload / name).write_text("evil")
    (upload / "where.json").write_text(json.dumps({"relative": place, "files": [[name, 4]], "mtime_s": 1}))
    done = shell.jackline("resume", str(mirror), "--trust", "--from-scratch")
    assert "is not where this run keeps its checkpoints (out/*.pt)" in done.err, done
    assert not (shell.work / place).exists()


def test_watch_of_a_copied_run_executes_nothing_of_it(shell: Shell, trap: Path) -> None:
    """Its host name is this machine's, and its end was not recorded: a run of our own would be taken over."""
    run = foreign_run(shell.runs / "gift", trap)
    write_start(run, gone())
    write_state(run, gone(), attempt=1, options={"on_event": f"touch {trap}", "when_done": f"touch {trap}"})
    run.attempt(1).raw_out.write_text("hello \x1b]52;c;AAAA\x07\x1b[2J\n")
    done = shell.jackline("watch", "gift")
    assert "hello" in done.out and "\x1b" not in done.out
    assert not trap.exists()
    assert not shell.pids()
    assert not run.attempt(1).exit_file.exists()


def test_hooks_never_come_from_the_state_file(shell: Shell, trap: Path) -> None:
    """A supervisor that takes over uses what this user asked for, not what somebody wrote into supervisor.json."""
    command = shell.python(
        "long.py", "import time, pathlib\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"
    )
    own = shell.folder / "own"
    assert (
        shell.jackline("run", "--name", "mine", "--when-done", f"touch {own}", "--detach", "--", *command).code == 0
    )
    run = RunDir(shell.runs / "mine")
    state = shell.run_dir("mine").state()
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)
    wait_for(lambda: identify(state["supervisor"]["pid"]) is None, "the end of the supervisor")
    forged = {**state, "options": {**state["options"], "when_done": f"touch {trap}", "on_event": f"touch {trap}"}}
    run.supervisor_file.write_text(json.dumps(forged))
    live = shell.start("watch", "mine")
    live.wait_for("a new one has taken over")
    (shell.work / "go").touch()
    assert live.wait() == 0, live.text()
    wait_for(own.exists, "the user's own hook")
    assert not trap.exists()


def test_resume_of_a_copied_run_asks_first(shell: Shell, trap: Path) -> None:
    run = foreign_run(shell.runs / "gift", trap)
    write_exit(run, 75)
    done = shell.jackline("resume", "gift")
    assert done.code == 2 and f"it would execute: touch {trap}" in done.err, done
    assert not trap.exists()
    assert done.err.count("\n") < 12


@pytest.mark.parametrize("field", ["argv", "when_done"])
def test_what_is_too_long_to_be_shown_is_not_executed(shell: Shell, trap: Path, field: str) -> None:
    """What would be cut off, or is far behind blanks, nobody has seen who says --trust."""
    long = f"true {' ' * 5000}; touch {trap}"
    facts: dict[str, Any] = {"argv": ("sh", "-c", long), "options": {}}
    if field == "when_done":
        facts = {"argv": ("true",), "options": {"when_done": long}}
    write_exit(foreign_run(shell.runs / "gift", trap, **facts), 75)
    done = shell.jackline("resume", "gift", "--trust")
    assert done.code == 2 and "too long to be read here" in done.err, done
    assert not trap.exists()


def test_at_a_terminal_the_question_is_answered_with_yes_or_no(shell: Shell, trap: Path) -> None:
    run = foreign_run(shell.runs / "gift", trap, options={})
    write_exit(run, 75)
    command = f"{sys.executable} -m jackline resume gift"
    for answer, is_executed in (("n", False), ("y", True)):
        done = subprocess.run(
            ["script", "-qec", command, "/dev/null"],
            input=f"{answer}\n".encode(),
            env=shell.env,
            cwd=shell.work,
            capture_output=True,
            timeout=HANGS_S,
        )
        assert b"execute this?" in done.stdout, done
        assert trap.exists() is is_executed


def test_a_foreign_run_with_links_inside_is_not_even_trusted(shell: Shell, trap: Path, tmp_path: Path) -> None:
    run = foreign_run(shell.runs / "gift", trap)
    write_exit(run, 75)
    (run.path / "kept").symlink_to(tmp_path)
    done = shell.jackline("resume", "gift", "--trust")
    assert done.code == 2 and "holds symbolic links: kept" in done.err, done
    assert not trap.exists()


def test_a_run_that_comes_back_from_somebody_else_is_theirs_now(shell: Shell, trap: Path, tmp_path: Path) -> None:
    """Its run.json is what this user once made. Everything beside it may have been changed."""
    command = shell.python("mine.py", "print('mine')\nraise SystemExit(75)\n")
    assert shell.jackline("run", "--name", "mine", "--", *command).code == 75
    shutil.copytree(shell.runs / "mine", shell.runs / "back")
    done = shell.jackline("resume", "back")
    assert done.code == 2 and "it was not made here by you" in done.err, done
    moved = (shell.runs / "mine").rename(shell.runs / "moved")
    again = shell.jackline("resume", str(moved))
    assert again.code == 75 and "was not made here" not in again.err, again


def test_the_same_command_typed_again_follows_no_links_of_a_foreign_run(
    shell: Shell, trap: Path, tmp_path: Path
) -> None:
    command = shell.python("mine.py", "print('mine')\nraise SystemExit(75)\n")
    assert shell.jackline("run", "--name", "mine", "--", *command).code == 75
    theirs = shell.runs / "theirs"
    shutil.copytree(shell.runs / "mine", theirs)
    shutil.rmtree(shell.runs / "mine")
    shutil.rmtree(theirs / "attempts")
    (tmp_path / "elsewhere" / "001").mkdir(parents=True)
    (theirs / "attempts").symlink_to(tmp_path / "elsewhere")
    done = shell.jackline("run", "--name", "theirs", "--", *command)
    assert done.code == 2 and "holds symbolic links: attempts" in done.err, done
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["001"]


@pytest.mark.parametrize(
    "words", [("send", "gift", "--to", "webhook:http://127.0.0.1:9/", "--once"), ("checkpoints", "verify", "gift")]
)
def test_what_a_reader_notes_about_a_foreign_run_goes_nowhere_else(
    shell: Shell, trap: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = foreign_run(shell.runs / "gift", trap)
    write_exit(run, 75)
    shutil.copytree(Path(__file__).parents[1] / "golden" / "checkpoint-1", tmp_path / "elsewhere")
    for name in ("exports", "checkpoints"):
        (run.path / name).symlink_to(tmp_path / "elsewhere")
    done = shell.jackline(*words)
    assert "Traceback" not in done.err, done
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step-00000003"]
    pruned = shell.jackline("checkpoints", "prune", "gift", "--keep", "1")
    assert pruned.code == 2 and "holds symbolic links" in pruned.err


def test_the_same_command_typed_again_drops_the_hooks_of_a_foreign_run(shell: Shell, trap: Path) -> None:
    """The command is the user's own then; what the folder adds to it is not."""
    command = shell.python("mine.py", "print('mine')\n")
    assert shell.jackline("run", "--name", "mine", "--", *command).code == 0
    run = RunDir(shell.runs / "mine")
    contents = read_run_file(run)
    write_run_file(run, replace(contents, options={**contents.options, "when_done": f"touch {trap}"}))
    write_exit(run, 75)
    state = json.loads(run.supervisor_file.read_text())
    run.supervisor_file.write_text(json.dumps({**state, "is_finished": True}))
    assert shell.jackline("run", "--name", "mine", "--", *command).code == 0
    assert not read_run_file(run).options["when_done"]
    assert not trap.exists()


def test_status_of_a_foreign_run_searches_the_disk_for_nothing(shell: Shell, trap: Path) -> None:
    run = foreign_run(shell.runs / "gift", trap, options={"checkpoints": "/**/*"}, cwd="/")
    write_exit(run, 75)
    done = shell.jackline("status", "gift")
    assert done.code == 0 and "its checkpoints are not looked for" in done.out, done


def test_why_of_a_foreign_run_shows_no_line_of_a_file_that_it_names(shell: Shell, trap: Path) -> None:
    """A report about it is often sent to somebody, perhaps to the person who made the run."""
    private = shell.folder / "settings.py"
    private.write_text("password = 'secret-word'\n")
    run = foreign_run(shell.runs / "gift", trap)
    write_start(run, gone())
    attempt = run.attempt(1)
    attempt.wait_file.write_text(json.dumps({"status": 11, "signal": 11, "ended_at_s": 2.0, "is_settled": True}))
    attempt.stacks.mkdir(exist_ok=True)
    for name in ("fh.7", "fh.²"):
        (attempt.stacks / name).write_text(
            f'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File "{private}", line 1 in f\n'
        )
    for words in (("why", "gift"), ("report", "gift", "--md", "--out", "-")):
        done = shell.jackline(*words)
        assert "Traceback" not in done.err, done
        assert "secret-word" not in done.out + done.err, done
    assert "settings.py" in shell.jackline("why", "gift").out


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_stop_signals_no_process_that_is_not_the_runs_own(
    shell: Shell, trap: Path, innocent: subprocess.Popen[bytes]
) -> None:
    run = foreign_run(shell.runs / "gift", trap)
    process = identify(innocent.pid)
    assert process is not None
    write_start(run, process)
    write_state(run, process, attempt=1)
    done = shell.jackline("stop", "gift")
    assert done.code != 0 and "nothing was signalled" in done.err, done
    assert innocent.poll() is None


def test_a_process_of_another_user_than_the_folder_is_not_the_run(
    shell: Shell, trap: Path, innocent: subprocess.Popen[bytes]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    run = foreign_run(shell.runs / "gift", trap)
    process = identify(innocent.pid)
    assert process is not None
    write_start(run, process)
    write_state(run, process, attempt=1)
    os.chown(run.path, 12345, 12345)
    assert json.loads(shell.jackline("status", "gift", "--json").out)["state"] == "dead"
    assert shell.jackline("stop", "gift").code == 2
    assert innocent.poll() is None


# -- what is stored, and for whom ------------------------------------------------------------------------------------


def test_a_runs_folder_is_for_its_owner_alone_and_passwords_are_nowhere(shell: Shell) -> None:
    command = shell.python(
        "long.py", "import time, pathlib\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"
    )
    secret = "secret-" + "word"
    os.umask(0o022)
    address = f"memory://me:{secret}@store/x"
    hook = f"true https://me:{secret}@host/"
    words = ["--mirror", address, "--on-event", hook, "--mirror-patience", "1s"]
    assert shell.jackline("run", "--name", "mine", "--detach", *words, "--", *command).code == 0
    run = shell.runs / "mine"
    state = shell.run_dir("mine").state()
    try:
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert secret not in listed
        for path in run.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path
        stored = [path for path in Path(shell.env["XDG_STATE_HOME"]).rglob("*.json")]
        assert stored and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in stored)
    finally:
        (shell.work / "go").touch()
        wait_for(lambda: identify(state["supervisor"]["pid"]) is None, "the end of the run")


def test_a_state_folder_in_the_temporary_directory_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    folder = tmp_path / "jackline-state-0"
    monkeypatch.setattr(registry, "state_folder", lambda: folder)
    run = make_run(tmp_path / "run")
    assert registry.register(run, vouched=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # as if somebody else had made it first, for everybody
    assert not registry.register(run, vouched=True)
    assert registry.registered_runs() == []
    assert registry.entry_of(run) == registry.RegistryEntry()
    shutil.rmtree(folder)
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345, follow_symlinks=False)
        assert not registry.register(run, vouched=True)


@pytest.mark.parametrize("tokenizer", ["https://evil.example/tokenizer.json", "/etc/passwd"])
def test_the_tokenizer_of_a_foreign_run_is_not_fetched_from_a_place_that_it_names(
    tmp_path: Path, tokenizer: str
) -> None:
    from jackline.errors import UsageError
    from jackline.trainer.config import resolve
    from jackline.trainer.trained.stored import read_tokenizer

    config = resolve("demo", (f"tokenizer={tokenizer}",)).config
    run = make_run(tmp_path / "gift")
    with pytest.raises(UsageError, match="names a place for its tokenizer"):
        read_tokenizer(run, config)
    os.mkfifo(run.tokenizer_file)
    with pytest.raises(OSError, match="not a plain file"):
        read_tokenizer(run, config)


def test_the_recipe_of_a_foreign_run_is_not_executed_to_load_its_model(tmp_path: Path, trap: Path) -> None:
    """`jackline.load`, `sample` and `export` read config.yaml, whose recipe may be a file with code."""
    from jackline.errors import UsageError
    from jackline.trainer.trained.stored import read_config

    (tmp_path / "evil.py").write_text(f"open({str(trap)!r}, 'w')\ndef recipe(): pass\n")
    run = make_run(tmp_path / "gift")
    run.config_file.write_text(f"recipe: {tmp_path}/evil.py:recipe\n")
    with pytest.raises(UsageError, match="its recipe is code that would be executed"):
        read_config(run)
    assert registry.register(run, vouched=True)
    with pytest.raises(UsageError, match="names another recipe than the command"):
        read_config(run)
    assert not trap.exists()
