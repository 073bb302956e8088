"""Ends by a signal that can be explained without the output: sent by us, the kernel or somebody else, or a crash.

Pure: takes evidence, returns a finding or None. `diagnose` owns the order in which these rules are tried.
"""

from __future__ import annotations

import re
import signal as signals
from collections import Counter

from jackline.diagnosis.deaths.disk import fullest, is_full
from jackline.diagnosis.deaths.evidence import GO_ON, Cause, Confidence, Evidence, Finding, SentSignal
from jackline.diagnosis.deaths.left.particulars import native_hint
from jackline.diagnosis.deaths.sentences import (
    at_place,
    cpp_exception,
    growth_line,
    is_memory_nearly_full,
    less_memory,
    memory_line,
    memory_lines,
    memory_share,
    place_line,
    ran_line,
)
from jackline.diagnosis.frames import Frame
from jackline.diagnosis.user_code import is_user_file
from jackline.errors import EXIT_STOPPED
from jackline.units import format_bytes, format_duration

_WHY_TO_CAUSE: dict[str, Cause] = {
    "ctrl-c": "stopped",
    "stop": "stopped",
    "sigterm": "stopped",
    "time-limit": "time_limit",
    "stuck": "stuck",
    "memory": "memory_guard",
}
_WHO = {"ctrl-c": "Ctrl-C", "stop": "`jackline stop`", "jackline stop": "`jackline stop`"}
_SHM_NEARLY_FULL_BYTES = 1 << 20
REPEATED_FRAMES = 20
ENDLESS_CALL_HINT = "look at the condition that ends the recursion; a higher recursion limit only delays it"
_LAST_LINES, _VERY_LAST_LINES = 12, 3
_SIGNAL = (
    r"(?:SIGTERM|SIGINT|SIGUSR[12]|signal:? (?:number )?(?:15|10|12|2)\b|(?:15 )?death signal|termination signal)"
)
_TOLD_SIGNAL = re.compile(
    r"\b(?:receiv\w+|caught|got|handling|trapped|interrupted by|due to|because of|called with)\b"
    rf"[^\n]{{0,40}}{_SIGNAL}"
    rf"|{_SIGNAL}[^\n]{{0,30}}\b(?:receiv\w+|caught)",
    re.IGNORECASE,
)
# Words about a signal to come, and lines of Ray's helper processes.
_NOT_ITSELF = re.compile(
    r"\b(?:will|when|if|once|register\w*|install\w*|handler for)\b|^\*\*\* |^\((?:raylet|pid=|\w+ pid=)",
    re.IGNORECASE,
)
_FAULT_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')

_OTHER_SIGNALS: dict[int, tuple[str, str]] = {
    signals.SIGHUP: ("its terminal was closed, or somebody sent SIGHUP", "start it with `jackline run --detach`"),
    signals.SIGILL: (
        "it ran an instruction this CPU does not have",
        "a package was built for a newer CPU: install a build for this machine; for torch in bf16 on a virtual "
        "machine, start it with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 (AMX may be advertised and not work)",
    ),
    signals.SIGFPE: ("a native library divided by zero", "look at sizes of 0 in the call at the line named"),
    signals.SIGPIPE: ("it wrote into a pipe whose reader was gone", "look at the program after the `|`"),
    signals.SIGXCPU: ("it used up its CPU time (ulimit -t)", "raise the limit: ulimit -t unlimited"),
    signals.SIGXFSZ: ("a file grew over its limit (ulimit -f)", "raise the limit: ulimit -f unlimited"),
    signals.SIGALRM: (
        "a timer of its own ran out (signal.alarm)",
        "look for signal.alarm or setitimer in the script",
    ),
    signals.SIGTRAP: (
        "a native library stopped at a check of its own",
        "read the lines above the end: `jackline logs`",
    ),
    signals.SIGSYS: ("a sandbox forbade a system call (seccomp)", "start the container with another profile"),
    signals.SIGUSR1: ("it has no handler for SIGUSR1, which Slurm sends before the end", GO_ON),
    signals.SIGUSR2: ("it has no handler for SIGUSR2, which Slurm sends before the end", GO_ON),
}


def signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sent_by_us(evidence: Evidence) -> Finding | None:
    """The finding when Jackline itself ended the command, and at whose request."""
    first = next((sent for sent in evidence.sent_signals if sent.why in _WHY_TO_CAUSE), None)
    if first is None:
        # A session reads the request itself and exits without any signal.
        # And a shutdown signals all processes at once: the command may exit before we could pass the signal on.
        is_left = evidence.exit_code in (0, EXIT_STOPPED) or evidence.signal == signals.SIGTERM
        if evidence.stop_requested_by and is_left:
            return _stopped(evidence, evidence.stop_requested_by)
        return None
    ours = {sent.signal for sent in evidence.sent_signals}
    if evidence.signal is not None and evidence.signal not in ours:
        return None  # a signal that we did not send ended it first
    cause = _WHY_TO_CAUSE[first.why]
    if cause == "stopped":
        return _stopped(evidence, evidence.stop_requested_by or first.why)
    return _ended(cause, first, evidence)


