"""Which checkpoints may be deleted. A pure decision; the writer acts on it.

No setting can break this rule: the last two good checkpoints stay, and nothing is deleted because of a newer one that
was not read back and found whole. The one exception is a disk budget that cannot hold three: then one good checkpoint
stays, and the best.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jackline.checkpoint.format.manifest import Name, Rewind, is_left_behind
from jackline.errors import UsageError
from jackline.immutable import immutable

ALWAYS_KEPT = 2
KEPT_IN_BUDGET = 1  # where a disk budget would leave no room for the next save


@immutable
class Keep:
    """What to keep besides the last two good ones.

    `last`: that many newest. `every`: steps that are multiples of it, for ever. `best`: the metric whose best
    checkpoint is kept, e.g. 'loss' (lower is better) or '+accuracy' (higher is better).
    """

    last: int = 3
    every: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"keep_last = {self.last} keeps nothing", hint="2 or more; two are kept in any case")
        if self.every is not None and self.every < 1:
            raise UsageError(f"keep_every = {self.every} is not a number of steps", hint="1 or more, or leave it out")


def checkpoints_to_delete(
    names: Sequence[Name],
    *,
    good: Collection[Name],
    keep: Keep,
    best: Collection[Name] = (),
    unread: Collection[Name] = (),
    least: int = ALWAYS_KEPT,
) -> list[Name]:
    """Oldest first. `good` are those that were read back and found whole; `best` stay whatever their age.

    Without two good ones (`least`) nothing is deleted at all. One newer than the second newest good one is never
    deleted, whatever its state: it may be the one that is being verified. `unread` are those that may turn out to be
    good: the newest of them are not deleted in favour of older good ones.
    """
    verified = sorted(set(good) & set(names), reverse=True)
    if len(verified) < least:
        return []
    num_kept = max(keep.last, least)
    hopeful = sorted({*verified, *unread}, reverse=True)
    kept = {*verified[:num_kept], *hopeful[:num_kept]}
    oldest_safe = verified[least - 1]
    return sorted(
        name
        for name in names
        if name < oldest_safe
        and name not in kept
        and name not in best
        and not (keep.every and name.step % keep.every == 0)
    )


def left_behind_to_delete(
    there: Iterable[Name], *, rewinds: Collection[Rewind], deleted_here: Collection[Name], confirmed: Name | None
) -> list[Name]:
    """Of those in a mirror that a rewind left behind, the ones that may be deleted there, oldest first.

    A person deletes what was left behind and the mirror follows, but only when the new line has one there that is
    `confirmed` (the newest of the line, or None). One that is still here, or never was here, stays there too.
    """
    replaced = [rewind for rewind in rewinds if confirmed is not None and confirmed.step > rewind.step]
    return sorted({name for name in there if name in deleted_here and is_left_behind(name, replaced)})


def best_checkpoint(metrics: Mapping[Name, Mapping[str, float]], metric: str | None) -> Name | None:
    """The checkpoint with the best value of `metric`; of equals the oldest. None when no checkpoint has it."""
    if metric is None:
        return None
    is_high_good, key = metric.startswith("+"), metric.removeprefix("+")
    known = {name: values[key] for name, values in metrics.items() if key in values}
    if not known:
        return None
    return min(known, key=lambda name: (-known[name] if is_high_good else known[name], name))


def best_to_keep(
    metrics: Mapping[Name, Mapping[str, float]], metric: str | None, good: Collection[Name]
) -> list[Name]:
    """The best that was read back and found whole; before it, if any, a better one that is not read back yet."""
    whole = {name: values for name, values in metrics.items() if name in good}
    found = (best_checkpoint(metrics, metric), best_checkpoint(whole, metric))
    return list(dict.fromkeys(name for name in found if name is not None))
