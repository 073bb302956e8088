"""Which run this process belongs to: the supervisor's, or one of its own.

Under `jackline run` the environment says which. Without a supervisor (`python train.py`), the same rules of identity
apply and the session writes the attempt's two files itself (start.json, exit.json), so that `status`, `stop` and
`why` work. There is no supervisor and no lock then, and the user is told so. Owns these files of an unsupervised
attempt and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jackline.errors import EXIT_STOPPED, CannotResume, UsageError
from jackline.machine.disk import explain_refusal
from jackline.machine.gpu.watch import gpu_names, gpu_sizes
from jackline.rundir.access.trust import judge
from jackline.rundir.command import plain_settings
from jackline.rundir.create import Claim, claim_run, find_existing
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import (
    AlreadyFinished,
    Clash,
    Create,
    Elsewhere,
    Watch,
    decide_start,
    default_name,
    numbered_name,
)
from jackline.rundir.kin import Same, find_same, kin_lines, relocate
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import identify
from jackline.rundir.recorded import read_recorded
from jackline.rundir.records.exit import ExitRecord, read_exit, write_exit
from jackline.rundir.records.fields import number
from jackline.rundir.records.start import StartRecord, write_start
from jackline.rundir.records.stop_request import read_stop_request
from jackline.rundir.records.supervisor import read_supervisor
from jackline.rundir.registry import register
from jackline.rundir.reserves import release_records, reserve_records
from jackline.rundir.run_file import check_name, describe_run, with_gpus
from jackline.rundir.status import read_status
from jackline.session.settings import Settings

_OTHER_PLACE = "choose another place: attach(runs_dir=...) or $JACKLINE_RUNS"


@dataclass(frozen=True)
class Home:
    """The run and the attempt. `is_old`: the run has earlier attempts. `notes` are for people."""

    run: RunDir
    attempt: AttemptDir | None
    is_supervised: bool
    is_old: bool
    is_finished: bool = False
    started_at_s: float = field(default_factory=time.time)
    notes: tuple[str, ...] = ()


class BeginsAnew(CannotResume, SystemExit):
    """The run has made progress and no checkpoint of it is left. Exits with code 3 when nothing catches it."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.code = self.exit_code


def refuse_to_begin_anew(home: Home, environ: Mapping[str, str]) -> None:
    """Raise when a checkpoint was saved by an earlier attempt and nothing is left to resume from."""
    if not home.is_old or environ.get("JACKLINE_FROM_SCRATCH"):
        return
    recorded = read_recorded(home.run)
    if recorded.saved_step > 0:
        name = home.run.name
        raise BeginsAnew(
            f"run '{name}' was saved at step {recorded.saved_step}, and no checkpoint of it is left",
            hint=f"put its checkpoints back, or begin anew: jackline resume {name} --from-scratch; "
            "without a supervisor: JACKLINE_FROM_SCRATCH=1",
        )


def find_home(settings: Settings) -> Home:
    """Where this session's files go; creates the folder when the run is new."""
    supervised = _supervised(os.environ)
    return supervised if supervised is not None else _bare(settings)


def is_notebook() -> bool:
    return "ipykernel" in sys.modules


def command_line() -> list[str]:
    """The command a user would type to start this process. A notebook's kernel has none."""
    return ["notebook"] if is_notebook() else list(sys.orig_argv)


def repeatable_command() -> list[str]:
    """The same with this very interpreter: whoever resumes the run may have another `python` on PATH."""
    words = command_line()
    return words if is_notebook() or not sys.executable else [sys.executable, *words[1:]]


def _supervised(environ: Mapping[str, str]) -> Home | None:
    folder = environ.get("JACKLINE_RUN_DIR")
    if not folder or not RunDir(Path(folder)).has_run_file:
        return None
    run = RunDir(Path(folder))
    number = environ.get("JACKLINE_ATTEMPT", "")
    attempt = run.attempt(int(number)) if number.isdigit() else run.last_attempt()
    return Home(run, attempt, is_supervised=True, is_old=len(run.list_attempts()) > 1)