def _stopped(evidence: Evidence, by: str) -> Finding:
    who = _WHO.get(by, by)
    if by.startswith("SIGTERM"):
        who += " (a shutdown, a preemption or a person)"
    return Finding(
        "stopped",
        "certain",
        f"stopped by {who} after {format_duration(evidence.duration_s)}",
        (*_how_it_ended(evidence), *memory_line(evidence)),
        GO_ON,
    )


def _ended(cause: Cause, first: SentSignal, evidence: Evidence) -> Finding:
    after = format_duration(evidence.duration_s)
    how = _how_it_ended(evidence)
    if cause == "time_limit":
        title = f"ended by Jackline after {after}: the time limit was reached"
        return Finding(cause, "certain", title, (*how, *memory_line(evidence)), GO_ON)
    if cause == "stuck":
        place = evidence.stuck_frame or evidence.last_frame
        title = f"ended by Jackline after {after}: it was stuck{at_place(place)}"
        hint = "`jackline why` shows the stacks of every process from when it hung"
        told = (evidence.stuck_text,) if evidence.stuck_text else ()
        return Finding(cause, "certain", title, (*place_line(place), *told, *how), hint, True, place)
    title = f"ended by Jackline after {after}, before the kernel would have killed it for memory"
    return Finding(
        cause, "certain", title, (*memory_lines(evidence), *how), less_memory(evidence), place=evidence.growing_frame
    )


def _how_it_ended(evidence: Evidence) -> tuple[str, ...]:
    if evidence.signal == signals.SIGKILL:
        return ("it did not end when asked to and was killed (SIGKILL)",)
    if evidence.signal is not None:
        return (f"it ended on {signal_name(evidence.signal)}",)
    return (f"it exited with code {evidence.exit_code}",)


def has_oom_kill(evidence: Evidence) -> bool:
    """Whether the kernel counted an OOM kill that may have been in this run. If the cgroup's counter did not change,
    the answer is no, even if the machine's did: the cgroup counts every kill inside it, whichever limit was hit."""
    if evidence.kernel_log or evidence.oom_kills_in_cgroup:
        return True
    return evidence.oom_kills_in_cgroup is None and bool(evidence.oom_kills_on_machine)


def kernel_oom(evidence: Evidence, *, victim: str = "it") -> Finding | None:
    if not has_oom_kill(evidence):
        return None
    proof: list[str] = []
    if evidence.oom_kills_in_cgroup:
        proof.append(
            f"the kernel counted {_kills(evidence.oom_kills_in_cgroup)} in its memory cgroup during this attempt"
        )
    elif evidence.oom_kills_on_machine:
        proof.append(
            f"the kernel counted {_kills(evidence.oom_kills_on_machine)} on this machine during this attempt"
        )
    if evidence.kernel_log:
        proof.append(f"kernel log: {evidence.kernel_log[-1].strip()[:160]}")
    share = memory_share(evidence)
    is_certain = bool(evidence.kernel_log) or (bool(evidence.oom_kills_in_cgroup) and (share is None or share > 0.8))
    title = f"the kernel killed {victim} because memory ran out"
    if evidence.memory_limit_bytes and share is not None and share > 0.8:
        title += f": the limit is {format_bytes(evidence.memory_limit_bytes)}"
    return Finding(
        "kernel_oom",
        "certain" if is_certain else "likely",
        title,
        (*memory_lines(evidence), *proof),
        less_memory(evidence),
        place=evidence.growing_frame,
    )


def _kills(count: int) -> str:
    return "1 out-of-memory kill" if count == 1 else f"{count} out-of-memory kills"


def are_counters_unreadable(evidence: Evidence) -> bool:
    return evidence.oom_kills_in_cgroup is None and evidence.oom_kills_on_machine is None


def did_only_the_machine_count(evidence: Evidence) -> bool:
    """An OOM kill was counted on this machine, but none in the cgroup in which the command started."""
    return not evidence.kernel_log and evidence.oom_kills_in_cgroup == 0 and bool(evidence.oom_kills_on_machine)


def perhaps_oom(evidence: Evidence) -> Finding:
    """The OOM explanation, where the kernel's counters are unreadable or show a kill elsewhere on the machine."""
    if did_only_the_machine_count(evidence):
        why = "it counted a kill on this machine, though none in this run's cgroup"
    else:
        why = "its counters could not be read here"
    title = f"the kernel may have killed it because memory ran out; {why}"
    place = evidence.growing_frame
    return Finding("kernel_oom", "not sure", title, memory_lines(evidence), less_memory(evidence), place=place)


