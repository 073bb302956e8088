"""The words of a run under way, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackline.checkpoint.mirror.progress import LossBounds
from jackline.models.shapes import GPTShape, find_shape
from jackline.trainer.report.flops import flops_per_token, mfu, peak_flops
from jackline.trainer.report.step_line import FinalFacts, StepLine, curves_lines, final_lines, step_line

GIB = 2**30


def test_a_full_step_line_has_every_number_a_person_looks_for() -> None:
    facts = StepLine(
        step=1200,
        total_steps=10_000,
        loss=3.41207,
        lr=2.9e-4,
        grad_norm=0.8412,
        tokens_per_s=489_803.2,
        mfu=0.537,
        data_wait_share=0.003,
        memory_bytes=int(14.8 * GIB),
        memory_limit_bytes=139 * GIB,
        eta_s=11_520,
        bounds=LossBounds(41, 360),
    )
    assert step_line(facts) == (
        "step 1,200/10,000  loss 3.4121  ppl 30.33  lr 2.90e-04  grad 0.841  489,803 tok/s  MFU 53.7 %  wait 0.3 %"
        "  mem 14.8 GiB of 139 GiB  ETA 3 h 12 min"
    )
    assert step_line(facts, 72) == "step 1,200/10,000  loss 3.4121  489,803 tok/s  ETA 3 h 12 min"
    for columns in range(20, 160):
        line = step_line(facts, columns)
        assert len(line) <= columns
        assert line.startswith("step 1,200/10,000") and set(line.split("  ")) <= set(step_line(facts).split("  "))


def test_what_is_not_known_is_left_out() -> None:
    assert step_line(StepLine(3, 0, loss=10.8)) == "step 3  loss 10.8000  ppl 49,021"


def test_what_a_crash_would_cost_is_said_only_when_it_is_unusually_much() -> None:
    assert step_line(StepLine(3, 9, bounds=LossBounds(12, None))) == "step 3/9"
    assert step_line(StepLine(3, 9, bounds=LossBounds(None, None))) == "step 3/9"
    assert step_line(StepLine(3, 9, bounds=LossBounds(2460, None))) == "step 3/9  at risk 41 min"


def test_an_exploded_loss_still_makes_a_line() -> None:
    assert step_line(StepLine(3, 9, loss=float("nan"))) == "step 3/9  loss nan  ppl nan"
    assert step_line(StepLine(3, 9, loss=900.0)) == "step 3/9  loss 900.0000  ppl inf"
    assert step_line(StepLine(3, 9, loss=13.0)) == "step 3/9  loss 13.0000  ppl 4.42e+05"


def test_final_statistics_are_a_small_table() -> None:
    facts = FinalFacts(
        outcome="stopped by Ctrl-C",
        step=500,
        total_steps=2000,
        tokens=1_024_000,
        seconds=95,
        first_loss=9.1,
        last_loss=4.5,
        best=("val_loss", 4.61, 480),
        tokens_per_s=10_800,
        spent_s={"saving": 1.0, "training": 90, "data wait": 4, "evaluation": 0},
        peak_memory_bytes=GIB,
        checkpoint="runs/demo/checkpoints/step-00000500",
        num_alarms=2,
        commands=("jackline resume demo", "jackline report demo"),
    )
    assert final_lines(facts) == [
        "end       stopped by Ctrl-C at step 500 of 2,000, after 1 min 35 s",
        "tokens    1,024,000, 10,800 a second",
        "loss      9.1000 -> 4.5000 (ppl 90.02)",
        "best      val_loss 4.6100 at step 480",
        "time      training 1 min 30 s (95 %), data wait 4.0 s (4 %), saving 1.0 s (1 %)",
        "memory    at most 1.0 GiB",
        "warnings  2, shown above and in events-0.jsonl",
        "saved     runs/demo/checkpoints/step-00000500",
        "next      jackline resume demo",
        "          jackline report demo",
    ]


def test_a_run_that_saved_nothing_says_so() -> None:
    lines = final_lines(FinalFacts("stopped by Ctrl-C", 0, 10, 0, 0.5))
    assert lines == [
        "end       stopped by Ctrl-C at step 0 of 10, after 0.5 s",
        "tokens    0",
        "saved     nothing: there is no checkpoint",
    ]


def test_over_ssh_the_tunnel_is_spelt_out() -> None:
    there = {"SSH_CONNECTION": "10.0.0.9 50022 203.0.113.7 2222"}
    assert curves_lines(Path("my runs/tb"), {}, user="u", host="gpu1") == [
        "curves: tensorboard --logdir 'my runs/tb' --port 6006"
    ]
    assert curves_lines(Path("tb"), there, user="u", host="gpu1") == [
        "curves: tensorboard --logdir tb --port 6006",
        "        on your own machine: ssh -N -L 6006:localhost:6006 -p 2222 u@203.0.113.7"
        "  then open http://localhost:6006",
    ]


def test_arithmetic_is_counted_as_the_measured_table_counts_it() -> None:
    small = GPTShape(12, 12, 768, vocab_size=50_304)
    count = flops_per_token(small, 1024)
    # 489,803 tokens/s were 53.7 % and 553,859 were 60.8 % there.
    assert mfu(489_803, count, peak_flops("NVIDIA H200", "bf16-weights")) == pytest.approx(0.537, abs=0.0006)
    assert mfu(553_859, count, peak_flops("NVIDIA H200", "bf16")) == pytest.approx(0.608, abs=0.0007)


def test_an_embedding_that_is_only_looked_up_is_no_arithmetic() -> None:
    tied, untied = GPTShape(2, 2, 64, is_tied=True), GPTShape(2, 2, 64, is_tied=False)
    assert flops_per_token(tied, 128) == flops_per_token(untied, 128)
    assert flops_per_token(find_shape("nano"), 1) < flops_per_token(find_shape("nano"), 1024)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 780),
        ("NVIDIA H100 80GB HBM3", "bf16-weights", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165),
        ("Tesla T4", "bf16", None),
        ("cpu", "fp32", None),
        ("Some Other GPU", "bf16", None),
    ],
)
def test_a_peak_is_known_by_the_drivers_name_or_not_at_all(
    name: str, precision: str, teraflops: float | None
) -> None:
    assert peak_flops(name, precision) == (None if teraflops is None else teraflops * 1e12)
    assert (mfu(1000, 1e9, peak_flops(name, precision)) is None) == (teraflops is None)
