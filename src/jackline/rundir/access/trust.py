"""Whether a run's folder was made here by this user: only then its instructions are followed.

A folder from somebody else is data. Its command, its hooks and its mirror are executed only after a person has seen
and accepted them (cli/trusting.py), and the processes it names are believed only as far as the kernel confirms them.
Owns these judgements. Does not own asking.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from jackline.rundir import registry
from jackline.rundir.atomic import sha256_hex
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, is_alive
from jackline.rundir.records.start import read_start

MAX_LINKS_LOOKED_FOR = 20_000
_MAX_PARENTS = 50


class Trust:
    """`why_not` is empty for a run that this user has made or accepted."""

    __slots__ = ("why_not",)  # a dataclass would cost `status` a millisecond

    def __init__(self, why_not: str = "") -> None:
        self.why_not = why_not

    @property
    def is_ours(self) -> bool:
        return not self.why_not


def judge(run: RunDir) -> Trust:
    """Whether this user has made the run here, or has accepted what its run.json would execute."""
    entry = registry.entry_of(run)
    try:
        folder, file = run.path.stat(), run.run_file.lstat()
    except OSError:
        return Trust("its run.json cannot be read")
    owners = {os.geteuid(), *(() if entry.owner is None else (entry.owner,))}
    for found in (folder, file):
        if found.st_uid not in owners:
            return Trust(f"it belongs to user '{user_name(found.st_uid)}'")
        if found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode):
            return Trust("every user of this machine may write to it")
    if _is_registered(run, entry) or _is_running_here(run):
        return Trust()
    return Trust("it was not made here by you")


def is_known_text(data: bytes) -> bool:
    """Whether a run.json with these bytes was made or accepted here by this user, wherever it is now."""
    digest = sha256_hex(data)
    return any(entry.digest == digest for entry in registry.entries())


def find_links(run: RunDir) -> list[str]:
    """Symbolic links inside the run: through one in place of a folder, files would be written elsewhere."""
    found: list[str] = []
    for folder, names, files in itertools.islice(os.walk(run.path), MAX_LINKS_LOOKED_FOR):
        paths = (Path(folder) / name for name in (*names, *files))
        found += [str(path.relative_to(run.path)) for path in paths if path.is_symlink()]
    return sorted(found)


def is_believable(process: ProcessId | None, run: RunDir) -> bool:
    """Whether a live process can be this run's: it belongs to the owner of the run's folder. One that is gone, or on
    another machine, can be anything."""
    if process is None or not is_alive(process):
        return True
    try:
        owner = run.path.stat().st_uid
        owners = {owner}
        if user_of(process.pid) not in owners and registry.entry_of(run).owner == owner:
            owners.add(os.geteuid())  # the file system shows our own folder as another user's
        # `sudo` and the like become another user; whoever started them has not.
        return any(user_of(pid) in owners for pid in _with_parents(process.pid))
    except OSError:
        return True


def may_be_signalled(process: ProcessId, run: RunDir) -> bool:
    """Whether the kernel confirms that the process belongs to this run: it has a file of the run open, or was
    started for it, or its parents were. A pid in a file alone would let a forged folder end any process of ours."""
    if not is_believable(process, run):
        return False
    if any(_is_of(pid, run) for pid in _with_parents(process.pid)):
        return True
    # Without the right to look, only the user's own word is left.
    return not _can_look_at(process.pid) and judge(run).is_ours


def user_of(pid: int) -> int:
    """The real user of a process. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    raise ProcessLookupError(pid)


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_registered(run: RunDir, entry: registry.RegistryEntry) -> bool:
    if entry.path is not None and entry.digest is None:
        return True  # registered by an older version, in this very place
    try:
        digest, inode = registry.digest_of(run), run.path.stat().st_ino
    except OSError:
        return False
    return digest == entry.digest or any(_is_moved(other, digest, inode) for other in registry.entries())


def _is_moved(entry: registry.RegistryEntry, digest: str, inode: int) -> bool:
    """Whether the folder is the one of this entry, at another place. Its run.json alone is not enough: somebody who
    was sent the run can send it back with other files in it."""
    if entry.digest != digest:
        return False
    if entry.inode is not None:
        return entry.inode == inode
    return entry.path is not None and not Path(entry.path).exists()  # an entry of an older version


def _is_running_here(run: RunDir) -> bool:
    """Whether its command runs now, as this user, started for this folder: nobody else can have arranged that."""
    attempt = run.last_attempt()
    child = read_start(attempt).child if attempt is not None else None
    if child is None or not is_alive(child):
        return False
    try:
        return user_of(child.pid) == os.geteuid() and _is_of(child.pid, run)
    except OSError:
        return False


def _is_of(pid: int, run: RunDir) -> bool:
    paths = {str(run.path), str(run.path.resolve())}
    words = _words(f"/proc/{pid}/cmdline")
    named = {word.removeprefix("JACKLINE_RUN_DIR=") for word in _words(f"/proc/{pid}/environ") if "RUN_DIR=" in word}
    return bool(paths & named) or bool(paths & set(words)) or any(_is_inside(link, paths) for link in _links(pid))


def _is_inside(link: str, paths: set[str]) -> bool:
    return any(link == path or link.startswith(f"{path}/") for path in paths)


def _links(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(str(path.readlink()))
    return found


def _words(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return [os.fsdecode(word) for word in file.read(4 << 20).split(b"\0")]
    except OSError:
        return []


def _can_look_at(pid: int) -> bool:
    return os.access(f"/proc/{pid}/fd", os.R_OK)


def _with_parents(pid: int) -> Iterator[int]:
    for _ in range(_MAX_PARENTS):
        if pid <= 1:
            return
        yield pid
        pid = _parent_of(pid)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat_line = file.read()
    except OSError:
        return 0
    return int(stat_line[stat_line.rfind(b")") + 2 :].split()[1])
