"""The settings of a session, and telling them apart from the objects to be saved.

`attach` takes both as keywords. A misspelt setting would silently become a value to save, so plain values whose name
looks like a setting are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from jackline.checkpoint.schedule import Cadence
from jackline.checkpoint.writer.retention import Keep
from jackline.errors import UsageError
from jackline.rundir.layout import DISK_BUDGET_VARIABLE
from jackline.settings import above, at_least, declare, setting, settings_of, validate
from jackline.units import parse_bytes, parse_duration

Verdict = Literal["refuse", "warn", "continue"]
VERDICTS: tuple[Verdict, ...] = ("refuse", "warn", "continue")
USE_NEW = "use new"  # for a setting of the optimizers: take the program's value, not the saved one
# What a change means by default: with other data the position is meaningless, other arguments mean another run; the
# rest may be what the user wants.
DEFAULT_VERDICTS: dict[str, Verdict] = {
    "data": "refuse",
    "code": "warn",
    "arguments": "refuse",
    "schedule": "warn",
    "versions": "warn",
}
_RUN, _SAVING, _PLACES, _RESUMING = "run", "saving", "places", "resuming"  # groups
MIRROR_VARIABLE, PATIENCE_VARIABLE = "JACKLINE_MIRROR", "JACKLINE_MIRROR_PATIENCE"
RESERVED = ("session", "random", "values")


@dataclass(frozen=True)
class Settings:
    """Keywords of `attach` that are not objects. None: not set, or chosen for you."""

    name: str | None = setting(
        None, "Name of the run; None: the script's name and a hash of its arguments.", group=_RUN
    )
    new: bool = setting(False, "Start another run instead of resuming.", group=_RUN)
    runs_dir: str | None = setting(None, "Where runs are kept; None: $JACKLINE_RUNS or ./runs.", group=_RUN)
    save_every_steps: int | None = setting(
        None, "Steps between checkpoints.", unit="steps", allowed=above(0), group=_SAVING
    )
    save_every_s: float | None = setting(
        None,
        "Time between checkpoints; both None: as often as costs under 0.5 % of the time.",
        unit="seconds",
        allowed=above(0),
        group=_SAVING,
    )
    keep_last: int = setting(
        3, "Newest checkpoints to keep; two are kept in any case.", allowed=at_least(1), group=_SAVING
    )
    keep_every: int | None = setting(
        None,
        "Keep checkpoints of steps that are multiples of this.",
        unit="steps",
        allowed=at_least(1),
        group=_SAVING,
    )
    keep_best: str | None = setting(
        None, "Keep the best by this logged number: 'loss' (low is good), '+accuracy' (high is good).", group=_SAVING
    )
    disk_budget: int | None = setting(
        None,
        "Most disk space for this run's folder: checkpoints, logs, caches. A save that would pass it is refused.",
        unit="bytes",
        allowed=above(0),
        group=_PLACES,
    )
    mirror: str | None = setting(
        None, "Second place for checkpoints: a folder or URL; `jackline run --mirror` replaces it.", group=_PLACES
    )
    mirror_patience_s: float = setting(
        600.0,
        "How long a finished run waits for its last upload while no byte moves; then it ends and can be resumed.",
        unit="seconds",
        allowed=at_least(0),
        group=_PLACES,
    )
    leave_out_frozen: bool = setting(
        False, "Name parameters that do not train by their hash instead of storing them.", group=_SAVING
    )
    accumulate: int | None = setting(
        None,
        "Batches to a step, when the optimizers cannot tell.",
        unit="batches",
        allowed=at_least(1),
        group=_RESUMING,
    )
    seed: int | None = setting(None, "Seed of data order and augmentation; None: torch's own.", group=_RESUMING)
    seekable: bool = setting(
        True, "Rebuild a plain DataLoader with an order that resumes at any batch at once.", group=_RESUMING
    )
    keyed_random: bool = setting(True, "Random augmentation depends on (seed, epoch, index) alone.", group=_RESUMING)
    exact: bool = setting(
        False, "Resume bit-exactly on a GPU too: deterministic kernels, no autotuning.", group=_RESUMING
    )
    on_change: str | Mapping[str, str] = field(
        default_factory=dict,
        metadata=declare(
            "After a change: 'refuse', 'warn' or 'continue', for all or by kind ('data' ...); {'lr': 'use new'}.",
            group=_RESUMING,
        ),
    )
    verify: bool = setting(True, "Save, load and compare once before step 1.", group=_SAVING)
    trial: bool = setting(
        True, "Train the first two steps twice, in a copy of the process, and compare (on the CPU).", group=_SAVING
    )
    overlap: bool = setting(
        False,
        "Copy beside the next step: you promise that only optimizer.step() changes what is saved.",
        group=_SAVING,
    )
    grace_s: float = setting(
        30.0, "How long saving and stopping may take, when nobody else says.", unit="seconds", group=_SAVING
    )
    wait_for_disk_s: float = setting(
        600.0,
        "How long a run that is done waits when the disk refuses its last save; then it exits with 75, resumable.",
        unit="seconds",
        allowed=at_least(0),
        group=_PLACES,
    )
    memory_guard: bool = setting(
        True, "Save and exit before the host's memory is full, to resume with less.", group=_RESUMING
    )

    replay_every: int | None = setting(
        None,
        "Do a step of safe_step again every so many steps, and when its loss is strange, to tell machine from data.",
        unit="steps",
        allowed=at_least(1),
        group=_RUN,
    )
    on_spike: Literal["continue", "rewind"] = setting(
        "continue",
        "After a jump of the logged loss: rewind goes back and leaves those batches out, at most three times.",
        group=_RUN,
    )

    def __post_init__(self) -> None:
        validate(self)
        self.verdicts()

    def with_supervisor(self, environ: Mapping[str, str]) -> Settings:
        """The mirror that was given to `jackline run`, which reaches the command through its environment."""
        place, patience = environ.get(MIRROR_VARIABLE), environ.get(PATIENCE_VARIABLE)
        return replace(
            self,
            mirror=place or self.mirror,
            mirror_patience_s=float(patience) if place and patience else self.mirror_patience_s,
        )

    def cadence(self) -> Cadence:
        return Cadence(self.save_every_steps, self.save_every_s)

    def keep(self) -> Keep:
        return Keep(self.keep_last, self.keep_every, self.keep_best)

    def budget(self, environ: Mapping[str, str]) -> int | None:
        """The disk budget: ours or that of `jackline run --disk-budget`, whichever is smaller."""
        word = environ.get(DISK_BUDGET_VARIABLE, "")
        wishes = [self.disk_budget, int(word) if word.isdigit() else None]
        return min((wish for wish in wishes if wish), default=None)

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict for each kind of change."""
        wish = self.on_change
        wanted = dict.fromkeys(DEFAULT_VERDICTS, wish) if isinstance(wish, str) else dict(wish)
        found = dict(DEFAULT_VERDICTS)
        for kind, given in wanted.items():
            verdict = "continue" if given == "go on" else given
            if verdict == USE_NEW and kind not in DEFAULT_VERDICTS:
                continue  # the name of an optimizer's setting, which is checked where the optimizers are known
            if kind not in DEFAULT_VERDICTS:
                raise UsageError(
                    f"on_change knows no '{kind}'",
                    hint=f"there are {', '.join(map(repr, DEFAULT_VERDICTS))}, and 'use new' for 'lr' and the like",
                )
            if verdict not in VERDICTS:
                raise UsageError(
                    f"on_change = {verdict!r} is not a verdict", hint="use 'refuse', 'warn' or 'continue'"
                )
            found[kind] = next(word for word in VERDICTS if word == verdict)
        return found

    def used_new(self) -> set[str]:
        """Settings of the optimizers of which the program's value is wanted, not the saved one."""
        wish = {} if isinstance(self.on_change, str) else self.on_change
        return {word for word, verdict in wish.items() if verdict == USE_NEW and word not in DEFAULT_VERDICTS}


def split(given: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Split the keywords of `attach` into settings and state."""
    names = [entry.name for entry in fields(Settings)]
    settings = Settings(**{word: _read(word, value) for word, value in given.items() if word in names})
    state = {word: value for word, value in given.items() if word not in names}
    for word, value in state.items():
        if word in RESERVED:
            raise UsageError(f"'{word}' is a part that Jackline saves itself", hint="choose another name")
        if isinstance(value, bool | int | float | str | None):
            _refuse_misspelt(word, names)
    return settings, state


def _read(name: str, value: Any) -> Any:
    """A size or a duration may be given as text: '20G', '15m'."""
    unit = settings_of(Settings)[name].declared.unit
    if not isinstance(value, str) or unit not in ("bytes", "seconds"):
        return value
    return parse_bytes(value) if unit == "bytes" else parse_duration(value)


def _refuse_misspelt(word: str, names: list[str]) -> None:
    from difflib import get_close_matches

    near = get_close_matches(word, names, n=1, cutoff=0.75)
    if near:
        raise UsageError(
            f"unknown setting '{word}'",
            hint=f"did you mean '{near[0]}'? A value to be saved needs a name less like a setting",
        )
