"""`jackline plan --fit`: the smallest change of settings with which a training fits.

Owns the order of changes, what each costs, and the wording of the answer. A change is a list of words as a person
would type them, so the answer can be copied. Each is tried with one trace of one sample; the first that fits is
planned whole. What a person has set stays, except that samples become shorter when nothing else is left.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jackline.errors import UsageError
from jackline.memory.plan.choose import Fit, Plan, Room, for_a_rank, plan
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.hub import is_config_target
from jackline.memory.plan.target import Candidate, load_candidates
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.step import replay, trace_step
from jackline.units import format_bytes

_SHORTEST = 256
_LONGEST = 2**20

_CHECKPOINTING = ("--gradient-checkpointing",)
_EIGHT_BITS = ("--optimizer", "adamw8bit")
_PAGED = ("--optimizer", "paged-adamw8bit")
_SHARDED = ("--parallel", "fsdp")
_PURE = ("--precision", "bf16-pure")
_ADAPTERS = ("--lora", "r=16,targets=all-linear")
_FOUR_BITS = ("--quantize", "nf4")
_COSTS = {
    _CHECKPOINTING: "about a third more time",
    _EIGHT_BITS: "optimizer state in 8 bits; needs bitsandbytes",
    _PAGED: "optimizer state in host memory, slower updates; needs bitsandbytes",
    _SHARDED: "every layer is gathered from all GPUs in each pass",
    _PURE: "weights and sums in bf16: small updates are lost",
    _ADAPTERS: "only adapters are trained; needs peft",
    _FOUR_BITS: "frozen weights in 4 bits; needs bitsandbytes",
    ("recompute=true",): "about a third more time",
    ("loss_chunk_rows=2048",): "2 to 4 % more time",
}


@dataclass(frozen=True)
class Tried:
    """One set of changes. `reserved_bytes`: what one sample at a time needs; `words`: as typed."""

    words: tuple[str, ...]
    costs: tuple[str, ...]
    reserved_bytes: int
    fit: Fit


@dataclass(frozen=True)
class Fitted:
    """`made` is the plan of the last one tried; it does not fit only if nothing does."""

    tried: tuple[Tried, ...]
    candidate: Candidate
    made: Plan
    longest: int = 0  # tokens of the longest sample that fits, where that was asked

    @property
    def words(self) -> tuple[str, ...]:
        return self.tried[-1].words


@dataclass(frozen=True)
class Request:
    target: str
    gpu: GpuModel
    room: Room
    words: tuple[str, ...]


def find_fit(request: Request, on_try: Callable[[str], None]) -> Fitted:
    """Try changes until one fits. `on_try` is told what is tried."""
    tried: list[Tried] = []
    candidate: Candidate | None = None
    for change in _different(_changes(request), request.words):
        words = tuple(word for part in change for word in part)
        try:
            candidate = candidate_of(request, words)
        except UsageError:
            if not words:
                raise
            continue  # this target has no such setting
        on_try(" ".join(words) or "the settings as given")
        needed, fit = one_sample(candidate, request)
        costs = tuple(_COSTS.get(part, "text beyond it is cut off") for part in change)
        tried.append(Tried(words, costs, needed, fit))
        if fit == "fits":
            break
    assert candidate is not None
    on_try("the micro-batch")
    made = plan(candidate.job, request.gpu, room=request.room)
    longest = _longest(request, candidate, on_try) if made.fit == "fits" and len(tried) == 1 else 0
    return Fitted(tuple(tried), candidate, made, longest)


def _changes(request: Request) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Sets of changes, the cheapest first. Each set stands alone: adapters need no optimizer in 8 bits."""
    yield ()
    if not is_config_target(request.target):
        yield from _own_changes(request)
        return
    many = request.gpu.count > 1
    sharded = (_SHARDED,) if many else ()
    yield (_CHECKPOINTING,)
    if many:
        yield (_SHARDED,)
    yield (*sharded, _CHECKPOINTING)
    yield (*sharded, _CHECKPOINTING, _EIGHT_BITS)
    yield (*sharded, _CHECKPOINTING, _PAGED)
    if request.gpu.has_bf16:
        yield (*sharded, _CHECKPOINTING, _EIGHT_BITS, _PURE)
    yield (_ADAPTERS,)
    yield (_ADAPTERS, _CHECKPOINTING)
    yield (_ADAPTERS, _FOUR_BITS, _CHECKPOINTING)
    yield from _shorter(request, (_ADAPTERS, _FOUR_BITS, _CHECKPOINTING), "--seq-len")


