"""A step that runs out of memory is done again in smaller slices, and nothing else changes."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jackline.errors import UsageError
from jackline.memory.guard.safe_step import BatchDependent, OutOfMemory, SafeStep, Shrunk
from jackline.models.gpt import GPT
from jackline.models.loss import IGNORED
from jackline.models.shapes import GPTShape
from tests.memory.injected import MESSAGE, OutOfMemoryAt

LENGTH = 16


def make_model(seed: int = 0, dropout: float = 0.1) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTShape(2, 2, 32, context=LENGTH, vocab_size=101, dropout=dropout))


def make_batch(num_samples: int = 16, *, is_ragged: bool = False) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 101, (num_samples, LENGTH), generator=drawn)
    targets = torch.randint(0, 101, (num_samples, LENGTH), generator=drawn)
    if is_ragged:
        for number in range(num_samples):
            targets[number, 1 + (number * 7) % LENGTH :] = IGNORED
    return ids, targets


def token_loss(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, int]]:
    def fn(part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        ids, targets = part
        return model(ids, targets), int((targets != IGNORED).sum())

    return fn


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def relative_l2(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    off = sum(((a.double() - b.double()) ** 2).sum().item() for a, b in pairs)
    return float((off / sum((b.double() ** 2).sum().item() for _, b in pairs)) ** 0.5)


def clean_step(micro_batch: int, *, is_ragged: bool = False, dropout: float = 0.1) -> tuple[float, list[Tensor]]:
    model = make_model(dropout=dropout)
    torch.manual_seed(11)
    result = SafeStep(model, micro_batch=micro_batch)(token_loss(model), make_batch(is_ragged=is_ragged))
    assert not result.shrunk
    return result.loss.item(), gradients(model)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_shrunk_step_is_bit_equal_to_a_clean_step_of_the_same_micro_batch(is_ragged: bool) -> None:
    model = make_model()
    torch.manual_seed(11)
    safe = SafeStep(model)
    with OutOfMemoryAt(max_rows=4 * LENGTH) as injected:
        result = safe(token_loss(model), make_batch(is_ragged=is_ragged))
    assert injected.num_raised == 2
    assert [(s.old_micro_batch, s.new_micro_batch) for s in result.shrunk] == [(16, 8), (8, 4)]
    assert (result.micro_batch, result.num_slices, safe.micro_batch) == (4, 4, 4)
    loss, expected = clean_step(4, is_ragged=is_ragged)
    assert result.loss.item() == loss
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 5, 7, 16])
def test_slices_of_any_size_give_the_gradients_of_the_whole_batch(micro_batch: int, is_ragged: bool) -> None:
    loss, sliced = clean_step(micro_batch, is_ragged=is_ragged, dropout=0.0)
    model = make_model(dropout=0.0)
    ids, targets = make_batch(is_ragged=is_ragged)
    whole = model(ids, targets) / (targets != IGNORED).sum()
    whole.backward()
    assert relative_l2(sliced, gradients(model)) <= 5e-6
    assert loss == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("number", [1, 5, 20, 33])
def test_an_error_anywhere_in_the_step_drops_what_was_done_and_starts_over(number: int) -> None:
    model = make_model()
    torch.manual_seed(11)
    with OutOfMemoryAt(number=number) as injected:
        result = SafeStep(model, micro_batch=8)(token_loss(model), make_batch())
    assert injected.num_raised == 1
    assert result.micro_batch == 4
    _, expected = clean_step(4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), expected, strict=True))


def test_the_phase_and_the_numbers_of_the_error_are_kept() -> None:
    model = make_model()
    seen: list[Shrunk] = []
    with OutOfMemoryAt(number=1):
        SafeStep(model, on_change=seen.append)(token_loss(model), make_batch())
    (change,) = seen
    assert (change.phase, change.slice_number, change.error) == ("forward", 0, MESSAGE)
    assert (change.wanted_bytes, change.free_bytes) == (2 * 2**30, int(613.56 * 2**20))
    with OutOfMemoryAt(number=18):
        model.zero_grad()
        SafeStep(model, on_change=seen.append)(token_loss(model), make_batch())
    assert seen[1].phase == "backward"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    ],
)
def test_every_way_to_say_out_of_memory_counts(error: Exception) -> None:
    model = make_model()
    with OutOfMemoryAt(number=3, error=error) as injected:
        result = SafeStep(model)(token_loss(model), make_batch())
    assert (injected.num_raised, result.micro_batch) == (1, 8)


def test_any_other_error_is_the_callers() -> None:
    model = make_model()
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="cannot be multiplied"), OutOfMemoryAt(number=3, error=error):
        SafeStep(model)(token_loss(model), make_batch())


class DrawsAndCounts(nn.Module):
    """Draws from every generator and writes to a buffer, as nothing sane does all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, value: Tensor) -> Tensor:
        self.seen += value.shape[0]
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        out: Tensor = self.norm(self.layer(value)) * noise
        return out.pow(2).sum()


