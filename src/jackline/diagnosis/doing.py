"""Describes what a process is doing, from its stack, what it waits for, or its name. Pure.

Owns the words. The tables that turn frames into phases are in `phases`. C and Rust callables have no Python frame, so
the text of the calling line is used as well. Does not decide what is slow or stuck: that is
`supervisor.hang.verdict`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import PurePath

from jackline.diagnosis.frames import SHELL, Frame, ProcessStack, ThreadStack, innermost_user_frame
from jackline.diagnosis.phases import COMPILING, DOWNLOADING, bare_function, phase_of
from jackline.diagnosis.waiting import IDLE_LOOP, awaited_by, is_at_file_lock, is_at_locked_database, is_idle_loop
from jackline.immutable import immutable
from jackline.machine.readings import UNTIL_A_SIGNAL, Wait
from jackline.units import format_bytes

ARRIVES_BYTES_PER_S = 1024.0  # fewer bytes are keep-alives, not a download


@immutable
class Doing:
    """`what` is a phrase ('importing torch'); `frame` is the line in the user's own code."""

    what: str
    frame: Frame | None = None


@immutable
class Around:
    """What else was measured: bytes that arrive, programs that the process has started, whether it uses a GPU."""

    net_bytes_per_s: float | None = None  # None: not measured
    children: tuple[str, ...] = ()  # names of the other processes in its tree
    has_gpu: bool = False


_COMPILERS = re.compile(
    r"cc1(plus)?|gcc.*|g\+\+.*|clang.*|nvcc|cicc|ptxas|cudafe.*|fatbinary|ld|collect2|as|make|cmake|ninja|rustc|cargo"
)
_BY_COMM: tuple[tuple[str, str], ...] = (
    (_COMPILERS.pattern, COMPILING),
    (r"wget|curl|aria2c|git|git-remote-.*|git-lfs|rsync|scp|aws|gsutil|rclone|huggingface-cli|hf", "downloading"),
    (r"pip\d?(\.\d+)?|uv|conda|mamba|apt(-get)?|dpkg", "installing packages"),
    (r"tar|gzip|pigz|gunzip|unzip|zstd|xz|bzip2|7z", "packing or unpacking"),
    (r"cp|mv|dd|cat|tee", "copying"),
    (r"md5sum|sha\d+sum|xxhsum", "checking sums"),
    (r"ffmpeg|ffprobe", "converting media"),
    (r"nvidia-smi", "asking the GPU driver"),
)
_WAITING = {
    "sleep": "sleeping",
    "lock": "waiting for a lock",
    "file_lock": "waiting for a file lock",
    "network": "waiting for the network",
    "local_socket": "waiting on a local socket",
    "pipe": "waiting on a pipe",
    "keyboard": "waiting for keyboard input",
    "child": "waiting for a child process",
    "poll": "waiting for events",
    "disk": "waiting for the disk",
    "file": "waiting on a file",
    "stopped": "paused",
    "zombie": "dead, but its parent has not noticed",
}
# These states take precedence over any phase: whatever the process was doing, it cannot continue.
_OVERRIDING = ("stopped", "zombie", "keyboard")
_WITH_TARGET = ("file_lock", "network", "disk", "file", "pipe")


def describe(stack: ProcessStack | None, wait: Wait, comm: str, around: Around | None = None) -> Doing:
    """What a process does now: from `stack` if there is one, else from its name and what it waits for."""
    around = around or Around()
    thread = stack.main if stack else None
    frame = innermost_user_frame(thread)
    if wait.kind in _OVERRIDING:
        return Doing(describe_wait(wait), frame)
    if thread is None or not thread.frames:
        return Doing(_by_name(wait, comm))
    if frame is not None and frame.function == SHELL:
        return Doing(waiting_words(stack, wait) or _running(frame), frame)
    package = imported_package(thread)
    if package and not _compiles_around_import(thread, frame):
        return Doing(f"importing {package}", frame)
    if words := meeting(stack):
        return Doing(words, frame)
    if wait.kind == "file_lock" or is_at_file_lock(stack, wait):
        return Doing(waiting_words(stack, wait), frame)
    phase = phase_of(thread.frames, frame, has_gpu=around.has_gpu)
    if phase == DOWNLOADING or phase.startswith("loading a model or"):
        return Doing(_download(phase, wait, around), frame)
    compiler = next((name for name in around.children if _COMPILERS.fullmatch(name)), "")
    if compiler and phase in ("", COMPILING, "waiting for a child process"):
        return Doing(f"{COMPILING} ({compiler})", frame)
    if phase:
        return Doing(phase, frame)
    return Doing(waiting_words(stack, wait) or _running(frame), frame)