def killed(evidence: Evidence) -> tuple[Finding, ...]:
    """A SIGKILL that we did not send, and neither did the kernel according to its counters."""
    is_full = is_memory_nearly_full(evidence)
    is_doubtful = did_only_the_machine_count(evidence) or (is_full and are_counters_unreadable(evidence))
    confidence: Confidence = "not sure" if is_doubtful else "likely"
    hint = "ask who or what ends processes here: a colleague, a scheduler, a container's limits"
    if is_full:
        hint = less_memory(evidence)
    title = "killed with SIGKILL (kill -9) by someone else"
    detail = (f"Jackline did not send it{_counters_say(evidence)}", *ran_line(evidence), *_growth(evidence, is_full))
    someone = Finding("killed_by_someone", confidence, title, detail, hint, place=evidence.last_frame)
    if not is_doubtful:
        return (someone,)
    kernel = perhaps_oom(evidence)
    # A counted kill and full memory together make the kernel more likely than a person.
    return (kernel, someone) if is_full and did_only_the_machine_count(evidence) else (someone, kernel)


def _counters_say(evidence: Evidence) -> str:
    if are_counters_unreadable(evidence):
        return "; the kernel's out-of-memory counters could not be read here"
    if did_only_the_machine_count(evidence):
        return "; the kernel counted an out-of-memory kill on this machine, but none in this run's cgroup"
    return ", and the kernel counted no out-of-memory kill"


def _growth(evidence: Evidence, is_full: bool) -> tuple[str, ...]:
    if not is_full:
        return ()
    return (
        *growth_line(evidence),
        "a memory daemon (systemd-oomd, earlyoom) may have done it: memory was nearly full",
    )


def terminated(evidence: Evidence) -> Finding:
    """A SIGTERM from outside. A person's `kill` and a preemption look the same, so both are reported. It is not
    restarted: a person's kill is never undone, and a machine that is being taken away would end the next attempt."""
    return Finding(
        "preempted",
        "not sure",
        "ended by SIGTERM, which Jackline did not send: a preemption, a shutdown or a person's `kill`",
        (*place_line(evidence.last_frame), *ran_line(evidence)),
        GO_ON,
        place=evidence.last_frame,
    )


def left_after_signal(evidence: Evidence) -> Finding | None:
    """Exit code 0, but its last lines say that a signal made it end. Lightning and many scripts do that after a
    SIGTERM: such a run is not finished, and may be resumed. Helpers of a run that is complete say it too (Ray), so
    its progress has a say; where that is not known, only the very last lines count."""
    if evidence.is_incomplete is False:
        return None
    count = _LAST_LINES if evidence.is_incomplete else _VERY_LAST_LINES
    lines = [line.strip() for line in evidence.output_tail if line.strip()][-count:]
    told = next(
        (line for line in reversed(lines) if _TOLD_SIGNAL.search(line) and not _NOT_ITSELF.search(line)), None
    )
    if told is None:
        return None
    return Finding(
        "stopped",
        "likely",
        f"ended by itself with exit code 0 after {format_duration(evidence.duration_s)}, because of a signal that "
        "Jackline did not send: a preemption, a shutdown or a person's `kill`",
        (f"it printed: {told[:160]}", *memory_line(evidence)),
        GO_ON,
    )


# What the C library prints when it finds its own records overwritten.
_HEAP = re.compile(
    r"(?:free|malloc|realloc|munmap_chunk)\(\): |double free or corruption|corrupted (?:size|double-linked)"
    r"|malloc_consolidate|\*\*\* stack smashing"
)


def interrupted(evidence: Evidence) -> Finding:
    title = "interrupted with SIGINT (Ctrl-C) by someone, not through Jackline"
    return Finding("killed_by_someone", "likely", title, ran_line(evidence), GO_ON, place=evidence.last_frame)


