"""`python -m jackline.memory REQUEST`: the half of `jackline plan` that needs torch, in a process of its own.

REQUEST is JSON: target, typed_target, gpu, words, price, is_fitting, is_reaching,
is_measuring, seconds, output (text, explain, table or json). The answer goes to stdout, progress and remarks to
stderr.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jackline.errors import EXIT_DONE, EXIT_FAILED, JacklineError, UsageError
from jackline.extras import explained
from jackline.machine.gpu.watch import read_gpus
from jackline.memory.fitting.change import Request as FitRequest
from jackline.memory.fitting.change import find_fit, fit_text
from jackline.memory.fitting.reach import Goal, reach, reach_json, reach_text
from jackline.memory.guard.oom_report import other_users
from jackline.memory.plan.calibration import (
    Calibration,
    calibrated,
    calibrated_room,
    calibration_of,
    note_measured,
)
from jackline.memory.plan.choose import MAX_ACCUMULATION, Plan, Room, add_evaluation, add_savings, plan, room_of
from jackline.memory.plan.explain import fit_table, plan_json, plan_text, table_text
from jackline.memory.plan.gpu_table import COMMON
from jackline.memory.plan.gpus import GPU_MODELS, GpuModel, find_gpu, match_gpu
from jackline.memory.plan.pace import Until
from jackline.memory.plan.probe import has_gpu, measure_plan, plan_by_measuring, start_factor
from jackline.memory.plan.target import Candidate, load_candidates
from jackline.memory.predict.step import CannotTrace
from jackline.pipes import drop_output
from jackline.units import format_bytes, format_duration

_TRACES_OF_A_PLAN = 4
_TABLE_BATCHES = (2, 4, 8, 16, 32, 64)
# How often a progress line is printed while a plan is computed.
_TELL_EVERY_S = 2.0


def main(argv: Sequence[str]) -> int:
    request: dict[str, Any] = json.loads(argv[0])
    gc.disable()  # a short process that imports and builds a lot: collections would find nothing and take a tenth
    try:
        with _sign_of_life() as life, explained("this plan"):
            code = _answer(request, life)
            sys.stdout.flush()
            return code
    except JacklineError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        drop_output()
        return EXIT_DONE


@dataclass
class Life:
    """What a plan is doing, for the lines that it prints meanwhile."""

    total: int = 0  # about how many traces there will be; 0: unknown
    done: int = 0
    what: str = "importing PyTorch and building the model"

    def traced(self, micro_batch: int) -> None:
        self.done += 1
        self.total = max(self.total, self.done)
        self.what = f"trace {self.done} of {self.total}: a step with micro-batch {micro_batch}"


@contextlib.contextmanager
def _sign_of_life() -> Iterator[Life]:
    """Print a line to stderr every 2 s: planning a large model takes ten seconds, and silence looks like a hang."""
    is_over = threading.Event()
    started_s = time.monotonic()
    life = Life()

    def tell() -> None:
        while not is_over.wait(_TELL_EVERY_S):
            _say(f"{life.what}, {format_duration(time.monotonic() - started_s)}")

    thread = threading.Thread(target=tell, name="jackline-life", daemon=True)
    thread.start()
    try:
        yield life
    finally:
        is_over.set()
        thread.join()


def _answer(request: dict[str, Any], life: Life) -> int:
    words = request["words"]
    if request["output"] == "table":
        _print_table(request["target"], request["gpu"], words, life)
        return EXIT_DONE
    gpu, room = _gpu_and_room(request["gpu"])
    if request.get("is_reaching"):
        return _answer_reach(request, gpu, room, life)
    if request.get("is_fitting"):
        return _answer_fit(request, gpu, room, life)
    found = load_candidates(request["target"], gpu, words)
    try:
        life.total = _TRACES_OF_A_PLAN * len(found)
        is_measuring = bool(request.get("is_measuring"))
        chosen, made = choose(found, gpu, room, life.traced, is_calibrated=not is_measuring)
        if is_measuring:
            life.what = "real steps on the GPU"
            made = _measure(chosen, made)
        life.what = "evaluation, and what would save memory"
        made = add_evaluation(chosen.job, made)
        if made.fit != "fits" or request["output"] != "text":
            made = add_savings(chosen.job, made)
    except CannotTrace as error:
        if request["gpu"] or not has_gpu():
            raise
        _say(f"{error.message}; measuring on the GPU instead")
        chosen = found[0]
        made = plan_by_measuring(chosen.job, gpu, room=room)
    until = _until(request, chosen)
    if request["output"] == "json":
        print(json.dumps(plan_json(made, chosen.shown, until), indent=1))
    else:
        print(plan_text(made, chosen.shown, is_explaining=request["output"] == "explain", until=until))
    return EXIT_DONE if made.fit != "no" else EXIT_FAILED


def _measure(chosen: Candidate, made: Plan) -> Plan:
    """Run the planned step, remember how far off the plan was, and give the plan with figures as measured."""
    if made.fit == "no":
        return made
    seen = measure_plan(chosen.job, made)
    if seen is None:
        _say("out of memory: the plan is wrong for this GPU, or something else holds its memory")
        return made
    ratio = seen.allocated_bytes / max(1, made.prediction.peak_allocated_bytes)
    time_ratio = seen.step_s / made.time.seconds if made.time is not None else None
    note_measured(made, ratio, time_ratio)
    said = f"measured by {seen.num_steps} steps: {format_bytes(seen.allocated_bytes)} allocated"
    said += f" (predicted {format_bytes(made.prediction.peak_allocated_bytes)}),"
    said += f" {1000 * seen.step_s:.3g} ms a step"
    said += f" (predicted {1000 * made.time.seconds:.3g})" if made.time is not None else ""
    known = Calibration(ratio, time_ratio or 1.0, "by real steps on this GPU just now", is_same_job=True)
    shown = calibrated(made, known)
    peak = replace(shown.prediction, peak_reserved_bytes=max(seen.reserved_bytes, seen.allocated_bytes))
    return replace(shown, prediction=peak, notes=(*made.notes, said))


def _answer_fit(request: dict[str, Any], gpu: GpuModel, room: Room, life: Life) -> int:
    def tell(what: str) -> None:
        life.what = f"trying {what}"

    typed = tuple(request["words"])
    found = find_fit(FitRequest(request["target"], gpu, room, typed), tell)
    made = add_evaluation(found.candidate.job, found.made)
    until = _until(request, found.candidate)
    if request["output"] == "json":
        tried = [asdict(one) for one in found.tried]
        more = {"changed": list(found.words), "tried": tried, "longest_seq_len": found.longest}
        print(json.dumps(plan_json(made, found.candidate.shown, until) | more, indent=1))
    else:
        is_explaining = request["output"] == "explain"
        print(plan_text(made, found.candidate.shown, is_explaining=is_explaining, until=until))
        print()
        print(fit_text(found, request["typed_target"], typed, request["gpu"] or ""))
    return EXIT_DONE if made.fit != "no" else EXIT_FAILED


def _answer_reach(request: dict[str, Any], gpu: GpuModel, room: Room, life: Life) -> int:
    def tell(what: str) -> None:
        life.what = f"trying {what}"

    asked = FitRequest(request["target"], gpu, room, tuple(request["words"]))
    seconds, price = float(request.get("seconds", 0.0)), float(request.get("price", 0.0))
    found = reach(asked, tell)
    goal = Goal(gpu, seconds, price)
    if request["output"] == "json":
        print(json.dumps(reach_json(found, request["typed_target"] or "", goal), indent=1))
    else:
        print(reach_text(found, request["typed_target"] or "", goal))
    return EXIT_DONE if found else EXIT_FAILED


def _until(request: dict[str, Any], chosen: Candidate) -> Until:
    steps = chosen.shown.get("steps", 0)
    return Until(steps if isinstance(steps, int) else 0, float(request.get("price", 0.0)))


def _gpu_and_room(text: str | None) -> tuple[GpuModel, Room]:
    """The GPU to plan for, and how much of it may be used.

    A GPU named by the user counts as empty. Of this machine's GPU only the free memory counts; the processes that
    hold the rest are printed.
    """
    if text:
        gpu = find_gpu(text)
        return gpu, room_of(gpu)
    gpus = read_gpus()
    if not gpus:
        raise UsageError("there is no NVIDIA GPU here, so say which one is meant")
    gpu = match_gpu(gpus[0].name, gpus[0].total_bytes)
    for user in other_users(gpus[:1], ()):
        size = format_bytes(user.used_bytes) if user.used_bytes is not None else "some memory"
        _say(f"on this GPU already: pid {user.pid} ({user.name or 'not visible from here'}), {size}")
    room = room_of(gpu, free_bytes=gpus[0].total_bytes - gpus[0].used_bytes)
    return (replace(gpu, start_factor=start_factor()) if has_gpu() else gpu), room


def choose(
    found: Sequence[Candidate],
    gpu: GpuModel,
    room: Room,
    on_trace: Callable[[int], None] | None = None,
    *,
    is_calibrated: bool = False,
) -> tuple[Candidate, Plan]:
    """The largest candidate that fits without being cut into many slices; the smallest when none does. With
    `is_calibrated` what was measured on such a GPU here counts."""
    for candidate in found:
        known = calibration_of(gpu, candidate.job.name, candidate.job.options) if is_calibrated else Calibration()
        made = calibrated(plan(candidate.job, gpu, room=calibrated_room(room, known), on_trace=on_trace), known)
        if candidate is found[-1] or (made.fit == "fits" and made.accumulation <= MAX_ACCUMULATION):
            return candidate, made
        _say(f"{candidate.job.name}: {made.fit}, accumulated {made.accumulation} times; trying a smaller size")
    raise UsageError("there is nothing to plan")


def _print_table(target: str, gpu: str | None, words: Sequence[str], life: Life) -> None:
    gpus = [find_gpu(gpu)] if gpu else [GPU_MODELS[name] for name in COMMON]
    candidates = _all_sizes(target, gpus[0], words)
    jobs = {str(candidate.shown.get("model_size", candidate.job.name)): candidate.job for candidate in candidates}
    kinds = {(one.precision, one.has_flash_attention, one.has_cudnn_attention) for one in gpus}
    life.total = len(jobs) * len(kinds) * 4
    print(table_text(fit_table(jobs, _TABLE_BATCHES, gpus, life.traced), gpus))


def _all_sizes(target: str, gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    if ":" in target:
        return load_candidates(target, gpu, words)
    try:
        return load_candidates(target, gpu, [*words, "model_size=auto"])
    except UsageError:  # this recipe has no `model_size=auto`: it trains the size it is given
        return load_candidates(target, gpu, words)


def _say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
