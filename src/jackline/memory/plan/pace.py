"""How long a planned training takes and what it costs: sentences and numbers.

Owns the wording. `predict/work` owns the estimate of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jackline.memory.plan.choose import Plan
from jackline.units import format_duration

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Until:
    """How far a training goes, and the price of an hour of all its GPUs; 0 means unknown."""

    steps: int = 0
    price_an_hour: float = 0.0


def time_lines(made: Plan, until: Until) -> Iterator[str]:
    if made.time is None or made.fit == "no":
        return
    low, high = made.time.range_s
    waits = {"products": "matrix products", "memory": "memory traffic", "Python": "Python, which starts the kernels"}
    waits["the host"] = "copies from and to the host, and the update there"
    between = f"{_step_text(low)} to {_step_text(high)}"
    samples = made.samples_a_step / made.time.seconds
    yield (
        f"  a step takes about {_step_text(made.time.seconds)} ({between}),"
        f" most of it {waits[made.time.bound]}; {_rate_text(samples)} samples/s, without torch.compile"
    )
    steps = until.steps or (1000 if until.price_an_hour else 0)
    if steps:
        cost = f", {_money(made, until, steps)}" if until.price_an_hour else ""
        yield f"  {steps:,} steps: about {format_duration(made.time.seconds * steps)}{cost}"


def _step_text(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _money(made: Plan, until: Until, steps: int) -> str:
    assert made.time is not None
    one = steps / _HOUR_S * until.price_an_hour * made.gpu.count
    low, high = made.time.range_s
    return f"cost {made.time.seconds * one:,.2f} ({low * one:,.2f} to {high * one:,.2f})"


def time_json(made: Plan, until: Until) -> dict[str, Any]:
    if made.time is None:
        return {}
    hours = made.time.seconds * until.steps / _HOUR_S
    return {
        "step_s": made.time.seconds,
        "range_s": list(made.time.range_s),
        "bound": made.time.bound,
        "steps": until.steps,
        "hours": hours,
        "cost": hours * until.price_an_hour * made.gpu.count,
    }
