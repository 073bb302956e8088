"""Finds the checkpoints that a user's own script writes, and tells which are complete.

Owns finding them, and the arguments added to the command line to resume. Never loads one: unpickling runs code and
needs torch. files.py checks the inside of a file, choice.py decides which one is used. Does not own Jackline's own
checkpoints.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.supervisor.foreign.files import check_directory, check_file

PLACEHOLDER = "{checkpoint}"
_NUMBER = re.compile(r"\d+")
# Folders with tens of thousands of files that never hold a user's checkpoints: walking them would cost seconds.
_NEVER_ENTERED = frozenset({"node_modules", "site-packages", "dist-packages", "__pycache__"})


@immutable
class ForeignCheckpoint:
    """A file or a folder as it was found; `number` is the last number in its name."""

    path: Path
    number: int | None
    mtime_s: float
    size_bytes: int
    is_directory: bool


@immutable
class Preset:
    """How a known trainer names its checkpoints, and its option to resume from one."""

    name: str
    checkpoints: str
    resume_arg: str


_PRESETS = {
    "hf": Preset("hf", "**/checkpoint-*", "--resume_from_checkpoint {checkpoint}"),
    "lightning": Preset("lightning", "**/*.ckpt", "--ckpt_path {checkpoint}"),
}


def preset(name: str) -> Preset:
    if name in _PRESETS:
        return _PRESETS[name]
    from difflib import get_close_matches

    near = get_close_matches(name, _PRESETS, n=1)
    guess = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"unknown preset '{name}' for --resume-from: known are {' and '.join(sorted(_PRESETS))}",
        hint=guess + 'for others say it yourself: --checkpoints GLOB --resume-arg "--resume {checkpoint}"',
    )


def check_resume_arg(resume_arg: str) -> None:
    """Reject a wrong value at the start, not after the first crash hours later."""
    try:
        words = shlex.split(resume_arg)
    except ValueError as error:
        raise UsageError(
            f"--resume-arg {resume_arg!r} cannot be split into words: {error}",
            hint='write it as on a command line: --resume-arg "--resume {checkpoint}"',
        ) from None
    strange = [name for word in words for name in re.findall(r"\{(\w*)\}", word) if name != "checkpoint"]
    if strange:
        raise UsageError(
            f"--resume-arg knows only {{checkpoint}}, not {{{strange[0]}}}",
            hint='for example --resume-arg "--resume {checkpoint}"',
        )


def resume_argv(argv: Sequence[str], resume_arg: str, checkpoint: Path | None) -> list[str]:
    """The command of the next attempt. Without a checkpoint it is the command as it was typed. If `resume_arg` has no
    placeholder, the command finds the checkpoint itself."""
    if checkpoint is None:
        return list(argv)
    # Split first, then fill in: a path with a space or a quote in it stays one word.
    return [*argv, *(word.replace(PLACEHOLDER, str(checkpoint)) for word in shlex.split(resume_arg))]


def list_checkpoints(pattern: str, cwd: Path) -> list[ForeignCheckpoint]:
    """Everything the GLOB matches, the newest last: by the last number in the name, then by time.

    Names without a number (last.ckpt) are common beside numbered ones; then only the time can order them all. `**`
    costs a walk of the tree, so call this at the end of attempts or every tens of seconds, not at every tick.
    """
    found = [entry for path in _expand(pattern, cwd) if (entry := describe(path)) is not None]
    if all(entry.number is not None for entry in found):
        return sorted(found, key=lambda entry: (entry.number, entry.mtime_s, str(entry.path)))
    return sorted(found, key=lambda entry: (entry.mtime_s, str(entry.path)))


def is_whole(checkpoint: ForeignCheckpoint, open_paths: set[str]) -> tuple[bool, str]:
    """Whether it is complete, and why or why not. `open_paths`: files that the process tree has open for writing."""
    try:
        if checkpoint.is_directory:
            return check_directory(checkpoint.path, open_paths)
        now = checkpoint.path.stat()
        if now.st_size != checkpoint.size_bytes:
            return False, f"its size is changing: {checkpoint.size_bytes} bytes, then {now.st_size}"
        return check_file(checkpoint.path, open_paths)
    except OSError as error:
        return False, f"it cannot be read: {error.strerror or error}"


def newest_whole(checkpoints: Sequence[ForeignCheckpoint], open_paths: set[str]) -> ForeignCheckpoint | None:
    """Ordered by time, then by number: two files written in turn may have numbers that say nothing about order."""
    for checkpoint in sorted(checkpoints, key=lambda entry: (entry.mtime_s, entry.number or -1), reverse=True):
        if is_whole(checkpoint, open_paths)[0]:
            return checkpoint
    return None


def describe(path: Path) -> ForeignCheckpoint | None:
    """None when nothing is there."""
    try:
        found = path.stat()
    except OSError:
        return None  # a dangling link, or deleted since it was listed
    is_directory = path.is_dir()
    numbers = _NUMBER.findall(path.name if is_directory else path.stem)
    return ForeignCheckpoint(
        path=path,
        number=int(numbers[-1]) if numbers else None,
        mtime_s=_newest_mtime_s(path) if is_directory else found.st_mtime,
        size_bytes=0 if is_directory else found.st_size,
        is_directory=is_directory,
    )


def _newest_mtime_s(folder: Path) -> float:
    """The newest mtime of its files: a folder's own mtime does not change when a file inside it grows."""
    times = [folder.stat().st_mtime]
    with os.scandir(folder) as entries:
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max(times)


