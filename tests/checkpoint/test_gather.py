"""The way through a buffer on the GPU, run with host tensors: the same code, another device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jackline import accelerator
from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.checkpoint.staging import gather
from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.gather import GpuCopies, Span, choose_way, plan_batches
from jackline.checkpoint.staging.layout import Layout, lay_out_state
from jackline.checkpoint.staging.stage import Stager
from jackline.checkpoint.state.capture import Source, capture
from jackline.rundir.layout import RunDir
from tests.checkpoint.states import fingerprint, make_state, train_step
from tests.deadline import HANGS_S

PLENTY = 1 << 50
WAYS = ["whole", "bounce", "none"]


def here(way: Any = "auto", batch_bytes: int = 4096, free: Callable[[], int] = lambda: PLENTY) -> GpuCopies:
    return GpuCopies(way, batch_bytes, free_bytes=lambda device: free(), kinds=("cpu",))


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([0, 0, 0, 4, 700])), max_size=30),
    most=st.one_of(st.none(), st.integers(0, 8000)),
)
def test_batches_hold_every_tensor_once_and_touch_nothing_else(sizes: list[Any], most: int | None) -> None:
    spans, position = [], 96
    for number, (size, hole) in enumerate(sizes):
        position += hole
        spans.append(Span(number, position, size))
        position += size
    batches, alone = plan_batches(spans, most)
    placed = [number for batch in batches for number, _ in batch.places]
    assert sorted(placed + alone) == [span.number for span in spans if span.size_bytes]
    assert not (alone and most is None)
    for batch in batches:
        assert most is None or batch.size_bytes <= most
        end = 0
        for one in batch.stretches:
            assert (one.start - one.in_buffer) % 512 == 0 and one.in_buffer >= end
            end = one.in_buffer + one.size_bytes
        parts = sorted((at, at + spans[n].size_bytes, spans[n].start) for n, at in batch.places)
        covered = []
        for one in batch.stretches:
            inside = [part for part in parts if one.in_buffer <= part[0] < one.in_buffer + one.size_bytes]
            assert all(start - at == one.start - one.in_buffer for at, _, start in inside)
            edges = [one.in_buffer, *(stop for _, stop, _ in inside)]
            assert [at for at, _, _ in inside] == edges[:-1] and edges[-1] == one.in_buffer + one.size_bytes
            covered += inside
        assert covered == parts


def test_a_copy_on_the_gpu_is_made_only_where_three_would_fit() -> None:
    state, batch = 100 << 20, 128 << 20
    auto = GpuCopies(batch_bytes=batch)
    assert choose_way(auto, state, 3 * state + 1) == "whole"
    assert choose_way(auto, state, 3 * state) == "none"
    assert choose_way(auto, 10 * state, 4 * batch + 1) == "bounce"
    assert choose_way(GpuCopies("bounce"), state, 0) == "bounce"


def test_under_a_limit_a_copy_is_judged_by_what_the_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 139 GiB that are free a process limited to 512 MiB may take only what it has not taken yet."""
    driver = SimpleNamespace(
        mem_get_info=lambda device: (139 << 30, 140 << 30),
        get_per_process_memory_fraction=lambda device: 0.5 / 140,
        memory_reserved=lambda device: 400 << 20,
    )
    monkeypatch.setattr(accelerator, "backend", lambda: driver)

    free_bytes = GpuCopies().free_bytes(torch.device("cuda"))

    assert 111 << 20 <= free_bytes <= 112 << 20
    assert choose_way(GpuCopies(), 100 << 20, free_bytes) == "none"
    assert GpuCopies().is_limited(torch.device("cuda"))
    assert choose_way(GpuCopies(), 1 << 20, free_bytes, is_limited=True) == "none"


def odd_state() -> dict[str, Any]:
    """Every kind of number, strides, views, a tie, buffers between weights, nothing and one large tensor."""
    state = make_state(width=24)
    for _ in range(2):
        train_step(state)
    torch.manual_seed(1)
    waves = torch.randn(7, 5, dtype=torch.complex64)
    loose = {
        "t": torch.randn(9, 5).t(), "part": torch.randn(10, 10)[2:7, 3:9], "none": torch.empty(0, 3),
        "waves": waves, "conj": waves.conj(), "neg": waves.conj().imag, "bool": torch.rand(33) > 0.5,
        "bf16": torch.randn(77).bfloat16(), "f8": torch.randn(19).to(torch.float8_e4m3fn),
        "i16": torch.arange(9).short(),
        "one": torch.tensor(3.0), "thin": torch.randn(1, 6)[:, ::2], "large": torch.randn(4000),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16), "f64": torch.randn(3, 3, dtype=torch.float64),
    }  # fmt: skip
    return {**{key: state[key] for key in ("model", "optim")}, "norm": nn.BatchNorm2d(3), "loose": loose}


def images(arena: Arena, layout: Layout) -> list[bytes]:
    parts = []
    for image in layout.images:
        start, header = image.arena_offset, len(image.header)
        parts.append(arena.read(start + header, image.size_bytes - header))
    return parts


def stage(layout: Layout, sources: list[Source], copies: GpuCopies | None, *, is_overlapped: bool) -> list[bytes]:
    arena = Arena(layout.size_bytes, is_pinned=False)
    staging = Stager(arena, copies).begin(layout, sources, is_overlapped=is_overlapped)
    assert staging.finish()
    return images(arena, layout)


@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_gathered_bytes_are_those_of_the_plain_way(way: str, is_overlapped: bool) -> None:
    sources = capture(odd_state(), defer=("loose",)).sources
    layout = lay_out_state(sources)
    plain = stage(layout, sources, None, is_overlapped=False)
    assert stage(layout, sources, here(way), is_overlapped=is_overlapped) == plain


