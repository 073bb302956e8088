"""Alarms for numbers that cannot be: a target that leaks, a model that does not learn, a rate that is not the planned
one, data seen twice, a machine that got slow.

    watch = Sentinels(Facts(vocab_size=50304, schedule=schedule, tokens_per_step=32768, floor=floor))
    for alarm in watch.look(StepFacts(step=7, loss=9.1, lr=3e-4, ...)): say(alarm.text)
    for alarm in watch.look_eval(EvalFacts(step=500, losses=per_batch_losses)): ...

Pure: numbers in, alarms out, no torch, no clock. They are fed with losses that arrive late, so they never make a GPU
wait; a healthy step costs about 20 us. The rules live in files of their own (sentinel_*.py) and were tried on planted
faults. Owns the order of the rules, that a rule speaks seldom, and the state that goes into the checkpoint.
Does not own what happens then: the loop writes events, says lines, and stops or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from jackline.trainer.sentinels.data import RepeatedData, SmallValidation
from jackline.trainer.sentinels.facts import (
    Alarm,
    EvalFacts,
    Facts,
    Found,
    PairFacts,
    Rule,
    StepFacts,
    Surroundings,
)
from jackline.trainer.sentinels.loss import FlatLoss, LossSpike, LossUnderFloor
from jackline.trainer.sentinels.numbers import NotFinite, WrongRate, ZeroGradient
from jackline.trainer.sentinels.outputs import Collapse, CollapsedGates, Overfit
from jackline.trainer.sentinels.speed import SlowSteps

__all__ = ["Alarm", "EvalFacts", "Facts", "PairFacts", "Sentinels", "StepFacts", "Surroundings"]

# A fault that lasts is said again after this many steps, then twice as many, and so on.
SAY_AGAIN_AFTER = 200
# A head that guesses numbers begins with one for all: it has to have had the time to tell them apart.
FIRST_PAIRS_AT = 100


class Sentinels:
    """All rules of one run. `read_surroundings` is asked only when steps have become slow, `name_bad_tensor` (see
    sentinels_torch) only when a NaN is told."""

    def __init__(
        self,
        facts: Facts,
        read_surroundings: Callable[[], Surroundings] | None = None,
        name_bad_tensor: Callable[[], str] | None = None,
    ) -> None:
        self._name_bad_tensor = name_bad_tensor
        self._rules: dict[str, Rule] = {
            "finite": NotFinite(),
            "floor": LossUnderFloor(facts),
            **({"flat": FlatLoss(facts)} if facts.vocab_size else {}),
            "spike": LossSpike(facts),
            "rate": WrongRate(facts),
            "gradient": ZeroGradient(),
            "gates": CollapsedGates(),
            "repeat": RepeatedData(),
            "speed": SlowSteps(read_surroundings, facts.unit),
        }
        self._eval = SmallValidation(facts)
        self._floor_of_eval = LossUnderFloor(facts)
        self._is_language = bool(facts.vocab_size)
        self._pair_rules: dict[str, Collapse | Overfit] = {"collapse": Collapse(), "overfit": Overfit()}
        self._said: dict[str, list[int]] = {}  # kind -> [step it was said at, how often]
        self.num_alarms = 0

    def look(self, step: StepFacts) -> list[Alarm]:
        """The alarms of one step, in order of steps."""
        return self._spoken(step.step, (found for rule in self._rules.values() for found in rule.look(step)))

    def look_eval(self, facts: EvalFacts) -> list[Alarm]:
        """The alarms of one validation."""
        found = [*self._floor_of_eval.look_eval(facts)]
        if self._is_language:
            found += self._eval.look(facts)
        if facts.pairs is not None and facts.step >= FIRST_PAIRS_AT:
            found += [alarm for rule in self._pair_rules.values() for alarm in rule.look(facts.pairs)]
        return self._spoken(facts.step, found)

    def _spoken(self, step: int, found: Iterable[Found]) -> list[Alarm]:
        alarms = []
        for alarm in found:
            at, count = self._said.get(alarm.kind, (0, 0))
            if count and step < at + SAY_AGAIN_AFTER * 2 ** min(count - 1, 12):
                continue
            self._said[alarm.kind] = [step, count + 1]
            text = f"step {step:,}: {alarm.text}"
            if alarm.kind == "not-finite" and self._name_bad_tensor is not None and (bad := self._name_bad_tensor()):
                text += f"; first bad tensor: {bad}"
            alarms.append(replace(alarm, text=text, step=step))
        self.num_alarms += len(alarms)
        return alarms

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, a few kilobytes."""
        return {
            "rules": {name: rule.state() for name, rule in (self._rules | self._pair_rules).items()},
            "eval": self._eval.state(),
            "said": self._said,
            "num_alarms": self.num_alarms,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What is missing or new since it was written begins afresh: alarms are never a reason not to resume."""
        for name, rule in (self._rules | self._pair_rules).items():
            kept = state.get("rules", {}).get(name)
            if kept:
                rule.load(kept)
        if state.get("eval"):
            self._eval.load(state["eval"])
        self._said = {str(kind): [int(at), int(count)] for kind, (at, count) in state.get("said", {}).items()}
        self.num_alarms = int(state.get("num_alarms", 0))
