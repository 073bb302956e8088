"""Several ranks of one training in one run: what they must agree on, and what only the first of them does.

With DDP every rank holds the same weights, so rank 0 saves for all and the others follow: they load what rank 0 has
chosen, keep their own RNG states in its checkpoint, and stop at the same step. With FSDP2 every rank holds a part and
saves it; rank 0's writer commits all parts as one checkpoint. Owns the agreement and the exchange.
Every rank makes these calls at the same boundaries; a call that only some ranks made would wait for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from jackline.checkpoint.engine import CheckpointEngine, EngineSettings, Wait
from jackline.checkpoint.format.manifest import parse_name
from jackline.checkpoint.machines.holding import Machine, Saved
from jackline.checkpoint.machines.places import has_parts
from jackline.checkpoint.shards import is_distributed, is_divided
from jackline.checkpoint.state import load
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.checkpoint.writer.parts import Team
from jackline.data.loader.order import mix
from jackline.errors import CannotResume, UsageError
from jackline.machine.procfs import list_numbers, read_text
from jackline.rundir.layout import RunDir
from jackline.session.machines.agreement import Turns, copy_save, decide_save
from jackline.session.machines.resume import load_apart
from jackline.session.saving.replicas import Follower, describe_replicas, restore_replica
from jackline.session.settings import Settings

_GLOO_THREAD = "(pt_gloo_runloop"
_RESTS_WITHIN_S = 2.0


@dataclass(frozen=True)
class Ranks:
    """This rank, and a group of its own for the small messages: the user's group may be NCCL's, or busy."""

    rank: int
    size: int
    group: Any
    is_sharded: bool = False  # FSDP2: every rank saves its part, and rank 0 commits them as one checkpoint
    is_told: list[bool] = field(default_factory=list)  # that the weights of the ranks differ
    wrappers: list[Any] = field(default_factory=list)  # of DistributedDataParallel
    machine: Machine | None = None  # where each machine has a folder of its own; None: all ranks share one
    turns: Turns = field(default_factory=Turns)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits: for its machine, or for all."""
        return self.is_first if self.machine is None else self.rank in self.machine.leaders

    def agree(self, *flags: bool) -> list[bool]:
        """Each flag is set on all ranks when it is set on one."""
        if self.group is None:
            return list(flags)
        told = torch.tensor([float(flag) for flag in flags])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(value) for value in told.tolist()]

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on every rank."""
        if self.group is None:
            return [text]
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


ALONE = Ranks(0, 1, None)  # one process: what it tells is all that is told


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
    size = ranks.size if ranks is not None else 1
    return restored is not None and len(restored.get("ranks") or [0]) == size


def join_ranks(environ: Mapping[str, str], state: Mapping[str, Any]) -> Ranks | None:
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
    group = dist.new_group(backend="gloo")
    atexit.register(_leave, group)
    return Ranks(dist.get_rank(), dist.get_world_size(), group, is_sharded(state))


def _leave(group: Any) -> None:
    """Before the interpreter ends: a thread of gloo that still lets go of a Python object then aborts the process
    ("terminate called without an active exception"), after all work was done. NCCL's groups are left alone."""
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group(None if dist.get_backend() == "gloo" else group)
    let_gloo_rest(_RESTS_WITHIN_S)


def let_gloo_rest(limit_s: float) -> None:
    """Until gloo's threads have let go of their last work: a script that has destroyed its groups itself leaves them
    running. While this thread sleeps, they get the lock of the interpreter."""
    num_calm, until_s = 0, time.monotonic() + limit_s
    while num_calm < 3 and time.monotonic() < until_s:
        time.sleep(0.005)
        found = [read_text(f"/proc/self/task/{tid}/stat") or "" for tid in list_numbers("/proc/self/task")]
        is_calm = all(stat.rpartition(") ")[2].startswith("S") for stat in found if _GLOO_THREAD in stat)
        num_calm = num_calm + 1 if is_calm else 0


def make_engine(ranks: Ranks | None, run: RunDir, settings: EngineSettings) -> Any:
    """The engine that saves all of the state, this rank's part of it, or nothing."""
    if ranks is None or (ranks.is_first and not ranks.is_sharded and ranks.machine is None):
        return CheckpointEngine(run, settings)
    if ranks.machine is None and not ranks.is_sharded:
        return Follower(run)
    token = ranks.from_first(secrets.token_hex(6))
    if not ranks.is_sharded and not ranks.is_leader:
        return Follower(run)
    members = ranks.machine.members if ranks.machine is not None else ()
    team = Team(token, ranks.rank, ranks.size, members) if ranks.is_sharded else None
    uploads = ranks.is_leader if ranks.is_sharded else ranks.is_first
    machine = Saved(ranks.machine, token) if ranks.machine is not None else None
    return CheckpointEngine(run, replace(settings, team=team, machine=machine, uploads=uploads))


