"""`jackline plan --fit "A100-80 x2, 24 h"`: what these GPUs can train, and how far in that time.

Owns the ways that are tried, the largest model, the longest sample and the tokens of each, and their wording.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jackline.errors import UsageError
from jackline.memory.fitting.change import Request, candidate_of, one_sample
from jackline.memory.plan.choose import for_a_rank
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.hub import is_config_target
from jackline.memory.plan.target import Candidate, load_candidates
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.job import Job
from jackline.memory.predict.step import replay, trace_step
from jackline.memory.predict.work import StepTime, estimate
from jackline.units import format_bytes, format_duration

_CHECKPOINTING = ("--gradient-checkpointing",)
_SHARDED = ("--parallel", "fsdp")
_LEAN = (*_CHECKPOINTING, "--optimizer", "adamw8bit", "--precision", "bf16-pure")
_ADAPTERS = (*_CHECKPOINTING, "--lora", "r=16,targets=all-linear")
_FOUR_BITS = (*_ADAPTERS, "--quantize", "nf4")
_LENGTH_STEP = 256
_LONGEST = 2**20
_TOKENS_A_WEIGHT = 20  # a training from scratch that makes good use of its compute
_MOST_SIZES = 3
_MOST_SAMPLES = 2**16
_MOST_TRIES = 6
# Shapes of public decoders: layers, width, heads, key-value heads, width between, vocabulary.
_DECODERS = {
    "70B": (80, 8192, 64, 8, 28672, 128_256),
    "32B": (64, 5120, 40, 8, 27648, 152_064),
    "14B": (48, 5120, 40, 8, 13824, 152_064),
    "8B": (32, 4096, 32, 8, 14336, 128_256),
    "3B": (28, 3072, 24, 8, 8192, 128_256),
    "1.2B": (16, 2048, 32, 8, 8192, 128_256),
    "0.5B": (24, 896, 14, 2, 4864, 152_064),
    "0.1B": (12, 768, 12, 12, 2048, 32_000),
}


@dataclass(frozen=True)
class Reached:
    """One way that fits. `largest_batch` is of one GPU at a time; rates are of all GPUs together."""

    name: str
    words: tuple[str, ...]
    parameters: int
    seq_len: int  # 0: samples have no length
    largest_batch: int
    longest: int  # tokens of the longest sample, one at a time; 0 where samples have no length
    reserved_bytes: int
    samples_a_s: float
    error: float  # of the rate

    @property
    def per_sample(self) -> int:
        return self.seq_len or 1


@dataclass(frozen=True)
class Goal:
    """What was asked. `seconds` 0: no time was given."""

    gpu: GpuModel
    seconds: float
    price_an_hour: float = 0.0

    @property
    def cost(self) -> float:
        return self.seconds / 3600 * self.price_an_hour * self.gpu.count


class Need(NamedTuple):
    """Of one step. `size` is what is allocated, above the budget where that does not fit."""

    size: int
    reserved: int
    time: StepTime


Needs = Callable[[int, int], Need]  # by samples, and tokens of each


def reach(request: Request, on_try: Callable[[str], None]) -> list[Reached]:
    """All ways that fit, the best first; empty where none does. Without a target: of public decoders."""
    if not request.target:
        return list(_decoders(request, on_try))
    if is_config_target(request.target):
        return list(_of_config(request, on_try))
    if ":" in request.target:
        candidate = candidate_of(request, ())
        on_try("one sample")
        return [_of_samples(request, candidate)] if one_sample(candidate, request)[1] == "fits" else []
    return list(_of_sizes(request, on_try))


def _of_config(request: Request, on_try: Callable[[str], None]) -> Iterator[Reached]:
    """As typed and with recomputation, on several GPUs also in shares. Only where none of these fits: with less
    precision, with adapters, with 4-bit weights."""
    found = 0
    for is_last_resort, way in _ways(request):
        if is_last_resort and found:
            return
        on_try(" ".join(way) or "the settings as given")
        try:
            candidate = candidate_of(request, way)
        except UsageError:
            if not way:
                raise
            continue  # this model has no such setting
        reached = _reached(request, candidate, way, _by_length(request, way, candidate))
        if reached is not None:
            found += 1
            yield reached


def _ways(request: Request) -> list[tuple[bool, tuple[str, ...]]]:
    """(whether it is a last resort, settings), without what a person has set."""
    shared: list[tuple[str, ...]] = [(), _SHARDED] if request.gpu.count > 1 else [()]
    ways = [(False, (*way, *more)) for way in shared for more in ((), _CHECKPOINTING)]
    last = [(*shared[-1], *_LEAN)] if request.gpu.has_bf16 else []
    ways += [(True, way) for way in (*last, _ADAPTERS, _FOUR_BITS)]
    given = {_name(word) for word in request.words}
    return [(last, way) for last, way in ways if not {_name(word) for word in way if word[:2] == "--"} & given]


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def _of_sizes(request: Request, on_try: Callable[[str], None]) -> Iterator[Reached]:
    """A recipe's sizes, the largest first; those beyond the third that fits say nothing new."""
    try:
        candidates = load_candidates(request.target, request.gpu, [*request.words, "model_size=auto"])
    except UsageError:
        candidates = load_candidates(request.target, request.gpu, request.words)
    found = 0
    for candidate in candidates:
        size = str(candidate.shown.get("model_size", candidate.job.name))
        on_try(size)
        words = (f"model_size={size}",) if "model_size" in candidate.shown else ()
        reached = _reached(request, candidate, words, _by_length(request, words, candidate))
        if reached is not None:
            found += 1
            yield replace(reached, name=size)
        if found == _MOST_SIZES:
            return


