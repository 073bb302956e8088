"""Predictions against what was measured: on an H200, and on this machine's CPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from jackline.memory.plan.gpus import GPU_MODELS, Precision
from jackline.memory.plan.scale import line_through, make_line
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import CannotTrace, Prediction, meta_copy, predict, replay, trace_step
from jackline.memory.predict.trace import Recorder
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from tests.memory.jobs import gpt_job
from tests.memory.recorded import BF16, BF16_RECOMPUTED, FLOAT32_RECOMPUTED

GIB = 2**30
H200 = GPU_MODELS["H200"]
STOCK = {"optimizer": "foreach", "is_expandable": False}
SMALL = GPTShape(2, 4, 64, context=64, vocab_size=997)


# Measured on an H200 with torch 2.11, stock AdamW, default allocator, one slice a step: GiB allocated, reserved.
@pytest.mark.parametrize(
    ("size", "batch", "precision", "is_recomputing", "allocated", "reserved"),
    [
        ("tiny", 4, "bf16", False, 3.13, 3.96),
        ("small", 8, "bf16", False, 8.10, 9.54),
        ("small", 8, "fp32", False, 10.61, 11.28),
        ("medium", 8, "fp32", True, 9.44, 10.30),
    ],
)
def test_the_prediction_meets_what_an_h200_measured(
    size: str, batch: int, precision: str, is_recomputing: bool, allocated: float, reserved: float
) -> None:
    options = StepOptions(precision=precision, is_recomputing=is_recomputing, **STOCK)
    made = predict(gpt_job(size), batch, H200, options, is_accumulating=False)
    assert made.peak_allocated_bytes / GIB == pytest.approx(allocated, rel=0.005)
    assert made.peak_reserved_bytes / GIB == pytest.approx(reserved, rel=0.02)


# The five that were off by 11 to 19 % while the kernels' own memory was not in the trace: bytes reserved.
@pytest.mark.parametrize(
    ("size", "batch", "length", "precision", "is_recomputing", "is_expandable", "reserved"),
    [
        ("medium", 16, 1024, "bf16", True, False, 17282629632),
        ("medium", 16, 1024, "bf16", False, False, 30110908416),
        ("tiny", 8, 256, "bf16", True, False, 2522873856),
        ("small", 10, 512, "bf16", False, False, 7795113984),
        ("medium", 4, 1024, "fp32", True, True, 7413432320),
    ],
)
def test_a_warm_process_reserves_to_the_byte_what_an_h200_did(
    size: str, batch: int, length: int, precision: str, is_recomputing: bool, is_expandable: bool, reserved: int
) -> None:
    options = StepOptions(precision=precision, optimizer="foreach", is_recomputing=is_recomputing)
    trace = trace_step(gpt_job(size, length=length), batch, H200, options, is_accumulating=False)
    made = replay(trace.in_warm_process(), batch, is_expandable=is_expandable)
    assert made.peak_reserved_bytes == reserved


@pytest.mark.parametrize(
    ("batch", "length", "is_expandable", "reserved_gib"),
    [(10, 512, False, 7.228515625), (8, 1024, True, 8.916015625)],
)
def test_a_fresh_process_reserves_to_the_byte_what_an_h200_did(
    batch: int, length: int, is_expandable: bool, reserved_gib: float
) -> None:
    options = StepOptions(precision="bf16", optimizer="foreach", is_expandable=is_expandable)
    made = predict(gpt_job("small", length=length), batch, H200, options, is_accumulating=False)
    assert made.peak_reserved_bytes == reserved_gib * GIB


@pytest.mark.parametrize(
    ("heads", "width", "batch", "length", "options", "recorded"),
    [
        (16, 1024, 4, 1024, StepOptions("fp32", "foreach", is_recomputing=True), FLOAT32_RECOMPUTED),
        (12, 768, 10, 512, StepOptions("bf16", "foreach"), BF16),
        (8, 512, 8, 256, StepOptions("bf16", "foreach", is_recomputing=True), BF16_RECOMPUTED),
    ],
)
def test_the_backward_pass_of_a_layer_is_an_h200s_event_for_event(
    heads: int, width: int, batch: int, length: int, options: StepOptions, recorded: str
) -> None:
    shape = GPTShape(3, heads, width, context=1024, vocab_size=997)
    trace = trace_step(gpt_job(shape, length=length), batch, H200, options, is_accumulating=False)
    blocks = [
        (1 if event >= 0 else -1) * -(-trace.allocations[max(event, ~event)].num_bytes // 512)
        for event in trace.events
    ]
    large = [size for size in blocks if abs(size) > 2048]
    layer = [int(word) for word in recorded.split()]
    # Two inner layers, two steps.
    assert sum(large[at : at + len(layer)] == layer for at in range(len(large))) == 4


def test_a_trace_serves_every_gpu_that_differs_in_its_processors_alone() -> None:
    options = StepOptions(precision="fp32")
    job = gpt_job(GPTShape(1, 4, 256, context=1024, vocab_size=97), length=1024)
    one, other = (trace_step(job, 16, GPU_MODELS[name], options) for name in ("RTX4090", "L4"))
    assert one.allocations != other.allocations
    assert one.on(GPU_MODELS["L4"]) == other


def test_a_real_run_on_the_cpu_allocates_what_was_predicted() -> None:
    job = gpt_job(SMALL, length=64, options=StepOptions(precision="fp32", optimizer="foreach"))
    predicted = predict(job, 8, H200, is_accumulating=False)
    recorder = Recorder("cpu")
    model = job.build(job.options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for weight in model.parameters():
        recorder.add(weight.data, "weights")
    with recorder:
        for _ in range(2):
            job.loss(model, job.batch(8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recorder.finish()
    now = peak = 0
    for event in trace.events:
        now += trace.allocations[event].num_bytes if event >= 0 else -trace.allocations[~event].num_bytes
        peak = max(peak, now)
    workspace = predicted.parts["workspace"]
    assert predicted.peak_allocated_bytes - workspace == pytest.approx(peak, rel=0.01)


def parts_of(options: StepOptions, *, is_accumulating: bool = False) -> Prediction:
    return predict(gpt_job(SMALL, length=64), 16, H200, options, is_accumulating=is_accumulating)


def test_the_parts_are_the_whole() -> None:
    for precision in ("fp32", "bf16", "fp16", "bf16-weights"):
        made = parts_of(StepOptions(precision=precision))
        assert sum(made.parts.values()) == made.peak_allocated_bytes
        assert made.peak_reserved_bytes >= made.peak_allocated_bytes


def test_every_part_has_the_size_arithmetic_gives_it() -> None:
    made = parts_of(StepOptions(precision="bf16"))
    count = sum(weight.numel() for weight in GPT(SMALL).parameters())
    rows = 16 * 64
    assert made.parts["weights"] == 4 * count
    assert made.parts["optimizer"] == pytest.approx(8 * count, rel=0.02)
    # log-probabilities in bf16, their float32 copy and its gradient: 10 bytes, not the 12 of float32 logits
    assert made.parts["logits"] == pytest.approx(10 * rows * 997, rel=0.001)
    assert made.peak_phase == "backward"


def test_gradients_lie_about_when_they_are_accumulated() -> None:
    alone = parts_of(StepOptions(precision="bf16"))
    accumulated = parts_of(StepOptions(precision="bf16"), is_accumulating=True)
    count = sum(weight.numel() for weight in GPT(SMALL).parameters())
    more = accumulated.peak_allocated_bytes - alone.peak_allocated_bytes
    assert more == pytest.approx(4 * count, rel=0.02)
    assert accumulated.parts["gradients"] == pytest.approx(4 * count, rel=0.02)


def test_recomputing_and_chunks_and_bf16_weights_each_save() -> None:
    plain = parts_of(StepOptions(precision="bf16")).peak_allocated_bytes
    for options in (
        StepOptions(precision="bf16", is_recomputing=True),
        StepOptions(precision="bf16", loss_chunk_rows=128),
    ):
        assert parts_of(options).peak_allocated_bytes < plain
    # Without autocast the logits are widened as a whole, so it is float32 that bf16 weights save against.
    wide, narrow = (parts_of(StepOptions(precision=word)) for word in ("fp32", "bf16-weights"))
    assert narrow.peak_allocated_bytes < wide.peak_allocated_bytes


def test_the_stock_optimizer_needs_room_for_a_fifth_copy_of_the_weights() -> None:
    job = gpt_job(SMALL, length=8)
    fused, stock = (
        predict(job, 1, H200, StepOptions("fp32", kind), is_accumulating=False) for kind in ("fused", "foreach")
    )
    count = sum(weight.numel() for weight in GPT(SMALL).parameters())
    assert stock.peak_phase == "optimizer"
    assert stock.peak_allocated_bytes - stock.parts["workspace"] == pytest.approx(20 * count, rel=0.05)
    assert fused.peak_allocated_bytes < stock.peak_allocated_bytes


def test_two_traces_make_all_others() -> None:
    job = gpt_job(SMALL, length=64)
    options = StepOptions(precision="bf16")
    traces = {n: trace_step(job, n, H200, options) for n in (2, 4, 13)}
    line = make_line(traces[2], 2, traces[4], 4)
    assert line is not None
    assert line.at(13).allocations == traces[13].allocations


def test_two_traces_make_the_kernels_own_memory_of_all_others() -> None:
    """It is no straight line: from some number of rows on there is more of it, and from another on no more."""
    job = gpt_job(GPTShape(1, 4, 64, context=1024, vocab_size=97), length=1024)
    traces = {n: trace_step(job, n, H200, StepOptions(precision="bf16")) for n in (2, 4, 40)}
    line = make_line(traces[2], 2, traces[4], 4)
    assert line is not None
    assert line.at(40).allocations == traces[40].allocations


def test_two_traces_make_the_sums_of_all_others() -> None:
    """Along the rows, over all, and over a number of rows that grows with the batch."""
    job = Job(
        "sums",
        lambda _: nn.Linear(256, 256),
        lambda n: torch.zeros(n, 4096, 256),
        lambda model, x: model(x).sum(dim=2).sum() + model(x).sum(dim=(0, 1)).mean() + model(x).mean(dim=0).sum(),
        64,
    )
    line = line_through(lambda n: trace_step(job, n, H200, StepOptions(precision="fp32")), 2, 4)
    assert line is not None
    assert line.at(33).allocations == trace_step(job, 33, H200, StepOptions(precision="fp32")).allocations


class OfEverything(nn.Module):
    """What a stranger's model may hold: convolutions, norms, sums of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(16), nn.GroupNorm(4, 16)])
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.last = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution(self.words(ids).transpose(1, 2))
        for norm in self.norms:
            hidden = hidden + norm(hidden)
        found = self.layer(hidden.transpose(1, 2))
        counts = (ids > 0).sum(dim=1).sum() + ids.sum() + ids[:0].sum()
        sums = (
            found.sum(dim=(0, 2)).mean()
            + found.double().sum()
            + found.permute(2, 0, 1).sum(dim=0, keepdim=True).mean()
        )
        out: torch.Tensor = self.last(found).mean() + sums + counts + self.words.weight.sum(dim=[]).mean()
        return out


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_strangers_model_is_traced_whatever_it_is_made_of(precision: Precision) -> None:
    job = Job(
        "mine", lambda _: OfEverything(), lambda n: torch.zeros(n, 32, dtype=torch.long), lambda model, x: model(x), 8
    )
    made = predict(job, 8, H200, StepOptions(precision))
    assert sum(made.parts.values()) == made.peak_allocated_bytes > 0


class ReadsItsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(value)
        if out.sum().item() > 0:
            out = out * 2
        return out.sum()


def test_a_model_that_reads_its_values_is_planned_with_an_assumption_that_names_the_line() -> None:
    job = Job("mine", lambda _: ReadsItsValues(), lambda n: torch.zeros(n, 4), lambda model, x: model(x), 8)
    trace = trace_step(job, 2, H200, job.options)
    line = 1 + inspect.getsourcelines(ReadsItsValues.forward)[1] + 1
    assert trace.assumptions == (f"a value that is read is 0 (test_predict.py:{line})",)


class NeedsADevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_meta:
            raise RuntimeError("this kernel needs a GPU")
        return self.layer(value).sum()


def test_a_model_that_cannot_be_traced_is_named_with_its_line() -> None:
    job = Job("mine", lambda _: NeedsADevice(), lambda n: torch.zeros(n, 4), lambda model, x: model(x), 8)
    with pytest.raises(CannotTrace) as caught:
        predict(job, 2, H200)
    assert caught.value.message == "mine cannot be traced without a GPU: this kernel needs a GPU"
    assert "test_predict.py" in caught.value.detail[0]
    assert 'raise RuntimeError("this kernel needs a GPU")' in caught.value.detail[0]
    assert caught.value.hint == (
        "the rehearsal before step 0 measures it instead; or give shapes that do not depend on values"
    )


def test_a_copy_on_the_meta_device_keeps_ties_and_takes_no_memory() -> None:
    model = GPT(SMALL)
    copy = meta_copy(model)
    assert all(weight.is_meta for weight in copy.parameters())
    assert copy.head.weight is copy.tokens.weight
    assert not any(weight.is_meta for weight in model.parameters())
