"""The first bad tensor, found in a real model; and what is read of the machine when it became slow."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import torch

from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.trainer.sentinels.speed import read_surroundings
from jackline.trainer.sentinels.tensors import first_bad_tensor, weights_without_gradient
from jackline.trainer.sentinels.watch import Facts, Sentinels, StepFacts
from tests.deadline import HANGS_S

SHAPE = GPTShape(2, 2, 16, context=8, vocab_size=32)


def made() -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    return GPT(SHAPE), torch.randint(0, 32, (2, 8))


def test_a_healthy_model_has_no_bad_tensor() -> None:
    model, ids = made()
    model(ids, ids).backward()
    assert first_bad_tensor(model, lambda: model(ids, ids)) == ""
    assert weights_without_gradient(model) == []


def test_a_bad_weight_is_named_with_its_count() -> None:
    model, _ = made()
    with torch.no_grad():
        model.blocks[1].up.weight[3, 2] = float("nan")
    assert first_bad_tensor(model) == "weight blocks.1.up.weight: 1 of 1,024 values are not finite"


def test_an_update_with_nan_has_spoilt_everything_and_is_told_so() -> None:
    model, _ = made()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
    found = first_bad_tensor(model)
    assert found == (
        "all 28 weights, by an update with it; the first is weight tokens.weight: 512 of 512 values are not finite"
    )


def test_a_nan_alarm_names_the_first_bad_tensor_and_looks_for_it_once() -> None:
    model, _ = made()
    with torch.no_grad():
        model.blocks[0].qkv.bias[5] = float("nan")
    calls: list[str] = []

    def name() -> str:
        calls.append("asked")
        return first_bad_tensor(model)

    watch = Sentinels(Facts(32), None, name)
    steps = [StepFacts(step, loss=math.nan, windows=[640 * step]) for step in range(1, 50)]
    alarms = [alarm for step in steps for alarm in watch.look(step)]
    assert [alarm.text for alarm in alarms] == [
        "step 1: loss is nan; its windows: 640; first bad tensor: weight blocks.0.qkv.bias: 1 of 48 values are not"
        " finite"
    ]
    assert calls == ["asked"]


def test_with_whole_weights_the_first_bad_output_is_named() -> None:
    model, ids = made()
    with torch.no_grad():
        model.blocks[0].up.bias.fill_(10.0)
        model.blocks[0].down.weight.fill_(3e38)
    found = first_bad_tensor(model, lambda: model(ids, ids))
    assert found.startswith("output of blocks.0.down (Linear): ") and found.endswith("256 values are not finite")
    assert not any(module._forward_hooks for module in model.modules())


def test_a_bad_gradient_is_the_one_nearest_the_loss() -> None:
    model, ids = made()
    model(ids, ids).backward()
    for name, weight in model.named_parameters():
        if name in ("blocks.0.up.weight", "blocks.1.down.weight"):
            assert weight.grad is not None
            weight.grad[0, 0] = float("inf")
    found = first_bad_tensor(model)
    assert found == "gradient of blocks.1.down.weight: 1 of 1,024 values are not finite"


def test_a_batch_that_cannot_be_run_again_adds_no_second_death() -> None:
    model, _ = made()

    def broken() -> None:
        raise RuntimeError("no memory left")

    assert first_bad_tensor(model, broken) == "the batch could not be run again (RuntimeError: no memory left)"


def test_weights_cut_off_from_the_loss_are_named() -> None:
    model, ids = made()
    model(ids, ids).backward()
    model.blocks[0].up.weight.grad = None
    model.blocks[1].down.bias.grad.zero_()
    assert weights_without_gradient(model) == ["blocks.0.up.weight", "blocks.1.down.bias"]


def test_the_cpu_time_of_others_is_seen_and_our_own_is_not() -> None:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.nice(10))
    try:
        first = read_surroundings()
        deadline_s = time.monotonic() + HANGS_S
        while _cpu_s(other.pid) < 1.0 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        second = read_surroundings()
    finally:
        other.kill()
        other.wait()
    assert second.others_cpu_s is not None and first.others_cpu_s is not None
    assert second.others_cpu_s - first.others_cpu_s > 0.7
    assert second.at_s > first.at_s
    assert second.queued_s is None or second.queued_s >= (first.queued_s or 0.0)
    assert second.allocator_retries is None and second.gpu_others == ()


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
