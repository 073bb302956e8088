"""Checks whether a user's own command would start: its interpreter, script and imports; and in which environment.

Owns the checks and their wording. Facts about a script come from `import_probe`, which runs in the interpreter that
the command names. The user's code is not executed, except with `--help` if the script parses its arguments.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jackline
from jackline.diagnosis.packages import install_hint, package_of
from jackline.diagnosis.preflight import import_probe
from jackline.diagnosis.preflight.target import Target
from jackline.extras import requirement
from jackline.immutable import immutable

State = Literal["ok", "note", "problem"]

PROBE_TIMEOUT_S = 30.0
HELP_TIMEOUT_S = 60.0
HELP_LINES = 6


@immutable
class Check:
    """The result of one check. A problem would stop the command; a note may cost time later."""

    name: str
    state: State
    text: str
    hint: str = ""


def check_command(target: Target, *, cpus: float, has_gpu: bool, tries_help: bool = True) -> list[Check]:
    """Every check that is possible for this command, in the order in which a start would fail."""
    if target.shell_script is not None:
        return [Check("program", "ok", target.program), _check_shell(target)]
    if target.interpreter is None:
        return [Check("program", "ok", f"{target.program} (not a Python command: nothing more can be checked)")]
    if target.script is not None and not Path(target.script).is_file():
        return [Check("interpreter", "ok", target.interpreter), _missing_script(target.script)]
    answer = run_probe(target)
    if answer is None:
        return [_silent_interpreter(str(target.interpreter))]
    checks = [_check_interpreter(answer, has_gpu)]
    checks += _check_script(target, answer)
    if "missing" in answer:
        checks += _check_imports(answer)
        checks += _check_habits(answer, target, cpus)
    if tries_help and answer.get("has_parser") and not any(check.state == "problem" for check in checks):
        checks += _check_help(target)
    return checks


def _check_shell(target: Target) -> Check:
    script = str(target.shell_script)
    if not Path(script).is_file():
        return _missing_script(script)
    done = subprocess.run(
        [target.program, "-n", script], capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S
    )
    if done.returncode:
        return Check("script", "problem", (done.stderr.strip().splitlines() or ["does not parse"])[0])
    return Check("script", "ok", f"{script} parses")


def _missing_script(script: str) -> Check:
    from difflib import get_close_matches

    folder = Path(script).parent
    names = [path.name for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    near = get_close_matches(Path(script).name, names, n=1)
    hint = f"did you mean '{folder / near[0]}'?" if near else f"looked in {Path.cwd()}"
    return Check("script", "problem", f"there is no file '{script}'", hint)


def run_probe(target: Target) -> dict[str, Any] | None:
    """Ask the interpreter about the script. None when it gives no answer in time."""
    folder = Path(target.script).resolve().parent if target.script else Path.cwd()
    questions = {
        "path": target.script or ("<command line>" if target.code is not None else None),
        "source": target.code,
        "module": target.module,
        "folder": str(folder),
        "is_script": target.module is None,
        "packages": ["torch", "numpy", "transformers", "lightning", "tensorflow", "jax"],
    }
    source = Path(import_probe.__file__).read_text()
    flags = [flag for flag in target.flags if re.fullmatch(r"-[EIsSP]+", flag)]
    text = _ask(str(target.interpreter), [*flags, "-c", source, json.dumps(questions)])
    # There may be other lines, because startup files of the environment may print.
    for line in reversed((text or "").splitlines()):
        if line.startswith(import_probe.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(import_probe.MARK))
            return answer
    return None


def _silent_interpreter(interpreter: str) -> Check:
    """The interpreter gave no answer: it is too old for the probe, or it cannot run at all."""
    version = _ask(interpreter, ["-c", "import sys; print(sys.version.split()[0])"])
    if version:
        text = f"Python {version.strip()}, {interpreter}: too old for a look into the script"
        return Check("interpreter", "note", text, "Python 3.7 is the oldest that can be asked")
    text = f"{interpreter} cannot run even a line of code"
    return Check("interpreter", "problem", text, f"try: {interpreter} -c 'print(1)'")


def _ask(interpreter: str, words: list[str]) -> str | None:
    try:
        done = subprocess.run(
            [interpreter, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _check_interpreter(answer: dict[str, Any], has_gpu: bool) -> Check:
    version = ".".join(map(str, answer["version"]))
    packages = ", ".join(f"{name} {number}" for name, number in answer["versions"].items())
    text = f"Python {version}, {answer['executable']}" + (f"; {packages}" if packages else "")
    if has_gpu and "+cpu" in answer["versions"].get("torch", ""):
        return Check("interpreter", "note", text, "this torch is built without CUDA: the GPU will not be used")
    return Check("interpreter", "ok", text)


def _check_script(target: Target, answer: dict[str, Any]) -> list[Check]:
    if answer.get("syntax"):
        return [
            Check("script", "problem", f"{shown(error['file'])}:{error['line']}: {error['message']}", error["text"])
            for error in answer["syntax"]
        ]
    if target.module is not None and not answer["module"]["found"]:
        python = answer["executable"]
        return [
            Check("module", "problem", f"there is no module '{target.module}'", f"looked in the paths of {python}")
        ]
    if target.module is not None:
        return [Check("module", "ok", f"{target.module}, {answer['module']['file'] or 'found'}")]
    if "files" not in answer:
        return []
    count = len(answer["files"])
    text = f"{target.script or 'the code after -c'} compiles"
    return [Check("script", "ok", text + (f", and {count - 1} of its own modules" if count > 1 else ""))]


def shown(path: str) -> str:
    """The path, shortened to a relative one when it is below the current folder."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def _check_imports(answer: dict[str, Any]) -> list[Check]:
    checks = []
    relative = [entry for entry in answer["missing"] if entry["relative"]]
    if relative:
        place = _place(relative[0])
        hint = "start it as a module: python -m package.module"
        checks.append(Check("imports", "problem", f"{place}: a script cannot import from its own package", hint))
    absent = [entry for entry in answer["missing"] if not entry["relative"] and not entry["optional"]]
    now = [entry for entry in absent if not entry["late"]]
    later = [entry for entry in absent if entry["late"]]
    if now:
        checks.append(Check("imports", "problem", f"not found: {_listed(now)}", _remedy(now, answer)))
    if later:
        text = f"not found, imported only when that code is reached: {_listed(later)}"
        checks.append(Check("imports", "note", text, _remedy(later, answer)))
    return checks or [Check("imports", "ok", "every import can be found")]


