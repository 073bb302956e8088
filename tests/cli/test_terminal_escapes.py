"""Escape sequences in a run's files, names and processes: none reaches the screen, by any command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.cli.text.safety import safe_output
from tests.cli.fuzz import (
    ACTS,
    COLORED,
    COMMANDS,
    NOT_READERS,
    OF_MODELS,
    SERVED,
    VICTIM,
    ask_inside,
    forbidden,
    make_base,
    run_inside,
)
from tests.shell import Shell

ESCAPES = (
    "\x1b]52;c;cm0gLXJmIH4=\x07",  # puts text into the clipboard
    "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "\x9d52;c;AAAA\x9c",
    "\x1b]0;title\x07",
    "\x1b]2;title\x1b\\",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]50;font\x07",
    "\x1b]1337;File=inline=1:AAAA\x07",
    "\x1b]4;0;#ffffff\x07",
    "\x1b]10;#000000\x07\x1b]11;#000000\x07",
    "\x1b[2J",
    "\x1b[3J",
    "\x1b[H",
    "\x1b[1;1H",
    "\x1b[1A\x1b[2K",
    "\x1b[8mhidden\x1b[0m",
    "\x1b[31mred\x1b[0m",
    "\x1b[5mblinks\x1b[0m",
    "\x1b[?1049h",
    "\x1b[?25l",
    "\x1b[?1000h",
    "\x1b[?2004h",
    "\x1b[6n",
    "\x1b[c",
    "\x1b[21t",
    "\x1b[!p",
    "\x1b[4h",
    "\x1b[10;20r",
    "\x1bc",
    "\x1b(0",
    "\x1b7\x1b8",
    '\x1bP$q"p\x1b\\',
    "\x1b^private\x1b\\",
    "\x1b_Gapc\x1b\\",
    "\x1b#8",
    "\x9b2J",
    "\x9b31m",
    "\x90q\x9c",
    "\x85\x8d\x84",
    "\x07\x08\x0b\x0c\x0e\x0f\x7f",
    "safe\rforged",
    "\u202egnp.exe\u202c",
    "\u2066isolated\u2069\u200f\u061c",
    "\u200bzero\ufeff\u2028\u2029",
)


def with_text(value: Any, text: str) -> Any:
    """The same JSON with `text` in every string."""
    if isinstance(value, str):
        return value + text if "step-" not in value and len(value) != 36 else value
    if isinstance(value, dict):
        return {key: with_text(entry, text) for key, entry in value.items()}
    return [with_text(entry, text) for entry in value] if isinstance(value, list) else value


def texts_in(value: Any) -> Iterator[str]:
    """Every string of a JSON value, as a program sees it that has decoded it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts_in(entry)


def forge(run: Path, text: str) -> None:
    """Put `text` into every string of every record, into every line of every text, and into names of files."""
    for path in sorted(run.rglob("*.json")):
        if path.parent.name.startswith("step-"):
            continue
        value = json.loads(path.read_text())
        path.write_text(json.dumps(with_text(value, text)))
    for path in sorted(run.rglob("*.jsonl")):
        lines = path.read_text().splitlines()
        path.write_text("".join(json.dumps(with_text(json.loads(line), text)) + "\n" for line in lines))
    for name in ("out.log", "attempts/001/incident-1.txt", "attempts/001/raw.out", "checkpoints/latest"):
        path = run / name
        path.write_text(path.read_text() + f"{text}Traceback (most recent call last):\n{text}ValueError: {text}\n")
    (run / "checkpoints" / f"damaged-{text[:40]}").mkdir() if "/" not in text else None


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path / "shell")
    yield made
    made.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))[-1]