def waiting_words(stack: ProcessStack | None, wait: Wait) -> str:
    """'waiting for the end of thread 'loader''; '' for a main thread that runs or whose wait is unknown."""
    if is_idle_loop(stack, wait):
        return IDLE_LOOP
    if is_at_locked_database(stack, wait):
        return "waiting for a database that another connection has locked"
    if wait.kind == "file_lock" and stack is not None and stack.main is not None and stack.main.awaits:
        return f"waiting for {stack.main.awaits}"
    if is_at_file_lock(stack, wait):
        known = stack.main.awaits if stack is not None and stack.main is not None else ""
        known = "" if known == "a file lock" else known  # its file could not be looked at
        return f"waiting for {known or 'a file lock that another process or another part of this one holds'}"
    awaited = awaited_by(stack.main) if stack is not None and wait.kind == "lock" else ""
    return f"waiting for {awaited}" if awaited else describe_wait(wait)


MEETING_HINT = (
    "start the same command on every machine; if it runs there, check the address, the port and the firewall"
)
_MEETING_FILES = ("torch/distributed/elastic/rendezvous/", "torch/distributed/rendezvous.py")
_MEETING_CALLS = ("_store_based_barrier", "_create_c10d_store")
_ENDPOINT = re.compile(r"--(?:rdzv[-_]endpoint|master[-_]addr)[= ](\S+)")
_NUM_NODES = re.compile(r"--nnodes[= ](\S+)")


def meeting(stack: ProcessStack | None) -> str:
    """For a process that waits until all machines or ranks of its job have started: where they meet; '' otherwise."""
    thread = stack.main if stack else None
    if stack is None or thread is None:
        return ""
    inner = list(itertools.takewhile(lambda frame: not frame.is_user, thread.frames))
    is_there = any(part in frame.file for frame in inner for part in _MEETING_FILES)
    if not is_there and not any(bare_function(frame) in _MEETING_CALLS for frame in inner):
        return ""
    endpoint, nodes = _ENDPOINT.search(stack.command), _NUM_NODES.search(stack.command)
    where = f" at {endpoint[1]}" if endpoint else ""
    if nodes:
        return f"waiting for the other machines of the job to join{where} (--nnodes {nodes[1]})"
    return f"waiting for the other ranks of the job to start{where}"


def outermost(stack: ProcessStack | None) -> ProcessStack | None:
    """For a program that has printed since its stack was taken: only its outermost own line is sure to be right."""
    thread = stack.main if stack else None
    frame = next((frame for frame in reversed(thread.frames) if frame.is_user), None) if thread else None
    if stack is None or thread is None or frame is None:
        return None
    outer = Frame(frame.function, frame.file, frame.line, "", frame.is_user)
    return replace(stack, threads=(replace(thread, frames=(outer,)),))


def _download(phase: str, wait: Wait, around: Around) -> str:
    """A download has bytes that arrive. Without them it is a wait for the network, or no network at all."""
    rate = around.net_bytes_per_s
    if rate is None:
        return phase
    if rate >= ARRIVES_BYTES_PER_S:
        return f"{DOWNLOADING}, {format_bytes(rate)}/s"
    if phase != DOWNLOADING:
        return phase
    if wait.kind in ("network", "poll", "sleep"):
        target = f" ({wait.target})" if wait.kind == "network" and wait.target else ""
        return f"waiting for the network{target}: no bytes arrive"
    return "preparing a download: no bytes arrive"


