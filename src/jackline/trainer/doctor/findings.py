"""What `jackline doctor RECIPE` thinks of the facts: pure judgements, each with its words.

Owns what counts as a problem (the run would fail or be lost), what as a note (it costs time or quality), and the
arithmetic of disk and time. The facts come from trial.py and examine.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jackline.trainer.optim.schedule import Schedule, describe_schedule, key_points, plot_lines
from jackline.trainer.report.step_line import format_rate
from jackline.units import format_bytes, format_duration

State = Literal["ok", "note", "problem"]
_FULL_SHARE = 0.95  # of what is free: a disk filled to the last byte fails others first
_TIGHT_SHARE = 0.5
_FAR_FROM_GUESSING = 0.1  # of ln V


@dataclass(frozen=True)
class Finding:
    """One thing looked at. A problem stops the run; a note may cost time later."""

    name: str
    state: State
    text: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge_gpu(name: str, capability: tuple[int, int], built_for: Sequence[str], torch_version: str) -> Finding:
    """Whether this torch has code for the GPU. `is_available()` says yes to GPUs it cannot run anything on."""
    major, minor = capability
    own = f"sm_{major}{minor}"
    if runs_on(capability, built_for):
        return Finding("device", "ok", f"{name} ({own}); torch {torch_version} has code for it")
    known = ", ".join(word for word in built_for if word.startswith("sm_"))
    return Finding(
        "device",
        "problem",
        f"torch {torch_version} has no code for {name} ({own}); it was built for {known or 'no GPU at all'}",
        "install a torch build for this GPU, or use another GPU; device=cpu trains without it",
    )


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Machine code runs on GPUs of the same major number and the same or a higher minor one; PTX on all newer."""
    for word in built_for:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", word)
        if found is None:
            continue
        built = (int(found[2]), int(found[3]))
        is_exact = word[-1] in "af"  # for one architecture only
        if is_exact and built == capability:
            return True
        if not is_exact and (capability >= built if found[1] == "compute" else _same_major(capability, built)):
            return True
    return False


def _same_major(capability: tuple[int, int], built: tuple[int, int]) -> bool:
    return capability[0] == built[0] and capability[1] >= built[1]


def judge_unused_gpu(gpu: str, torch_version: str, cuda: str | None) -> Finding:
    """A GPU is here and torch does not see it."""
    why = f"was built for CUDA {cuda}, which this driver may be too old for" if cuda else "was built without CUDA"
    return Finding(
        "device",
        "problem",
        f"{gpu} is here, but torch {torch_version} cannot use it: it {why}",
        "install torch with CUDA, or say device=cpu to train without the GPU",
    )


def judge_vocabulary(tokenizer: str, tokens: int, model_tokens: int, largest_id: int) -> Finding:
    """The tokenizer's ids against the rows of the model's embedding."""
    if tokens > model_tokens:
        return Finding(
            "vocabulary",
            "problem",
            f"the tokenizer '{tokenizer}' has {tokens:,} tokens, the model has room for {model_tokens:,}",
            "vocab_size=0 takes the tokenizer's own",
        )
    if largest_id >= model_tokens:
        return Finding(
            "vocabulary",
            "problem",
            f"the data holds token {largest_id:,}, the model has room for {model_tokens:,}",
            "the cache was made with another tokenizer: `jackline data prepare --rebuild` makes it anew",
        )
    text = f"{tokens:,} tokens of '{tokenizer}' in a model of {model_tokens:,}; largest id seen {largest_id:,}"
    if model_tokens % 64:
        return Finding("vocabulary", "note", text, "a multiple of 64 is faster on a GPU: vocab_size=0 rounds up")
    return Finding("vocabulary", "ok", text)


def judge_context(seq_len: int, context: int | None) -> Finding:
    """The windows against the positions the model has; None: as many as one likes."""
    if context is None:
        return Finding("context", "ok", f"seq_len={seq_len}: the model turns its positions, so any length fits")
    fits, state = ("fits", "ok") if seq_len <= context else ("does not fit", "problem")
    return Finding("context", state, f"seq_len={seq_len} {fits} into the model's context of {context}")  # type: ignore[arg-type]


def judge_schedule(schedule: Schedule) -> Finding:
    points = [f"{point.name} (step {point.step:,}): {point.lr:.3g}" for point in key_points(schedule)]
    text = "\n".join([describe_schedule(schedule), *points, *plot_lines(schedule, width=50, height=5)])
    if schedule.is_warm_up_cut:
        return Finding("lr", "note", text, "fine for a trial; otherwise a shorter warmup_steps or a longer run")
    return Finding("lr", "ok", text)


@dataclass(frozen=True)
class DiskFacts:
    """`num_kept` checkpoints at the end of the run, and one more while it is being written."""

    checkpoint_bytes: int
    num_kept: int
    free_bytes: int
    folder: str
    cache_bytes: int = 0  # that the data may still take on the same disk


