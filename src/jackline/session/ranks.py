"""Several ranks of one training in one run: what they must agree on, and what only the first of them does.

With DDP every rank holds the same weights, so rank 0 saves for all and the others follow: they load what rank 0 has
chosen, keep their own RNG states in its checkpoint, and stop at the same step. Owns the agreement and the exchange.
Every rank makes these calls at the same boundaries; a call that only some ranks made would wait for ever.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jackline.checkpoint.engine import EngineSettings
from jackline.checkpoint.mirror.progress import LossBounds
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.state import load
from jackline.checkpoint.state.attributes import Baseline, find_roots
from jackline.checkpoint.state.capture import Captured, capture
from jackline.checkpoint.state.frozen import FrozenHashes
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.checkpoint.ticket import Event, Ticket
from jackline.data.loader.order import mix
from jackline.errors import CannotResume, UsageError
from jackline.rundir.layout import RunDir
from jackline.session.home import Home, find_home
from jackline.session.settings import Settings

_REFUSED, _NONE = -2, -1


@dataclass(frozen=True)
class Ranks:
    """This rank, and a group of its own for the small messages: the user's group may be NCCL's, or busy."""

    rank: int
    size: int
    group: Any

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def agree(self, *flags: bool) -> list[bool]:
        """Each flag is set on all ranks when it is set on one."""
        told = torch.tensor([float(flag) for flag in flags])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(value) for value in told.tolist()]

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on every rank."""
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.group)
        longest = max(int(one) for one in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [bytes(part[: int(size)].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]

    def from_first(self, text: str) -> str:
        """What rank 0 says; the others' text is ignored."""
        return self.gather(text)[0]


def wait_for_all(ranks: Ranks | None) -> None:
    """A rank that has gone is no reason to fail here: this one is about to end too."""
    if ranks is not None:
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=ranks.group)


def agree(attached: Any, *, is_save_due: bool) -> bool:
    """At a boundary of several ranks: a stop that one of them was asked for, and a save that is due on one of them,
    are those of all. Returns whether to save."""
    if attached.ranks is None:
        return is_save_due
    stop = attached.stop
    is_asked, is_due = attached.ranks.agree(bool(stop.by), is_save_due)
    if is_asked:
        stop.ask("a request to another rank")
        stop.is_agreed = True
    return bool(is_due)


def is_same_size(ranks: Ranks | None, restored: Mapping[str, Any] | None) -> bool:
    """Whether it resumes with as many ranks as it was saved with, so that this rank gets the same batches."""
    before = len((restored or {}).get("ranks") or [0])
    return restored is not None and before == (ranks.size if ranks is not None else 1)


def refuse_safe_step(ranks: Ranks | None) -> None:
    if ranks is not None:
        raise UsageError(
            "safe_step() does not know yet how several ranks shrink a batch together",
            hint="call loss.backward() yourself",
        )


def join_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """None for a training of one process."""
    size = environ.get("WORLD_SIZE", "1")
    is_many = size.isdigit() and int(size) > 1
    if not dist.is_available() or not dist.is_initialized():
        if is_many:
            raise UsageError(
                f"this is one of {size} ranks, and they cannot talk to one another yet",
                hint="torch.distributed.init_process_group() first, then attach() on every rank",
            )
        return None
    if dist.get_world_size() == 1:
        return None
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))


def settings_for(ranks: Ranks, settings: Settings) -> Settings:
    """Without what only one process can do: train its first steps twice, or mirror what rank 0 mirrors."""
    if settings.keep_best is not None:
        raise UsageError(
            "keep_best does not know yet how to compare a number of several ranks",
            hint="leave it out, and keep_every=N keeps more checkpoints",
        )
    if ranks.is_first:
        return replace(settings, trial=False)
    return replace(settings, trial=False, verify=False, mirror=None, memory_guard=False)


def find_shared_home(ranks: Ranks | None, settings: Settings) -> Home:
    """Rank 0 finds or creates the run; the others are guests in it and write neither its start nor its end."""
    if ranks is None:
        return find_home(settings)
    home = find_home(settings) if ranks.is_first else None
    told = ranks.from_first(json.dumps({"path": str(home.run.path), "is_old": home.is_old}) if home else "")
    if home is not None:
        return home
    found = json.loads(told)
    return Home(RunDir(Path(found["path"])), None, is_supervised=True, is_old=bool(found["is_old"]))


