"""Where a notebook's runs are copied to: turns the argument of `setup` into a folder or URL and stores it.

Owns notebook.json in the runs folder. A restarted kernel has lost all its variables, and a run that continued without
its mirror would be lost with the machine. Does not own copying: the run's mirror does that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from jackline.cli.commands.run import check_mirror, full_place
from jackline.errors import UsageError
from jackline.machine.host import find_notebook
from jackline.notebook.command import say, without_traceback
from jackline.rundir import atomic
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.access.writing import folder_inside
from jackline.rundir.find import runs_folder
from jackline.rundir.registry import own_state_folder

DRIVE = Path("/content/drive")
DRIVE_FILES = "MyDrive"
KAGGLE = Path("/kaggle/working")
MEMORY = "notebook.json"
_LONGEST = {"colab": "Colab: after 12 hours at most", "kaggle": "Kaggle: after 12 hours at most"}


@without_traceback
def setup(save_to: str | os.PathLike[str] | None = None) -> None:
    """Choose where checkpoints are copied to, so that they outlive this machine.

    "drive:FOLDER" mounts Google Drive (Colab asks once), "kaggle:FOLDER" is the output of a Kaggle notebook, anything
    else is a folder or a URL that fsspec knows. None: nothing is copied, and a message explains what that means.
    """
    place = None if save_to is None else find_place(os.fspath(save_to), find_notebook(os.environ))
    folder = runs_folder()
    if place is not None:
        check_writable(place)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_json(folder / MEMORY, {"save_to": place})
    _remember(folder, place)
    say(f"runs are in {folder}")
    for line in what_survives(place, find_notebook(os.environ)):
        say(line)


def saved_place(folder: Path) -> str | None:
    """The last choice in `setup`, also from an earlier kernel."""
    found = atomic.read_json(folder / MEMORY)
    place = found.get("save_to") if isinstance(found, Mapping) else None
    if not isinstance(place, str) or not place:
        return None
    with contextlib.suppress(OSError):
        if atomic.read_json(_own_memory(folder)) == {"save_to": place}:
            return place
    say(f"{folder / MEMORY} names a place for copies that you did not choose here: {without_secrets(place)}")
    say("nothing is copied there; choose it with setup(save_to=...)")
    return None


def _remember(folder: Path, place: str | None) -> None:
    """A runs folder may come with somebody's repository: only what this user's own state folder says is believed."""
    with contextlib.suppress(OSError):
        folder_inside(_own_memory(folder).parent)
        atomic.write_json(_own_memory(folder), {"save_to": place})


def _own_memory(folder: Path) -> Path:
    """Raises OSError when the state folder belongs to somebody else."""
    name = atomic.sha256_hex(os.fsencode(folder.resolve()))[:16]
    return own_state_folder() / "notebooks" / f"{name}.json"


def find_place(word: str, host: str | None) -> str:
    kind, _, rest = word.partition(":")
    if kind == "drive":
        if host != "colab":
            raise UsageError(
                f"save_to='{word}' means Google Drive, and this is not Colab", hint="setup(save_to='/a/folder')"
            )
        return str(mount_drive(DRIVE) / (rest or "jackline"))
    if kind == "kaggle":
        if host != "kaggle":
            raise UsageError(
                f"save_to='{word}' means Kaggle's output, and this is not Kaggle", hint="setup(save_to='/a/folder')"
            )
        return str(KAGGLE / (rest or "jackline"))
    return full_place(word) or word


def mount_drive(point: Path) -> Path:
    """Mount with Colab's own function, which asks the user. An existing mount is used as it is."""
    files = point / DRIVE_FILES
    if files.is_dir():
        return files
    say(f"mounting Google Drive at {point}; Colab asks for your permission")
    try:
        from google.colab import drive  # type: ignore[import-not-found,import-untyped,unused-ignore]

        drive.mount(str(point))
    except Exception as problem:  # Colab may raise any type: a refusal is a ValueError
        why = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise UsageError(
            f"Google Drive could not be mounted: {why}",
            hint="run the cell again and allow it; setup() without save_to continues without a second place",
        ) from None
    if not files.is_dir():
        raise UsageError(f"Google Drive was mounted at {point}, but there is no {DRIVE_FILES}", hint="run it again")
    return files


def check_writable(place: str) -> None:
    """Fail now if the place cannot be written. A URL is checked only by the run's first upload."""
    check_mirror(place)
    if "://" in place:
        return
    probe = Path(place) / f".jackline-{os.getpid()}.probe"
    try:
        probe.write_bytes(b"jackline")
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"nothing can be written to {place}: {error.strerror}", hint="is it full, or mounted read-only?"
        ) from None


def what_survives(place: str | None, host: str | None) -> list[str]:
    if place is not None:
        return [
            f"checkpoints and records are copied to {place} as they are made",
            "after the machine is lost, running all cells again resumes from there",
        ]
    when = f" ({_LONGEST[host]})" if host in _LONGEST else ""
    return [
        f"nothing is copied elsewhere: when this machine is taken away{when}, every checkpoint on it is lost",
        "hint: setup(save_to='drive:runs') on Colab, or a folder or URL that outlives the machine",
    ]
