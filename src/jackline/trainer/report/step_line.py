"""The words of a run under way: the step line, the final statistics, and how to see the curves. Pure text.

Owns the wording and the order. The numbers are the loop's; what is not known is left out, never shown as 0.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.mirror.progress import LossBounds
from jackline.units import format_bytes, format_duration

TENSORBOARD_PORT = 6006
TOKENS = "tokens"
_SHORT = {TOKENS: "tok"}
_MAX_EXPONENT = 80.0  # past e^80 a perplexity says nothing
UNUSUAL_S = 900.0  # of unsaved work


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


def step_line(facts: StepLine, columns: int | None = None) -> str:
    """step 1,200/10,000  loss 3.4121  ppl 30.33  lr 2.9e-04  grad 0.84  489,803 tok/s  MFU 53.7 %  wait 0.3 % ...

    Where it is longer than `columns`, what matters least is left out.
    """
    parts = [part for part in _step_parts(facts) if part[1]]
    while columns is not None and len("  ".join(text for _, text in parts)) > columns and len(parts) > 1:
        parts.remove(max(parts, key=lambda part: part[0]))
    return "  ".join(text for _, text in parts)


def _step_parts(facts: StepLine) -> list[tuple[int, str]]:
    """Each part with its rank; the highest is left out first."""
    of = f"/{facts.total_steps:,}" if facts.total_steps else ""
    limit = f" of {format_bytes(facts.memory_limit_bytes)}" if facts.memory_limit_bytes else ""
    unit = _SHORT.get(facts.unit, facts.unit)
    is_text = facts.unit == TOKENS
    return [
        (0, f"step {facts.step:,}{of}"),
        (7, facts.place),
        (1, _told(facts.loss, lambda loss: f"loss {loss:.4f}")),
        (8, _told(facts.loss if is_text else None, lambda loss: f"ppl {format_ppl(loss)}")),
        (5, _told(facts.lr, lambda lr: f"lr {lr:.2e}")),
        (9, _told(facts.grad_norm, lambda norm: f"grad {norm:.3g}")),
        (3, _told(facts.tokens_per_s, lambda rate: f"{format_rate(rate)} {unit}/s")),
        (10, _told(facts.mfu, lambda share: f"MFU {100 * share:.1f} %")),
        (11, _told(facts.data_wait_share, lambda share: f"wait {100 * share:.1f} %")),
        (6, _told(facts.memory_bytes, lambda size: f"mem {format_bytes(size)}{limit}")),
        (2, _told(facts.eta_s, lambda left_s: f"ETA {format_duration(left_s)}")),
        (4, unusual_risk(facts.bounds)),
        *((12, note) for note in facts.notes),
    ]


def _told(value: float | None, text: Callable[[float], str]) -> str:
    """'' for what is not known."""
    return "" if value is None else text(value)


def unusual_risk(bounds: LossBounds | None) -> str:
    """'at risk 41 min': what a crash would cost, where that is unusually much; `jackline status` always has it."""
    if bounds is None or bounds.process_s is None or bounds.process_s < UNUSUAL_S:
        return ""
    return f"at risk {format_duration(bounds.process_s)}"


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