def _bare(settings: Settings) -> Home:
    folder = runs_folder(settings.runs_dir)
    argv = command_line()
    wanted = plain_settings({"argv": argv, "cwd": str(Path.cwd())})
    is_new = settings.new or bool(os.environ.get("JACKLINE_NEW"))
    same = _meant(folder, settings, is_new, wanted)
    name, existing = same.run.name, find_existing(same.run)
    if same.moved_from is not None and existing is not None:
        existing = replace(existing, settings=wanted)
    taken = [path.name for path in folder.iterdir()] if is_new and folder.is_dir() else []
    accepts = settings.verdicts()["arguments"] != "refuse"
    decision = decide_start(wanted, existing, name=numbered_name(name, taken), is_new=is_new, accepts_changes=accepts)
    run = RunDir(folder / decision.name)
    _refuse(decision, run)
    is_old = not isinstance(decision, Create)
    notes = _start_notes(folder, decision, same, wanted, is_chosen=is_new or settings.name is not None)
    # A folder that somebody else made is used, but its command and hooks stay unaccepted: this script has neither.
    is_ours = not is_old or judge(run).is_ours
    if is_old and same.moved_from is not None:
        relocate(run, repeatable_command(), wanted)
    lock = _lock_of(run) if is_old else _claim(run, wanted).lock
    try:
        attempt = _begin_attempt(run)
    finally:
        lock.release()
    register(run, vouched=is_ours, is_made=not is_old)
    note = f"run '{run.name}' in {run.path}, unsupervised (`jackline run -- ...` also watches, explains and restarts)"
    return Home(
        run,
        attempt,
        is_supervised=False,
        is_old=is_old,
        is_finished=isinstance(decision, AlreadyFinished),
        notes=(note, *notes),
    )


def _meant(folder: Path, settings: Settings, is_new: bool, wanted: dict[str, Any]) -> Same:
    """The named run; without a name, the run of this command, also in another spelling or in a moved folder."""
    if settings.name is not None:
        run = RunDir(folder / check_name(settings.name))
        return find_same(folder, run.name, wanted) if run.path.exists() else Same(run)
    name = default_name(command_line(), wanted)
    return Same(RunDir(folder / name)) if is_new else find_same(folder, name, wanted)


def _start_notes(folder: Path, decision: Any, same: Same, wanted: dict[str, Any], *, is_chosen: bool) -> list[str]:
    """What the person should know about which run this is; nothing for a run that they named themselves."""
    if isinstance(decision, Create):
        words = shlex.join(command_line())
        again = "jackline run --name {} --continue-with-changes -- " + words.replace("{", "{{").replace("}", "}}")
        return [] if is_chosen else kin_lines(folder, decision.name, wanted, again.format)
    if same.moved_from is not None:
        return [f"this run ran in {same.moved_from}, which is gone: it continues in {wanted['cwd']}"]
    return []


def _refuse(decision: Any, run: RunDir) -> None:
    if isinstance(decision, Watch) or (isinstance(decision, Clash) and decision.is_alive):
        child = read_status(run).child
        who = f" (process {child.pid})" if child else ""
        raise UsageError(
            f"run '{run.name}' is alive{who}",
            hint=f"`jackline stop {run.name}` first, or attach(name=...) for another run",
        )
    if isinstance(decision, Clash):
        raise UsageError(
            f"run '{run.name}' was started with another command",
            detail=decision.differences,
            hint="attach(new=True) starts another run, on_change={'arguments': 'warn'} continues this one",
        )
    if isinstance(decision, Elsewhere):
        raise UsageError(
            f"run '{run.name}' was last seen on another machine; whether it lives cannot be told from here",
            hint=f"once it has ended there: jackline resume {run.name} --here; or attach(new=True) for another run",
        )


def _claim(run: RunDir, wanted: dict[str, Any]) -> Claim:
    argv = repeatable_command()
    contents = describe_run(run.name, kind="run", argv=argv, settings=wanted, options={}, cwd=Path.cwd())
    contents = with_gpus(contents, gpu_names(), gpu_sizes())
    claim = claim_run(run, contents, hint=_OTHER_PLACE)
    if claim is None:
        raise UsageError(
            f"another process started run '{run.name}' this very moment",
            hint=f"`jackline stop {run.name}` first, or attach(name=...) for another run",
        )
    return claim