def test_no_command_lets_an_escape_through(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences at once: what one would hide is then cut together with it, so each is also tried by itself."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for number in range(0, len(ESCAPES), 11):
        shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(base, runs / VICTIM)
        forge(runs / VICTIM, "".join(f"a{escape}z" for escape in ESCAPES[number : number + 11]))
        for name, reader in SERVED.items():
            said, trouble = ask_inside(reader, runs)
            assert not trouble, trouble
            for text in texts_in([json.loads(line) for line in said.split("\n")]):
                assert not forbidden(text), f"{name} answered with {forbidden(text)}: {text!r}"
        for words in (*COMMANDS, *ACTS):
            said, trouble = run_inside([*words, "--runs-dir", str(runs)])
            assert not trouble, trouble
            if "--raw" not in words:
                char = forbidden(said, with_colors=words == COLORED)
                assert not char, f"jackline {' '.join(words)} printed {char}:\n{said!r}"


def test_every_command_that_reads_a_run_is_tried() -> None:
    """A new command is added to the lists of fuzz.py, or is said there to read no run."""
    from jackline.cli.main import COMMANDS as ALL

    tried = {words[0] for words in (*COMMANDS, *ACTS, *OF_MODELS)}
    assert tried | set(NOT_READERS) == set(ALL)
    assert not tried & set(NOT_READERS)


@pytest.mark.parametrize("escape", ESCAPES)
def test_each_escape_is_removed_and_the_text_around_it_stays(escape: str) -> None:
    shown = safe_output(f"before{escape}\nafter ".encode()).decode()
    assert not forbidden(shown)
    assert shown.startswith("before") and shown.endswith("after ")
    colored = safe_output(f"before{escape}\nafter ".encode(), with_colors=True).decode()
    assert not forbidden(colored.replace("\x1b[31m", "").replace("\x1b[0m", ""))


def test_raw_output_keeps_its_colours_on_a_terminal_and_nothing_else(shell: Shell) -> None:
    command = shell.python("paints.py", f"print({ESCAPES[16]!r} + {''.join(ESCAPES)!r} + 'end')\n")
    assert shell.jackline("run", "--name", "paints", "--", *command).code == 0
    live = shell.start("logs", "paints", "--raw", surface="pty")
    assert live.wait() == 0
    said = live.text()
    assert "\x1b[31mred\x1b[0m" in said
    left = said.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\r\n", "\n")
    assert not forbidden(left), repr(said)


def test_an_argument_of_a_process_reaches_why_pid_without_its_escapes(tmp_path: Path) -> None:
    """`why --pid` prints names that another program chose: of its threads, files and functions."""
    script = tmp_path / "s\x1b[2J\u202e.py"
    script.write_text(
        "import sys, threading, time\n"
        f"t = threading.current_thread(); t.name = {'n' + ESCAPES[0]!r}\n"
        "print('ready', flush=True)\n"
        f"time.sleep(600)  # {ESCAPES[0]} {ESCAPES[10]} {ESCAPES[-3]}\n"
    )
    with subprocess.Popen([sys.executable, str(script), ESCAPES[0]], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            said, trouble = run_inside(["why", "--pid", str(process.pid), "--for", "0.2s"])
        finally:
            process.kill()
    assert not trouble, trouble
    assert "time.sleep" in said
    assert not forbidden(said), repr(said)


def test_an_error_about_what_was_typed_is_filtered_too(tmp_path: Path) -> None:
    for words in (["status", "x\x1b[2J\x1b]52;c;A\x07"], ["\x1b[2J"], ["resume", f"/nowhere/\x9b2J{ESCAPES[0]}"]):
        said, trouble = run_inside([*words])
        assert not trouble, trouble
        assert said and not forbidden(said), repr(said)


def test_a_password_in_a_url_is_never_printed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "runs" / VICTIM)
    forge(tmp_path / "runs" / VICTIM, " sftp://me:secret-word@host/x https://secret-word@host/ ")
    for name, reader in SERVED.items():
        assert "secret-word" not in ask_inside(reader, tmp_path / "runs")[0], name
    for words in (*COMMANDS, *ACTS):
        said, _ = run_inside([*words, "--runs-dir", str(tmp_path / "runs")])
        assert "secret-word" not in said or "--raw" in words, words