def _expand(pattern: str, cwd: Path) -> list[Path]:
    # Glob characters in the name of the working directory are not part of the user's pattern.
    whole = os.path.join(glob.escape(str(cwd)), Path(pattern).expanduser())
    head, deep, tail = whole.partition("**")
    if not deep:
        return [Path(name) for name in glob.glob(whole)]  # noqa: PTH207 - Path.glob refuses absolute patterns
    wanted = re.compile(_glob_to_regex(tail.lstrip("/")))
    roots = glob.glob(head) if head.strip("/") else ["/"]  # noqa: PTH207
    return [Path(path) for root in roots for path in _walk(root.rstrip("/") or "/", wanted)]


def belongs(relative: str, pattern: str, cwd: str) -> bool:
    """Whether the GLOB matches this path, which is relative to the command's folder `cwd`. A hidden name counts only
    where the pattern names it, so that nothing lands in .git or .ssh. Pure: it does not look at the disk."""
    wanted = str(Path(pattern).expanduser())
    wanted = os.path.relpath(wanted, cwd) if os.path.isabs(wanted) else os.path.normpath(wanted)
    words = os.path.normpath(relative).split("/")
    if os.path.isabs(relative) or ".." in words:
        return False
    if any(word.startswith(".") and word not in wanted.split("/") for word in words):
        return False
    return re.fullmatch(_glob_to_regex(wanted), "/".join(words)) is not None


def _walk(root: str, wanted: re.Pattern[str]) -> Iterator[str]:
    """Like glob's `**`, but does not follow links to folders (they may loop) and does not descend into a match."""
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        entered = []
        for name in sorted(folders):
            relative = name if inside == "." else f"{inside}/{name}"
            if _matches(wanted, relative):
                yield os.path.join(folder, name)
            elif not name.startswith(".") and name not in _NEVER_ENTERED:
                entered.append(name)
        folders[:] = entered
        for name in files:
            relative = name if inside == "." else f"{inside}/{name}"
            if not name.startswith(".") and _matches(wanted, relative):
                yield os.path.join(folder, name)


def _matches(wanted: re.Pattern[str], relative: str) -> bool:
    """`**/a/b` matches a path that is a/b or ends in /a/b."""
    words = relative.split("/")
    return any(wanted.fullmatch("/".join(words[start:])) for start in range(len(words)))


def _glob_to_regex(pattern: str) -> str:
    parts: list[str] = []
    index = 0
    while index < len(pattern):
        char = pattern[index]
        end = pattern.find("]", index + 2) if char == "[" else -1
        if pattern.startswith("**/", index):
            parts.append("(?:.*/)?")
            index += 2
        elif char == "*":
            parts.append("[^/]*")
        elif char == "?":
            parts.append("[^/]")
        elif end > 0:
            body = pattern[index + 1 : end]
            parts.append("[" + ("^" + body[1:] if body.startswith("!") else body).replace("\\", "\\\\") + "]")
            index = end
        else:
            parts.append(re.escape(char))
        index += 1
    return "".join(parts)
