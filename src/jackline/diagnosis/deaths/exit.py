"""What an exit code says when no error explains the end."""

from __future__ import annotations

import re
from pathlib import PurePath

from jackline.diagnosis.deaths.evidence import GO_ON, Cause, Confidence, Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, memory_line, memory_lines, place_line, ran_line
from jackline.diagnosis.deaths.signal import signal_name
from jackline.diagnosis.frames import Frame
from jackline.diagnosis.packages import install_hint, package_of
from jackline.errors import EXIT_STOPPED
from jackline.units import format_bytes, format_duration

_ARGPARSE = re.compile(r"^(\S+): error: (.+)$")
_CLICK = re.compile(r"^Error: (.+)$")
_NOT_FOUND = re.compile(r"(?:^|: )([^:\s]+): (?:command )?not found$")
# 'launch.sh: line 7: nvcc: command not found' of bash, 'launch.sh: 7: nvcc: not found' of dash.
_SHELL_SAYS = re.compile(r"^(?P<file>[^\s:]+): (?P<word>line )?(?P<line>\d+): (?P<what>\S.*)$")
_NO_LIBRARY = re.compile(r"^(\S+): error while loading shared libraries: (\S+): ")
_NO_SYMBOL = re.compile(r"^(\S+): symbol lookup error: ")
_SHELLS, _SCRIPTS = ("bash", "sh", "dash", "zsh", "ksh"), (".sh", ".bash", ".slurm", ".sbatch", ".pbs")
_NO_FILE = re.compile(r"can't open file '?([^':]+)'?: \[Errno 2\]")
_NO_MODULE = re.compile(r"^\S*python[\d.]*: No module named (\S+)$")
_SHELL_SIGNALS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 31})
_PASSED_ON_SIGNALS = frozenset({4, 6, 7, 8, 9, 11, 15})  # 255 and 254 are sys.exit(-1) and sys.exit(-2)
_TIMEOUT = re.compile(r"(?:^|[\s/'\"])timeout\s")
_READ_ON = "read the end of its output: `jackline logs`"
_SCHEDULERS: tuple[tuple[re.Pattern[str], Cause, str, str], ...] = (
    (
        re.compile(r"DUE TO TIME LIMIT|walltime \d+ exceeded limit|TERM_RUNLIMIT"),
        "preempted",
        "the scheduler ended the job: its time limit was over",
        "ask for more time, or save and resume: `jackline run --time-limit` a little below the job's limit",
    ),
    (
        re.compile(
            r"oom[_-]kill event|some of the step tasks have been OOM Killed|TERM_MEMLIMIT|exceeded memory limit", re.I
        ),
        "kernel_oom",
        "the scheduler counted an out-of-memory kill: the job needed more host memory than it had asked for",
        "ask for more memory (--mem), or load less at once: this is host RAM, not GPU memory",
    ),
    (
        re.compile(r"DUE TO (?:PREEMPTION|NODE FAILURE)|CANCELLED AT .* DUE TO"),
        "preempted",
        "the scheduler ended the job",
        GO_ON,
    ),
)
# Of compilers, R, Julia, shells and loggers. The first of several began it.
_ERROR_LINE = re.compile(
    r"^(?:\S+: )?(?:[Ff]atal )?[Ee]rror(?: in \S+)?\s*:|^Error in |^ERROR:|: (?:fatal )?error: |\[ERROR\]"
    r"|\| ?(?:ERROR|CRITICAL) ?\|| - (?:ERROR|CRITICAL) - |\[CRITICAL\]|^(?:ERROR|FATAL|CRITICAL)\b"
    # A time before the level, as logging and many loggers write it; a JSON record; glog of C++ libraries.
    r"|^\W*\d[\dT:.,/+Z -]*[\s|\]]+\W?(?:ERROR|FATAL|CRITICAL)\b"
    r"|\"(?:level|levelname|severity)\": ?\"(?:error|fatal|critical)\"|^[EF]\d{4} \d\d:\d\d:\d\d",
    re.MULTILINE,
)
_NOT_FINITE = re.compile(r"(?:\bnan\b|\binf\b|\binfinit[ey]\b|non-?finite|not finite)", re.IGNORECASE)
_GIVES_UP = re.compile(
    r"stop|abort|exit|quit|terminat|diverg|giv(?:e|ing) up|fail|error|cannot continue", re.IGNORECASE
)
_CODES = {
    125: ("a container or a launcher could not start its command", _READ_ON),
    255: ("it exited with -1, as ssh does when its connection is lost", _READ_ON),
}