def step_of(model: DrawsAndCounts, safe: SafeStep) -> Any:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model.zero_grad()
    return safe(lambda part: (model(part), part.shape[0]), torch.ones(8, 8) * torch.arange(8.0)[:, None])


@pytest.mark.filterwarnings("ignore::jackline.memory.guard.safe_step.BatchDependent")
def test_generators_and_buffers_are_put_back_before_the_step_is_repeated() -> None:
    models = []
    for is_failing in (True, False):
        torch.manual_seed(0)
        model = DrawsAndCounts()
        safe = SafeStep(model, micro_batch=4)
        step_of(model, safe)
        if is_failing:
            with OutOfMemoryAt(number=4) as injected:  # in the second slice's backward pass
                result = step_of(model, safe)
            assert (injected.num_raised, result.micro_batch) == (1, 2)
        else:
            safe.micro_batch = 2
            step_of(model, safe)
        models.append((model, random.random(), float(np.random.rand()), torch.rand(()).item()))
    (ours, *drawn), (theirs, *expected) = models
    assert drawn == expected
    assert ours.seen.item() == 16
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
    assert all(torch.equal(a, b) for a, b in zip(gradients(ours), gradients(theirs), strict=True))


@pytest.mark.filterwarnings("ignore::jackline.memory.guard.safe_step.BatchDependent")
def test_only_buffers_that_change_are_copied_after_the_first_step() -> None:
    model = DrawsAndCounts()
    safe = SafeStep(model, micro_batch=4)
    step_of(model, safe)
    safe._buffers.take()
    assert sorted(safe._buffers._copies) == [
        "0.norm.num_batches_tracked",
        "0.norm.running_mean",
        "0.norm.running_var",
        "0.seen",
    ]


def test_layers_that_look_across_the_batch_are_warned_about_once() -> None:
    model = DrawsAndCounts()
    safe = SafeStep(model, micro_batch=4)
    with pytest.warns(BatchDependent) as caught:
        step_of(model, safe)
        step_of(model, safe)
    assert [str(warning.message) for warning in caught] == [
        "BatchNorm1d: results depend on which samples are together, and the batch is cut into 2 slices"
    ]


def test_one_sample_that_does_not_fit_is_an_error_that_says_so() -> None:
    model = make_model()
    with pytest.raises(OutOfMemory) as caught, OutOfMemoryAt(max_rows=1):
        SafeStep(model, micro_batch=2)(token_loss(model), make_batch())
    assert str(caught.value) == (
        f"error: step 0 ran out of memory with one sample at a time: {MESSAGE}\n"
        "hint: `jackline plan ... --explain` shows where it goes and what would save some"
    )
    assert all(weight.grad is None for weight in model.parameters())


