"""An attached loop that changes what it saves, in every way there is, right after each boundary.

    python -m tests.session.boundary_loop RUNS_DIR --cases 100 --seed 0 [--overlap] [--device cuda --way whole]

Each step is one case: one saved tensor, one way to change it, one instant of the step. What the checkpoint of the
boundary holds is compared with digests taken before that boundary. Prints one line a case before it happens, so that
a crash names its case, and at the end the cases that were wrong.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import json
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import jackline
from jackline.checkpoint.staging.gather import GpuCopies
from jackline.checkpoint.state.capture import capture
from jackline.checkpoint.state.dtypes import as_stored

WIDTH = 384
INSTANTS = ("start", "mid-body", "after backward", "hook")


class Average:
    """An EMA whose state_dict shows its live tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.crossed = nn.Parameter(torch.randn(WIDTH, 64).t())
        self.coarse = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tied(self.first(x))) * self.scale + self.coarse.float()
        return nn.functional.linear(x, self.crossed).square().mean()


def make_loose(device: str) -> dict[str, Tensor]:
    loose = {
        "plain": torch.randn(100_000, device=device),
        "strided": torch.randn(100, 100, device=device)[:, ::2],
        "bf16": torch.randn(999, device=device).bfloat16(),
        "number": torch.tensor(3, device=device),
        "empty": torch.empty(0, 3, device=device),
    }
    if device == "cpu":
        import numpy

        loose["of numpy"] = torch.from_numpy(numpy.ones(5000, dtype=numpy.float32))
    return loose


# -- the ways to change a tensor ------------------------------------------------------------------------------------


def in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def by_data(tensor: Tensor) -> None:
    tensor.data.fill_(7)


def by_numpy(tensor: Tensor) -> None:
    data = tensor.detach()
    (data.view(torch.int16) if data.dtype == torch.bfloat16 else data).numpy()[...] = 2


def rebind(tensor: Tensor) -> None:
    tensor.data = torch.full_like(tensor.data, 5)


def by_set(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.full_like(tensor, 4))


