"""The words of a run under way: the step line, the final statistics, and how to see the curves. Pure text.

Owns the wording and the order. The numbers are the loop's; what is not known is left out, never shown as 0.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.mirror.progress import LossBounds
from jackline.units import format_bytes, format_duration

TENSORBOARD_PORT = 6006
TOKENS = "tokens"
_SHORT = {TOKENS: "tok"}
_MAX_EXPONENT = 80.0  # past e^80 a perplexity says nothing
# What the two losses read without a number.
EVERYTHING = "everything since the start"


@dataclass(frozen=True)
class StepLine:
    """`step` is the number of steps done. None: not known, and so not shown."""

    step: int
    total_steps: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    data_wait_share: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    eta_s: float | None = None
    bounds: LossBounds | None = None
    notes: tuple[str, ...] = ()
    unit: str = TOKENS
    place: str = ""  # '(epoch 2/50, batch 34/437)'


def step_line(facts: StepLine) -> str:
    """step 1,200/10,000  loss 3.4121  ppl 30.33  lr 2.9e-04  grad 0.84  489,803 tok/s  MFU 53.7 %  wait 0.3 % ..."""
    parts = [f"step {facts.step:,}/{facts.total_steps:,}" if facts.total_steps else f"step {facts.step:,}"]
    parts += [facts.place] if facts.place else []
    if facts.loss is not None:
        parts += [f"loss {facts.loss:.4f}", *([f"ppl {format_ppl(facts.loss)}"] if facts.unit == TOKENS else [])]
    if facts.lr is not None:
        parts.append(f"lr {facts.lr:.2e}")
    if facts.grad_norm is not None:
        parts.append(f"grad {facts.grad_norm:.3g}")
    if facts.tokens_per_s is not None:
        parts.append(f"{format_rate(facts.tokens_per_s)} {_SHORT.get(facts.unit, facts.unit)}/s")
    if facts.mfu is not None:
        parts.append(f"MFU {100 * facts.mfu:.1f} %")
    if facts.data_wait_share is not None:
        parts.append(f"wait {100 * facts.data_wait_share:.1f} %")
    if facts.memory_bytes is not None:
        limit = f" of {format_bytes(facts.memory_limit_bytes)}" if facts.memory_limit_bytes else ""
        parts.append(f"mem {format_bytes(facts.memory_bytes)}{limit}")
    if facts.eta_s is not None:
        parts.append(f"ETA {format_duration(facts.eta_s)}")
    if facts.bounds is not None:
        parts.append(bounds_text(facts.bounds))
    return "  ".join([*parts, *facts.notes])


def bounds_text(bounds: LossBounds) -> str:
    """'at risk 41 s (6 min if the machine is lost)'."""
    process, machine = (EVERYTHING if s is None else format_duration(s) for s in (bounds.process_s, bounds.machine_s))
    if process == machine == EVERYTHING:
        return f"at risk: {EVERYTHING}"
    if machine == EVERYTHING:
        return f"at risk {process} (no off-machine copy)"
    return f"at risk {process} ({machine} if the machine is lost)"


def format_ppl(loss: float) -> str:
    if math.isnan(loss):
        return "nan"
    if loss > _MAX_EXPONENT:
        return "inf"
    value = math.exp(loss)
    return f"{value:.3g}" if value >= 1e5 else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


@dataclass(frozen=True)
class FinalFacts:
    """What is said at the end, whatever the end was. `outcome` is a clause: 'finished', 'stopped by Ctrl-C'.

    `spent_s` says where the time of this attempt went, by name ('training', 'data wait', 'evaluation', 'saving').
    """

    outcome: str
    step: int
    total_steps: int
    tokens: int
    seconds: float
    first_loss: float | None = None
    last_loss: float | None = None
    best: tuple[str, float, int] | None = None  # metric, value, step
    tokens_per_s: float | None = None
    mfu: float | None = None
    spent_s: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    checkpoint: str | None = None
    num_alarms: int = 0
    commands: tuple[str, ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)  # rows of the recipe's own, by label
    unit: str = TOKENS  # what `tokens` counts


def final_lines(facts: FinalFacts) -> list[str]:
    """A small table; the same after the last step, after Ctrl-C and after a time limit."""
    of = f" of {facts.total_steps:,}" if facts.total_steps else ""
    rows = [
        ("end", f"{facts.outcome} at step {facts.step:,}{of}, after {format_duration(facts.seconds)}"),
        (facts.unit, _tokens_text(facts)),
        *facts.more.items(),
        ("loss", _loss_text(facts)),
        ("best", _best_text(facts.best)),
        ("time", _time_text(facts.spent_s)),
        ("memory", f"at most {format_bytes(facts.peak_memory_bytes)}" if facts.peak_memory_bytes else ""),
        ("warnings", f"{facts.num_alarms}, shown above and in events-0.jsonl" if facts.num_alarms else ""),
        ("saved", facts.checkpoint or "nothing: there is no checkpoint"),
    ]
    lines = [f"{label:<10}{text}" for label, text in rows if text]
    return lines + [f"{'next' if not at else '':<10}{command}" for at, command in enumerate(facts.commands)]


def _tokens_text(facts: FinalFacts) -> str:
    parts = [f"{facts.tokens:,}"]
    if facts.tokens_per_s is not None:
        parts.append(f"{format_rate(facts.tokens_per_s)} a second")
    if facts.mfu is not None:
        parts.append(f"MFU {100 * facts.mfu:.1f} %")
    return ", ".join(parts)


def _loss_text(facts: FinalFacts) -> str:
    if facts.last_loss is None:
        return ""
    first = f"{facts.first_loss:.4f} -> " if facts.first_loss is not None else ""
    return f"{first}{facts.last_loss:.4f}" + (f" (ppl {format_ppl(facts.last_loss)})" if facts.unit == TOKENS else "")


def _best_text(best: tuple[str, float, int] | None) -> str:
    return "" if best is None else f"{best[0]} {best[1]:.4f} at step {best[2]:,}"


def _time_text(spent_s: Mapping[str, float]) -> str:
    total = sum(spent_s.values())
    if not total:
        return ""
    shares = sorted(spent_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_duration(s)} ({100 * s / total:.0f} %)" for name, s in shares if s > 0)


def curves_lines(folder: Path, environ: Mapping[str, str], *, user: str, host: str) -> list[str]:
    """How to look at the curves; over ssh with the tunnel that makes the page reachable."""
    lines = [f"curves: tensorboard --logdir {shlex.quote(str(folder))} --port {TENSORBOARD_PORT}"]
    if "SSH_CONNECTION" in environ:
        # The address the person came to is the one that works for them; a host name often does not resolve at home.
        words = environ["SSH_CONNECTION"].split()
        there = words[2] if len(words) == 4 else host
        port = f" -p {words[3]}" if len(words) == 4 and words[3] != "22" else ""
        tunnel = f"ssh -N -L {TENSORBOARD_PORT}:localhost:{TENSORBOARD_PORT}{port} {user}@{there}"
        lines.append(f"        on your own machine: {tunnel}  then open http://localhost:{TENSORBOARD_PORT}")
    return lines