def test_what_the_failed_attempt_held_is_gone_before_the_next_one_begins() -> None:
    model = make_model()
    kept: list[weakref.ref[Tensor]] = []
    alive_at_start: list[int] = []

    def fn(part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        alive_at_start.append(sum(ref() is not None for ref in kept))
        hidden = model.tokens(part[0])
        kept.append(weakref.ref(hidden))
        return model(*part) + hidden.sum() * 0, part[0].numel()

    gc.disable()
    try:
        with OutOfMemoryAt(max_rows=4 * LENGTH):
            SafeStep(model)(fn, make_batch())
    finally:
        gc.enable()
    assert alive_at_start[:3] == [0, 0, 0]


def test_a_bare_mean_is_refused_unless_it_is_told_what_it_counts_for() -> None:
    model = make_model(dropout=0.0)
    batch = make_batch(is_ragged=True)

    def mean(part: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(part[0])
        return F.cross_entropy(logits.flatten(0, 1), part[1].flatten(), ignore_index=IGNORED)

    with pytest.raises(UsageError) as caught:
        SafeStep(model, micro_batch=4)(mean, batch)
    assert str(caught.value) == (
        "error: fn returned a single tensor: a mean over slices of different size would weigh samples wrongly\n"
        "hint: return (loss_sum, count), or give weight=: how much a slice's mean counts for"
    )
    SafeStep(model, micro_batch=5)(mean, batch, weight=lambda part: int((part[1] != IGNORED).sum()))
    _, expected = clean_step(16, is_ragged=True, dropout=0.0)
    assert relative_l2(gradients(model), expected) <= 5e-6


def test_something_else_than_a_sum_and_a_count_is_refused() -> None:
    model = make_model()
    with pytest.raises(UsageError, match=r"fn returned dict, not \(loss_sum, count\) with a scalar loss_sum"):
        SafeStep(model)(lambda part: {"loss": model(*part)}, make_batch())


def test_gradients_that_are_there_already_are_refused() -> None:
    model = make_model()
    safe = SafeStep(model)
    safe(token_loss(model), make_batch())
    with pytest.raises(UsageError, match="there are gradients already at the start of the step"):
        safe(token_loss(model), make_batch())


def test_a_count_known_beforehand_is_the_divisor() -> None:
    model = make_model(dropout=0.0)
    result = SafeStep(model, micro_batch=4)(token_loss(model), make_batch(), count=2 * 16 * LENGTH)
    loss, expected = clean_step(4, dropout=0.0)
    assert result.loss.item() == pytest.approx(loss / 2, rel=1e-6)
    assert relative_l2([g * 2 for g in gradients(model)], expected) <= 1e-6


def test_a_batch_without_any_target_gives_zero_and_not_nan() -> None:
    model = make_model()
    ids, targets = make_batch(4)
    result = SafeStep(model, micro_batch=2)(token_loss(model), (ids, torch.full_like(targets, IGNORED)))
    assert (result.loss.item(), result.count) == (0.0, 0.0)
    assert all(torch.isfinite(g).all() for g in gradients(model))


def test_a_scaler_scales_and_keeps_its_state() -> None:
    model = make_model(dropout=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with OutOfMemoryAt(max_rows=8 * LENGTH) as injected:
        SafeStep(model, scaler=scaler)(token_loss(model), make_batch())
    assert injected.num_raised == 1
    assert scaler.get_scale() == 1024.0
    _, expected = clean_step(8, dropout=0.0)
    assert relative_l2([g / 1024 for g in gradients(model)], expected) <= 1e-6


def test_the_micro_batch_stays_small_and_travels_with_the_checkpoint() -> None:
    model = make_model()
    safe = SafeStep(model)
    with OutOfMemoryAt(max_rows=4 * LENGTH):
        safe(token_loss(model), make_batch())
        model.zero_grad()
        assert not safe(token_loss(model), make_batch()).shrunk
    other = SafeStep(make_model())
    other.load_state_dict(safe.state_dict())
    assert (other.micro_batch, other.step, other.changes) == (4, 2, safe.changes)
    other.grow(16)
    assert other.micro_batch == 16


def test_a_smaller_size_can_come_from_a_plan_but_always_gets_smaller() -> None:
    model = make_model()
    with OutOfMemoryAt(max_rows=11 * LENGTH):
        result = SafeStep(model, shrink=lambda n: 11)(token_loss(model), make_batch())
    assert (result.micro_batch, result.num_slices) == (11, 2)
    model.zero_grad()
    with OutOfMemoryAt(max_rows=14 * LENGTH):
        result = SafeStep(model, shrink=lambda n: n)(token_loss(model), make_batch())
    assert result.micro_batch == 14


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((torch.zeros(3, 2), torch.zeros(4)), "must have one first dimension in common, found 3, 4"),
        ("words", "must have one first dimension in common, found none"),
        (torch.zeros(0, 3), "the batch has no samples"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        SafeStep(make_model())(lambda part: part, batch)


def test_dicts_and_extra_values_are_cut_along_the_samples() -> None:
    model = nn.Linear(3, 1)
    seen = []

    def fn(part: dict[str, Any]) -> tuple[Tensor, int]:
        seen.append((part["x"].shape[0], part["scale"], part["name"]))
        return model(part["x"]).sum(), part["x"].shape[0]

    SafeStep(model, micro_batch=2)(fn, {"x": torch.ones(5, 3), "scale": torch.tensor(2.0), "name": "n"})
    assert [size for size, _, _ in seen] == [2, 2, 1]
    assert all(name == "n" for _, _, name in seen)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_cuda_graphs_are_refused_and_recompiling_is_announced() -> None:
    model = make_model()
    with pytest.raises(UsageError) as caught:
        SafeStep(torch.compile(model, mode="reduce-overhead"))
    assert str(caught.value) == (
        "error: safe_step cannot shrink a model compiled with CUDA graphs: their memory is fixed when they are made\n"
        'hint: compile with mode="default" or "max-autotune-no-cudagraphs"'
    )
    seen: list[Shrunk] = []
    compiled = torch.compile(model, backend="eager")
    with OutOfMemoryAt(number=1):
        SafeStep(compiled, on_change=seen.append)(token_loss(model), make_batch())
    model.zero_grad()
    with OutOfMemoryAt(number=1):
        SafeStep(model, on_change=seen.append)(token_loss(model), make_batch())
    assert [change.is_recompiling for change in seen] == [True, False]