def _lock_of(run: RunDir) -> RunLock:
    """Hold the run's lock while the next attempt begins, so that of several starts only one continues it."""
    lock = RunLock(run.lock)
    with contextlib.suppress(OSError):  # a folder that cannot be written is reported by `_begin_attempt`
        is_mine = lock.try_acquire()
        status = read_status(run)
        if is_mine and status.state not in ("alive", "unwatched"):
            return lock
        lock.release()
        who = f" in process {status.child.pid}" if status.child else ""
        raise UsageError(
            f"another process started run '{run.name}' this very moment{who}",
            hint=f"`jackline stop {run.name}` first, or attach(name=...) for another run",
        )
    return lock


def _begin_attempt(run: RunDir) -> AttemptDir:
    former = run.last_attempt()
    attempt = run.attempt(former.number + 1 if former else 1)
    try:
        attempt.path.mkdir(parents=True, exist_ok=True)
        write_start(attempt, StartRecord(identify(os.getpid()), started_at_s=time.time(), is_bare=True))
        reserve_records(run, attempt, is_supervised=False)
    except OSError as error:
        raise UsageError(
            f"cannot write to {run.path}: {explain_refusal(error, run.path)}",
            hint=_OTHER_PLACE,
        ) from None
    return attempt


def write_ending(home: Home, *, exit_code: int, cause: str, text: str) -> None:
    """Write exit.json of an unsupervised attempt; otherwise the supervisor writes it."""
    if home.is_supervised or home.attempt is None:
        return
    now_s = time.time()
    record = ExitRecord(
        exit_code=exit_code,
        child_exit_code=exit_code,
        started_at_s=home.started_at_s,
        ended_at_s=now_s,
        duration_s=now_s - home.started_at_s,
        is_stopped=cause == "stopped",
        cause=cause,
        text=text,
        is_bare=True,
    )
    write_exit(home.attempt, record)
    # The process may keep running (a notebook's kernel), but it is not this attempt any more.
    write_start(home.attempt, StartRecord(started_at_s=home.started_at_s, is_bare=True))
    release_records(home.run, home.attempt)


def exit_as_unsaved(home: Home, text: str, say: Callable[[str], None]) -> None:
    """When the program ends: say once more that this run is not saved, and make its exit code 75.

    Its own code behind the block runs first, and so do its exit handlers. A supervisor gives code 75 by itself.
    """
    if home.is_supervised or is_notebook():
        return
    pid = os.getpid()

    def at_exit() -> None:
        last = home.run.last_attempt()
        is_done_since = last is not None and last != home.attempt and read_exit(last).cause == "finished"
        if os.getpid() != pid or is_done_since:
            return
        say(f"run '{home.run.name}' is NOT finished: {text}")
        if getattr(sys, "last_value", None) is None and change_exit_code(EXIT_STOPPED):
            say(f"this program exits with code {EXIT_STOPPED}; started again, it resumes from there")

    atexit.register(at_exit)


def change_exit_code(code: int) -> bool:
    """Make this code the process's own, once Python has ended: every exit handler and buffer is served as usual.

    An exit handler of Python cannot do that, one of the C library can: with glibc, `exit` called inside `exit` runs
    the handlers that are left and takes the new code. With another library that is undefined, and not done.
    """
    try:
        libc = ctypes.CDLL(None)
        is_glibc = bool(libc.gnu_get_libc_version())
        add, end = libc.__cxa_atexit, ctypes.cast(libc.exit, ctypes.c_void_p)
    except (OSError, AttributeError):
        return False
    add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return is_glibc and add(end, code, None) == 0


def read_grace_s(run: RunDir, otherwise_s: float) -> float:
    """How long a graceful stop may take: set by whoever asked for it, else by the supervisor, else by our setting."""
    for grace_s in (read_stop_request(run).grace_s, number(read_supervisor(run).options.get("grace_s"))):
        if grace_s is not None:
            return float(grace_s)
    return otherwise_s
