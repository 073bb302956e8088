"""What a verdict rests on: what was measured, which rule decided, what would change its mind. Pure.

Owns the content of `why --evidence` and of `evidence` in supervisor.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jackline.diagnosis.waiting import effective_wait
from jackline.supervisor.hang.rules import MIND_CHANGERS, stuck_limit_s, suspect_limit_s
from jackline.supervisor.hang.scene import Scene, Verdict
from jackline.supervisor.hang.text import frame_of, place_text
from jackline.units import format_bytes, format_duration


def evidence_of(scene: Scene, verdict: Verdict) -> dict[str, Any]:
    state, leader = scene.state, scene.leader
    wait = effective_wait(leader.stack, leader.reading.wait)
    suspect_s, stuck_s = suspect_limit_s(scene), stuck_limit_s(scene)
    return {
        "rule": verdict.rule,
        "nothing_moved_for_s": round(scene.now_s - state.progress_at_s, 1),
        "main_did_not_move_for_s": round(scene.now_s - state.moved_at_s, 1),
        "no_output_for_s": round(scene.now_s - state.output_at_s, 1),
        "stuck_limit_s": None if math.isinf(stuck_s) else round(stuck_s, 1),
        "suspect_limit_s": None if math.isinf(suspect_s) else round(suspect_s, 1),
        "cpu_cores": round(state.rates.cpu_s, 3),
        "disk_bytes_per_s": round(state.rates.disk_bytes),
        "tcp_bytes_per_s": round(state.rates.tcp_bytes),
        "active_sockets_per_s": round(state.rates.socket_events, 2),
        "leader_pid": leader.reading.pid,
        "waits_for": f"{wait.kind} {wait.target}".strip() + (", without a time limit" if wait.is_endless else ""),
        "at": place_text(frame_of(leader)),
        "seen_there": leader.num_seen,
        "num_processes": len(state.views),
        "num_samples": len(state.window),
        "signs": [{"ago_s": round(scene.now_s - at_s, 1), "what": what} for at_s, what in state.signs],
        "is_deadlock_proved": state.deadlock is not None,
        "would_change": MIND_CHANGERS.get(verdict.rule, "anything that moves"),
    }


def evidence_lines(evidence: Mapping[str, Any]) -> Iterator[str]:
    """The same for people; tolerates missing and foreign values, because it may come from a file."""

    def number(name: str) -> float:
        value = evidence.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    def seconds(name: str) -> str:
        return format_duration(number(name))

    yield f"rule: {evidence.get('rule') or '?'}"
    limit = "never, it waits for clients" if evidence.get("stuck_limit_s") is None else seconds("stuck_limit_s")
    yield f"nothing at all moved for {seconds('nothing_moved_for_s')} (STUCK at {limit})"
    limit = "never, others work for it" if evidence.get("suspect_limit_s") is None else seconds("suspect_limit_s")
    yield f"the main thread did not move for {seconds('main_did_not_move_for_s')} (SUSPECT at {limit})"
    yield f"no output for {seconds('no_output_for_s')}"
    disk, tcp = format_bytes(number("disk_bytes_per_s")), format_bytes(number("tcp_bytes_per_s"))
    count = f"{number('num_processes'):.0f} process(es)"
    yield f"CPU {number('cpu_cores'):.2f} cores, disk {disk}/s, TCP {tcp}/s in {count}"
    yield f"process {number('leader_pid'):.0f} waits for: {evidence.get('waits_for') or '?'}"
    if evidence.get("at"):
        yield f"it stands at {evidence['at']}, seen there in {number('seen_there'):.0f} looks"
    yield f"deadlock proved: {'yes' if evidence.get('is_deadlock_proved') else 'no'}"
    signs = evidence.get("signs")
    for sign in signs if isinstance(signs, list) else ():
        if isinstance(sign, dict):
            yield f"last movement, {format_duration(float(sign.get('ago_s') or 0.0))} ago: {sign.get('what')}"
    yield f"what would change its mind: {evidence.get('would_change') or '?'}"
