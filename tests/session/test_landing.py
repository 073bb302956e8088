"""Numbers of a device land in host memory that is used again: never before they were read, never by waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jackline.session.metrics.landing import PAGE, Lane, Page, make_buffer, mark_arrival, read_places
from jackline.session.metrics.scalars import Scalars


class LateStream:
    """A stream whose work is over when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_marks = 0

    def record_event(self) -> LateStream:
        self.num_marks += 1
        return self

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Far(torch.Tensor):
    """Says that it is on a GPU. What happens to it is what happens to a tensor there, but on the host."""

    is_cpu = False  # type: ignore[assignment]


class HostLanes:
    """Lanes for such tensors: real pages, without a GPU to pin them for."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.lanes: dict[torch.dtype, Lane] = {}
        self.num_pages = 0

    def land(self, value: torch.Tensor) -> Any:
        if value.dtype not in self.lanes:
            self.lanes[value.dtype] = Lane(self.stream, lambda: self.make(value.dtype))
        return self.lanes[value.dtype].land(value)

    def make(self, dtype: torch.dtype) -> torch.Tensor:
        self.num_pages += 1
        return make_buffer(dtype, is_pinned=False)


def far(number: float, **more: Any) -> torch.Tensor:
    return torch.tensor(number, **more).as_subclass(Far)


def scalars_on(stream: LateStream) -> tuple[Scalars, HostLanes]:
    scalars, lanes = Scalars(), HostLanes(stream)
    scalars._lanes = lanes  # type: ignore[assignment]
    return scalars, lanes


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_value_on_a_device_costs_one_copy_and_a_mark_for_many_lines() -> None:
    stream = LateStream()
    scalars, _ = scalars_on(stream)
    values = {"loss": far(1.5), "norm": far(2.0, dtype=torch.bfloat16), "lr": 0.1}
    scalars.log(0, values)
    with Operations() as operations:
        scalars.log(1, values)
        assert operations.seen == ["aten.copy_.default"] * 2
        scalars.send(float("inf"))
        assert operations.seen == ["aten.copy_.default"] * 2
    assert stream.num_marks == 1


def test_what_is_logged_is_the_value_of_that_moment() -> None:
    stream = LateStream()
    stream.is_done = True
    scalars, _ = scalars_on(stream)
    weight = torch.nn.Parameter(far(1.0))
    loss = (weight * 3).reshape(1, 1)
    total = far(7, dtype=torch.int64)
    scalars.log(1, {"loss": loss, "weight": weight, "total": total})
    with torch.no_grad():
        loss.zero_()
        weight.add_(1)
        total.add_(1)
    with torch.inference_mode():
        scalars.log(2, {"loss": loss, "total": far(2**53, dtype=torch.int64)})
    scalars.log(3, {"loss": far(float("nan"))})
    scalars.send(float("inf"))
    lines = [(step, values) for step, _, values in scalars.resolve()]
    assert lines[:2] == [(1, {"loss": 3.0, "weight": 1.0, "total": 7.0}), (2, {"loss": 0.0, "total": float(2**53)})]
    assert str(lines[2]) == "(3, {'loss': nan})"
    assert loss.grad_fn is not None and not any(
        place.slot.requires_grad for lane in scalars._lanes.lanes.values() for place in lane._page.places
    )


def test_a_place_is_used_again_only_after_it_was_read() -> None:
    stream = LateStream()
    scalars, lanes = scalars_on(stream)
    num_lines, step = 3 * PAGE + 1, 0
    for _ in range(num_lines):
        scalars.log(step, {"loss": far(float(step))})
        step += 1
    scalars.send(float("inf"))
    assert lanes.num_pages == 4

    # The device is behind: nothing is known, and what is logged meanwhile takes new places.
    assert scalars.resolve() == []
    for _ in range(num_lines):
        scalars.log(step, {"loss": far(float(step))})
        step += 1
    assert lanes.num_pages == 7

    stream.is_done = True
    scalars.send(float("inf"))
    assert [(line[0], line[2]["loss"]) for line in scalars.resolve()] == [(at, float(at)) for at in range(step)]
    for _ in range(20):
        for _ in range(num_lines):
            scalars.log(step, {"loss": far(float(step))})
            step += 1
        scalars.send(float("inf"))
        found = scalars.resolve()
        assert [line[2]["loss"] for line in found] == [float(line[0]) for line in found]
        assert len(found) == num_lines
    assert lanes.num_pages == 7


def test_lines_that_nobody_takes_hold_no_places() -> None:
    stream = LateStream()
    scalars, lanes = scalars_on(stream)
    scalars._waiting = type(scalars._waiting)(maxlen=10)
    for step in range(2 * PAGE):
        scalars.log(step, {"loss": far(float(step))})
    scalars.send(float("inf"))
    assert [line[2]["loss"] for line in scalars.resolve(wait=True)] == [float(at) for at in range(246, 256)]
    # The page that was half dropped is not used again, because nobody can say that its copies are over.
    for step in range(2 * PAGE):
        scalars.log(step, {"loss": far(float(step))})
    assert lanes.num_pages == 4


def test_pages_of_a_long_stall_are_not_all_held() -> None:
    lane = Lane(LateStream(), lambda: make_buffer(torch.float32, is_pinned=False))
    places = [lane.land(torch.tensor(float(at))) for at in range(100 * PAGE)]
    assert mark_arrival(places) == [lane.stream]
    assert read_places(places) == [float(at) for at in range(100 * PAGE)]
    assert len(lane._free) == 64
    assert all(isinstance(page, Page) and page.num_read == 0 for page in lane._free)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch tells that it may miss some
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the pages are tried unpinned above")
def test_on_a_gpu_nothing_waits_and_every_number_is_exact() -> None:
    scalars, device = Scalars(), torch.device("cuda")
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)
    side, number = torch.cuda.Stream(), torch.zeros((), device=device)
    graph = torch.full((1,), 2.0, device=device, requires_grad=True) * 2
    ones = [torch.ones((), device=device).to(kind) for kind in kinds]
    found = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3 * PAGE):
            number.add_(1)
            scalars.log(step, {"number": number, "graph": graph, "lr": 0.5} | {str(one.dtype): one for one in ones})
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000)  # a stream that is behind: its numbers arrive last
                scalars.log(step, {"side": torch.full((), float(step), device=device)})
            scalars.send(float("inf") if step % 7 == 0 else 0.0)
            found += scalars.resolve()
        scalars.send(float("inf"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += scalars.resolve(wait=True)
    assert len(found) == 6 * PAGE
    for step, (first, second) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert first[2] == {"number": step + 1.0, "graph": 4.0, "lr": 0.5} | {str(kind): 1.0 for kind in kinds}
        assert second[2] == {"side": float(step)}