def inner_signal(exit_code: int | None) -> int | None:
    """The signal n for an exit code of 128 + n, by which a shell reports a process that a signal ended, and for
    256 - n: Python's returncode -n, passed on by sys.exit."""
    if exit_code is None:
        return None
    if exit_code - 128 in _SHELL_SIGNALS:
        return exit_code - 128
    return 256 - exit_code if 256 - exit_code in _PASSED_ON_SIGNALS else None


def shell_line(exit_code: int) -> str:
    number = inner_signal(exit_code) or 0
    if exit_code == 128 + number:
        return f"exit code {exit_code} = 128 + {number}: a process inside it ended by {signal_name(number)}"
    return (
        f"exit code {exit_code} = 256 - {number}: a launcher passed on that a process inside it ended by "
        f"{signal_name(number)} (returncode -{number})"
    )


def finished(evidence: Evidence) -> Finding:
    if evidence.unsaved_why:
        return Finding(
            "stopped",
            "certain",
            f"its command ended, but the run is not finished: {evidence.unsaved_why}",
            memory_line(evidence),
            "look at what its command saved itself; `jackline resume` trains the steps that are not saved again",
        )
    title = f"finished after {format_duration(evidence.duration_s)}"
    return Finding("finished", "certain", title, memory_line(evidence))


def asked_to_stop(evidence: Evidence) -> Finding | None:
    if evidence.exit_code != EXIT_STOPPED:
        return None
    if evidence.restart_wish:
        return Finding(
            "stopped",
            "certain",
            f"it saved and exited after {format_duration(evidence.duration_s)}, to continue in a new process",
            (evidence.restart_wish, *memory_lines(evidence)),
            "Jackline starts it again; without a supervisor, run the same command again",
            place=evidence.growing_frame,
        )
    if evidence.unsaved_why:
        return unsaved(evidence)
    return Finding(
        "stopped",
        "certain",
        f"it stopped by itself after {format_duration(evidence.duration_s)} to be resumed (exit code {EXIT_STOPPED})",
        memory_line(evidence),
        GO_ON,
    )


def unsaved(evidence: Evidence) -> Finding:
    """Training was done and the disk refused its last state; the steps since the last checkpoint must be repeated."""
    free = evidence.disk_free_bytes
    known = (f"{evidence.disk_path} has {format_bytes(free)} free now",) if free is not None else ()
    return Finding(
        "disk_full",
        "certain",
        f"it is not finished: its last state could not be saved (exit code {EXIT_STOPPED})",
        (evidence.unsaved_why, *known, *memory_line(evidence)),
        "make room on that disk (df -h, df -i), then run the same command again, or `jackline resume`",
    )