def count_kept(keep_last: int, keep_every: int, total_steps: int, *, keeps_best: bool) -> int:
    """Checkpoints that lie there at the end; two are kept whatever is asked for."""
    return max(2, keep_last) + keeps_best + (total_steps // keep_every if keep_every else 0)


def judge_disk(facts: DiskFacts) -> Finding:
    needed = facts.checkpoint_bytes * (facts.num_kept + 1)
    each = f"{facts.num_kept} checkpoints of {format_bytes(facts.checkpoint_bytes)} kept and one being written"
    text = f"{each}: {format_bytes(needed)} of {format_bytes(facts.free_bytes)} free in {facts.folder}"
    if needed > _FULL_SHARE * facts.free_bytes:
        return Finding(
            "disk",
            "problem",
            f"{text}: the run would fill the disk",
            "a smaller keep_last or larger keep_every, or another place with --runs-dir PATH",
        )
    if needed > _TIGHT_SHARE * facts.free_bytes:
        return Finding("disk", "note", f"{text}: tight", "other programs write there too")
    return Finding("disk", "ok", text)


@dataclass(frozen=True)
class TimeFacts:
    step_s: float
    total_steps: int
    tokens_per_step: int
    eval_s: float = 0.0  # all validations together
    is_compiling: bool = False
    limit_s: float = 0.0
    session: str = ""  # 'Slurm', 'Kaggle', 'Colab'
    session_left_s: float = 0.0
    unit: str = "tokens"

    @property
    def total_s(self) -> float:
        return self.step_s * self.total_steps + self.eval_s


def judge_time(facts: TimeFacts) -> Finding:
    """Against the limit that was set, or what is left of the platform's session."""
    rate = f"{format_rate(facts.tokens_per_step / facts.step_s)} {facts.unit}/s" if facts.step_s > 0 else "?"
    text = (
        f"{facts.total_steps:,} steps of about {format_duration(facts.step_s)} ({rate}):"
        f" {format_duration(facts.total_s)} with validation"
    )
    if facts.is_compiling:
        text += "; less, because it will be compiled, which this check was not"
    limit_s = facts.limit_s or facts.session_left_s
    if not limit_s:
        return Finding("time", "ok", f"{text}; no time limit")
    whose = "the time limit" if facts.limit_s else f"the rest of this {facts.session} session"
    if facts.total_s <= limit_s:
        return Finding("time", "ok", f"{text}; fits into {whose} of {format_duration(limit_s)}")
    reached = int(facts.total_steps * limit_s / facts.total_s)
    return Finding(
        "time",
        "note",
        f"{text}; {whose} is {format_duration(limit_s)}: it gets to about step {reached:,}",
        "it is saved then, and the same command resumes from there; a mirror keeps it if the machine goes",
    )


@dataclass(frozen=True)
class StepTaken:
    """What one real step on real data showed."""

    loss: float
    guessing_loss: float  # ln V; 0: there is no vocabulary to guess out of
    grad_norm: float
    untouched: tuple[str, ...]  # weights without a gradient
    num_weights: int
    step_s: float


def judge_step(taken: StepTaken) -> Finding:
    guessing = f" (guessing is {taken.guessing_loss:.4f})" if taken.guessing_loss else ""
    numbers = f"loss {taken.loss:.4f}{guessing}, gradient norm {taken.grad_norm:.3g}"
    if taken.loss - taken.loss != 0 or taken.grad_norm - taken.grad_norm != 0:
        hint = "precision=fp32 tells whether it is the precision"
        return Finding("step", "problem", f"{numbers}: not a finite number in the first step", hint)
    if taken.untouched:
        names = ", ".join(taken.untouched[:3]) + (", ..." if len(taken.untouched) > 3 else "")
        text = f"{numbers}; {len(taken.untouched)} of {taken.num_weights} weights get no gradient: {names}"
        return Finding("step", "problem", text, "they would never learn: the loss is cut off from them")
    text = f"{numbers}; all {taken.num_weights} weights get a gradient; {format_duration(taken.step_s)}"
    if taken.guessing_loss and abs(taken.loss - taken.guessing_loss) > _FAR_FROM_GUESSING * taken.guessing_loss:
        return Finding("step", "note", text, "an untrained model should be near guessing: look at its initialisation")
    return Finding("step", "ok", text)


def judge_memory(needed_bytes: int, free_bytes: int, what: str, details: str) -> Finding:
    text = f"{details} {format_bytes(needed_bytes)} of {format_bytes(free_bytes)} free {what}"
    if needed_bytes > free_bytes:
        return Finding("memory", "problem", text, "a smaller batch_size, micro_batch, seq_len or model")
    if needed_bytes > 0.9 * free_bytes:
        return Finding("memory", "note", f"{text}: tight", "a smaller micro_batch")
    return Finding("memory", "ok", text)
