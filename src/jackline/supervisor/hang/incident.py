"""The incident file: everything known at the time of a SUSPECT or STUCK verdict, as text for people.

Owns the layout of incident-N.txt and the advice per label. Does not take stacks (`stacks`) or judge (`verdict`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jackline.diagnosis.doing import describe_wait
from jackline.diagnosis.frames import ProcessStack, ThreadStack
from jackline.machine.readings import ProcessReading, TreeReading
from jackline.rundir.atomic import write_whole
from jackline.supervisor.hang.deadlock import Deadlock
from jackline.supervisor.hang.lock_cycle import explain_locks
from jackline.supervisor.hang.verdict import Verdict
from jackline.units import format_bytes

_STEPS = "What to do next"
_ALWAYS = "`jackline why` samples the stacks again; `jackline stop` saves and ends it"
_LARGEST_SOURCE_BYTES = 4 << 20
_MOST_PROCESSES = 200

_ADVICE = {
    "STUCK_RANKS": (
        "all ranks but the one named wait in a collective: look at what that one does instead",
        "every rank must make the same calls in the same order, also in the last, shorter batch",
    ),
    "STUCK_LOCK": (
        "look at the lines above for a lock that its holder never lets go: a thread that died, a fork while a "
        "thread held it, two locks taken in different order",
    ),
    "STUCK_NET": (
        "the far end does not answer; give the call a timeout and retry it",
        "check the address and the proxy, and whether the server is up",
    ),
    "STUCK_CHILD": ("the process named above does not continue, and the main process waits for it",),
    "STUCK_DISK": ("a disk or network file system does not answer; `df` and `dmesg` may tell which",),
    "STOPPED": ("somebody stopped it (SIGSTOP, Ctrl-Z, a debugger); `kill -CONT PID` continues it",),
    "STOPPED_CHILD": ("somebody stopped a worker that the main process waits for; `kill -CONT PID` continues it",),
    "KEYBOARD": ("it asks a question that nobody can answer; pass the answer as an option, or start with --tty",),
    "GPU_SPIN": (
        "a kernel or a collective hangs: with several ranks, look for one that stands at another line",
        "NCCL_DEBUG=INFO and TORCH_NCCL_TRACE_BUFFER_SIZE=2000 tell more next time",
    ),
    "SLEEPING": ("it waits in a loop for something that has not come; look at what the loop looks for",),
}


def write_incident(
    path: Path,
    *,
    verdict: Verdict,
    stacks: Sequence[ProcessStack],
    tree: TreeReading,
    now_s: float,
    native_text: str = "",
) -> None:
    """Write the file whole or not at all. `now_s` is time.time()."""
    text = incident_text(verdict, stacks, tree, now_s, native_text)
    write_whole(path, text.encode("utf-8", "replace"))


def incident_text(
    verdict: Verdict, stacks: Sequence[ProcessStack], tree: TreeReading, now_s: float, native_text: str = ""
) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    lines = [f"{verdict.kind} ({verdict.label}) at {stamp}", "", verdict.text, ""]
    found = verdict.deadlock
    locks = [sentence for stack in stacks for sentence in explain_locks(stack.threads, read_source)]
    if found is not None:
        lines += ["The deadlock (proved: read inside the processes and from the kernel)"]
        lines += [*(f"  - {sentence}" for sentence in found.story), ""]
    elif locks:
        lines += ["Who waits for whom (read from the source, not verified)", *(f"  - {line}" for line in locks), ""]
    lines += [_STEPS, *(f"  - {line}" for line in advice(verdict, stacks, tree, native_text)), ""]
    lines += [f"Processes ({len(tree.processes)})", *_process_lines(tree, stacks), ""]
    lines += ["Stacks, innermost line first; > marks your own code", ""]
    for stack in stacks:
        lines += [*stack_lines(stack), ""]
    if native_text:
        lines += ["Native stacks", "", native_text.rstrip(), ""]
    return "\n".join(lines)


def advice(
    verdict: Verdict, stacks: Sequence[ProcessStack] = (), tree: TreeReading | None = None, native_text: str = ""
) -> tuple[str, ...]:
    known = _ADVICE.get(verdict.label, ("look at the innermost of your own lines below: it does not return",))
    if verdict.deadlock is not None:
        about = _about_children(stacks, tree.processes if tree else (), native_text)
        return (*_about_deadlock(verdict.deadlock), *about, _ALWAYS)
    if verdict.label == "STUCK_LOCK" and "file lock" in verdict.text:
        is_known = "held by process" in verdict.text
        known = ("let the process that holds the lock end, or end it: an earlier run that still lives?",)
        known = known if is_known else ("`lsof FILE` or /proc/locks names the process that holds that lock",)
    if verdict.label == "STUCK_CHILD":
        known += tuple(_about_children(stacks, tree.processes if tree else (), native_text))
    return (*known, _ALWAYS)


def steps_in(text: str) -> list[str]:
    """The advice that an incident file gives, without what holds for all of them."""
    lines = text.partition(f"\n{_STEPS}\n")[2].partition("\n\n")[0].splitlines()
    steps = [line.strip().removeprefix("- ") for line in lines]
    return [step for step in steps if step and step != _ALWAYS]


def _about_deadlock(found: Deadlock) -> tuple[str, ...]:
    """By what its members wait for."""
    waits = [member.waits_for for member in found.members]
    if any(words in found.text for words in (" has ended with ", " was killed by ", " has exited with code ")):
        if " has exited with code 0" in found.text:
            return (
                "close the child's end of the pipe in its parent after the start: an EOFError then tells its end",
            )
        return (
            "mend first what has ended: whoever waits for it is never told",
            "a timeout on the wait makes an error of it next time",
        )
    if "threads of that pool" in found.text or "thread of that pool" in found.text:
        return ("a task must not wait for tasks of its own pool: give inner ones a pool of their own",)
    if "forked" in found.text:
        return ("use 'spawn' instead of 'fork' in a program with threads",)
    if any("pipe" in wait or "socket" in wait or wait.startswith("the end of process") for wait in waits):
        return (
            "between processes: read both pipes of a child (communicate()), and close the ends that are not used",
        )
    if sum(bool(member.holds) for member in found.members) > 1:
        return ("take the locks in the same order everywhere, or take one of them with a timeout",)
    if any("lock" in wait for wait in waits):
        return ("take the lock with `with`, so that every way out of the block gives it back",)
    return (
        "look for who should put, set, notify or finish it, and whether that code is reached on every way",
        "a timeout on the wait makes an error of it next time",
    )


def _about_children(
    stacks: Sequence[ProcessStack], processes: Sequence[ProcessReading], native_text: str
) -> Iterator[str]:
    """By what the children themselves wait for."""
    pids = {process.pid for process in processes}
    children = [process for process in processes if process.ppid in pids]
    if any(stack.role.startswith("DataLoader worker") for stack in stacks):
        yield "with a DataLoader: try num_workers=0 to see the error itself, or set timeout="
    far = next((one for one in children if one.wait.kind == "network" and "listening" not in one.wait.target), None)
    if far is not None:
        whom = f" ({far.wait.target})" if far.wait.target else ""
        yield f"process {far.pid} ({far.comm}) waits for a far end that does not answer{whom}: give it a timeout"
    for child in children:
        pool = thread_pool_of(child.pid, native_text)
        if pool and child.num_threads == 1 and child.wait.kind == "lock" and child.wait.is_endless:
            yield (
                f"process {child.pid} waits in {pool} for other threads, and it has none: a fork does not take the "
                "threads of a library along. Use the start method 'spawn', or let the parent compute with one thread "
                "(torch.set_num_threads(1)) before it forks"
            )
            return


_POOLS = re.compile(r"\((lib(?:gomp|iomp5|omp|mkl_\w+|openblas\w*|tbb\w*)[-.\w]*\.so[.\d]*)\)$")


def thread_pool_of(pid: int, native_text: str) -> str:
    """The library with threads of its own in which the innermost native frame of a process is; '' for none."""
    section = native_text.partition(f"process {pid}\n")[2]
    inner = (line for line in section.partition("Thread ")[2].splitlines()[1:4] if line.startswith(" "))
    found = _POOLS.search(next(inner, ""))
    return found[1] if found else ""


def _process_lines(tree: TreeReading, stacks: Sequence[ProcessStack]) -> Iterator[str]:
    commands = {stack.pid: stack.command for stack in stacks}
    for process in tree.processes[:_MOST_PROCESSES]:
        yield f"  {process_line(process, commands.get(process.pid, ''))}"
    if len(tree.processes) > _MOST_PROCESSES:
        yield f"  and {len(tree.processes) - _MOST_PROCESSES} more"


def process_line(process: ProcessReading, command: str = "") -> str:
    """'pid 12  S  CPU 3.1 s  310 MiB  4 threads  waiting for a lock  python train.py'."""
    return (
        f"pid {process.pid} (parent {process.ppid})  {process.state}  CPU {process.cpu_s:.1f} s  "
        f"{format_bytes(process.rss_bytes)}  {process.num_threads} thread{'s' if process.num_threads != 1 else ''}  "
        f"{describe_wait(process.wait) or 'running'}  {(command or process.comm)[:200]}"
    )


def stack_lines(stack: ProcessStack, *, only_user: bool = False) -> Iterator[str]:
    """The stacks of one process. With `only_user`, only the innermost frame and lines of the user's own code."""
    if not stack.pid:
        yield f"({stack.problem})"
        return
    how = f", read by {stack.method}" if stack.method else ""
    role = f" ({stack.role})" if stack.role else ""
    yield f"process {stack.pid}{role}: {stack.command[:200] or '?'}{how}"
    if stack.problem:
        yield f"  ({stack.problem})"
    for thread in stack.threads:
        yield from _thread_lines(thread, only_user=only_user)
    for task in stack.tasks:
        yield f"  {task}"


def _thread_lines(thread: ThreadStack, *, only_user: bool) -> Iterator[str]:
    kind = "main thread" if thread.is_main else "thread"
    waiting = f", {thread.wait}" if thread.wait else ""
    yield f"  {kind} '{thread.name}' ({thread.thread_id}){waiting}"
    for number, frame in enumerate(thread.frames):
        if only_user and number and not frame.is_user:
            continue
        mark = ">" if frame.is_user else " "
        place = frame.place if frame.line else frame.file
        yield f"  {mark} {place} in {frame.function}{f'    {frame.source}' if frame.source else ''}"


def read_source(file: str) -> str | None:
    """The text of a source file; None when it is not readable. Called only if a recent read of it did not hang."""
    path = Path(file)
    try:
        if not path.is_absolute() or not path.is_file() or path.stat().st_size > _LARGEST_SOURCE_BYTES:
            return None
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
