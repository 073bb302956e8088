"""What a person may decide about a session, and telling those words from the objects to be saved.

`attach` takes both as keywords. A misspelt setting would silently become a value to save, so plain values whose name
looks like a setting are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jackline.checkpoint.schedule import Cadence
from jackline.checkpoint.writer.retention import Keep
from jackline.errors import UsageError

Verdict = Literal["refuse", "warn", "go on"]
VERDICTS: tuple[Verdict, ...] = ("refuse", "warn", "go on")
# What a change means by default: other data make the position meaningless, other arguments are another run; the rest
# may be what the person wants.
DEFAULT_VERDICTS: dict[str, Verdict] = {
    "data": "refuse",
    "code": "warn",
    "arguments": "refuse",
    "schedule": "warn",
    "versions": "warn",
}
RESERVED = ("session", "random", "values")


@dataclass(frozen=True)
class Settings:
    """Keywords of `attach` that are not objects.

    name, new, runs_dir     which run this is; without a name it is the script's and a hash of its arguments
    save_every_steps, _s    neither: automatic, as often as costs under 0.5 %
    keep_last, _every, _best  see checkpoints; keep_best='loss' (low is good) or '+accuracy'
    leave_out_frozen        parameters that do not train are named by their hash instead of stored
    accumulate              batches to a step, when the optimizers cannot tell
    seed                    of the data order and the augmentation; None: torch's own
    seekable                rebuild a plain DataLoader with an order that can be seeked
    keyed_random            random augmentation depends on (seed, epoch, index) alone
    exact                   bit-exact on a GPU too: deterministic kernels, no autotuning
    on_change               'refuse', 'warn' or 'go on', for all or for {'data', 'code', 'arguments', 'schedule',
                            'versions'}
    prove                   save, load and compare once before step 1
    overlap                 a promise: a step changes parameters and optimizer state in optimizer.step() alone, or
                            calls run.before_change() first. The copy then runs beside forward and backward. Without
                            it a save holds the state of its boundary whatever the loop does
    grace_s                 how long a polite end may take, when nobody else says
    memory_guard            save and leave before the host's memory is full, to go on with less
    """

    name: str | None = None
    new: bool = False
    runs_dir: str | None = None
    save_every_steps: int | None = None
    save_every_s: float | None = None
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: str | None = None
    mirror: str | None = None
    leave_out_frozen: bool = False
    accumulate: int | None = None
    seed: int | None = None
    seekable: bool = True
    keyed_random: bool = True
    exact: bool = False
    on_change: str | Mapping[str, str] = field(default_factory=dict)
    prove: bool = True
    overlap: bool = False
    grace_s: float = 30.0
    memory_guard: bool = True

    def __post_init__(self) -> None:
        self.cadence()
        self.keep()
        self.verdicts()
        if self.accumulate is not None and self.accumulate < 1:
            raise UsageError(f"accumulate = {self.accumulate} is not a number of batches", hint="1 or more")

    def cadence(self) -> Cadence:
        return Cadence(self.save_every_steps, self.save_every_s)

    def keep(self) -> Keep:
        return Keep(self.keep_last, self.keep_every, self.keep_best)

    def verdicts(self) -> dict[str, Verdict]:
        """What follows from each kind of change."""
        wish = self.on_change
        wanted = dict.fromkeys(DEFAULT_VERDICTS, wish) if isinstance(wish, str) else dict(wish)
        found = dict(DEFAULT_VERDICTS)
        for kind, verdict in wanted.items():
            if kind not in DEFAULT_VERDICTS:
                raise UsageError(
                    f"on_change knows no '{kind}'", hint=f"there are {', '.join(map(repr, DEFAULT_VERDICTS))}"
                )
            if verdict not in VERDICTS:
                raise UsageError(f"on_change = {verdict!r} is not a verdict", hint="use 'refuse', 'warn' or 'go on'")
            found[kind] = next(word for word in VERDICTS if word == verdict)
        return found


def split(given: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """The settings and the state out of the keywords of `attach`."""
    names = [entry.name for entry in fields(Settings)]
    settings = Settings(**{word: value for word, value in given.items() if word in names})
    state = {word: value for word, value in given.items() if word not in names}
    for word, value in state.items():
        if word in RESERVED:
            raise UsageError(f"'{word}' is a part that Jackline saves itself", hint="choose another name")
        if isinstance(value, bool | int | float | str | None):
            _refuse_misspelt(word, names)
    return settings, state


def _refuse_misspelt(word: str, names: list[str]) -> None:
    from difflib import get_close_matches

    near = get_close_matches(word, names, n=1, cutoff=0.75)
    if near:
        raise UsageError(
            f"unknown setting '{word}'",
            hint=f"did you mean '{near[0]}'? A value to be saved needs a name less like a setting",
        )