def by_resize(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    tensor.data.fill_(6)


def by_thread(tensor: Tensor) -> None:
    # Not joined here: it writes while the loop continues.
    thread = threading.Thread(target=lambda: [tensor.data.fill_(value) for value in range(2, 9)])
    thread.start()
    _writers.append(thread)


def by_c(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    ctypes.memset(storage.data_ptr(), 0x3C, storage.nbytes())


def by_second_stream(tensor: Tensor) -> None:
    with torch.cuda.stream(_side()):
        tensor.data.fill_(8)


_writers: list[threading.Thread] = []
_streams: list[Any] = []
ON_HOST = (in_place, by_data, by_numpy, rebind, by_set, by_resize, by_thread, by_c)
ON_GPU = (in_place, by_data, rebind, by_set, by_resize, by_thread, by_second_stream)


def _side() -> Any:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


# -- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    change: Callable[[Tensor], None]
    instant: str
    is_late: bool  # on a GPU: written by a second stream that is still waiting when the boundary comes

    def __str__(self) -> str:
        late = ", beside a late stream" if self.is_late else ""
        return f"{self.name} {self.change.__name__} at {self.instant}{late}"


def digests(state: dict[str, Any]) -> dict[str, str]:
    found = {}
    for key, name, tensor, _ in capture(state).sources:
        found[f"{key}.{name}"] = _digest(
            as_stored(tensor.detach()).cpu().contiguous().clone()
        )  # numpy makes a storage unresizable
    return found


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()


def read_digests(folder: Path) -> dict[str, str]:
    """Of what is on the disk, read by hand."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                body = data[start + begin : start + end]
                found[f"{path.stem}.{name}"] = hashlib.sha256(body).hexdigest()
    return found


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{key}.{name}": tensor for key, name, tensor, _ in capture(state).sources}


class Drill:
    """Plans a case before each boundary, carries it out after it, and looks at the checkpoint."""

    def __init__(self, given: argparse.Namespace, run: Any, state: dict[str, Any]) -> None:
        self.run, self.state = run, state
        self.wrong: list[str] = []
        self._given = given
        self._draw = random.Random(given.seed)
        self._engine = run._attached.saver.engine
        self._case: Case | None = None
        self._expected: dict[str, str] = {}
        self._late: Tensor | None = None

    def plan(self) -> None:
        """The last thing before a boundary."""
        while _writers:
            _writers.pop().join()
        if self._given.device == "cuda":
            torch.cuda.synchronize()
        tensors = tensors_of(self.state)
        ways = ON_GPU if self._given.device == "cuda" else ON_HOST
        is_late = self._given.device == "cuda" and not self._given.overlap and self._draw.random() < 0.3
        name = self._draw.choice(sorted(tensors))
        case = Case(name, self._draw.choice(ways), self._draw.choice(INSTANTS), is_late)
        tensor = tensors[name]
        if case.change is by_resize and not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()  # before the boundary: numpy has seen this one
        if case.change in ON_GPU[-1:] and not tensor.is_cuda:
            case = Case(name, by_data, case.instant, is_late)  # an optimizer's counter, on the host
        self._case = case
        self._expected = digests(self.state)
        print(f"step {self.run.step}: {case}", flush=True)
        if is_late:
            self._write_late()

    def at(self, instant: str) -> None:
        """If the case is due here: changes the tensor."""
        if self._case is None or self._case.instant != instant:
            return
        if self._given.overlap and instant != "hook":  # the hook comes behind the session's own
            self.run.before_change()
        if self._given.overlap and self._given.device == "cuda":
            _side().wait_stream(torch.cuda.current_stream())  # declared changes are in order with the loop's stream
        self._case.change(tensors_of(self.state)[self._case.name])

    def look(self) -> None:
        """Waits for the checkpoint of the boundary before this step."""
        while self._engine.is_busy:
            self._engine._link.pump(0.05)
        if self._case is None:
            return
        step = self.run.step - 1
        found = read_digests(self._engine.folder / f"step-{step:08d}")
        for name in sorted(found.keys() | self._expected.keys()):
            if found.get(name) != self._expected.get(name):
                self.wrong.append(f"step {step}: {name} is wrong after {self._case}")

    def _write_late(self) -> None:
        tensor = self.state["loose"]["plain"]
        self._expected["loose.plain"] = _digest(torch.full(tensor.shape, 9.5))
        with torch.cuda.stream(_side()):
            torch.cuda._sleep(20_000_000)  # about 10 ms
            tensor.data.fill_(9.5)


def train(given: argparse.Namespace) -> int:
    device = given.device
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    model = Model().to(device)
    average = Average(model)
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "target": target, "ema": average, "loose": make_loose(device)}
    data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))
    settings = {"runs_dir": given.runs_dir, "name": f"boundary-{given.seed}", "verify": False, "new": True}
    with jackline.attach(
        **state,
        loader=torch.utils.data.DataLoader(data, batch_size=8),
        save_every_steps=1,
        overlap=given.overlap,
        memory_guard=False,
        **settings,
    ) as run:
        run._attached.saver.engine._area._copies = GpuCopies(given.way)
        drill = Drill(given, run, state)
        optimizer.register_step_pre_hook(lambda *_: drill.at("hook"))
        for (batch,) in run.steps(total=given.cases + 1):
            drill.at("start")
            loss = model(batch.to(device))
            drill.at("mid-body")
            optimizer.zero_grad()
            try:
                loss.backward()
            except RuntimeError:  # autograd sees that its weights were changed; the step continues all the same
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
            drill.at("after backward")
            optimizer.step()
            drill.look()
            drill.plan()
    print("\n".join(drill.wrong))
    print(f"{given.cases} cases, {len(drill.wrong)} wrong tensors", flush=True)
    return int(bool(drill.wrong))


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("runs_dir")
    options.add_argument("--cases", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--overlap", action="store_true")
    options.add_argument("--device", default="cpu")
    options.add_argument("--way", default="auto")
    return train(options.parse_args())


if __name__ == "__main__":
    sys.exit(main())
