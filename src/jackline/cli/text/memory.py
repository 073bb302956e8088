"""Memory in sentences, for `status` and `why`: the host's, the card's, what ran out, who else is there. Pure.

Reads what the session (session-RANK.json) and the supervisor (supervisor.json) wrote; a value of the wrong kind
counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jackline.cli.text.safety import safe_text
from jackline.cli.view.run_view import listing, mapping, number
from jackline.units import format_bytes, format_duration

_MAX_OTHERS = 4


def memory_section(session: dict[str, Any], state: dict[str, Any], attempt: int | None) -> Iterator[str]:
    """Everything known of this attempt's memory, a line each."""
    is_ours = session.get("attempt") == attempt
    host = host_line(state, session if is_ours else {})
    if host:
        yield f"host memory: {host}"
    card = card_line(session) if is_ours else ""
    if card:
        yield f"GPU memory: {card}"
    for other in others_beside(state):
        yield f"also on the card: {other}"
    if is_ours:
        yield from oom_lines(session)


def host_line(state: dict[str, Any], session: dict[str, Any]) -> str:
    """Used, limit, forecast, and the line that grows."""
    memory, inside = mapping(state.get("memory")), mapping(mapping(session.get("memory")).get("host"))
    used, limit = number(memory.get("used_bytes")), number(memory.get("limit_bytes"))
    if used is None or not limit:
        used, limit = number(inside.get("used_bytes")), number(inside.get("limit_bytes"))
    if used is None or not limit:
        return ""
    source = f" ({safe_text(memory['limit_source'], 80)})" if memory.get("limit_source") else ""
    parts = [f"{format_bytes(used)} of {format_bytes(limit)}{source} in use, {100 * used / limit:.0f} %"]
    left_s = number(memory.get("seconds_to_limit"))
    left_s = number(inside.get("seconds_to_limit")) if left_s is None else left_s
    growth = number(memory.get("growth_bytes_per_s"))
    if left_s is not None:
        pace = f", growing {format_bytes(growth)}/s" if growth and growth > 0 else ""
        parts.append(f"full in about {format_duration(left_s)} at this rate{pace}")
    grows_at = memory.get("grows_at") or inside.get("grows_at")
    if isinstance(grows_at, str) and left_s is not None:
        parts.append(f"it grows at {safe_text(grows_at, 240)}")
    return "; ".join(parts)


def card_line(session: dict[str, Any]) -> str:
    """What PyTorch's own books say of this process, and the micro-batch it has come to."""
    memory = mapping(session.get("memory"))
    card, parts = mapping(memory.get("card")), []
    allocated, reserved = number(card.get("allocated_bytes")), number(card.get("reserved_bytes"))
    if allocated is not None and reserved is not None:
        text = f"{format_bytes(allocated)} in tensors, {format_bytes(reserved)} reserved"
        most, kept = number(card.get("peak_allocated_bytes")), number(card.get("peak_reserved_bytes"))
        if most is not None and kept is not None:
            text += f" (at most {format_bytes(most)} and {format_bytes(kept)})"
        parts.append(text)
    shrinks, micro_batch = number(memory.get("num_shrinks")), number(memory.get("micro_batch"))
    if shrinks and micro_batch is not None:
        times = "once" if shrinks == 1 else f"{shrinks:.0f} times"
        parts.append(f"micro-batch {micro_batch:.0f} after running out {times}")
    return "; ".join(parts)


def others_beside(state: dict[str, Any]) -> list[str]:
    """'pid 4211 (python other.py), 15.2 GiB' for every stranger on the cards."""
    found = [mapping(entry) for entry in listing(state.get("gpu_others"))]
    return [_other(entry) for entry in found[:_MAX_OTHERS] if number(entry.get("pid")) is not None]


def _other(entry: dict[str, Any]) -> str:
    size, pid = number(entry.get("used_bytes")), number(entry.get("pid")) or 0
    name = safe_text(entry.get("name"), 80) if entry.get("name") else ""
    shown = name or "not visible from here: another container, or already dead"
    return f"pid {pid:.0f} ({shown}), {'an unknown amount' if size is None else format_bytes(size)}"


def oom_lines(session: dict[str, Any]) -> Iterator[str]:
    """The last time the card's memory ran out: step, shape, needed and free, largest part, what would have fitted."""
    account = mapping(mapping(session.get("memory")).get("last_oom"))
    step = number(account.get("step"))
    if step is None:
        return
    shape = f", batch {safe_text(account['shape'], 60)}" if account.get("shape") else ""
    yield f"the card's memory ran out at step {step:.0f}{shape}{_needed(account)}"
    parts = {safe_text(part, 60): number(size) or 0.0 for part, size in mapping(account.get("parts")).items()}
    if parts:
        largest = max(parts, key=lambda part: parts[part])
        yield f"  largest part: {largest}, {format_bytes(parts[largest])}"
    new, fitting = number(account.get("new_micro_batch")), number(account.get("fitting_micro_batch"))
    if new is not None:
        yield f"  it went on with micro-batch {new:.0f}"
    elif fitting:
        yield f"  about micro-batch {fitting:.0f} would have fitted; run.safe_step finds it and keeps the batch"
    if account.get("needs_new_process") is True:
        yield "  what is left is split between blocks: only a new process gets it back"
    for entry in listing(account.get("others"))[:_MAX_OTHERS]:
        if number(mapping(entry).get("pid")) is not None:
            yield f"  also on the card then: {_other(mapping(entry))}"


def _needed(account: dict[str, Any]) -> str:
    wanted, free, total = (number(account.get(f"{word}_bytes")) for word in ("wanted", "free", "total"))
    text = f": needed {format_bytes(wanted)}" if wanted is not None else ""
    if text and free is not None:
        text += f", {format_bytes(free)} free" + (f" of {format_bytes(total)}" if total is not None else "")
    return text
