"""Why an attempt ended: turns evidence into findings, the most certain first.

Owns the order in which explanations are tried: what we did ourselves, what the kernel counted, what the signal says,
what the program printed, and last what its exit code says. Each explanation is a rule in a module beside this. Pure.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Callable
from dataclasses import replace

from jackline.diagnosis.deaths import exit as rules_exit
from jackline.diagnosis.deaths.code import (
    SEE_LOG,
    import_error,
    keyboard_input,
    no_main_guard,
    own_error,
    own_exception,
    syntax_error,
)
from jackline.diagnosis.deaths.disk import disk_full
from jackline.diagnosis.deaths.evidence import GO_ON, Confidence, Evidence, Finding
from jackline.diagnosis.deaths.gpu import cuda_error, nccl_timeout
from jackline.diagnosis.deaths.left.particulars import with_exit_place, with_particulars
from jackline.diagnosis.deaths.memory import cuda_oom, host_memory_error
from jackline.diagnosis.deaths.network import network, refused_by_server
from jackline.diagnosis.deaths.ranks import aborted_at_exit, first_failed, port_in_use, sizes_differ
from jackline.diagnosis.deaths.sentences import ran_line
from jackline.diagnosis.deaths.signal import (
    crashed,
    has_oom_kill,
    interrupted,
    kernel_oom,
    killed,
    left_after_signal,
    other_signal,
    sent_by_us,
    terminated,
)
from jackline.diagnosis.deaths.traceback_text import WRAPPERS, Chain, ErrorText, fatal_chain
from jackline.diagnosis.deaths.workers import faulted, lost_process, no_more_threads, worker_killed

_ERROR_RULES: tuple[Callable[[ErrorText, Evidence], Finding | None], ...] = (
    cuda_oom,
    cuda_error,
    disk_full,
    host_memory_error,
    no_more_threads,
    own_error,
    no_main_guard,
    import_error,
    syntax_error,
    keyboard_input,
    port_in_use,
    sizes_differ,
    refused_by_server,
    network,
)
# Rules for output without a traceback, where only the last lines are known. Import and syntax errors always have one.
_LINE_RULES = (cuda_oom, cuda_error, disk_full, host_memory_error, no_more_threads, sizes_differ, network)
_NUM_LAST_LINES = 30
# Of C++, when the interpreter ends while threads of torch.distributed run: it says nothing of what went wrong before.
_AT_EXIT = "terminate called without an active exception"
_LOGGED_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|\b(?:[Ee]rror|[Ff]ailed|[Ff]atal)\b")
_CRASHES = (signals.SIGSEGV, signals.SIGABRT, signals.SIGBUS)


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """Pure; never empty; the best explanation first. A job of several ranks is explained by the first that failed."""
    is_failed = evidence.exit_code != 0 and sent_by_us(evidence) is None
    first = first_failed(evidence) if is_failed else None
    if first is None:
        found = _diagnose(evidence)
    else:
        found = (first.finding,) if first.finding else first.name_in(_diagnose(first.evidence))
    return tuple(replace(one, hint=_load_first(evidence)) if one.hint == GO_ON else one for one in found)


def _load_first(evidence: Evidence) -> str:
    """A script whose state was rescued does not continue by itself."""
    if not evidence.rescued:
        return GO_ON
    return f"`{evidence.rescued}` prints the lines that load the rescued state; with them the same command continues"


def _diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    evidence = _with_printed_fault(evidence)
    chain = fatal_chain(evidence.output_tail)
    ours = sent_by_us(evidence)
    if ours is not None:
        return (ours, *_trouble_while_ending(chain, evidence))
    if evidence.exit_code == 0:
        return _finished(chain, evidence)
    if evidence.exit_code is None and evidence.signal is None:
        return _unseen(chain, evidence)
    by_scheduler = rules_exit.scheduler_said(evidence) if chain is None else None
    if by_scheduler is not None:
        return (by_scheduler,)
    number = evidence.signal or rules_exit.inner_signal(evidence.exit_code)
    found = _by_signal(number, chain, evidence) if number else _by_exit_code(chain, evidence)
    return _with_shell(found, evidence) if evidence.signal is None and number else found


def _by_signal(number: int, chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    if number == signals.SIGKILL:
        by_kernel = kernel_oom(evidence)
        return (by_kernel,) if by_kernel else killed(evidence)
    if number == signals.SIGTERM:
        return (terminated(evidence),)
    if number == signals.SIGINT:
        return (interrupted(evidence),)
    if number == signals.SIGABRT and any(_AT_EXIT in line for line in evidence.output_tail[-_NUM_LAST_LINES:]):
        return _said(chain, evidence) or ((_own(chain, evidence),) if chain else (aborted_at_exit(evidence),))
    if number in _CRASHES:
        said = _said_before_abort(chain, evidence) if number == signals.SIGABRT else _threads_ran_out(evidence)
        return (*said, crashed(evidence, number))
    return (other_signal(evidence, number),)


def _by_exit_code(chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    quiet = (rules_exit.asked_to_stop, rules_exit.command_not_found)
    loud = (rules_exit.module_not_found, rules_exit.usage_error, rules_exit.told_error, rules_exit.not_finite)
    unsaid = (_said_in_log, rules_exit.timed_out)
    for rule in quiet:
        finding = rule(evidence)
        if finding is not None:
            return (finding,)
    said = _said(chain, evidence)
    if said:
        return (*said, *_also_oom(said, evidence))
    if chain is not None:
        found = _interrupted_or_own(chain, evidence)
        return (found, *_also_oom((found,), evidence))
    for rule in (*loud, *unsaid):
        finding = rule(evidence)
        if finding is not None:
            finding = replace(with_exit_place(finding, evidence), rule=rule.__name__.strip("_"))
            return (finding, *_also_oom((finding,), evidence))
    plain = with_exit_place(rules_exit.exit_code(evidence), evidence)
    also = _also_oom((plain,), evidence)
    # Nothing was said, and the kernel ended a process in this run's own cgroup: that explains more than a number.
    if also and evidence.oom_kills_in_cgroup:
        return (replace(also[0], confidence="likely"), plain)
    return (plain, *also)


def _said(chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    """Findings of the first rule that matches the errors, root first, or the last lines."""
    if chain is None:
        return _said_in_lines(evidence)
    # The error that names the signal of a lost process tells more than the broken connection that it was noticed by.
    errors = sorted(chain.errors, key=_names_no_signal) if lost_process(chain.root) is not None else chain.errors
    for error in errors:
        lost = worker_killed(error, evidence)
        if lost:
            return lost
        timeout = nccl_timeout(evidence.output_tail, evidence, error)
        if timeout is not None:
            return (timeout,)
        for rule in _ERROR_RULES:
            finding = rule(error, evidence)
            if finding is not None:
                return (replace(finding, rule=rule.__name__),)
    return _said_by_child(chain, evidence) if chain.root.name in WRAPPERS else ()


def _names_no_signal(error: ErrorText) -> bool:
    lost = lost_process(error)
    return lost is None or lost.signal is None


def _said_by_child(chain: Chain, evidence: Evidence) -> tuple[Finding, ...]:
    """A command that the script started printed why it failed; the script says only that it did."""
    found = _said_in_lines(evidence)
    return tuple(replace(one, confidence="likely", place=chain.root.place) for one in found)


def _said_in_lines(evidence: Evidence) -> tuple[Finding, ...]:
    timeout = nccl_timeout(evidence.output_tail, evidence, None)
    if timeout is not None:
        return (timeout,)
    text = ErrorText("", "\n".join(evidence.output_tail[-_NUM_LAST_LINES:]))
    lost = worker_killed(text, evidence)
    if lost:
        return lost
    found = (rule(_matching_line(rule, evidence) or text, evidence) for rule in _LINE_RULES)
    return tuple(finding for finding in found if finding is not None)[:1]


def _said_in_log(evidence: Evidence) -> Finding | None:
    """Its output says nothing: many programs write their errors only to a log file."""
    if not evidence.log_tail:
        return None
    there = replace(evidence, output_tail=evidence.log_tail, log_tail=())
    chain = fatal_chain(there.output_tail)
    found = _said(chain, there) or ((_own(chain, there),) if chain is not None else ())
    where = f"its output does not say so; its log does: {evidence.log_path}"
    sure: Confidence = "likely" if evidence.is_log_its_own else "not sure"
    if found:
        hint = f"the whole traceback is in {evidence.log_path}" if found[0].hint == SEE_LOG else found[0].hint
        return replace(found[0], confidence=sure, detail=(where, *found[0].detail), hint=hint)
    line = next((line.strip() for line in reversed(evidence.log_tail) if _LOGGED_ERROR.search(line)), "")
    # Where `jackline run > log` stands in that folder, the log holds its output once more.
    if not line or any(line in one for one in evidence.output_tail):
        return None
    title = f"ended with exit code {evidence.exit_code}; the last error in its log: {line[:200]}"
    return Finding("exit_code", sure, title, (where, *ran_line(evidence)), f"read that log: {evidence.log_path}")


def _matching_line(rule: Callable[[ErrorText, Evidence], Finding | None], evidence: Evidence) -> ErrorText | None:
    """The one line that the rule matches, so that the report does not quote thirty."""
    for line in reversed(evidence.output_tail[-_NUM_LAST_LINES:]):
        error = ErrorText("", line)
        if rule(error, evidence) is not None:
            return error
    return None


def _said_before_abort(chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    """C++ code prints its error and then aborts, so look at the output."""
    said = _said_in_lines(evidence)
    return said or (_said(chain, evidence) if chain else ())


def _threads_ran_out(evidence: Evidence) -> tuple[Finding, ...]:
    """Libraries go on without the thread that they could not start, and crash."""
    found = no_more_threads(ErrorText("", "\n".join(evidence.output_tail[-_NUM_LAST_LINES:])), evidence)
    return (found,) if found else ()


def _interrupted_or_own(chain: Chain, evidence: Evidence) -> Finding:
    if chain.root.name == "KeyboardInterrupt":
        return interrupted(evidence)
    return _own(chain, evidence)


def _own(chain: Chain, evidence: Evidence) -> Finding:
    return with_particulars(own_exception(chain, evidence), chain, evidence)


def _also_oom(found: tuple[Finding, ...], evidence: Evidence) -> tuple[Finding, ...]:
    """An OOM kill was counted, but the error does not mention one: report it with low confidence."""
    if not has_oom_kill(evidence) or any(finding.cause == "kernel_oom" for finding in found):
        return ()
    by_kernel = kernel_oom(evidence, victim="another process of the run")
    if by_kernel is None:
        return ()
    return (replace(by_kernel, confidence="not sure"),)


def _trouble_while_ending(chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    """It was asked to stop and failed while stopping, for example while saving to a full disk."""
    is_expected = chain is None or {error.name for error in chain.errors} & {"KeyboardInterrupt", "SystemExit"}
    if evidence.exit_code in (None, 0) or is_expected or chain is None:
        return ()
    return _said(chain, evidence) or (_own(chain, evidence),)


def _finished(chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    """A pipe (`python train.py | tee log`) reports only the exit code of its last program."""
    done = rules_exit.finished(evidence)
    if done.cause == "finished" and (signalled := left_after_signal(evidence)) is not None:
        return (signalled,)
    last = next((line for line in reversed(evidence.output_tail) if line.strip()), "")
    if chain is None or chain.last.first_line != last.strip():
        return (done,)
    other = _said(chain, evidence) or (_own(chain, evidence),)
    doubt = f"but its output ends with {chain.last.first_line[:160]}"
    cause = "a pipe hides the exit code of all but its last program: use `set -o pipefail`"
    if any(line.startswith("Exception in thread ") for line in evidence.output_tail[-_NUM_LAST_LINES:]):
        cause = "a thread ended with that error, and the program went on without it: look whether its work is missing"
    return (Finding("finished", "not sure", done.title, (doubt, *done.detail), cause), *other)


def _unseen(chain: Chain | None, evidence: Evidence) -> tuple[Finding, ...]:
    """Nobody saw the exit status: everything that watched was killed. What the process wrote last still tells."""
    by_kernel = kernel_oom(evidence)
    unseen = rules_exit.unseen(evidence)
    if by_kernel:
        return (by_kernel, unseen)
    number = faulted(evidence.fault_text)
    if number is not None:
        found = _by_signal(number, chain, replace(evidence, signal=number))
    elif chain is not None and not any(line.strip() for line in evidence.output_tail[chain.end :]):
        found = _by_exit_code(chain, replace(evidence, exit_code=1))
    else:
        return (unseen,)
    why = "nobody saw its exit status; this is the last that it wrote"
    return (replace(found[0], confidence="likely", detail=(*found[0].detail, why)), *found[1:])


def _with_printed_fault(evidence: Evidence) -> Evidence:
    """A script that switches faulthandler on by itself has the stack of its crash in its output."""
    starts = [at for at, line in enumerate(evidence.output_tail) if line.startswith("Fatal Python error: ")]
    if evidence.fault_text or not starts:
        return evidence
    return replace(evidence, fault_text="\n".join(evidence.output_tail[starts[-1] :]))


def _with_shell(found: tuple[Finding, ...], evidence: Evidence) -> tuple[Finding, ...]:
    """The signal ended a process inside the command, and the shell around it reported that by its exit code."""
    assert evidence.exit_code is not None
    best = found[0]
    sure: Confidence = "likely" if best.confidence == "certain" else best.confidence
    detail = (rules_exit.shell_line(evidence.exit_code), *best.detail)
    return (replace(best, confidence=sure, detail=detail), *found[1:])
