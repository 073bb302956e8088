"""A command line in its plainest spelling, so that `python x.py`, `./x.py` and `python3.11 -u /abs/x.py` are one run.

Owns which words decide what a command trains: the script, its arguments and the folder it runs in. The interpreter,
its options and programs that only start others (nohup, nice) do not. Reads the disk only to follow links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_SHELL = re.compile(r"(ba|z|da|k)?sh")
_STARTERS = ("nohup", "setsid", "time", "exec")
# Short options of the interpreter may be joined (-uB). -W and -X take a word, -c and -m end the options.
_OPTIONS = re.compile(r"-[bBdEiIOPqsSuvx]*(?P<letter>[WXcm]?)(?P<rest>.*)")


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run with its command in the plainest spelling. Those of a recipe have no command and stay."""
    argv, cwd = settings.get("argv"), settings.get("cwd")
    if not isinstance(argv, list | tuple) or not isinstance(cwd, str):
        return dict(settings)
    return {**settings, "argv": plain_command([str(word) for word in argv], cwd), "cwd": _real(cwd)}


def plain_command(argv: Sequence[str], cwd: str) -> list[str]:
    """['python', 'x.py', '--lr', '1'] for every spelling of it; a command that is not understood as it was typed."""
    words = _without_starters(list(argv))
    if not words:
        return list(argv)
    program = os.path.basename(words[0])
    if _PYTHON.fullmatch(program):
        return _plain_python(words, cwd)
    if _SHELL.fullmatch(program):
        return _plain_shell(words, cwd)
    if program == "env" and len(words) > 1:
        at = next((at for at, word in enumerate(words) if at and ("=" not in word or word.startswith("-"))), None)
        if at is None or words[at].startswith("-"):
            return words
        return [*(words[:at] if at > 1 else []), *plain_command(words[at:], cwd)]
    if "/" not in words[0]:
        return words
    path = _from_folder(words[0], cwd)
    interpreter = {".py": "python", ".sh": "bash"}.get(os.path.splitext(path)[1])
    return [interpreter, path, *words[1:]] if interpreter else [path, *words[1:]]


def script_of(settings: Mapping[str, Any]) -> str:
    """The script's path from the folder of the run, or '-m module'; '' for a command without one."""
    argv = settings.get("argv")
    if not isinstance(argv, list | tuple) or len(argv) < 2 or argv[0] not in ("python", "bash"):
        return ""
    if argv[1] == "-m" and len(argv) > 2:
        return f"-m {argv[2]}"
    return "" if str(argv[1]).startswith("-") else str(argv[1])


def _without_starters(words: list[str]) -> list[str]:
    while words:
        if words[0] in _STARTERS:
            words = words[1:]
        elif words[0] == "nice":
            number = 3 if words[1:2] == ["-n"] else 2 if words[1:2] and words[1].startswith("-") else 1
            words = words[number:]
        else:
            break
    return words


def _plain_python(words: list[str], cwd: str) -> list[str]:
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        match = None if words[at].startswith("--") else _OPTIONS.fullmatch(words[at])
        letter, rest = (match["letter"], match["rest"]) if match else ("", "")
        if letter in ("c", "m"):
            named = [rest] if rest else words[at + 1 : at + 2]
            return ["python", f"-{letter}", *named, *words[at + (1 if rest else 2) :]]
        takes_word = (letter in ("W", "X") and not rest) or words[at] == "--check-hash-based-pycs"
        at += 2 if takes_word else 1
    if at >= len(words) or words[at] == "-":
        return ["python", *words[at:]]
    return ["python", _from_folder(words[at], cwd), *words[at + 1 :]]


def _plain_shell(words: list[str], cwd: str) -> list[str]:
    script = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
    return ["bash", _from_folder(script, cwd), *words[2:]] if script else words


def _from_folder(path: str, cwd: str) -> str:
    """The path from `cwd` for a file below it, so that it survives a renamed folder; else the absolute path. A URL is
    no path: with one slash less, nobody would see that it holds a password."""
    if "://" in path:
        return path
    folder = _real(cwd)
    full = _real(os.path.join(folder, path))
    inside = os.path.relpath(full, folder)
    return full if inside.startswith("..") else inside


def _real(path: str) -> str:
    """With links followed; a text that can be no path, from a damaged file, stays as it is."""
    try:
        return os.path.realpath(path)
    except ValueError:  # half a character, a zero byte
        return path