def describe_wait(wait: Wait) -> str:
    """'waiting for the network (10.0.0.3:443)'; '' for a thread that runs or whose wait is unknown."""
    if wait.kind == "stopped":
        return f"paused ({wait.target or 'SIGSTOP'})"
    if wait.kind == "sleep" and wait.target == UNTIL_A_SIGNAL:
        return "waiting for a signal"
    words = _WAITING.get(wait.kind, "")
    is_telling = wait.target and wait.kind in _WITH_TARGET and not wait.target.startswith(("pipe:", "socket:"))
    return f"{words} ({wait.target})" if words and is_telling else words


def imported_package(thread: ThreadStack) -> str:
    """The package that the user's own line is importing right now; '' when it is not importing."""
    frames = thread.frames
    own = innermost_user_frame(thread)
    for index, frame in enumerate(frames):
        is_import = index > 0 and _is_import_machinery(frames[index - 1])
        if frame.is_user and frame is own:
            return _package_named(frame, frames[:index]) if is_import else _imported_by_library(frames[:index])
    outermost = [index for index in range(1, len(frames)) if _is_import_machinery(frames[index - 1])]
    outermost = [index for index in outermost if not _is_import_machinery(frames[index])]
    return _package_named(frames[outermost[-1]], frames[: outermost[-1]]) if outermost else ""


def _compiles_around_import(thread: ThreadStack, frame: Frame | None) -> bool:
    """A compiler imports its parts while it works; its own frames are then outside of the import."""
    outermost = max(index for index, entry in enumerate(thread.frames) if _is_import_machinery(entry))
    return phase_of(thread.frames[outermost:], frame, has_gpu=False) == COMPILING


def _imported_by_library(inner: tuple[Frame, ...]) -> str:
    """A library called by the user's line imports something on first use: 'torch._dynamo'. '' when none does."""
    marks = [index for index in range(1, len(inner)) if _is_import_machinery(inner[index])]
    for index in reversed(marks):
        frame = inner[index - 1]
        parts = PurePath(frame.file).with_suffix("").parts
        if _is_import_machinery(frame) or bare_function(frame) != "<module>":
            continue
        at = [place for place, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
        name = parts[at[-1] + 1 :] if at else parts[-1:]
        return ".".join(part for part in name if part != "__init__")
    return ""


_IMPORT_OF_ONE = re.compile(r"from\s+([A-Za-z_]\w*)|import\s+([A-Za-z_]\w*)[\w.]*(?:\s+as\s+\w+)?\s*(?:[#;]|$)")


def _is_import_machinery(frame: Frame) -> bool:
    return frame.file.startswith("<frozen importlib.") or "/importlib/_bootstrap" in frame.file


def _package_named(frame: Frame, inner: tuple[Frame, ...]) -> str:
    match = _IMPORT_OF_ONE.match(frame.source)
    if match:
        return match[1] or match[2]
    # For a line with several imports, or importlib.import_module(name), use the first file that is being run.
    for other in reversed(inner):
        if not _is_import_machinery(other) and not other.file.startswith("<"):
            parts = PurePath(other.file).parts
            marks = [at for at, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
            if marks and marks[-1] + 1 < len(parts):
                return parts[marks[-1] + 1].removesuffix(".py")
            name = PurePath(other.file)
            return name.parent.name if name.stem == "__init__" else name.stem
    return "a module"


def _running(frame: Frame | None) -> str:
    if frame is None:
        return "running"
    if bare_function(frame).startswith("<") or frame.function == "?":
        return f"running {PurePath(frame.file).name}"
    return f"running {frame.function}"


def _by_name(wait: Wait, comm: str) -> str:
    for pattern, phase in _BY_COMM:
        if re.fullmatch(pattern, comm):
            return f"{phase} ({comm})"
    waiting = describe_wait(wait)
    if waiting or not comm.startswith("python"):
        return f"{comm}: {waiting}" if waiting and comm else waiting or f"running {comm}".strip()
    return f"running {comm}: its line is not known yet"
