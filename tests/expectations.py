"""Compares what a program says of itself with what was found out about it. Pure: an Outcome in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.zoo import ALARMS, Outcome, Program


def problems_of(program: Program, outcome: Outcome) -> list[str]:
    """Where what was found out differs from what the program says of itself; empty when all is well."""
    found = list(outcome.problems)
    for check in (_verdict, _never, _place, _death, _words, _event, _live, _ending, _whole):
        found += check(program, outcome)
    return found


def _verdict(program: Program, outcome: Outcome) -> Iterator[str]:
    wanted = program.words("verdict", "|")
    if not wanted:
        return
    matching = [label for kind, label in outcome.verdicts if kind in wanted]
    if not matching:
        yield f"verdict {'|'.join(wanted)} was never given; seen: {sorted(set(outcome.verdicts))}"
    labels = tuple(program.words("label", "|"))
    if matching and labels and not any(label.startswith(labels) for label in matching):
        yield f"label {'|'.join(labels)} was never given; seen: {sorted(set(matching))}"
    if matching and set(wanted) <= set(ALARMS) and not outcome.incidents:
        yield "there is no incident file"


def _ending(program: Program, outcome: Outcome) -> Iterator[str]:
    for event in outcome.events:
        text = str(event.get("text", ""))
        if text.startswith("it moves again") and event.get("label") in ("ENDED", "ZOMBIE"):
            yield f"its end was told as movement: {text}"


def _never(program: Program, outcome: Outcome) -> Iterator[str]:
    for kind in program.words("never"):
        texts = [str(event.get("text")) for event in outcome.events if event.get("verdict") == kind]
        if any(seen == kind for seen, _ in outcome.verdicts):
            yield f"false alarm: {kind} {texts}"


def _place(program: Program, outcome: Outcome) -> Iterator[str]:
    """The line is named: by the alarm and its incident, by the heartbeat, or by the explanation of the death."""
    for marker in program.words("also"):
        if outcome.incidents and not any(program.place(marker) in text for text in outcome.incidents):
            yield f"no incident file names {program.place(marker)}:\n" + "\n".join(outcome.incidents)
    if "marker" not in program.expect:
        return
    place = program.place(program.expect["marker"])
    if "cause" in program.expect:
        frames = [finding.get("place") or {} for finding in outcome.exit.get("findings") or []]
        named = {f"{Path(str(frame.get('file'))).name}:{frame.get('line')}" for frame in frames if frame}
        if place not in named and place not in str(outcome.exit.get("text")):
            yield f"the death is not placed at {place}; places {sorted(named)}, text: {outcome.exit.get('text')}"
        return
    if not set(program.words("verdict", "|")) <= set(ALARMS):
        seen = {_now(state) for state in outcome.states}
        if place not in seen:
            yield f"{place} was never shown as what it is doing; shown: {sorted(seen)}"
        return
    alarms = [str(event.get("text")) for event in outcome.events if event.get("verdict") in ALARMS]
    if alarms and not any(place in text for text in alarms):
        yield f"the alarm does not name {place}: {alarms}"
    if outcome.incidents and not any(place in text for text in outcome.incidents):
        yield f"no incident file names {place}:\n" + "\n".join(outcome.incidents)


def _now(state: dict[str, Any]) -> str:
    now = state.get("now") or {}
    return f"{Path(str(now.get('file'))).name}:{now.get('line')}"


def _death(program: Program, outcome: Outcome) -> Iterator[str]:
    wanted = program.words("cause", "|")
    if wanted and outcome.exit.get("cause") not in wanted:
        yield f"cause is {outcome.exit.get('cause')!r}, not {'|'.join(wanted)!r}: {outcome.exit.get('text')}"
    if "exit" in program.expect:
        code = int(program.expect["exit"])
        if outcome.exit.get("child_exit_code") != code:
            yield f"exit.json says exit code {outcome.exit.get('child_exit_code')}, the program ended with {code}"
        if outcome.exit_code != code:
            yield f"jackline run ended with {outcome.exit_code}, the program with {code}; stderr: {outcome.stderr}"
    if "signal" in program.expect:
        number = int(program.expect["signal"])
        if outcome.exit.get("signal") != number:
            yield f"exit.json says signal {outcome.exit.get('signal')}, the program ended by {number}"
        if program.expect.get("cause") != "stopped" and outcome.exit_code != 128 + number:
            yield f"jackline run ended with {outcome.exit_code}, not {128 + number}"


def _words(program: Program, outcome: Outcome) -> Iterator[str]:
    if "says" in program.expect and program.expect["says"].lower() not in outcome.said.lower():
        yield f"nobody said {program.expect['says']!r}; said:\n{outcome.said[-3000:]}"
    if "out" in program.expect:
        text = program.expect["out"]
        if text.encode() not in outcome.stdout:
            yield f"{text!r} was not printed; stdout ends with {outcome.stdout[-300:]!r}"
        if text not in outcome.out_log:
            yield f"{text!r} is not in out.log, which ends with {outcome.out_log[-300:]!r}"


def _event(program: Program, outcome: Outcome) -> Iterator[str]:
    wanted = program.expect.get("event")
    if wanted and not any(event.get("event") == wanted for event in outcome.events):
        yield f"there was no event {wanted!r}; events: {[event.get('event') for event in outcome.events]}"


def _live(program: Program, outcome: Outcome) -> Iterator[str]:
    if program.expect.get("live") == "yes" and len(outcome.stdout_at_s) < 5:
        yield f"its lines came in {len(outcome.stdout_at_s)} lumps, not as they were printed"


def _whole(program: Program, outcome: Outcome) -> Iterator[str]:
    """What holds for every run: an explained end, nothing left running, no part of the watch failed."""
    if not outcome.exit:
        yield f"there is no exit.json; stderr: {outcome.stderr[-2000:]}"
    if outcome.left_over:
        yield f"left running: {outcome.left_over}"
    allowed = program.words("off")
    for event in outcome.events:
        if event.get("protection") and event["protection"] not in allowed:
            yield f"a protection failed: {event.get('text')}"


def alarms_of(outcome: Outcome) -> list[str]:
    """Everything that would have worried the owner of a healthy program."""
    worried = [
        str(event.get("text")) for event in outcome.events if event.get("event") in ("stuck", "memory", "incident")
    ]
    worried += [str(event.get("text")) for event in outcome.events if event.get("verdict") in ALARMS]
    worried += [f"shown as {kind} {label}" for kind, label in outcome.verdicts if kind in ALARMS]
    return list(dict.fromkeys(worried))
