"""Describes what a process is doing, from its stack, what it waits for, or its name. Pure.

Owns the tables that turn frames into phases (importing, downloading, compiling ...). C and Rust callables have no
Python frame, so the text of the calling line is used as well. Does not decide what is slow or stuck: that is
`supervisor.hang.verdict`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack, innermost_user_frame
from jackline.machine.readings import Wait


@dataclass(frozen=True)
class Doing:
    """`what` is a phrase ('importing torch'); `frame` is the line in the user's own code."""

    what: str
    frame: Frame | None = None


# Matches any frame of the main thread: (file, function, phase). The first row that matches wins, so the rarer phase
# comes first: a download inside a data loader is a download.
_BY_FRAME: tuple[tuple[str, str, str], ...] = (
    (r"/torch/_(inductor|dynamo|functorch)/|/triton/(compiler|runtime|backends)/", r"", "compiling"),
    (r"/torch/utils/cpp_extension\.py|/setuptools/|/numba/core/|/jax/_src/(compiler|interpreters)", r"", "compiling"),
    (r"/torch/serialization\.py", r"save", "saving a checkpoint"),
    (r"/torch/distributed/checkpoint/", r"save", "saving a checkpoint"),
    (r"/(safetensors|transformers/modeling_utils|lightning|accelerate)", r"save", "saving a checkpoint"),
    (r"/torch/serialization\.py", r"load|read", "loading a checkpoint"),
    (r"/torch/distributed/checkpoint/", r"load|read", "loading a checkpoint"),
    (r"/safetensors/", r"load|get_tensor", "loading a checkpoint"),
    (r"/huggingface_hub/|/boto3?/|/botocore/|/gcsfs/|/s3fs/|/gdown/|/torch/hub\.py", r"", "downloading"),
    (r"/urllib/request\.py|/urllib3/|/requests/|/httpx/|/httpcore/|/aiohttp/|/ftplib\.py", r"", "downloading"),
    (r"/transformers/tokenization|/tokenizers/|/tiktoken/|/sentencepiece/", r"", "tokenising"),
    (r"/torch/cuda/|/torch/utils/_device", r"synchronize", "waiting for the GPU"),
    (r"/torch/optim/", r"step", "in the optimizer step"),
    (r"/torch/autograd/|/torch/_tensor\.py", r"backward|grad", "in the backward pass"),
    (r"/torch/distributed/", r"barrier|all_reduce|all_gather|broadcast|wait", "waiting for other ranks"),
    (r"/torch/utils/data/", r"", "loading data"),
    (r"/datasets/(arrow_dataset|builder|iterable_dataset|load)\.py", r"", "loading data"),
    (r"/torch/nn/modules/", r"", "in the forward pass"),
    (r"/pip/_internal/", r"", "installing packages"),
    (r"/subprocess\.py", r"wait|communicate|run|call", "waiting for a child process"),
)
# Matches the user's own function names, when no library frame matches.
_BY_FUNCTION: tuple[tuple[str, str], ...] = (
    (r"(^|_)(eval(uate|uation)?|valid(ate|ation)?|test_epoch)(_|$)", "evaluating"),
    (r"token(ize|ise)", "tokenising"),
    (r"(^|_)download", "downloading"),
    (r"save_(checkpoint|model|state)|checkpoint_save", "saving a checkpoint"),
    (r"load_(checkpoint|model|state)|resume_from", "loading a checkpoint"),
    (r"load_(data|dataset|corpus)|__getitem__|collate|preprocess", "loading data"),
    (r"train(ing)?_(step|batch)|(^|_)train_(one_)?epoch", "training"),
)
# Matches the text of the line that called into C or Rust.
_BY_SOURCE: tuple[tuple[str, str], ...] = (
    (r"\bencode_batch\(|\btoken(izer|iser)\b.*\(|\.encode_ordinary_batch\(", "tokenising"),
    (r"\btorch\.compile\(|\bnvcc\b", "compiling"),
    (r"\btorch\.save\(|\bsave_file\(|\.save_pretrained\(|\.save_checkpoint\(", "saving a checkpoint"),
    (r"\btorch\.load\(|\bload_file\(|\.load_state_dict\(", "loading a checkpoint"),
    (r"from_pretrained\(|load_dataset\(|snapshot_download\(|hf_hub_download\(", "downloading or loading"),
    (r"urlretrieve\(|urlopen\(|requests\.(get|post)\(", "downloading"),
    (r"\.backward\(", "in the backward pass"),
    (r"\b(optim\w*|opt)\.step\(|\bscaler\.step\(", "in the optimizer step"),
    (r"\.item\(\)|\.cpu\(\)|\.tolist\(\)|synchronize\(", "waiting for the GPU"),
    (r"^for .*\bin\b.*load(er)?\b|\bnext\(.*(loader|iter)", "loading data"),
    (r"\bos\.fsync\(", "waiting for the disk"),
)
_BY_COMM: tuple[tuple[str, str], ...] = (
    (r"cc1(plus)?|gcc.*|g\+\+.*|clang.*|nvcc|cicc|ptxas|cudafe.*|fatbinary", "compiling"),
    (r"ld|collect2|as|make|cmake|ninja|rustc|cargo", "compiling"),
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


def describe(stack: ProcessStack | None, wait: Wait, comm: str) -> Doing:
    """What a process does now: from `stack` if there is one, else from its name and what it waits for."""
    thread = stack.main if stack else None
    frame = innermost_user_frame(thread)
    if wait.kind in _OVERRIDING:
        return Doing(describe_wait(wait), frame)
    if thread is None or not thread.frames:
        return Doing(_by_name(wait, comm))
    package = imported_package(thread)
    if package:
        return Doing(f"importing {package}", frame)
    phase = _phase(thread, frame)
    if phase:
        return Doing(phase, frame)
    waiting = describe_wait(wait)
    return Doing(waiting or _running(frame), frame)


def describe_wait(wait: Wait) -> str:
    """'waiting for the network (10.0.0.3:443)'; '' for a thread that runs or whose wait is unknown."""
    if wait.kind == "stopped":
        return f"paused ({wait.target or 'SIGSTOP'})"
    words = _WAITING.get(wait.kind, "")
    is_telling = wait.target and wait.kind in _WITH_TARGET and not wait.target.startswith(("pipe:", "socket:"))
    return f"{words} ({wait.target})" if words and is_telling else words


def imported_package(thread: ThreadStack) -> str:
    """The package that the user's own line is importing right now; '' when it is not importing."""
    frames = thread.frames
    for index, frame in enumerate(frames):
        is_import = index > 0 and _is_import_machinery(frames[index - 1])
        if frame.is_user:
            return _package_named(frame, frames[:index]) if is_import else ""
    outermost = [index for index in range(1, len(frames)) if _is_import_machinery(frames[index - 1])]
    outermost = [index for index in outermost if not _is_import_machinery(frames[index])]
    return _package_named(frames[outermost[-1]], frames[: outermost[-1]]) if outermost else ""


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


def _phase(thread: ThreadStack, frame: Frame | None) -> str:
    # All frames count, not only those inside the user's innermost line: a data loader that called the user's
    # __getitem__ is outside of it and matters as well.
    for file, function, phase in _BY_FRAME:
        for entry in thread.frames:
            if not entry.is_user and re.search(file, entry.file) and re.search(function, entry.function):
                return phase
    if frame is not None:
        for pattern, phase in _BY_SOURCE:
            if re.search(pattern, frame.source):
                return phase
    names = [entry.function.rpartition(".")[2] for entry in thread.frames if entry.is_user]
    for name in names:
        for pattern, phase in _BY_FUNCTION:
            if re.search(pattern, name):
                return phase
    return ""


def _running(frame: Frame | None) -> str:
    if frame is None:
        return "running"
    if frame.function in ("<module>", "?"):
        return f"running {PurePath(frame.file).name}"
    return f"running {frame.function}"


def _by_name(wait: Wait, comm: str) -> str:
    for pattern, phase in _BY_COMM:
        if re.fullmatch(pattern, comm):
            return f"{phase} ({comm})"
    waiting = describe_wait(wait)
    return f"{comm}: {waiting}" if waiting and comm else waiting or f"running {comm}".strip()