def _listed(entries: list[dict[str, Any]]) -> str:
    first = {entry["name"]: _place(entry) for entry in reversed(entries)}
    return ", ".join(f"{name} ({place})" for name, place in sorted(first.items()))


def _place(entry: dict[str, Any]) -> str:
    return f"{shown(entry['file'])}:{entry['line']}"


def _remedy(entries: list[dict[str, Any]], answer: dict[str, Any]) -> str:
    """The folder to add to the path, if the module is the user's own; otherwise the package to install."""
    heads = sorted({entry["name"].partition(".")[0] for entry in entries})
    for head in heads:
        for base in (Path(), Path("src"), Path("..")):
            if (base / head).is_dir() or (base / f"{head}.py").is_file():
                return f"'{head}' is in {base.resolve()}: put PYTHONPATH={base} before the command"
    named = {head: requirement("train") if head == "jackline" else package_of(head) for head in heads}
    known = " ".join(name for name in named.values() if name is not None)
    unknown = [head for head, name in named.items() if name is None]
    parts = [f"{answer['executable']} -m pip install {known}"] if known else []
    return "; ".join([*parts, *(install_hint(head) for head in unknown[:1])])


def _check_habits(answer: dict[str, Any], target: Target, cpus: float) -> list[Check]:
    """Notes about things that do not stop a start but cause trouble later."""
    checks = []
    if answer["hiding"]:
        names = ", ".join(f"{name}.py" for name in answer["hiding"])
        text = f"{names} in the script's folder hides Python's own module of that name"
        checks.append(Check("names", "note", text, "rename the file"))
    for call in answer["calls"][:3]:
        word = "asks for keyboard input" if call["name"] == "input" else "stops in the debugger"
        checks.append(Check("input", "note", f"{_place(call)} {word}", "`jackline run --tty` gives it a terminal"))
    most = max(_workers(answer, target), key=lambda pair: pair[0], default=None)
    if most and most[0] > cpus:
        text = f"{most[0]} data workers ({most[1]}) on {cpus:g} usable CPUs"
        checks.append(Check("workers", "note", text, f"num_workers={max(1, int(cpus))} or less is as fast"))
    return checks


