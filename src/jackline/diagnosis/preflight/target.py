"""What a command line runs: the interpreter and the script behind launchers, wrappers and `#!` lines.

Owns parsing a user's own argv. Starts nothing, and reads at most the first line of a file.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import field
from pathlib import Path

from jackline.errors import UsageError
from jackline.immutable import immutable

PYTHON_NAME = re.compile(r"(python|pypy)[\d.]*")
SHELLS = ("sh", "bash", "dash", "zsh")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
LAUNCH_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# Programs that take a Python script as an argument; all options before the .py belong to the launcher.
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun", "colossalai", "composer", "lightning", "fabric")
# What trainings are usually started with.
COMMON = (*LAUNCHERS, *SHELLS, "python", "python3", "uv", "poetry", "make", "srun", "mpirun")


@immutable
class Target:
    """What a command line runs, as far as it is known."""

    argv: tuple[str, ...]
    program: str
    interpreter: str | None = None
    flags: tuple[str, ...] = ()
    script: str | None = None
    module: str | None = None
    code: str | None = None
    shell_script: str | None = None
    arguments: tuple[str, ...] = field(default_factory=tuple)


def read_command_line(argv: tuple[str, ...]) -> Target:
    """Find interpreter and script behind launchers (torchrun, accelerate), wrappers (nice, env) and `#!` lines."""
    program = shutil.which(argv[0])
    if program is None:
        raise _not_found(argv[0])
    name = Path(program).name
    if PYTHON_NAME.fullmatch(name):
        return _python_target(argv, program, argv)
    if name in SHELLS:
        script = next((word for word in argv[1:] if not word.startswith("-")), None)
        return Target(argv, program, shell_script=None if "-c" in argv else script)
    shebang = _shebang(program)
    if shebang and name in LAUNCHERS:
        return _launched(argv, program, shebang)
    if shebang:
        return Target(argv, program, shebang, script=program, arguments=argv[1:])
    inner = next((at for at, word in enumerate(argv[1:], 1) if PYTHON_NAME.fullmatch(Path(word).name)), None)
    if inner is not None and shutil.which(argv[inner]):
        return _python_target(argv, str(shutil.which(argv[inner])), argv[inner:])
    return Target(argv, program)


def _not_found(word: str) -> UsageError:
    if Path(word).is_file():
        return UsageError(
            f"cannot run '{word}'",
            detail=f"'{word}' is a file that may not be executed",
            hint=f"python {word}, or chmod +x {word}",
        )
    return UsageError(f"there is no command '{word}'", hint=spelling_hint(word))


def spelling_hint(word: str) -> str:
    """The program that was probably meant, if it is there."""
    from difflib import get_close_matches

    near = [name for name in get_close_matches(word, COMMON, n=3, cutoff=0.75) if shutil.which(name)]
    return f"did you mean '{near[0]}'?" if near else "check the spelling and the active environment"


def _python_target(argv: tuple[str, ...], interpreter: str, words: tuple[str, ...]) -> Target:
    flags: list[str] = []
    at = 1
    while at < len(words):
        word = words[at]
        if word in ("-m", "-c") and at + 1 < len(words):
            value, rest = words[at + 1], words[at + 2 :]
            if word == "-m" and value in LAUNCH_MODULES:
                return _launched(argv, argv[0], interpreter, rest)
            kind = {"module": value} if word == "-m" else {"code": value}
            return Target(argv, argv[0], interpreter, tuple(flags), arguments=rest, **kind)
        if word == "-":  # the script is read from standard input
            return Target(argv, argv[0], interpreter, tuple(flags), arguments=words[at + 1 :])
        if not word.startswith("-"):
            script = str(Path(word) / "__main__.py") if Path(word).is_dir() else word
            return Target(argv, argv[0], interpreter, tuple(flags), script=script, arguments=words[at + 1 :])
        flags.append(word)
        if word in WITH_VALUE and at + 1 < len(words):
            at += 1
            flags.append(words[at])
        at += 1
    return Target(argv, argv[0], interpreter, tuple(flags))


def _launched(argv: tuple[str, ...], program: str, interpreter: str, words: tuple[str, ...] | None = None) -> Target:
    words = argv[1:] if words is None else words
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if at is not None:
        return Target(argv, program, interpreter, script=words[at], arguments=words[at + 1 :])
    named = next((at for at, word in enumerate(words[:-1]) if word in ("-m", "--module")), None)
    return Target(argv, program, interpreter, module=None if named is None else words[named + 1])


def _shebang(program: str) -> str | None:
    """The Python interpreter named in a script's first line; None for any other program."""
    try:
        with open(program, "rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode("utf-8", "replace").split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    if not words or not PYTHON_NAME.fullmatch(Path(words[0]).name):
        return None
    return shutil.which(words[0])
