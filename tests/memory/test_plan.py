"""The plan: the largest micro-batch that fits, the global batch kept, savings traced anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jackline.memory.plan.choose import Room, add_savings, largest_that, plan, room_of, split_batch
from jackline.memory.plan.gpus import GPU_MODELS, GpuModel
from jackline.memory.plan.scale import line_through
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.job import StepOptions
from jackline.memory.predict.step import replay, trace_step
from jackline.models.shapes import GPTShape
from tests.memory.jobs import gpt_job

GIB, MIB = 2**30, 2**20
SMALL = GPTShape(2, 4, 64, context=64, vocab_size=997)


@pytest.mark.parametrize(
    ("batch", "largest", "expected"),
    [
        (32, 13, (11, 3)),
        (32, 16, (16, 2)),
        (32, 40, (32, 1)),
        (7, 3, (3, 3)),
        (8, 0, (1, 8)),
        (1, 1, (1, 1)),
        (30, 7, (6, 5)),
    ],
)
def test_a_batch_is_cut_into_as_few_and_as_even_slices_as_fit(
    batch: int, largest: int, expected: tuple[int, int]
) -> None:
    micro_batch, accumulation = split_batch(batch, largest)
    assert (micro_batch, accumulation) == expected
    assert micro_batch * (accumulation - 1) < batch <= micro_batch * accumulation


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("at_most", [1, 2, 8, 13])
def test_the_largest_number_is_found_whatever_it_is(limit: int, at_most: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert largest_that(fits, at_most) == min(limit, at_most)
    assert all(1 <= number <= at_most for number in asked)


def card_of(num_bytes: int) -> GpuModel:
    return GpuModel("test", num_bytes, 80, 0)


def test_the_choice_fits_and_one_more_does_not() -> None:
    job = gpt_job(SMALL, length=64, global_batch=500, options=StepOptions("bf16"))
    gpu = card_of(128 * MIB)
    made = plan(job, gpu)
    assert made.fit == "fits"
    budget = made.room.budget_bytes
    assert 1 < made.max_micro_batch < 500
    replay(trace_step(job, made.max_micro_batch, gpu, job.options), 0, is_expandable=True, cap_bytes=budget)
    with pytest.raises(ArenaFull):
        replay(trace_step(job, made.max_micro_batch + 1, gpu, job.options), 0, is_expandable=True, cap_bytes=budget)
    assert made.micro_batch * (made.accumulation - 1) < 500 <= made.micro_batch * made.accumulation
    assert made.prediction.peak_reserved_bytes <= budget


def test_a_whole_batch_that_fits_is_not_cut() -> None:
    made = plan(gpt_job(SMALL, length=64, global_batch=12), card_of(GIB))
    assert (made.micro_batch, made.accumulation, made.fit) == (12, 1, "fits")


def test_a_model_that_cannot_fit_is_a_no_with_ways_out() -> None:
    job = gpt_job(SMALL, length=64, global_batch=4, options=StepOptions("fp32", "foreach", is_expandable=False))
    made = add_savings(job, plan(job, card_of(20 * MIB)))
    assert (made.fit, made.micro_batch, made.accumulation, made.max_micro_batch) == ("no", 1, 4, 0)
    assert made.prediction.peak_reserved_bytes > made.room.gpu_bytes
    names = [saving.name for saving in made.savings]
    assert names == [
        "fused AdamW",
        "expandable segments",
        "loss in chunks",
        "bf16 autocast",
        "recompute activations",
    ]


def test_savings_are_what_a_new_trace_says() -> None:
    job = gpt_job(SMALL, length=64, global_batch=64, options=StepOptions("bf16"))
    gpu = card_of(100 * MIB)
    made = add_savings(job, plan(job, gpu))
    saving = next(one for one in made.savings if one.name == "loss in chunks")
    before, after = (
        replay(trace_step(job, made.micro_batch, gpu, options), 0, is_expandable=True).peak_reserved_bytes
        for options in (job.options, replace(job.options, loss_chunk_rows=2048))
    )
    assert saving.saved_bytes == before - after


def test_the_parts_add_up_to_what_nvidia_smi_will_show() -> None:
    made = plan(gpt_job(SMALL, length=64), GPU_MODELS["T4"])
    assert sum(made.parts().values()) == made.device_bytes
    assert {"weights", "optimizer", "activations", "logits", "workspace", "fragmentation", "context"} <= set(
        made.parts()
    )


def test_memory_that_others_hold_is_not_planned_with() -> None:
    gpu = GPU_MODELS["T4"]
    assert room_of(gpu, free_bytes=4 * GIB).gpu_bytes == 4 * GIB - gpu.context_bytes
    assert room_of(gpu).gpu_bytes == gpu.usable_bytes - gpu.context_bytes


def test_a_rehearsal_that_measured_more_makes_the_room_smaller() -> None:
    assert Room(1000, margin=0.0, correction=1.25).budget_bytes == 800
    assert Room(10 * GIB, margin=0.1, correction=1.0).budget_bytes == 9 * GIB


def test_of_a_small_room_more_stays_free_than_a_share() -> None:
    """1.5 % of 500 MiB is less than a page of the allocator."""
    assert Room(500 * 2**20, margin=0.015).budget_bytes == 460 * 2**20


def test_a_line_survives_a_first_trace_with_a_tensor_too_many() -> None:
    """The first trace of a process may hold one that a later import keeps alive; every size would be traced then."""
    job = gpt_job(SMALL, length=64, global_batch=16)
    traces = {n: trace_step(job, n, GPU_MODELS["L4"], job.options) for n in (2, 4)}
    odd = replace(traces[2], events=traces[2].events[:-1])
    given = iter((odd, traces[4], traces[2]))
    line = line_through(lambda _: next(given), 2, 4)
    assert line is not None and line.at(4).allocations == traces[4].allocations
    different = iter((odd, traces[4], odd))
    assert line_through(lambda _: next(different), 2, 4) is None