def _different(
    changes: Iterator[tuple[tuple[str, ...], ...]], typed: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Without what a person has set, and each only once."""
    given = {_name(word) for word in typed} - {"seq_len"}
    seen = set()
    for change in changes:
        left = tuple(part for part in change if _name(part[0]) not in given)
        if left not in seen:
            seen.add(left)
            yield left


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _own_changes(request: Request) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Of a recipe, or of a function in a file."""
    if ":" in request.target:
        yield (("--precision", "bf16"),)
        yield (_EIGHT_BITS,)
        yield (_PAGED,)
        return
    yield (("loss_chunk_rows=2048",),)
    yield (("recompute=true",),)
    both = (("loss_chunk_rows=2048",), ("recompute=true",))
    yield both
    yield from _shorter(request, both, "seq_len=")


def _shorter(request: Request, rest: tuple[tuple[str, ...], ...], name: str) -> Iterator[tuple[tuple[str, ...], ...]]:
    shown = candidate_of(request, tuple(word for part in rest for word in part)).shown
    length = shown.get("seq_len")
    while isinstance(length, int) and length // 2 >= _SHORTEST:
        length //= 2
        yield (*rest, (f"{name}{length}",) if name.endswith("=") else (name, str(length)))


def candidate_of(request: Request, words: tuple[str, ...]) -> Candidate:
    """The smallest, where a recipe offers several sizes."""
    return load_candidates(request.target, request.gpu, [*request.words, *words])[-1]


def one_sample(candidate: Candidate, request: Request) -> tuple[int, Fit]:
    """What a step needs with one sample at a time, which is the least."""
    job = for_a_rank(candidate.job, request.gpu.count) if request.gpu.count > 1 else candidate.job
    trace = trace_step(job, 1, request.gpu, job.options, is_accumulating=job.global_batch > 1)
    found = replay(trace, 1, is_expandable=job.options.is_expandable)
    caps: tuple[tuple[int, Fit], ...] = ((request.room.budget_bytes, "fits"), (request.room.limit_bytes, "tight"))
    for cap, fit in caps:
        try:
            replay(trace, 1, is_expandable=job.options.is_expandable, cap_bytes=cap)
        except ArenaFull:
            continue
        return found.peak_reserved_bytes, fit
    return found.peak_reserved_bytes, "no"


def _longest(request: Request, candidate: Candidate, on_try: Callable[[str], None]) -> int:
    """Twice as long as long as one sample fits; 0 where samples have no length, or the one given is the longest."""
    length = candidate.shown.get("seq_len")
    if not isinstance(length, int):
        return 0
    name = ("--seq-len", "") if is_config_target(request.target) else ("", "seq_len=")
    found = length
    while 2 * found <= _LONGEST:
        words = tuple(word for word in (name[0], f"{name[1]}{2 * found}") if word)
        on_try(" ".join(words))
        try:
            if one_sample(candidate_of(request, words), request)[1] != "fits":
                break
        except (UsageError, ValueError):  # longer than the model can
            break
        found *= 2
    return found if found > length else 0


def fit_text(found: Fitted, target: str, typed: Sequence[str], gpu: str) -> str:
    """What was tried, then the line to type."""
    lines = []
    for one in found.tried:
        words = " ".join(one.words) or "as given"
        lines.append(f"  {format_bytes(one.reserved_bytes):>10}  {_WORDS[one.fit]:<12} {words}")
    head = "what one sample at a time would reserve:"
    last = found.tried[-1]
    if found.made.fit == "no":
        rest = [*lines, "nothing that Jackline knows makes it fit: a smaller model, or more or larger GPUs"]
        return "\n".join([head, *rest])
    if not last.words:
        more = f"samples of up to {found.longest:,} tokens fit, one at a time" if found.longest else ""
        return "\n".join([head, *lines, "no change is needed", *([more] if more else [])])
    lines.append("the change that fits, and what it costs:")
    lines += [f"  {' '.join(part)}: {cost}" for part, cost in zip(_parts(last.words), last.costs, strict=True)]
    quoted = shlex.join([target, "--gpu", gpu, *typed, *last.words] if gpu else [target, *typed, *last.words])
    lines.append(f"settings: {shlex.join(last.words)}")
    lines.append(f"to see more: jackline plan {quoted} --explain")
    return "\n".join([head, *lines])


def _parts(words: Sequence[str]) -> list[tuple[str, ...]]:
    """'--optimizer adamw8bit' is one part, '--gradient-checkpointing' another."""
    parts: list[tuple[str, ...]] = []
    for word in words:
        if parts and parts[-1] != _CHECKPOINTING and parts[-1][0].startswith("--") and not word.startswith("--"):
            parts[-1] = (*parts[-1], word)
        else:
            parts.append((word,))
    return parts


_WORDS = {"fits": "fits", "tight": "tight", "no": "does not fit"}
