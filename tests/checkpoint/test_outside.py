"""State that torch keeps outside state_dict, and objects of the caller's own: restored in place, or named."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from jackline.checkpoint.format.tree import CannotSave
from jackline.checkpoint.state.attributes import Baseline, find_roots
from jackline.checkpoint.state.capture import capture
from jackline.checkpoint.state.restore import Restored
from jackline.errors import CannotResume
from tests.checkpoint.test_roundtrip import load, save


class Schedule:
    """A person's own object inside a module, without state_dict."""

    def __init__(self) -> None:
        self.level, self.history = 1, [0]


class Odd(nn.Module):
    """Everything that state_dict leaves out."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.loose = torch.zeros(2)
        self.window = deque([1, 2], maxlen=4)
        self.array = np.zeros(3)
        self.schedule = Schedule()
        self.generator = torch.Generator().manual_seed(3)
        self.teacher = [nn.Linear(2, 2)]  # in a list, so that it is no submodule
        self.best: float | None = None

    def train_on(self) -> None:
        self.calls += 1
        self.drop.p = 0.5
        self.seen += 2
        self.loose = self.loose + 1
        self.window.append(7)
        self.array[1] = 9
        self.schedule.level, self.best = 4, 0.25
        self.schedule.history.append(5)
        torch.rand(2, generator=self.generator)
        self.body.weight.requires_grad_(False)
        self.norm.eval()
        with torch.no_grad():
            self.teacher[0].weight.fill_(3)
        self.cache = {"last": torch.ones(2), ("a", 1): [None, True]}

    def everything(self) -> dict[str, Any]:
        return {
            "calls": self.calls, "p": self.drop.p, "seen": self.seen.tolist(), "loose": self.loose.tolist(),
            "window": self.window, "array": self.array.tolist(), "level": self.schedule.level, "best": self.best,
            "history": self.schedule.history, "random": torch.rand(3, generator=self.generator).tolist(),
            "grads": [p.requires_grad for p in self.parameters()], "modes": [m.training for m in self.children()],
            "teacher": self.teacher[0].weight.tolist(), "cache": str(getattr(self, "cache", None)),
            "table": self.table.tolist(),
        }  # fmt: skip


def through_a_checkpoint(folder: Path, trained: Any, change: Any, fresh: Any, **other: Any) -> Restored:
    baseline = Baseline()
    for root in find_roots({"it": trained}):
        baseline.note(root)
    change()
    return load(save(folder, {"it": trained}, baseline=baseline, **other), {"it": fresh})


def test_what_state_dict_leaves_out_of_a_module_comes_back(tmp_path: Path) -> None:
    trained, fresh = Odd(), Odd()
    restored = through_a_checkpoint(tmp_path, trained, trained.train_on, fresh)
    assert fresh.everything() == trained.everything()
    assert restored.notes == (
        "it: requires_grad is as it was saved, other than in the program: body.weight",
        "it: train or eval mode is as it was saved, other than in the program: norm",
    )


def test_parts_that_the_program_freezes_are_trained_on_when_they_were_before_the_save(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)).eval()
        return model.requires_grad_(False)

    trained, fresh = build(), build()
    through_a_checkpoint(tmp_path, trained, lambda: trained.requires_grad_(True).train(), fresh)
    assert all(parameter.requires_grad for parameter in fresh.parameters())
    assert all(part.training for part in fresh.modules())


def test_a_compiled_module_has_the_same_names_outside_state_dict(tmp_path: Path) -> None:
    trained, fresh = Odd(), Odd()
    trained.body = torch.compile(trained.body, backend="eager")  # type: ignore[assignment]
    through_a_checkpoint(tmp_path, torch.compile(trained, backend="eager"), trained.train_on, fresh)
    assert fresh.everything() == trained.everything()


def test_the_file_of_a_module_still_loads_into_it_with_plain_pytorch(tmp_path: Path) -> None:
    trained = Odd()
    through_a_checkpoint(tmp_path, trained, trained.train_on, Odd())
    Odd().load_state_dict(load_file(tmp_path / "step-00000001" / "it.safetensors"))
    assert (tmp_path / "step-00000001" / "it.outside.safetensors").exists()


def test_attributes_that_training_left_alone_are_the_programs(tmp_path: Path) -> None:
    """Whoever edits dropout in the program gets the edited value, and a hidden buffer that differs is named."""
    fresh = Odd()
    fresh.drop.p, fresh.table[0] = 0.3, 9.0
    restored = through_a_checkpoint(tmp_path, Odd(), lambda: None, fresh)
    assert fresh.drop.p == 0.3 and fresh.table[0] == 9.0
    assert restored.notes == (
        "it.table (persistent=False) is not the one of the saved run; training had not changed it, so it was not "
        "stored: it is as the program made it",
    )


def test_a_hidden_buffer_that_grew_or_was_made_late_comes_back(tmp_path: Path) -> None:
    trained, fresh = Odd(), Odd()

    def grow() -> None:
        trained.seen = torch.arange(7.0)
        trained.body.register_buffer("late", torch.ones(2), persistent=False)

    through_a_checkpoint(tmp_path, trained, grow, fresh)
    assert fresh.seen.tolist() == list(range(7))
    assert fresh.body.late.tolist() == [1, 1]
    assert set(fresh.state_dict()) == set(Odd().state_dict())


def test_what_cannot_be_saved_is_named_at_the_save_and_at_the_resume(tmp_path: Path) -> None:
    trained, baseline = nn.Linear(2, 2), Baseline()
    baseline.note(trained)
    trained.source = iter([1, 2])  # type: ignore[assignment]
    trained.large = torch.zeros(5_000_000)
    trained.by_object = {trained.weight: torch.ones(1)}  # type: ignore[assignment]
    wanted = (
        "it.source (a list_iterator)",
        "it.large (a tensor of [5000000])",
        "it.by_object (a dict whose keys are tensors or addresses)",
    )
    assert capture({"it": trained}, baseline=baseline).unsaved == wanted
    restored = load(save(tmp_path, {"it": trained}, baseline=baseline), {"it": nn.Linear(2, 2)})
    assert [note.partition(" had changed")[0] for note in restored.notes] == ["it.source", "it.large", "it.by_object"]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, with the optimizer that has the momentum inside."""

    def __init__(self, params: Any, base: Any = torch.optim.SGD, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.num_updates = 0

    def step(self, closure: Any = None) -> None:
        self.num_updates += 1
        self.base_optimizer.step()


class LoadingSam(Sam):
    """With a load_state_dict of its own, which makes new groups."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


@pytest.mark.parametrize("kind", [Sam, LoadingSam])
def test_the_state_of_an_optimizer_inside_an_optimizer_comes_back(kind: type[Sam], tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Sam]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, kind(model.parameters(), lr=0.1, momentum=0.9)

    def train(model: nn.Module, optimizer: Sam, count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            model(torch.full((2, 3), number + 1.0)).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 3)
    other_model, other = make()
    path = save(tmp_path, {"model": model, "optimizer": optimizer}, baseline=Baseline())
    load(path, {"model": other_model, "optimizer": other})
    train(model, optimizer, 3)
    train(other_model, other, 3)
    assert torch.equal(model.weight, other_model.weight)  # type: ignore[arg-type]
    buffers = [state["momentum_buffer"] for state in other.base_optimizer.state.values()]
    assert len(buffers) == 2


def test_modes_and_flags_need_no_baseline(tmp_path: Path) -> None:
    path = save(tmp_path, {"it": Odd()})
    fresh = Odd().eval().requires_grad_(False)
    restored = load(path, {"it": fresh})
    assert all(part.training for part in fresh.modules())
    assert all(parameter.requires_grad for parameter in fresh.parameters())
    assert len(restored.notes) == 2


# -- the caller's own objects ----------------------------------------------------------------------------------------


def test_plain_objects_are_filled_in_place(tmp_path: Path) -> None:
    def make(full: bool) -> dict[str, Any]:
        objects: dict[str, Any] = {
            "ring": np.arange(6.0).reshape(2, 3) if full else np.zeros((2, 3)),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)) if full else np.zeros((2, 3), int, order="F"),
            "swapped": np.arange(3, dtype=">i4") if full else np.zeros(3, ">i4"),
            "scalar": np.array(4.5) if full else np.array(0.0),
            "queue": deque([1, (2, "x")], maxlen=3) if full else deque([9, 9, 9], maxlen=3),
            "names": {"a", "b"} if full else {"z"},
            "log": [1, [2, 3]] if full else [0] * 9,
            "raw": bytearray(b"abc") if full else bytearray(b"other"),
            "counts": Counter("aab") if full else Counter(),
            "order": {"b": 1, "a": 2} if full else {"a": 0, "b": 0},
            "ordered": OrderedDict(x=1, y=2) if full else OrderedDict(y=0, x=0),
            "default": defaultdict(list, {3: [1]}) if full else defaultdict(list),
        }
        return objects

    path = save(tmp_path, make(True))
    mine = make(False)
    load(path, into := dict(mine))
    for name, wanted in make(True).items():
        assert into[name] is mine[name], name
        assert type(mine[name]) is type(wanted), name
        assert mine[name] == wanted if name == "names" else str(mine[name]) == str(wanted), name
    assert mine["default"][4] == []


def test_a_view_of_an_array_sees_what_was_restored(tmp_path: Path) -> None:
    path = save(tmp_path, {"ring": np.arange(4.0)})
    ring = np.zeros(8)
    load(path, {"ring": ring[::2]})
    assert ring.tolist() == [0, 0, 1, 0, 2, 0, 3, 0]


def test_an_array_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, {"ring": np.arange(4.0)})
    with pytest.raises(CannotResume, match=r"ring does not fit: the checkpoint has float64\[4\], the program"):
        load(path, {"ring": np.zeros(5)})
    with pytest.raises(CannotResume, match=r"queue does not fit: maxlen is 3 in the checkpoint, 4 in the program"):
        load(save(tmp_path, {"queue": deque([1], 3)}, step=2), {"queue": deque([1], 4)})
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    with pytest.raises(CannotResume, match=r"ring is read-only and not as saved"):
        load(path, {"ring": fixed})


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    with pytest.raises(CannotSave, match="ring cannot be saved: a numpy MaskedArray of float64"):
        capture({"ring": np.ma.masked_array([1.0, 2.0], [True, False])})
