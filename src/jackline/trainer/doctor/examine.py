"""`python -m jackline.trainer.doctor.examine REQUEST`: the half of `jackline doctor RECIPE` that needs torch.

REQUEST is JSON: target, words, runs_folder, report_fd. Each finding goes to `report_fd` as a line of JSON as soon as
it is made; stdout is talk. Owns the order of the checks and what is not tried after which problem. Exit code 0 when
all checks were made, whatever they found; 2 when the settings themselves are wrong.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackline import accelerator
from jackline.errors import EXIT_DONE, JacklineError
from jackline.extras import explained, install_line
from jackline.machine.disk import read_disk
from jackline.machine.gpu.watch import read_gpus
from jackline.machine.host import find_session_end
from jackline.machine.memory import read_memory
from jackline.trainer.config import Resolved, TrainConfig, resolve_words
from jackline.trainer.doctor.findings import (
    DiskFacts,
    Finding,
    TimeFacts,
    count_kept,
    judge_context,
    judge_disk,
    judge_gpu,
    judge_memory,
    judge_schedule,
    judge_step,
    judge_time,
    judge_unused_gpu,
    judge_vocabulary,
)
from jackline.trainer.optim.schedule import schedule_of
from jackline.trainer.report.console import Console
from jackline.units import format_bytes, format_duration

if TYPE_CHECKING:
    from jackline.trainer.task import Task

_SHOWN_CHARS = 160
_PACKAGES = ("numpy", "safetensors", "tokenizers", "tensorboard")
Tell = Callable[[Finding], None]
EXIT_INTERRUPTED = 130  # as shells count it


@dataclass(frozen=True)
class Request:
    target: str
    words: tuple[str, ...]
    runs_folder: Path


def main(argv: Sequence[str]) -> int:
    asked: dict[str, Any] = json.loads(argv[0])
    request = Request(asked["target"], tuple(asked["words"]), Path(asked["runs_folder"]))
    report = os.fdopen(asked["report_fd"], "w")

    def tell(finding: Finding) -> None:
        print(json.dumps(finding.to_json()), file=report, flush=True)

    try:
        # Before torch is imported: a misspelt setting costs a tenth of a second.
        resolved = resolve_words(request.target, request.words)
        with Console() as console, explained(f"recipe '{request.target}'"):
            examine(resolved, request, console, tell)
    except JacklineError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_DONE


def examine(resolved: Resolved, request: Request, console: Console, tell: Tell) -> None:
    """All checks, in the order in which a run would fail. Stops where nothing further can be tried."""
    config = resolved.config
    tell(settings_finding(resolved))
    for line in config.unread_environment(os.environ):
        tell(Finding("environment", "note", line))
    if config.is_language:  # else the number of steps follows from the data
        tell(judge_schedule(schedule_of(config)))
    with console.phase("doctor", "importing torch, usually 2 to 20 s"):
        import torch
    tell(versions_finding(torch.__version__))
    with console.phase("doctor", "looking at device and precision"):
        found = list(device_findings(config))
    for finding in found:
        tell(finding)
    if any(finding.state == "problem" for finding in found):
        tell(_not_tried("data, memory, step and saving"))
        return
    try:
        from jackline.trainer.startup.device import choose_device
        from jackline.trainer.startup.sizing import settle_size

        config = settle_size(resolved, None, choose_device(config), console).config
        is_text = config.is_language and not config.chat  # conversations are no windows of a cache
        (_try_everything if is_text else _try_own)(config, request, console, tell)
    except JacklineError as error:
        tell(Finding("trial", "problem", " ".join((error.message, *error.detail)), error.hint or ""))


def settings_finding(resolved: Resolved) -> Finding:
    config = resolved.config
    changed = [
        f"{name}={getattr(config, name)} ({origin})"
        for name, origin in resolved.origins.items()
        if origin not in ("recipe", "quick") and name != "recipe"
    ]
    text = f"recipe {config.recipe}: " + (", ".join(changed) or "as it is")
    hint = f"`jackline train {config.recipe} --show` lists every setting with its origin"
    if config.quick:
        num_quick = sum(origin == "quick" for origin in resolved.origins.values())
        text += f"\n--quick: {num_quick} more settings make it a tiny run, on data: {config.data}"
        return Finding("settings", "note", text, hint)
    return Finding("settings", "ok", text, hint if changed else "")


def versions_finding(torch_version: str) -> Finding:
    found, missing = [f"Python {platform.python_version()}", f"torch {torch_version}"], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    text = ", ".join(found)
    if not missing:
        return Finding("versions", "ok", text)
    lost = "no curves for TensorBoard" if missing == ["tensorboard"] else "parts of the trainer need them"
    return Finding(
        "versions", "note", f"{text}; not installed: {', '.join(missing)}", f"{lost}; {install_line('train')}"
    )


def device_findings(config: TrainConfig) -> Iterator[Finding]:
    """The GPU against this torch, and the precision against the GPU."""
    import torch

    from jackline.trainer.startup.device import choose_device, device_name
    from jackline.trainer.startup.precision import choose_precision

    version, device = torch.__version__, choose_device(config)
    gpus = read_gpus(5.0)
    if accelerator.is_gpu(device) and accelerator.is_available():
        capability = accelerator.capability(device)
        yield judge_gpu(device_name(device), capability, torch.cuda.get_arch_list(), version)
    elif accelerator.is_gpu(device) or (gpus and config.device == "auto"):
        if gpus:
            yield judge_unused_gpu(gpus[0].name, version, torch.version.cuda)
        else:
            yield Finding("device", "problem", "device=cuda, but no NVIDIA GPU is visible", "device=auto")
        return
    else:
        is_small = config.model == config.SMALLEST or not config.is_language
        hint = "" if is_small else f"only model={config.SMALLEST} is of use on a CPU"
        yield Finding("device", "ok" if is_small else "note", device_name(device), hint)
    try:
        precision = choose_precision(config.precision, device)
    except JacklineError as error:
        yield Finding("precision", "problem", error.message, error.hint or "")
        return
    has_bf16 = (
        "" if not accelerator.is_gpu(device) else f"; bf16 on this GPU: {'yes' if precision_bf16(device) else 'no'}"
    )
    asked = "chosen for this device" if config.precision == "auto" else "as asked"
    yield Finding("precision", "ok", f"{precision}, {asked}{has_bf16}")


def precision_bf16(device: Any) -> bool:

    return accelerator.capability(device)[0] >= 8


def _try_everything(config: TrainConfig, request: Request, console: Console, tell: Tell) -> None:
    from jackline.trainer.doctor.trial import GIVE_UP_AFTER_S, opened
    from jackline.trainer.startup.device import choose_device

    device = choose_device(config)
    told: list[Finding] = []

    def note(finding: Finding) -> None:
        told.append(finding)
        tell(finding)

    try:
        with (
            console.phase("doctor", f"opening {config.data}, given up after {GIVE_UP_AFTER_S:.0f} s of no answer"),
            opened(config, device, console) as found,
        ):
            _judge_data(config, found, note)
            if any(finding.state == "problem" for finding in told):
                tell(_not_tried("memory, step and saving"))
            else:
                _try_model(config, request, found, console, tell)
    except JacklineError as error:
        if told:
            raise
        text = "\n".join((f"{config.data} cannot be read: {error.message}", *error.detail))
        other = "--data SOURCE trains on other data: a path, glob, http(s)://, hf://, or python-stdlib"
        tell(Finding("data", "problem", text, f"{error.hint}; {other}" if error.hint else other))
        tell(_not_tried("memory, step and saving"))


def _judge_data(config: TrainConfig, found: Any, tell: Tell) -> None:
    from jackline.trainer.network import context_of, shape_of

    size = found.first.tokens.shape
    text = f"{config.data}: first batch of {size[0]} x {size[1] - 1:,} tokens after {format_duration(found.took_s)}"
    shown = found.first_text if len(found.first_text) <= _SHOWN_CHARS else found.first_text[:_SHOWN_CHARS] + "..."
    text += f"\nbegins with {shown!r}"
    floor = found.floor
    if floor is not None and floor.is_noise:
        tell(
            Finding(
                "data", "note", f"{text}\n{floor.why}", "there is nothing to learn in noise: is it the right column?"
            )
        )
    else:
        low = f"\na loss below {floor.nats:.2f} would mean a data leak: {floor.why}" if floor is not None else ""
        tell(Finding("data", "ok", text + low))
    shape = shape_of(config, found.vocab_size)
    tell(judge_vocabulary(config.tokenizer, found.vocab_size, shape.vocab_size, int(found.first.tokens.max())))
    tell(judge_context(config.seq_len, context_of(shape)))


def _try_model(config: TrainConfig, request: Request, found: Any, console: Console, tell: Tell) -> None:
    from jackline.trainer.doctor.trial import make_task, predict_host_bytes
    from jackline.trainer.network import describe_shape, shape_of
    from jackline.trainer.startup.device import choose_device
    from jackline.trainer.startup.precision import choose_precision, settle_precision

    device = choose_device(config)
    precision = settle_precision(config, choose_precision(config.precision, device))
    free_bytes = _free_memory(device)
    tell(Finding("model", "ok", describe_shape(config.model, shape_of(config, found.vocab_size))))
    if not accelerator.is_gpu(device):
        # Before it is built: on a CPU too much memory ends other people's programs too.
        with console.phase("doctor", "predicting the memory of a step"):
            needed = predict_host_bytes(config, found.vocab_size, precision)
        foretold = judge_memory(needed, free_bytes, "of host memory", "a step is predicted to need")
        if foretold.state == "problem":
            tell(foretold)
            tell(_not_tried("step and saving"))
            return
    with console.phase("doctor", "building the model and choosing a micro-batch"):
        task = make_task(config, device, precision, found)
    _try_task(task, found.first, request, console, tell)


def _try_own(config: TrainConfig, request: Request, console: Console, tell: Tell) -> None:
    """What is no language model over text, as it is built for a training; what it caches the training finds there."""
    from jackline.trainer.build import build

    try:
        task = build(config, console, request.runs_folder / ".doctor")
    except JacklineError as error:
        tell(Finding("data", "problem", "\n".join((error.message, *error.detail)), error.hint or ""))
        tell(_not_tried("memory, step and saving"))
        return
    unit = "rows of conversations" if config.chat else task.counting.unit
    count = task.loader.num_windows()
    many = f"{count:,}" if count is not None else "an unknown number of"
    tell(Finding("data", "ok", f"{config.data or config.recipe}: {many} {unit} to train on"))
    if not config.is_language:  # of text it was told before: its steps are known without the data
        tell(judge_schedule(task.schedule))
    _try_task(task, next(task.loader), request, console, tell)


def _try_task(task: Task, first: Any, request: Request, console: Console, tell: Tell) -> None:
    """Memory, a step, the disk, saving, and the time of all of it."""
    from jackline.trainer.doctor.trial import state_bytes, take_step

    config = task.config
    memory = _try_memory(task, _free_memory(task.learner.device), console)
    tell(memory.finding)
    if memory.finding.state == "problem":
        tell(_not_tried("step and saving"))
        return
    task = task.with_micro_batch(memory.micro_batch)
    with console.phase("doctor", "one real step on real data"):
        taken = take_step(task, first)
    tell(judge_step(taken))
    disk = read_disk(request.runs_folder)
    free_disk = disk.free_bytes if disk is not None else 0
    size = state_bytes(task)
    keeps_best = config.val_fraction > 0 or not config.is_language
    kept = count_kept(config.keep_last, config.keep_every, task.total_steps, keeps_best=keeps_best)
    budget = judge_disk(DiskFacts(size, kept, free_disk, str(request.runs_folder)))
    tell(budget)
    if budget.state == "problem":
        tell(_not_tried("saving"))
    else:
        with console.phase("doctor", f"save, load, compare: {format_bytes(size)}"):
            tell(_try_saving(task, request.runs_folder))
    tell(judge_time(_time_facts(config, task, taken.step_s)))


def _try_saving(task: Task, runs_folder: Path) -> Finding:
    from jackline.trainer.doctor.trial import verify_save

    try:
        verified = verify_save(task, runs_folder)
    except (JacklineError, OSError) as error:
        text = " ".join((error.message, *error.detail)) if isinstance(error, JacklineError) else str(error)
        return Finding("saving", "problem", text, "another place for runs: --runs-dir PATH")
    text = f"{format_bytes(verified.checkpoint_bytes)} saved, loaded and equal in every bit"
    return Finding("saving", "ok", f"{text}, in {format_duration(verified.took_s)}")


@dataclass(frozen=True)
class _Memory:
    finding: Finding
    micro_batch: int


def _try_memory(task: Task, free_bytes: int, console: Console) -> _Memory:
    """Rehearsed, and measured."""
    from jackline.trainer.planning.rehearsal import rehearse_step

    chosen, is_on_gpu = task.chosen, accelerator.is_gpu(task.learner.device)
    plan = f"batch {task.config.batch_size} = {chosen.accumulation} x micro-batch {chosen.micro_batch}"
    where = "on the GPU" if is_on_gpu else "of host memory"
    try:
        with task.kernels():
            found = rehearse_step(task, console)
    except JacklineError as error:
        return _Memory(Finding("memory", "problem", f"{plan}: {error.message}", error.hint or ""), 1)
    if found.micro_batch != chosen.micro_batch:
        plan += f", shrunk to {found.micro_batch} by the rehearsal"
    finding = judge_memory(found.reserved_bytes, free_bytes, where, f"{plan} ({chosen.text}); measured")
    return _Memory(finding, found.micro_batch)


def _time_facts(config: TrainConfig, task: Task, step_s: float) -> TimeFacts:
    """A validation's forward pass costs a third of a step; how many windows there are is bounded by val_tokens."""
    from jackline.trainer.build import guess_step_s
    from jackline.trainer.startup.compiling import decide, why_not

    num_evals = task.total_steps // config.eval_every if config.eval_every else 0
    passes = (num_evals * config.eval_share + config.full_eval) if config.val_fraction and config.is_language else 0.0
    forward_s = step_s / 3 / max(1, task.counting.per_step) * config.val_tokens
    decision = decide(
        config.compile,
        has_gpu=accelerator.is_gpu(task.learner.device),
        can_compile=why_not(task.learner.device) if config.compile != "off" else "",
        steps_left=task.total_steps,
        eager_step_s=guess_step_s(task),
        is_warm=False,
    )
    session = find_session_end(os.environ, now_s=time.time())
    return TimeFacts(
        step_s=step_s,
        total_steps=task.total_steps,
        tokens_per_step=task.counting.per_step,
        eval_s=forward_s * passes,
        is_compiling=decision.is_compiled,
        limit_s=config.time_limit_s,
        session=session.platform if session else "",
        session_left_s=session.ends_at_s - time.time() if session else 0.0,
        unit=task.counting.unit,
    )


def _free_memory(device: Any) -> int:

    if accelerator.is_gpu(device):
        return accelerator.free_bytes()
    reading = read_memory([os.getpid()])
    return max(0, reading.limit.limit_bytes - reading.used_bytes)


def _not_tried(what: str) -> Finding:
    return Finding("not tried", "note", f"{what}: the problem above comes first")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
