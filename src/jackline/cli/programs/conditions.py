"""What `jackline wait` waits for: conditions as typed, and whether one of them holds. Pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches

from jackline.errors import UsageError
from jackline.immutable import immutable

OVER = ("finished", "stopped", "dead")
# word -> what it waits for; also the text of the guide.
WORDS = {
    "ended": "the run is over, however it ended",
    "finished": "it ended with exit code 0",
    "stopped": "it was stopped on request and can be resumed",
    "dead": "it crashed or was killed",
    "stuck": "the supervisor's verdict is STUCK",
    "suspect": "the verdict is SUSPECT or STUCK",
    "paused": "the process was stopped by a signal or a debugger",
    "restarted": "a later attempt than at the time of the call has begun",
    "nan": "a logged number is not finite",
}
_COMPARES = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_COUNTED = ("step", "epoch")
_METRIC = re.compile(r"(?P<name>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<value>[^<>=]+)")
_HINT = "such as: --until 'ended,stuck,step=1000,loss<2.5'"


@immutable
class Condition:
    """`text` as typed. A comparison has a `name`, a `sign` and a `value`; a word has only its text."""

    text: str
    name: str = ""
    sign: str = ""
    value: float = 0.0


@immutable
class Facts:
    """What is known of the run now. `metrics`: every value since the last look, oldest first."""

    state: str
    attempt: int = 0
    verdict: str | None = None
    step: float | None = None
    epoch: float | None = None
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def parse_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """The conditions of all --until options; each may hold several, with commas between them."""
    words = [word.strip() for text in texts for word in text.split(",")]
    found = tuple(_parse(word) for word in words if word)
    if not found:
        raise UsageError("--until names no condition", hint=_HINT)
    return found


def _parse(word: str) -> Condition:
    if word in WORDS:
        return Condition(word)
    name, equals, value = word.partition("=")
    if equals and name.strip() in _COUNTED:
        return Condition(word, name.strip(), ">=", _number(word, value))
    if match := _METRIC.fullmatch(word):
        return Condition(word, match["name"].strip(), match["sign"], _number(word, match["value"]))
    near = get_close_matches(word.lower(), [*WORDS, "step=", "epoch="], n=1)
    hint = f"did you mean '{near[0]}'?" if near else _HINT
    raise UsageError(f"--until does not know '{word}'", detail="words: " + ", ".join(WORDS), hint=hint)


def _number(word: str, text: str) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UsageError(f"--until {word}: '{text.strip()}' is not a number", hint=_HINT)
    return value


def find_met(conditions: Sequence[Condition], facts: Facts, *, first_attempt: int) -> Condition | None:
    """The first condition that holds. `first_attempt`: the attempt at the time of the call."""
    return next((one for one in conditions if _holds(one, facts, first_attempt)), None)


def _holds(condition: Condition, facts: Facts, first_attempt: int) -> bool:
    if condition.sign:
        return _compares(condition, facts)
    match condition.text:
        case "ended":
            return facts.is_over
        case "stuck":
            return facts.verdict == "STUCK"
        case "suspect":
            return facts.verdict in ("SUSPECT", "STUCK")
        case "paused":
            return facts.verdict == "PAUSED"
        case "restarted":
            return facts.attempt > first_attempt
        case "nan":
            return any(not math.isfinite(value) for values in facts.metrics.values() for value in values)
        case state:
            return facts.state == state


def _compares(condition: Condition, facts: Facts) -> bool:
    compare = _COMPARES[condition.sign]
    if condition.name in _COUNTED and condition.name not in facts.metrics:
        count = facts.step if condition.name == "step" else facts.epoch
        return count is not None and bool(compare(count, condition.value))
    return any(compare(value, condition.value) for value in facts.metrics.get(condition.name, ()))