def command_not_found(evidence: Evidence) -> Finding | None:
    tail = evidence.output_tail[-20:]
    missing = next((match for line in reversed(tail) if (match := _NO_FILE.search(line))), None)
    if missing and evidence.exit_code == 2:
        hint = "look at the path; the command runs in the folder it was started from"
        return Finding("command_not_found", "certain", f"Python found no file {missing[1]}", ran_line(evidence), hint)
    if evidence.exit_code == 127:
        if (unlinked := _not_linked(evidence)) is not None:
            return unlinked
        named = next((match for line in reversed(tail) if (match := _NOT_FOUND.search(line))), None)
        who = f"'{named[1]}'" if named else "the command"
        hint = (
            f"look at the spelling, or install it: which {named[1]}" if named else "look at the spelling and at PATH"
        )
        place = _shell_place(named.string) if named else None
        title = f"{who} was not found{at_place(place)} (exit code 127)"
        detail = (*place_line(place), *ran_line(evidence))
        certainty: Confidence = "certain" if named else "likely"  # a program may choose that code too
        return Finding("command_not_found", certainty, title, detail, hint, place=place)
    if evidence.exit_code == 126:
        place = next((found for line in reversed(tail) if (found := _shell_place(line))), None)
        title = f"the command cannot be executed{at_place(place)} (exit code 126)"
        hint = "make it executable (chmod +x FILE) or put its interpreter in front: python FILE"
        detail = (*place_line(place), *ran_line(evidence))
        return Finding("command_not_found", "certain", title, detail, hint, place=place)
    return None


def _not_linked(evidence: Evidence) -> Finding | None:
    """The loader of the system found the program, but not all of the libraries that it was linked with."""
    for line in reversed(evidence.output_tail[-20:]):
        missing, symbol = _NO_LIBRARY.search(line), _NO_SYMBOL.search(line)
        if missing is not None:
            title = f"the library {missing[2]} is missing, which {missing[1]} needs"
        elif symbol is not None:
            title = f"a library that {symbol[1]} needs is of another version: a function is missing in it"
        else:
            continue
        hint = "`ldd FILE` shows which libraries are found: install those it was built with, or set LD_LIBRARY_PATH"
        return Finding("import_error", "certain", title, (line.strip()[:240], *ran_line(evidence)), hint)
    return None


def _shell_place(line: str) -> Frame | None:
    """The line of a shell script that its shell complains about."""
    found = _SHELL_SAYS.match(line.strip())
    if found is None or PurePath(found["file"]).name.lstrip("-") in _SHELLS:
        return None  # its line is one of the command itself
    is_script = bool(found["word"]) or "/" in found["file"] or found["file"].endswith(_SCRIPTS)
    return Frame("", found["file"], int(found["line"]), "", is_user=True) if is_script else None


def module_not_found(evidence: Evidence) -> Finding | None:
    """`python -m NAME` reports a missing module without a traceback."""
    for line in reversed(evidence.output_tail[-20:]):
        match = _NO_MODULE.match(line.strip())
        if match:
            title = f"Python found no module '{match[1]}'"
            hint = install_hint(match[1])
            if package_of(match[1]) is not None:
                hint += ", or start it from the folder that holds it"
            return Finding("import_error", "certain", title, (line.strip()[:240], *ran_line(evidence)), hint)
    return None


def usage_error(evidence: Evidence) -> Finding | None:
    if evidence.exit_code != 2:
        return None
    tail = evidence.output_tail[-30:]
    is_usage = any(line.lower().startswith("usage:") for line in tail)
    for line in reversed(tail):
        argparse_says, click_says = _ARGPARSE.match(line), _CLICK.match(line)
        if is_usage and (argparse_says or click_says):
            who = argparse_says[1] if argparse_says else "the command"
            what = argparse_says[2] if argparse_says else (click_says[1] if click_says else "")
            title = f"{who} did not accept its arguments: {what[:240]}"
            return Finding("exit_code", "certain", title, ran_line(evidence), "look at its --help")
    return None


def told_error(evidence: Evidence) -> Finding | None:
    """An error in our own format, which cargo, git and others share: 'error: what', details below, 'hint: next'."""
    tail = [line.rstrip() for line in evidence.output_tail[-40:]]
    at = next((number for number in reversed(range(len(tail))) if tail[number].startswith("error: ")), None)
    if at is None:
        return None
    detail: list[str] = []
    hint = "read the end of its output: `jackline logs`"
    for line in tail[at + 1 : at + 8]:
        if line.startswith("hint: "):
            hint = line.removeprefix("hint: ")
            break
        if not line.startswith(" "):
            break
        detail.append(line.strip()[:240])
    return Finding(
        "exit_code", "certain", tail[at].removeprefix("error: ")[:300], (*detail, *ran_line(evidence)), hint
    )