@pytest.mark.parametrize("way", WAYS)
def test_over_the_bus_leg_by_leg_the_bytes_are_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LEG_BYTES", 1000)
    sources = capture(odd_state(), defer=("loose",)).sources
    layout = lay_out_state(sources)
    plain = stage(layout, sources, None, is_overlapped=False)
    assert stage(layout, sources, here(way), is_overlapped=True) == plain


def test_what_was_gathered_and_not_sent_is_sent_before_the_memory_goes() -> None:
    sources = capture(odd_state()).sources
    layout = lay_out_state(sources)
    arena = Arena(layout.size_bytes, is_pinned=False)
    stager = Stager(arena, here("whole"))
    staging = stager.begin(layout, sources, is_overlapped=True)
    stager.close()
    assert images(arena, layout) == stage(layout, sources, None, is_overlapped=False)
    assert staging.finish()  # comes too late and harms nothing


def test_a_second_save_takes_tensors_that_moved_and_changed() -> None:
    state = odd_state()
    sources = capture(state).sources
    layout = lay_out_state(sources)
    arena = Arena(layout.size_bytes, is_pinned=False)
    stager = Stager(arena, here("whole"))
    assert stager.begin(layout, sources, is_overlapped=True).finish()
    with torch.no_grad():
        state["model"][0].weight.data = torch.randn(24, 24).t()
        state["loose"]["large"].mul_(2)
    sources = capture(state).sources
    assert stager.begin(layout, sources, is_overlapped=True).finish()
    assert images(arena, layout) == stage(layout, sources, None, is_overlapped=False)


def test_with_a_copy_on_the_gpu_the_state_may_change_as_soon_as_the_call_is_over() -> None:
    state = odd_state()
    sources = capture(state, defer=("loose",)).sources
    layout = lay_out_state(sources)
    plain = stage(layout, sources, None, is_overlapped=False)
    arena = Arena(layout.size_bytes, is_pinned=False)
    staging = Stager(arena, here()).begin(layout, sources, is_overlapped=True)
    assert staging.held is not None and staging.held.is_empty and staging.moving.is_empty
    for tensor in (*state["model"].parameters(), state["loose"]["large"]):
        tensor.data.zero_()
    staging.barrier()
    assert staging.finish() and images(arena, layout) == plain


@pytest.fixture
def start(tmp_path: Any) -> Any:
    made: list[CheckpointEngine] = []

    def begin(**settings: Any) -> CheckpointEngine:
        run = RunDir(tmp_path / "run")
        run.path.mkdir(exist_ok=True)
        made.append(CheckpointEngine(run, EngineSettings(**settings)))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overlap", [True, False])
def test_what_was_gathered_comes_back_bit_for_bit(start: Any, way: str, overlap: bool) -> None:
    engine = start(gpu=here(way))
    state = make_state()
    for step in range(1, 4):
        train_step(state, engine.before_change)
        before = fingerprint(state)
        ticket = engine.save(state, step=step, overlap=overlap)
        train_step(state, engine.before_change)
        assert ticket.wait(HANGS_S)
        other = make_state(seed=3)
        engine.load_newest(other)
        assert fingerprint(other) == before


def test_the_memory_taken_on_the_gpu_is_said_and_given_back_when_it_runs_short(start: Any) -> None:
    free = [PLENTY]
    engine = start(gpu=here(batch_bytes=2048, free=lambda: free[0]))
    state = make_state()
    train_step(state)
    engine.prepare(state)
    assert [event.text for event in engine.poll() if event.kind == "gpu_memory"] == [
        "saves keep a copy of the state on the GPU (3.9 KiB), so training does not wait for the bus"
    ]
    assert engine.save(state, step=1, overlap=True).wait(HANGS_S)
    free[0] = 10
    train_step(state, engine.before_change)
    before = fingerprint(state)
    assert engine.save(state, step=2, overlap=True).wait(HANGS_S)
    assert [event.text for event in engine.poll() if event.kind == "gpu_memory"] == [
        "GPU memory is short: gave back the 3.9 KiB that saves had taken of it",
        "saves gather small tensors on the GPU (2.0 KiB)",
    ]
    other = make_state(seed=3)
    engine.load_newest(other)
    assert fingerprint(other) == before


def test_a_loop_that_ran_out_of_gpu_memory_gets_the_copy_back(start: Any) -> None:
    engine = start(gpu=here(batch_bytes=2048))
    assert engine.give_back_gpu_memory() == 0
    state = make_state()
    train_step(state)
    before = fingerprint(state)
    ticket = engine.save(state, step=1, overlap=True)
    assert engine.give_back_gpu_memory() > 3000 and engine.give_back_gpu_memory() == 0
    train_step(state, engine.before_change)
    assert ticket.wait(HANGS_S)
    other = make_state(seed=3)
    engine.load_newest(other)
    assert fingerprint(other) == before
    assert engine.save(state, step=2, overlap=True).wait(HANGS_S)
    engine.load_newest(other)
    assert fingerprint(other) == fingerprint(state)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU here; the same code runs on host tensors above"
)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_on_a_real_gpu_every_way_saves_the_state_of_the_call_while_training_continues(
    start: Any, way: Any, overlap: bool
) -> None:
    engine = start(gpu=GpuCopies(way, batch_bytes=1 << 20))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6)), nn.BatchNorm1d(700)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    state = {"model": model, "optim": optimizer}

    def train() -> None:
        model(torch.randn(64, 700, device="cuda")).square().mean().backward()
        engine.before_change()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(1, 6):
        train()
        before = fingerprint(state)
        ticket = engine.save(state, step=step, overlap=overlap, wait="writer")
        for _ in range(3):
            train()
        assert ticket.wait(HANGS_S)
        engine.load_newest(state)
        assert fingerprint(state) == before