def _reached(request: Request, candidate: Candidate, words: tuple[str, ...], needs: Needs) -> Reached | None:
    """Lines through one and two samples say where to look; what is found is traced itself. None: it does not fit."""
    length, budget = _length(candidate), request.room.budget_bytes
    first = needs(1, length)
    if first.size > budget:
        return None
    tried = {1: first}

    def of_samples(samples: int) -> int:
        tried[samples] = needs(samples, length)
        return tried[samples].size

    batch = _largest(of_samples, _Axis(1, 2, 1, _MOST_SAMPLES), first.size, budget)
    chosen = tried[batch]
    axis = _Axis(length, length * min(batch, 2), _LENGTH_STEP, _LONGEST)
    longest = _largest(lambda tokens: needs(1, tokens).size, axis, first.size, budget) if length else 0
    count = candidate.shown.get("parameters")
    ranks = 1 if candidate.job.options.parallel == "tp" else request.gpu.count
    return Reached(
        name=" ".join(words) or "as given",
        words=words,
        parameters=count if isinstance(count, int) else 0,
        seq_len=length,
        largest_batch=batch,
        longest=longest,
        reserved_bytes=chosen.reserved,
        samples_a_s=batch * ranks / chosen.time.seconds,
        error=chosen.time.error,
    )


def _length(candidate: Candidate) -> int:
    length = candidate.shown.get("seq_len")
    return length if isinstance(length, int) else 0


@dataclass(frozen=True)
class _Axis:
    first: int  # this fits
    second: int  # tried next
    step: int
    most: int