def not_finite(evidence: Evidence) -> Finding | None:
    """Many scripts leave when their loss is no number any more, with a sentence instead of an error."""
    for line in reversed(evidence.output_tail[-5:]):
        if _NOT_FINITE.search(line) and _GIVES_UP.search(line):
            title = f"it ended itself because its loss is no number any more: {line.strip()[:160]}"
            hint = (
                "too high a learning rate, a bad batch or too small a dtype: resume from before it with a lower rate "
                "or clipped gradients; torch.autograd.detect_anomaly() finds the operation"
            )
            return Finding("exit_code", "likely", title, ran_line(evidence), hint)
    return None


def scheduler_said(evidence: Evidence) -> Finding | None:
    """Slurm, PBS and LSF write into the job's output why they ended it."""
    for line in reversed(evidence.output_tail[-12:]):
        for pattern, cause, title, hint in _SCHEDULERS:
            if pattern.search(line):
                return Finding(cause, "likely", title, (f"it said: {line.strip()[:200]}", *ran_line(evidence)), hint)
    return None


def timed_out(evidence: Evidence) -> Finding | None:
    """Exit code 124: the command `timeout` of coreutils has ended it."""
    if evidence.exit_code != 124:
        return None
    is_seen = bool(_TIMEOUT.search(evidence.command))
    after = format_duration(evidence.duration_s)
    title = (
        f"`timeout` ended it after {after}: its time limit was over"
        if is_seen
        else (f"ended with exit code 124 after {after}, which the command `timeout` returns when its limit is over")
    )
    confidence: Confidence = "likely" if is_seen else "not sure"
    hint = "allow more time, or save and resume: `jackline run --time-limit` stops it so that it can save"
    return Finding("timed_out", confidence, title, (*_last_line(evidence), *ran_line(evidence)), hint)


def exit_code(evidence: Evidence) -> Finding:
    known = _CODES.get(evidence.exit_code or 0)
    title = f"ended with exit code {evidence.exit_code}; its output names no known error"
    hint = _READ_ON
    if known is not None:
        title, hint = f"ended with exit code {evidence.exit_code}: {known[0]}", known[1]
    said = next((line.strip() for line in evidence.output_tail[-8:] if _ERROR_LINE.search(line)), "")
    last = next((line for line in reversed(evidence.output_tail) if line.strip()), "")
    place = _shell_place(last)  # set -u, a syntax error, a builtin that failed: the shell's last words
    said = said or (last.strip() if place else "")
    if said and known is None:
        title = f"ended with exit code {evidence.exit_code} after this line: {said[:240]}"
    is_told = bool(said) and known is None and said == last.strip()
    # That it ended with this code is certain; why it did is not known.
    detail = (*(() if is_told else _last_line(evidence)), *ran_line(evidence))
    return Finding("exit_code", "likely" if known or said else "not sure", title, detail, hint, place=place)


def _last_line(evidence: Evidence) -> tuple[str, ...]:
    last = next((line.strip() for line in reversed(evidence.output_tail) if line.strip()), "")
    return (f"its last line: {last[:200]}",) if last else ("it printed nothing",)


def unseen(evidence: Evidence) -> Finding:
    last = next((line.strip() for line in reversed(evidence.output_tail) if line.strip()), "")
    said = (f"its last line: {last[:200]}",) if last else ()
    seen = (f"it was last seen alive after {format_duration(evidence.duration_s)}",)
    if evidence.is_adopted:
        title = "it is gone, and only the process that started it saw how it ended"
        hint = "a start with `jackline run -- ...` is seen to its end"
        return Finding("unknown", "not sure", title, (*said, *seen, *memory_line(evidence)), hint)
    return Finding(
        "unknown",
        "not sure",
        "it is gone and nobody saw how it ended",
        (*said, *seen, *memory_line(evidence)),
        "a lost machine or a killed supervisor does that; run the same command again to continue",
    )
