"""Two runs beside each other: what they were made of, and the first step at which their numbers part. Pure.

Numbers that are equal to the last bit are the strongest statement; where they part, the noise between replicates of
the same run tells whether the difference means anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jackline.immutable import immutable
from jackline.review.facts import SECTIONS, Facts

WINDOW = 25  # reports of which the mean is compared where no bit-equality can be expected
LEAST_RELATIVE = 0.01
Values = Mapping[float, float]  # step -> value


@immutable
class Difference:
    section: str
    name: str
    one: str | None  # None: only the other has it
    other: str | None


@immutable
class Parting:
    """How the values of one metric compare. `equal_until`: the last step up to which they are equal to the bit.

    `parts_at`: the first step from which they differ by more than the noise (or by 1 % without replicates).
    """

    metric: str
    num_common: int
    equal_until: float | None
    first_unequal: float | None
    parts_at: float | None
    one_last: float | None
    other_last: float | None
    noise: float | None


def differences(one: Facts, other: Facts) -> list[Difference]:
    found: list[Difference] = []
    for section in SECTIONS:
        here, there = one.get(section, {}), other.get(section, {})
        if section in ("packages", "settings", "data", "training") and not (here and there):
            continue  # a section that one of them did not record says nothing
        found += (
            Difference(section, name, here.get(name), there.get(name))
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        )
    return found


def part(metric: str, one: Values, other: Values, replicates: Sequence[Values] = ()) -> Parting:
    """`replicates`: the same metric of other runs that were started like `one`."""
    steps = sorted({*one} & {*other})
    unequal = [step for step in steps if not _same(one[step], other[step])]
    first = unequal[0] if unequal else None
    before = [step for step in steps if first is None or step < first]
    noise = _noise(one, replicates)
    return Parting(
        metric=metric,
        num_common=len(steps),
        equal_until=before[-1] if before else None,
        first_unequal=first,
        parts_at=_parts_at(one, other, steps, noise, first) if first is not None else None,
        one_last=one[steps[-1]] if steps else None,
        other_last=other[steps[-1]] if steps else None,
        noise=noise,
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _noise(one: Values, replicates: Sequence[Values]) -> float | None:
    """The largest difference of window means between `one` and its replicates."""
    gaps = []
    for replicate in replicates:
        steps = sorted({*one} & {*replicate})
        gaps += [abs(a - b) for _, a, b in _means(one, replicate, steps)]
    return max(gaps) if gaps else None


def _parts_at(one: Values, other: Values, steps: Sequence[float], noise: float | None, first: float) -> float | None:
    """The first step from which the means stay apart to the end, or at which one of them is not a number. Not before
    `first`, where they are first unequal: a window may begin earlier."""
    since = None
    for step, a, b in _means(one, other, steps):
        if math.isnan(a) != math.isnan(b):
            return max(step, first)
        least = noise * 1.5 if noise is not None else LEAST_RELATIVE * max(abs(a), abs(b))
        is_apart = abs(a - b) > least
        since = (step if since is None else since) if is_apart else None
    return max(since, first) if since is not None else None


def _means(one: Values, other: Values, steps: Sequence[float]) -> list[tuple[float, float, float]]:
    """Means of windows of equal length; few common steps are compared one by one."""
    size = WINDOW if len(steps) >= 4 * WINDOW else 1
    found = []
    for start in range(0, len(steps) - size + 1, size):
        window = steps[start : start + size]
        found.append((window[0], sum(one[s] for s in window) / size, sum(other[s] for s in window) / size))
    return found
