"""A plan as text and as JSON. Text for people has one idea a line and names the units.

Owns the wording of plans and tables of plans. `oom_report` owns the report after an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jackline.memory.plan.cards import Card
from jackline.memory.plan.choose import Plan, Saving
from jackline.units import format_bytes

_PART_WORDS = {
    "weights": "weights",
    "weight_copies": "weights again, in low precision",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations kept for backward",
    "logits": "logits and loss",
    "temporaries": "temporaries",
    "workspace": "cuBLAS workspace",
    "measured": "measured as a whole",
    "fragmentation": "reserved but unused (fragmentation)",
    "context": "CUDA context and driver",
}
_PRECISION_WORDS = {
    "fp32": "float32",
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast with a scaler",
    "bf16-weights": "bf16 weights with a float32 master",
}
_NUM_FIXES = 3
_WORTH_A_LINE = 2**20


def plan_text(made: Plan, shown: Mapping[str, object], *, is_explaining: bool = False) -> str:
    """The choice and whether it fits; with `is_explaining` also where the bytes go and what would save some."""
    lines = [f"{made.job} on {made.card.name}: {_verdict(made)}", *_choice(made, shown), _peaks(made)]
    lines += [f"note: {note}" for note in made.notes]
    if is_explaining:
        lines += ["", *_parts(made), "", *_savings(_useful(made))]
    elif made.fit != "fits":
        lines += [*_savings(_useful(made)[:_NUM_FIXES])]
    return "\n".join(lines)


def _verdict(made: Plan) -> str:
    if made.fit == "fits":
        return "fits"
    if made.fit == "tight":
        return "tight: it fits only with nothing to spare"
    return "does not fit, not even one sample at a time"


def _choice(made: Plan, shown: Mapping[str, object]) -> Iterator[str]:
    times = "once" if made.accumulation == 1 else f"{made.accumulation} times"
    yield (
        f"  batch {made.global_batch} = micro-batch {made.micro_batch}, accumulated {times}"
        f" (up to {made.max_micro_batch} would fit)"
    )
    yield f"  precision {_PRECISION_WORDS[made.options.precision]}"
    settings = ", ".join(f"{key}={value}" for key, value in shown.items())
    if settings:
        yield f"  {settings}"


def _peaks(made: Plan) -> str:
    allocated, reserved = made.prediction.peak_allocated_bytes, made.prediction.peak_reserved_bytes
    return (
        f"  peak {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved,"
        f" {format_bytes(made.device_bytes)} of {format_bytes(made.card.usable_bytes)} in nvidia-smi"
    )


def _parts(made: Plan) -> Iterator[str]:
    yield f"where it goes at the peak, in {_phase(made.prediction.peak_phase)}:"
    parts = made.parts()
    total = max(1, made.device_bytes)
    for part, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= _WORTH_A_LINE:
            yield f"  {format_bytes(size):>10}  {100 * size / total:4.0f} %  {_PART_WORDS.get(part, part)}"
    free = made.card.usable_bytes - made.device_bytes
    yield (
        f"  {format_bytes(free):>10}          free" if free >= 0 else f"  {format_bytes(-free):>10}          too much"
    )


def _phase(phase: str) -> str:
    return {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the update"}.get(
        phase, phase
    )


def _useful(made: Plan) -> tuple[Saving, ...]:
    return tuple(saving for saving in made.savings if saving.saved_bytes > 0)


def _savings(savings: tuple[Saving, ...]) -> Iterator[str]:
    if not savings:
        yield "nothing Jackline knows would save more"
        return
    yield "what would save memory, cheapest first:"
    for saving in savings:
        fitting = (
            f"micro-batch {saving.max_micro_batch} would fit" if saving.max_micro_batch else "still does not fit"
        )
        yield f"  {format_bytes(saving.saved_bytes):>10}  {saving.name} (price: {saving.price}; {fitting})"


def plan_json(made: Plan, shown: Mapping[str, object]) -> dict[str, Any]:
    peak = made.prediction
    return {
        "job": made.job,
        "card": made.card.name,
        "card_bytes": made.card.usable_bytes,
        "fit": made.fit,
        "global_batch": made.global_batch,
        "micro_batch": made.micro_batch,
        "accumulation": made.accumulation,
        "max_micro_batch": made.max_micro_batch,
        "precision": made.options.precision,
        "peak_allocated_bytes": peak.peak_allocated_bytes,
        "peak_reserved_bytes": peak.peak_reserved_bytes,
        "device_bytes": made.device_bytes,
        "peak_phase": peak.peak_phase,
        "parts": made.parts(),
        "savings": [asdict(saving) for saving in made.savings],
        "settings": dict(shown),
        "notes": list(made.notes),
    }


def table_text(cells: Mapping[tuple[str, int, str], str], cards: list[Card]) -> str:
    """Rows are size and batch, columns are GPUs. `cells` maps (size, batch, GPU) to the word in its cell."""
    rows = list(dict.fromkeys((size, batch) for size, batch, _ in cells))
    width = max(8, *(len(card.name) for card in cards), *(len(cell) for cell in cells.values()))
    head = f"{'size':<10} {'batch':>5}  " + "  ".join(f"{card.name:>{width}}" for card in cards)
    lines = [head]
    for size, batch in rows:
        words = "  ".join(f"{cells[size, batch, card.name]:>{width}}" for card in cards)
        lines.append(f"{size:<10} {batch:>5}  {words}")
    lines.append(
        "fits: the whole batch at once; at N: in micro-batches of N; tight: nothing to spare; no: not at all"
    )
    return "\n".join(lines)
