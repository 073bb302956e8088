"""What machines with folders of their own agree on: that they have them, and what becomes of each save of parts.

Rank 0 puts a mark into its folder for checkpoints; a rank that does not find it in its own sees another folder. Then
every machine has a run and checkpoints of its own.

A part alone is worth nothing, so two things are decided together at each save. One that a machine could not make is
set aside by all, before it counts as one of the last good ones. And a save is uploaded by every machine or by none.
Each uploads at its own speed: the next one goes to the mirror when all have uploaded the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jackline.checkpoint.format.catalogue import list_checkpoints, read_uploads
from jackline.checkpoint.format.manifest import TEMPORARY
from jackline.checkpoint.machines.holding import FOR_MIRROR, KEY, Machine
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.state.load import Refusal
from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import host_name
from jackline.session.home import Home, find_home
from jackline.session.machines.copying import Copier
from jackline.session.settings import Settings

_OWN_RUN = "JACKLINE_RUN_DIR"


def find_shared_home(ranks: Any, settings: Settings) -> tuple[Home, Any]:
    """The run, and the ranks with their machine where machines have folders of their own.

    Rank 0 finds or creates the run; the others are guests in it, or in the run of their own machine, and write
    neither its start nor its end.
    """
    if ranks is None:
        return find_home(settings), None
    home = find_home(settings) if ranks.is_first else None
    mark = _leave_mark(home.run) if home is not None else None
    path = str(home.run.path) if home is not None else ""
    facts = {"path": path, "is_old": home is not None and home.is_old, "mark": mark.name if mark else ""}
    told = json.loads(ranks.from_first(json.dumps(facts)))
    sees = home is not None or _sees(RunDir(Path(told["path"])), told["mark"])
    own = os.environ.get(_OWN_RUN, "")
    found = [json.loads(text) for text in ranks.gather(json.dumps({"sees": sees, "run": own, "host": host_name()}))]
    if mark is not None:
        mark.unlink(missing_ok=True)
    if all(one["sees"] for one in found):
        return home or Home(RunDir(Path(told["path"])), None, is_supervised=True, is_old=told["is_old"]), ranks
    _refuse_homeless(found, told["path"])
    machine = divide(found, ranks.rank, told["path"])
    if home is None:
        run = RunDir(Path(own or told["path"]))
        home = Home(run, None, is_supervised=True, is_old=len(run.list_attempts()) > 1)
    return home, replace(ranks, machine=machine)


def divide(found: list[dict[str, Any]], rank: int, first_path: str) -> Machine:
    """The machines, in the order of their first ranks. Each has a run of its own, by which it is known."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(found):
        groups.setdefault((one["host"], one["run"] or first_path), []).append(number)
    names: list[tuple[str, tuple[int, ...]]] = []
    for host, path in groups:
        name, taken = Path(path).name, [known for known, _ in names]
        names.append((name if name not in taken else f"{name}-{host}", tuple(groups[host, path])))
    return Machine(next(at for at, (_, members) in enumerate(names) if rank in members), tuple(names))


def _leave_mark(run: RunDir) -> Path | None:
    """None where the folder cannot be written to: what follows will say so."""
    folder = choose_place(run).folder
    mark = folder / f"{TEMPORARY}meet-{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
        return mark
    return None


def _sees(first: RunDir, mark: str) -> bool:
    if not mark:
        return first.path.is_dir()
    own = os.environ.get(_OWN_RUN)
    mine = RunDir(Path(own)) if own else first
    run = mine if mine.job_file.is_file() else first
    return (choose_place(run).folder / mark).exists()


def _refuse_homeless(found: list[dict[str, Any]], path: str) -> None:
    """Raise, on every rank, where one sees no folder and has no run on its own machine either."""
    for rank, one in enumerate(found):
        if not one["sees"] and not one["run"]:
            raise UsageError(
                f"rank {rank} on '{one['host']}' does not see the folder of this run ({path}), and has no run there",
                hint="start the ranks with `jackline run` on every machine, or share the folder (--runs-dir)",
            )


@dataclass
class Turns:
    """Which saves go to the mirror, by rank 0's clock, and which to the neighbour."""

    chosen_at_s: float | None = None
    copier: Copier | None = None  # of the first rank of each machine
    is_copying: bool = False  # some machine still copies the save before

    def close(self) -> None:
        """The copy under way is finished: after the training a script destroys the process groups."""
        if self.copier is not None:
            self.copier.close()

    def is_due(self, engine: Any, now_s: float) -> bool:
        every_s = engine.settings.mirror_every_s
        return self.chosen_at_s is None or now_s - self.chosen_at_s >= every_s


def is_behind(engine: Any) -> bool:
    """Whether this machine's newest save for the mirror is not there yet."""
    if engine.mirror is None:
        return False
    uploads = read_uploads(engine.folder)
    marked = [one for one in list_checkpoints(engine.folder) if one.manifest and one.manifest.facts.get(FOR_MIRROR)]
    return bool(marked) and marked[0].name not in uploads


def decide_save(attached: Any, flags: tuple[bool, ...], *, is_last: bool) -> list[bool]:
    """The `flags` as all ranks agree on them, and with them what only such machines ask."""
    ranks, saver, engine = attached.ranks, attached.saver, attached.saver.engine
    if ranks.machine is None:
        return list(ranks.agree(*flags))
    now_s = time.monotonic()
    turns = ranks.turns
    is_copying = turns.copier is not None and turns.copier.is_busy
    is_late, is_due = ranks.is_leader and is_behind(engine), ranks.is_first and turns.is_due(engine, now_s)
    found = list(ranks.agree(*flags, saver.has_failed, is_late, is_due, is_copying))
    is_lost, is_late, is_due, turns.is_copying = found[len(flags) :]
    if is_lost:
        drop_last(ranks, engine)
    engine.is_for_mirror = is_last or (is_due and not is_late)
    if engine.is_for_mirror:
        turns.chosen_at_s = now_s
    return found[: len(flags)]


def copy_save(attached: Any, *, is_last: bool) -> None:
    """Every machine, after a common save: its parts go to the neighbour, unless others are still on their way."""
    ranks, saver = attached.ranks, attached.saver
    if ranks.turns.copier is not None and saver.ticket is not None and (is_last or not ranks.turns.is_copying):
        key = f"{saver.engine.settings.machine.token}-{saver.engine.save_number}"
        ranks.turns.copier.copy(key, saver.ticket)


def make_copier(ranks: Any, engine: Any, tell: Callable[[str], None]) -> None:
    """All ranks call it: a process group is made together."""
    if ranks is None or ranks.machine is None or not ranks.is_sharded or len(ranks.machine.leaders) < 2:
        return
    group = dist.new_group(list(ranks.machine.leaders), backend="gloo")
    if ranks.is_leader:
        ranks.turns.copier = Copier(ranks.machine, engine.folder, group, tell)


def drop_last(ranks: Any, engine: Any) -> None:
    """What this machine has of the last save: another one could not make its part."""
    if not ranks.is_leader:
        return
    key = f"{engine.settings.machine.token}-{engine.save_number}"
    for one in list_checkpoints(engine.folder)[:2]:
        if one.manifest is not None and one.manifest.facts.get(KEY) == key:
            engine.refuse(Refusal(one.name, "another machine could not save its parts"))