def unwrapped(value: Any) -> Any:
    """The module inside DistributedDataParallel, so that a checkpoint loads with any number of ranks."""
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value


def refuse_sharded(state: Mapping[str, Any]) -> None:
    """A shard is not the whole state: saving rank 0's alone would lose the others'."""
    from torch.distributed.tensor import DTensor

    for word, value in state.items():
        if not isinstance(value, torch.nn.Module):
            continue
        names = [name for name, tensor in value.named_parameters() if isinstance(tensor, DTensor)]
        if names or type(value).__name__ == "FullyShardedDataParallel":
            raise UsageError(
                f"{word} is sharded over the ranks ({names[0] if names else 'FSDP'}): attach() saves only replicated "
                "state (DDP) so far",
                hint="use DistributedDataParallel, or JACKLINE=off and torch.distributed.checkpoint",
            )


# -- RNG states ---------------------------------------------------------------------------------------------------


def gather_random(ranks: Ranks, random: ProcessRandom) -> list[dict[str, Any]]:
    """The RNG states of all ranks, for rank 0's checkpoint."""
    told = ranks.gather(json.dumps(random.state_dict(), default=lambda one: {"hex": bytes(one).hex()}))
    return [json.loads(text, object_hook=_with_bytes) for text in told]


def _with_bytes(found: dict[str, Any]) -> Any:
    return bytes.fromhex(found["hex"]) if set(found) == {"hex"} else found


def restore_random(ranks: Ranks, random: ProcessRandom, saved: Any, step: int) -> str:
    """Give this rank its own RNG states back; text where they are new, because there were fewer ranks."""
    if isinstance(saved, list) and len(saved) == ranks.size:
        random.load_state_dict(saved[ranks.rank])
        return ""
    before = len(saved) if isinstance(saved, list) else 1
    if not ranks.is_first:
        torch.manual_seed(mix(torch.initial_seed(), step, ranks.rank) >> 1)
        random.restored = None
    words = f"it was saved with {before} rank{'s' * (before > 1)} and resumes with {ranks.size}"
    return f"{words}: the batches stay the same, other random numbers (dropout) differ"


# -- loading and saving ---------------------------------------------------------------------------------------


def load_together(ranks: Ranks, engine: Any, into: MutableMapping[str, Any]) -> load.Receipt | None:
    """Rank 0 chooses the newest whole checkpoint, and every rank loads that one."""
    if ranks.is_first:
        try:
            receipt: load.Receipt | None = engine.load_newest(into)
        except BaseException:
            ranks.from_first(str(_REFUSED))
            raise
        ranks.from_first(str(receipt.step if receipt is not None else _NONE))
        return receipt
    step = int(ranks.from_first(""))
    if step == _REFUSED:
        raise CannotResume("rank 0 cannot resume", hint="its own message says why")
    return engine.load_newest(into, step=step) if step != _NONE else None


class Follower:
    """The checkpoint engine of a rank that is not the first: it loads, and leaves saving to rank 0."""

    def __init__(self, run: RunDir) -> None:
        self.folder = choose_place(run).folder
        self.mirror: str | None = None
        self.is_busy = False
        self.why_off = ""
        self.stalled_s = 0.0
        self.settings = EngineSettings()
        self._baseline = Baseline()

    def save(self, state: Mapping[str, Any], *, step: int, **_: Any) -> Ticket:
        return Ticket(step, "committed")

    def save_again(self, ticket: Ticket) -> Ticket | None:
        return Ticket(ticket.step, "committed")

    def load_newest(self, into: MutableMapping[str, Any], *, step: int | None = None) -> load.Receipt | None:
        self._baseline.note_all(find_roots(into))
        return load.load_newest(self.folder, into, hash_frozen=FrozenHashes(), step=step)

    def note_program(self, state: Mapping[str, Any]) -> None:
        self._baseline.note_all(find_roots(state))

    def capture(self, state: Mapping[str, Any]) -> Captured:
        return capture(state, baseline=self._baseline)

    def before_change(self) -> None:
        """Nothing is copied here."""

    def prepare(self, state: Mapping[str, Any]) -> None:
        """No memory is needed for copies."""

    def give_back_gpu_memory(self) -> int:
        return 0

    def poll(self) -> list[Event]:
        return []

    def bounds(self) -> LossBounds:
        return LossBounds(None, None)

    def ask_mirror(self, number: int) -> None:
        """Rank 0 uploads."""

    def close(self, **_: Any) -> list[Event]:
        return []