def settings_for(ranks: Ranks, settings: Settings) -> Settings:
    """Without what only one process can do, such as training its first steps twice.

    `keep_best` goes by the numbers that rank 0 logs.
    """
    if ranks.is_first:
        return replace(settings, trial=False)
    is_verified = settings.verify and ranks.is_sharded  # all ranks save, or none
    return replace(settings, trial=False, verify=is_verified, memory_guard=False, keep_best=None)


def unwrapped(value: Any) -> Any:
    """The module inside DistributedDataParallel, so that a checkpoint loads with any number of ranks."""
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value


def is_sharded(state: Mapping[str, Any]) -> bool:
    """Whether every rank holds only a part of the state (FSDP2). Refuses wrappers whose parts have no names."""
    found = False
    for word, value in state.items():
        if not isinstance(value, torch.nn.Module):
            continue
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in value.modules()):
            raise UsageError(
                f"{word} is wrapped in FullyShardedDataParallel, which hides its parameters in flat ones",
                hint="use fully_shard(model) (FSDP2) or DistributedDataParallel",
            )
        for name, tensor in value.named_parameters():
            found = found or (is_distributed(tensor) and is_divided(tensor, f"{word}.{name}"))
    return found


def require_same_program(ranks: Ranks | None, fingerprint: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Refuse ranks that train different models, settings or code: what they exchange would be nonsense."""
    if ranks is None:
        return
    own = os.environ.get("JACKLINE_RUN_DIR")  # each machine of a job has a run of its own
    words = str(fingerprint["arguments"]["argv"]).split()
    argv = " ".join(word for word in words if not _is_rank_argument(word) and word != own)
    told = {
        _CODE: fingerprint["code"],
        "the arguments of": {"argv": argv},
        "the optimizer settings of": fingerprint["schedule"],
        "the parameters of": dict(places),
    }
    found = [json.loads(text) for text in ranks.gather(json.dumps(told, default=str))]
    for rank, other in enumerate(found):
        for kind, before in found[0].items():
            names = [name for name in {**before, **other[kind]} if before.get(name) != other[kind].get(name)]
            if kind == _CODE:  # rank 0 alone may import what draws its curves
                names = [name for name in names if name in before and name in other[kind]]
            if names:
                name = names[0]
                told_text = f"{_short(before.get(name))} on rank 0, {_short(other[kind].get(name))} on rank {rank}"
                raise UsageError(
                    f"{kind} rank {rank} differ from those of rank 0: {name}: {told_text}",
                    hint="start every rank with the same files, settings and arguments",
                )


_CODE = "the code of"


def _is_rank_argument(word: str) -> bool:
    return word.replace("_", "-").startswith(("--local-rank", "--node-rank"))


def _short(value: Any) -> str:
    return "nothing" if value is None else text if len(text := str(value)) <= 80 else text[:77] + "..."


# -- what a checkpoint has of each rank ----------------------------------------------------------------------------


def describe_ranks(ranks: Ranks, random: ProcessRandom) -> dict[str, Any]:
    """For rank 0's checkpoint: the RNG states of all ranks, and what else each of them has of its own."""
    told = ranks.gather(json.dumps(random.state_dict(), default=lambda one: {"hex": bytes(one).hex()}))
    states = [json.loads(text, object_hook=_with_bytes) for text in told]
    return {"ranks": states, **describe_replicas(ranks)}


def _with_bytes(found: dict[str, Any]) -> Any:
    return bytes.fromhex(found["hex"]) if set(found) == {"hex"} else found


def restore_rank(ranks: Ranks, random: ProcessRandom, session: Mapping[str, Any], step: int) -> str:
    """Give this rank its own RNG states back; text where they are new, because there were fewer ranks."""
    saved = session.get("ranks")
    if isinstance(saved, list) and len(saved) == ranks.size:
        random.load_state_dict(saved[ranks.rank])
        restore_replica(ranks, session)
        return ""
    before = len(saved) if isinstance(saved, list) else 1
    if not ranks.is_first:
        torch.manual_seed(mix(torch.initial_seed(), step, ranks.rank) >> 1)
        random.restored = None
    words = f"it was saved with {before} rank{'s' * (before > 1)} and resumes with {ranks.size}"
    return f"{words}: the batches stay the same, other random numbers (dropout) differ"


# -- loading and saving ---------------------------------------------------------------------------------------


def load_together(
    ranks: Ranks | None, engine: Any, into: MutableMapping[str, Any], *, step: int | None = None
) -> load.Receipt | None:
    """Rank 0 chooses the newest whole checkpoint (or that of `step`) and verifies it; every rank loads that one.

    When one rank cannot, none resumes: each of them raises. A process without ranks loads it alone.
    """
    members = tuple(range(ranks.size)) if ranks is not None else (0,)
    if ranks is not None and ranks.machine is not None:
        return load_apart(ranks, engine, into, step=step)
    if _has_parts(ranks, engine):  # machines had folders of their own when it was saved
        here = Machine(0, ((engine.run_name, members),))
        return load_apart(replace(ranks or ALONE, machine=here), engine, into, step=step)
    if ranks is None:
        found: load.Receipt | None = engine.load_newest(into, step=step)
        return found
    return _load_shared(ranks, engine, into, step)


def _load_shared(ranks: Ranks, engine: Any, into: MutableMapping[str, Any], step: int | None) -> load.Receipt | None:
    """From the folder that all ranks see."""
    receipt: load.Receipt | None = None
    problem: Exception | None = None
    if ranks.is_first:
        try:
            receipt = engine.load_newest(into, step=step)
        except Exception as error:
            problem = error
    told = ranks.from_first("" if receipt is None else str(receipt.name))
    if not ranks.is_first and (name := parse_name(told)) is not None:
        try:
            receipt = engine.load_newest(into, only=name)
        except Exception as error:
            problem = error
    texts = ranks.gather(_one_line(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text.strip():
            raise CannotResume(f"rank {rank} cannot resume: {text}", hint="that rank's own message says more")
    return receipt


def _has_parts(ranks: Ranks | None, engine: Any) -> bool:
    """Whether there is a checkpoint here, or only in the mirror, that has some of the ranks' parts alone."""
    is_first = ranks is None or ranks.is_first
    place = engine.settings.mirror if is_first and engine.settings.resume_from_mirror else None
    has = is_first and has_parts(engine.folder, engine.run_name, place)
    return has if ranks is None else bool(ranks.from_first("yes" if has else "").strip())


def _one_line(problem: Exception | None) -> str:
    return "" if problem is None else (str(problem).splitlines() or [type(problem).__name__])[0]


def save_together(attached: Any, save: Callable[..., bool], *, wait: Wait, again: bool, alone: bool) -> bool:
    """`save(wait, again)` on every rank at the same boundary. Of sharded state all ranks save, or none.

    `alone`: on this rank only, with the RNG states of the last common save.
    """
    ranks = attached.ranks
    if ranks is None or (alone and not ranks.is_sharded):
        return save(wait, again)
    if alone:
        return False  # a part is worth nothing without the others
    attached.of_ranks = describe_ranks(ranks, attached.rng_state)
    if not ranks.is_sharded:
        _compare_replicas(attached)
        return save(wait, again)
    saver, step = attached.saver, attached.stepper.steps_done
    is_stale = saver.last_step != step or again or attached.best.wants_save(step)
    flags = (ranks.is_first and is_stale, saver.engine.is_busy, bool(saver.why_off))
    is_wanted, is_busy, is_off = decide_save(attached, flags, is_last=wait != "never")
    saver.engine.save_number += 1
    if is_off:
        saver.turn_off("saving is off on another rank")
        return False
    if is_busy and wait == "never":
        saver.skip(step)
        return False
    if not is_wanted and not is_busy:
        return True
    is_saved = save(wait, True)
    copy_save(attached, is_last=wait != "never")
    return not ranks.agree(not is_saved)[0] if wait == "durable" else is_saved


def _compare_replicas(attached: Any) -> None:
    """With DDP all ranks must hold the same weights: rank 0's are saved. Tells once where they do not."""
    modules = [value for value in attached.saver.state.values() if isinstance(value, torch.nn.Module)]
    sums = [float(one.detach().sum(dtype=torch.float64)) for module in modules for one in module.parameters()]
    told = attached.ranks.gather(repr(sum(sums)))
    others = [rank for rank, text in enumerate(told) if text != told[0]]
    if others and not attached.ranks.is_told:
        attached.ranks.is_told.append(True)
        words = f"the weights of rank {others[0]} are not those of rank 0 ({told[others[0]]} and {told[0]} in sum)"
        text = f"{words}: the checkpoint has those of rank 0; gradients are not exchanged, or one rank changes alone"
        attached.reporter.event("replicas_differ", text, is_loud=attached.ranks.is_first)


def all_of(ranks: Ranks | None, is_done: bool) -> bool:
    """Whether every rank has done it. All ranks of sharded state call this."""
    return is_done if ranks is None or not ranks.is_sharded else not ranks.agree(not is_done)[0]