def _workers(answer: dict[str, Any], target: Target) -> list[tuple[int, str]]:
    found = [(entry["count"], _place(entry)) for entry in answer["workers"]]
    words = " ".join(target.arguments)
    pattern = r"(--\S*num[-_]workers|--workers)[= ](\d+)"
    return found + [(int(match[2]), match[1]) for match in re.finditer(pattern, words)]


def _check_help(target: Target) -> list[Check]:
    """Run it with --help: that executes every import and lists the known options, to compare with those given."""
    what = ["-m", target.module] if target.module else [str(target.script)]
    argv = [str(target.interpreter), *target.flags, *what, "--help"]
    print(f"[jackline] trying: {shlex.join(argv)} (at most {HELP_TIMEOUT_S:.0f} s)", file=sys.stderr, flush=True)
    text, code = run_help(argv)
    if code is None:
        return [
            Check("--help", "note", f"no answer within {HELP_TIMEOUT_S:.0f} s", "its imports are slow, or it hangs")
        ]
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if code != 0:
        return [Check("--help", "problem", f"exit code {code}: {lines[-1] if lines else 'no output'}")]
    brief = lines[:HELP_LINES] + (["..."] if len(lines) > HELP_LINES else [])
    return [Check("--help", "ok", "\n".join(brief) or "no output"), *_unknown_options(target, text)]


def _unknown_options(target: Target, text: str) -> list[Check]:
    from difflib import get_close_matches

    known = {option.replace("_", "-") for option in re.findall(r"--[A-Za-z][\w-]*", text)}
    given = [word.partition("=")[0] for word in target.arguments if re.match(r"--[A-Za-z]", word)]
    if "{" in text.partition("\n\n")[0] or not known:
        return []  # sub-commands have options of their own, which this text does not list
    # argparse accepts the beginning of an option's name for the option.
    unknown = [word for word in given if not any(option.startswith(word.replace("_", "-")) for option in known)]
    checks = []
    for word in unknown:
        near = get_close_matches(word, sorted(known), n=1)
        hint = f"did you mean '{near[0]}'?" if near else ""
        checks.append(Check("options", "note", f"--help does not list {word}", hint))
    return checks


def run_help(argv: list[str]) -> tuple[str, int | None]:
    """Output and exit code; None when it had to be killed. It sees no GPU and does not report to W&B."""
    quiet = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **quiet},
        start_new_session=True,
    )
    try:
        text, _ = child.communicate(timeout=HELP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "", None
    return text, child.returncode


ASK_TIMEOUT_S = 10.0
_QUESTION = """\
import json, sys
try:
    from importlib.metadata import version
    found = version("jackline")
except Exception:
    found = None
print("::jackline-python " + json.dumps([sys.prefix, sys.executable, found]))
"""


@immutable
class OtherPython:
    """The interpreter that a person's own commands use. `version`: of the Jackline installed there, if any."""

    prefix: str
    executable: str
    version: str | None


def ask_python(interpreter: str | None = None) -> OtherPython | None:
    """The named interpreter, or what `python` means in this shell. None where there is none or it does not answer."""
    program = interpreter or shutil.which("python") or shutil.which("python3")
    if program is None:
        return None
    try:
        # -P would be right, but Python 3.10 does not know it; -I leaves the current folder out too.
        done = subprocess.run(
            [program, "-I", "-c", _QUESTION],
            capture_output=True, text=True, errors="replace", timeout=ASK_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    for line in done.stdout.splitlines():
        if line.startswith("::jackline-python "):
            return OtherPython(*json.loads(line.removeprefix("::jackline-python ")))
    return None


def compare_environments(other: OtherPython | None) -> tuple[str, str] | None:
    """(text, hint) where Jackline's own environment is another one and that matters; None where it does not."""
    if other is None or other.prefix == sys.prefix:
        return None
    where = f"jackline runs in {sys.prefix}, your scripts run with {other.executable}"
    install = f"{other.executable} -m pip install {requirement('train')}"
    if other.version is None:
        return f"{where}, which has no jackline", f"run, status and why work; jackline.attach needs: {install}"
    if other.version != jackline.__version__:
        text = f"{where}: versions {jackline.__version__} and {other.version}"
        return text, f"use one version: {install}"
    return None