def _largest(need: Callable[[int], int], axis: _Axis, first_bytes: int, budget: int) -> int:
    """The largest number that fits, within a step or a few percent: each try is where a line through the largest that
    fits and the last one tried meets the budget."""
    low, low_bytes, high = axis.first, first_bytes, axis.most + axis.step
    wanted = axis.second
    for _ in range(_MOST_TRIES):
        wanted = min(wanted - (wanted - axis.first) % axis.step, high - axis.step)
        if wanted <= low:
            break
        try:
            needed = need(wanted)
        except (UsageError, ValueError):  # more than the model can
            high = wanted
            continue
        line = low + int((wanted - low) * (budget - low_bytes) / max(1, needed - low_bytes))
        if needed <= budget:
            low, low_bytes = wanted, needed
            wanted = min(axis.most, max(line, low))
        else:
            high = wanted
            wanted = max(low + axis.step, min(line, (low + high) // 2))
    return low


def _by_length(request: Request, words: tuple[str, ...], first: Candidate) -> Needs:
    """What this target needs with samples of any length."""
    jobs = {_length(first): first.job}

    def needs(samples: int, length: int) -> Need:
        if length not in jobs:
            setting = ("--seq-len", str(length)) if is_config_target(request.target) else (f"seq_len={length}",)
            jobs[length] = candidate_of(request, (*words, *setting)).job
        return _needed(jobs[length], samples, request)

    return needs


def _needed(job: Job, samples: int, request: Request) -> Need:
    job = for_a_rank(job, request.gpu.count) if request.gpu.count > 1 else job
    trace = trace_step(job, samples, request.gpu, job.options, is_accumulating=False)
    budget, how = request.room.budget_bytes, job.options.is_expandable
    try:  # under the cap an allocator gives back what it does not use, so more fits than it would reserve
        found = replay(trace, samples, is_expandable=how, cap_bytes=budget)
        size = found.peak_allocated_bytes
    except ArenaFull:
        found = replay(trace, samples, is_expandable=how)
        size = max(budget + 1, found.peak_allocated_bytes)
    return Need(size, found.peak_reserved_bytes, estimate(trace, request.gpu))


def _of_samples(request: Request, candidate: Candidate) -> Reached:
    """A function of a person's own: samples have no length that could be changed."""
    found = _reached(request, candidate, (), lambda samples, _: _needed(candidate.job, samples, request))
    assert found is not None
    return found


# Without a target: public decoders.


def _decoders(request: Request, on_try: Callable[[str], None]) -> Iterator[Reached]:
    """For each way of training the largest that fits."""
    shared = _SHARDED if request.gpu.count > 1 else ()
    ways = {
        "all weights": (*shared, *_CHECKPOINTING),
        "LoRA": _ADAPTERS,
        "LoRA on 4 bits": _FOUR_BITS,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways.items():
            for size in _DECODERS:
                if _weights(size) * _BYTES_A_WEIGHT[name] > request.room.budget_bytes * _ranks(request, name):
                    continue
                on_try(f"{name}: {size}")
                asked = replace(request, target=_written(Path(folder), size))
                first = candidate_of(asked, way)
                reached = _reached(asked, first, way, _by_length(asked, way, first))
                if reached is not None:
                    yield replace(reached, name=f"{name}: {size}", parameters=_weights(size))
                    break


_BYTES_A_WEIGHT = {"all weights": 18.0, "LoRA": 2.1, "LoRA on 4 bits": 0.6}


def _ranks(request: Request, name: str) -> int:
    return request.gpu.count if name.startswith("all") else 1


def _weights(size: str) -> int:
    layers, width, heads, few, between, vocabulary = _DECODERS[size]
    attention = 2 * width * width + 2 * width * (width // heads) * few
    return layers * (attention + 3 * width * between) + 2 * vocabulary * width


def _written(folder: Path, size: str) -> str:
    layers, width, heads, few, between, vocabulary = _DECODERS[size]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": few,
        "intermediate_size": between,
        "vocab_size": vocabulary,
        "max_position_embeddings": _LONGEST,
    }
    place = folder / size
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


# Words.


def reach_text(found: Sequence[Reached], target: str, goal: Goal) -> str:
    gpus = goal.gpu.name if goal.gpu.count == 1 else f"{goal.gpu.count} x {goal.gpu.name}"
    time = f" in {format_duration(goal.seconds)}" if goal.seconds else ""
    what = f"{target} on" if target else "the largest decoders for"
    if not found:
        return f"{what} {gpus}: nothing fits, not even one sample at a time with 4-bit weights and adapters"
    lines = [f"{what} {gpus}{time}"]
    for one in found:
        lines += ["", *_lines(one, goal)]
    lines += ["", *_footnotes(found, target, goal)]
    return "\n".join(lines)


def _lines(one: Reached, goal: Goal) -> Iterator[str]:
    size = f", {one.parameters / 1e9:.3g} B parameters" if one.parameters else ""
    yield f"{one.name}{size}: {format_bytes(one.reserved_bytes)} reserved"
    each = " on each GPU" if goal.gpu.count > 1 else ""
    of = f" of {one.seq_len:,} tokens" if one.seq_len else ""
    yield f"  largest batch: {one.largest_batch:,} samples{of} at a time{each}"
    if one.longest:
        yield f"  longest sample: {one.longest:,} tokens, one at a time"
    rate, word = one.samples_a_s * one.per_sample, "tokens" if one.seq_len else "samples"
    low, high = rate * (1 - one.error), rate * (1 + one.error)
    yield f"  {_short(rate)} {word} a second ({_short(low)} to {_short(high)})"
    if goal.seconds:
        amounts = [_short(value * goal.seconds) for value in (rate, low, high)]
        yield f"  in {format_duration(goal.seconds)}: {amounts[0]} {word} ({amounts[1]} to {amounts[2]})"


def _footnotes(found: Sequence[Reached], target: str, goal: Goal) -> Iterator[str]:
    if goal.cost:
        yield f"cost: {goal.cost:,.2f} for {format_duration(goal.seconds)}"
    if not target:
        yield "shapes of public Llama and Qwen models; jackline plan hf:ORG/NAME --fit ... asks for one of your own"
        best = _from_scratch(goal, found)
        if best:
            yield best
    yield "time: eager PyTorch, data always ready; what GPUs send to each other is not counted"
    words = next((one.words for one in found if one.words), ())
    if target and words:
        gpus = f'"{goal.gpu.name} x{goal.gpu.count}"' if goal.gpu.count > 1 else goal.gpu.name
        yield f"to see more: jackline plan {target} --gpu {gpus} {' '.join(words)} --explain"


def _from_scratch(goal: Goal, found: Sequence[Reached]) -> str:
    """How large a model these tokens are worth: work is about weights x tokens, and tokens are 20 x weights."""
    whole = next((one for one in found if one.name.startswith("all weights:")), None)
    if whole is None or not goal.seconds or not whole.parameters:
        return ""
    work = whole.samples_a_s * whole.per_sample * goal.seconds * whole.parameters
    best = (work / _TOKENS_A_WEIGHT) ** 0.5
    return (
        f"from scratch, with {_TOKENS_A_WEIGHT} tokens a weight: about {best / 1e9:.2g} B weights on"
        f" {_short(_TOKENS_A_WEIGHT * best)} tokens in that time"
    )


def _short(number: float) -> str:
    for word, step in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= step:
            return f"{number / step:.3g}{word}"
    return f"{number:.3g}"


def reach_json(found: Sequence[Reached], target: str, goal: Goal) -> dict[str, Any]:
    ways = []
    for one in found:
        amount = one.samples_a_s * one.per_sample
        done = {"units_a_s": amount, "unit": "tokens" if one.seq_len else "samples", "units": amount * goal.seconds}
        ways.append(asdict(one) | done)
    gpus = {"gpu": goal.gpu.name, "num_gpus": goal.gpu.count, "seconds": goal.seconds, "cost": goal.cost}
    return {"target": target, **gpus, "ways": ways}