def crashed(evidence: Evidence, number: int, *, who: str = "it") -> Finding:
    """A native crash, with the Python line that faulthandler recorded."""
    place = fault_place(evidence.fault_text) or evidence.last_frame
    detail = (*place_line(place), *ran_line(evidence))
    where = at_place(place)
    if number == signals.SIGSEGV and (again := endless_call(evidence.fault_text)) is not None:
        title = f"{who} ran out of stack: {again.function} calls itself without end{at_place(again)}"
        lines = (*place_line(again), *ran_line(evidence))
        return Finding("segfault", "certain", title, lines, ENDLESS_CALL_HINT, False, again)
    if number == signals.SIGSEGV:
        title = f"{who} crashed in native code with a segmentation fault{where}"
        return Finding("segfault", "certain", title, detail, native_hint(evidence, place), True, place)
    if number == signals.SIGBUS:
        return _bus_error(evidence, f"{who} crashed with a bus error{where}", detail, place)
    title = f"{who} aborted in native code (SIGABRT){where}"
    last = next((line.strip() for line in reversed(evidence.output_tail) if line.strip()), "")
    said = (f"it said last: {last[:160]}",) if last else ()
    hint = "read the lines above the end: `jackline logs`"
    if thrown := cpp_exception(evidence.output_tail):
        title += f": nothing caught the C++ exception {thrown[:160]}"
    broken = next((line.strip() for line in reversed(evidence.output_tail) if _HEAP.match(line)), "")
    if broken:
        title += f": {broken[:80]}"
        hint = "C code wrote outside its memory, at this line or before: update or pin the packages that bring C code"
    return Finding("abort", "certain", title, (*said, *detail), hint, True, place)


def shm_of_workers(evidence: Evidence, title: str, place: Frame | None) -> Finding:
    """A DataLoader worker writes its batches into /dev/shm. By now its files there are gone, so free room proves
    nothing."""
    free = evidence.shm_free_bytes
    is_full_now = free is not None and free < _SHM_NEARLY_FULL_BYTES
    known = (f"/dev/shm has {format_bytes(free)} free now, after the worker's files were removed",) if free else ()
    return Finding(
        "bus_error",
        "certain" if is_full_now else "likely",
        f"{title}: /dev/shm was full{at_place(place)}",
        (*place_line(place), *known, *ran_line(evidence)),
        "use fewer workers, or a larger /dev/shm (docker run --shm-size=8g)",
        False,
        place,
    )


def _bus_error(evidence: Evidence, title: str, detail: tuple[str, ...], place: Frame | None) -> Finding:
    shm, disk = evidence.shm_free_bytes, fullest(evidence)
    hint = "a file it had mapped shrank or could not be read; check the disk"
    if shm is not None and shm < _SHM_NEARLY_FULL_BYTES:
        title += ": /dev/shm is full"
        detail = (f"/dev/shm has {format_bytes(shm)} free; DataLoader workers pass batches through it", *detail)
        hint = "use fewer workers, or a larger /dev/shm (docker run --shm-size=8g)"
    elif disk is not None and is_full(disk):
        title += f": the disk of {disk.path} is full"
        detail = (f"{disk.path} has {format_bytes(disk.free_bytes)} free; a mapped file gets its space late", *detail)
        hint = f"free space on the disk of {disk.path}"
    return Finding("bus_error", "certain", title, detail, hint, True, place)


def fault_place(fault_text: str) -> Frame | None:
    """The innermost line of the user's code in the thread that crashed. Other threads may be listed before it."""
    lines = fault_text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), 0)
    threads: list[list[Frame]] = [[]]
    for index in range(start, len(lines)):
        if not lines[index].strip():
            threads.append([])  # the next thread begins
        match = _FAULT_FRAME.fullmatch(lines[index])
        if match:
            below = lines[index + 1] if index + 1 < len(lines) else ""
            source = below.strip() if below.startswith("    ") else ""
            threads[-1].append(Frame(match[3], match[1], int(match[2]), source, is_user_file(match[1])))
    # A thread of C++ code has no Python frames. The main thread is listed last.
    crashed, *others = threads
    users = [frames for frames in reversed(others) if any(frame.is_user for frame in frames)]
    frames = crashed or next(iter(users or [one for one in others if one]), [])
    return next((frame for frame in frames if frame.is_user), frames[0] if frames else None)


def endless_call(fault_text: str) -> Frame | None:
    """The line that repeats in the stack of the crashed thread; None where no line does. The stack that is printed is
    cut after 100 frames, so a function that calls itself fills it."""
    lines = fault_text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), 0)
    found: Counter[tuple[str, str, str]] = Counter()
    for line in lines[start:]:
        if found and not line.strip():
            break
        match = _FAULT_FRAME.fullmatch(line)
        if match:
            found[(match[1], match[2], match[3])] += 1
    most = found.most_common(1)
    if not most or most[0][1] < REPEATED_FRAMES:
        return None
    file, line_number, function = most[0][0]
    return Frame(function, file, int(line_number), "", is_user_file(file))


def other_signal(evidence: Evidence, number: int) -> Finding:
    known = _OTHER_SIGNALS.get(number)
    place = fault_place(evidence.fault_text) or evidence.last_frame
    meaning = f": {known[0]}" if known else ""
    title = f"ended by {signal_name(number)}, which Jackline did not send{meaning}"
    hint = known[1] if known else "look for what sends this signal: the script itself, a scheduler, a person"
    return Finding("other_signal", "certain", title, (*place_line(place), *ran_line(evidence)), hint, place=place)
