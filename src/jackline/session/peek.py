"""`jackline.peek`: where a run is, before its model is built; for models that grow, or change their optimizer.

    seen = jackline.peek("grow")
    model = build(num_blocks=2 if seen is None or seen.epoch < 5 else 4)

Reads the newest whole checkpoint without torch and changes nothing. Owns nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.export import read_state
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.tree import KIND, NOT_A_LEAF, decode
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.place import choose_place
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import default_name
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import check_name
from jackline.session.home import command_line

_PLAIN_KINDS = ("float", "complex", "bytes", "bytearray", "dict", "ordered", "counter", "tuple", "deque", "set")


@dataclass(frozen=True)
class Peek:
    """A run's newest whole checkpoint. `values` is `run.values`; tensors in it are None here."""

    name: str
    step: int
    epoch: int
    batch: int
    values: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def peek(name: str | None = None, *, runs_dir: str | None = None) -> Peek | None:
    """Where `attach(name=name)` will resume; None when it will start from the beginning.

    Without a name: the run of this script with these arguments. Every byte of the checkpoint is verified, because
    `attach` would pass over a damaged one too.
    """
    if os.environ.get("JACKLINE", "").lower() == "off":
        return None
    run = _find_run(name, runs_dir)
    if not run.has_run_file:
        return None
    folder = choose_place(run).folder
    for found in list_names(folder):
        try:
            manifest = verify_checkpoint(folder / str(found))
            state = read_state(folder / str(found), manifest)
            session = decode(state.get("session"), "session", _leaf)
            values = decode(state.get("values", {}), "values", _leaf)
        except (Damage, OSError):
            continue
        place = session if isinstance(session, dict) else {}
        epoch, batch = (place.get(word) if isinstance(place.get(word), int) else 0 for word in ("epoch", "batch"))
        return Peek(run.name, found.step, epoch or 0, batch or 0, _as_dict(values), dict(manifest.metrics))
    return None


def _find_run(name: str | None, runs_dir: str | None) -> RunDir:
    supervised = os.environ.get("JACKLINE_RUN_DIR")
    if supervised and RunDir(Path(supervised)).has_run_file:
        return RunDir(Path(supervised))
    argv = command_line()
    wanted = check_name(name) if name is not None else default_name(argv, {"argv": argv, "cwd": str(Path.cwd())})
    return RunDir(runs_folder(runs_dir) / wanted)


def _leaf(node: dict[str, Any], where: str) -> Any:
    return NOT_A_LEAF if node.get(KIND) in (*_PLAIN_KINDS, "frozenset") else None


def _as_dict(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else {}
