"""Capture, file, restore: any state comes back bit for bit, into the objects that exist."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from jackline.checkpoint.format.hashing import CHUNK_BYTES, best_algorithm
from jackline.checkpoint.format.manifest import STATE, Damage, Manifest, Name
from jackline.checkpoint.format.tree import CannotSave
from jackline.checkpoint.staging.layout import lay_out_state
from jackline.checkpoint.staging.pieces import fill_window
from jackline.checkpoint.state.capture import capture
from jackline.checkpoint.state.frozen import FrozenHashes
from jackline.checkpoint.state.restore import Restored, restore_checkpoint
from jackline.checkpoint.writer.commit import Draft
from jackline.checkpoint.writer.disk import Disk
from jackline.errors import CannotResume
from tests.checkpoint.states import fingerprint, make_state, train_step


class Memory:
    """An arena without a process."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def write(self, data: bytes, offset: int) -> None:
        ctypes.memmove(self.address + offset, data, len(data))


def save(folder: Path, state: Mapping[str, Any], step: int = 1, **how: Any) -> Path:
    captured = capture(state, **how)
    layout = lay_out_state(captured.sources)
    draft = Draft(folder, Name(step), best_algorithm(), Disk())
    entries = []
    for image in layout.images:
        memory = Memory(image.size_bytes)
        for start in range(0, image.size_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, image.size_bytes - start)
            fill_window(image, layout, captured.sources, (start, size), (memory, start))  # type: ignore[arg-type]
        entries.append(draft.add_small(image.name, memory.tensor.numpy().tobytes()))
    entries.append(draft.add_small(STATE, json.dumps(captured.tree, allow_nan=False).encode()))
    return draft.commit(Manifest(step, 0.0, best_algorithm(), tuple(entries)))


def load(path: Path, into: dict[str, Any]) -> Restored:
    return restore_checkpoint(path, into, hash_frozen=FrozenHashes())


ALL_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("uint16", "uint32", "uint64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bits(tensor.reshape(1))


def chance_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of arbitrary bit patterns, NaNs included."""
    size = dtype.itemsize * int(np.prod(shape))
    raw = torch.frombuffer(bytearray(random.Random(size).randbytes(max(size, 1))), dtype=torch.uint8)[:size]
    if dtype is torch.bool:
        raw = raw % 2
    return raw.clone().view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_kind_of_number_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "a": {"t": chance_bits(dtype, (3, 5)), "one": chance_bits(dtype, ()), "none": chance_bits(dtype, (0, 2))}
    }
    path = save(tmp_path, state)
    into = {"a": {name: torch.zeros_like(tensor) for name, tensor in state["a"].items()}}
    addresses = [tensor.data_ptr() for tensor in into["a"].values()]
    load(path, into)
    assert [tensor.data_ptr() for tensor in into["a"].values()] == addresses
    fresh: dict[str, Any] = {"a": None}
    load(path, fresh)
    for name, tensor in state["a"].items():
        for back in (into["a"][name], fresh["a"][name]):
            assert back.dtype == dtype and back.shape == tensor.shape and bits(back) == bits(tensor)
    assert set(load_file(path / "a.safetensors")) == {"t", "one", "none"}


def test_strided_tensors_keep_their_strides_and_unsaved_neighbours(tmp_path: Path) -> None:
    source = torch.arange(24.0).reshape(4, 6)
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    path = save(tmp_path, {"a": {"t": source.t(), "every": source[:, ::2], "image": images}})
    wide = torch.full((4, 6), -1.0)
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    into: dict[str, Any] = {"a": {"t": torch.zeros(4, 6).t(), "every": wide[:, ::2], "image": image}}
    load(path, into)
    assert torch.equal(into["a"]["t"], source.t()) and into["a"]["t"].stride() == (1, 6)
    assert torch.equal(wide[:, ::2], source[:, ::2]) and (wide[:, 1::2] == -1).all()
    assert torch.equal(image, images) and image.is_contiguous(memory_format=torch.channels_last)
    fresh: dict[str, Any] = {"a": None}
    load(path, fresh)
    assert fresh["a"]["t"].stride() == (1, 6) and fresh["a"]["image"].stride() == images.stride()


def test_lazy_conjugates_and_negatives_are_stored_as_what_they_mean(tmp_path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    state = {"a": {"conj": z.conj(), "imag": torch.conj(z).imag, "plain": z}}
    path = save(tmp_path, state)
    fresh: dict[str, Any] = {"a": None}
    load(path, fresh)
    assert torch.equal(fresh["a"]["conj"], z.conj().resolve_conj())
    assert torch.equal(fresh["a"]["imag"], -z.imag) and torch.equal(fresh["a"]["plain"], z)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    state = make_state()
    path = save(tmp_path, state)
    assert "3.weight" not in load_file(path / "model.safetensors")
    other = make_state(seed=1)
    load(path, other)
    model = other["model"]
    assert model[3].weight is model[0].weight
    assert torch.equal(model[0].weight, state["model"][0].weight)


def test_what_was_tied_and_is_apart_now_gets_the_values_twice(tmp_path: Path) -> None:
    shared = torch.randn(4)
    path = save(tmp_path, {"a": {"x": shared, "y": shared}})
    into = {"a": {"x": torch.zeros(4), "y": torch.zeros(4)}}
    load(path, into)
    assert torch.equal(into["a"]["x"], shared) and torch.equal(into["a"]["y"], shared)


def test_what_was_apart_and_is_tied_now_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": {"x": torch.ones(4), "y": torch.zeros(4)}})
    shared = torch.full((4,), 7.0)
    with pytest.raises(CannotResume) as caught:
        load(path, {"a": {"x": shared, "y": shared}})
    assert str(caught.value) == (
        "error: a.y shares its memory with x now, but did not when it was saved\n"
        "hint: build what was saved (jackline.peek(name) gives its step and epoch before that), or start a new run"
    )
    assert (shared == 7).all()


def test_a_whole_training_state_comes_back_and_trains_on_identically(tmp_path: Path) -> None:
    state = make_state()
    for _ in range(3):
        train_step(state)
    path = save(tmp_path, state)
    losses = [train_step(state) for _ in range(3)]
    other = make_state(seed=5)
    train_step(other)
    restored = load(path, other)
    assert restored.keys == ("model", "optim", "schedule", "random", "counters") and restored.not_restored == ()
    assert [train_step(other) for _ in range(3)] == losses
    assert fingerprint(other) == fingerprint(state)


def test_generators_of_every_kind_come_back(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        return {
            "chance": {
                "torch": torch.Generator().manual_seed(seed),
                "python": random.Random(seed),
                "pcg": np.random.default_rng(seed),
                "old": np.random.RandomState(seed),
                "philox": np.random.Generator(np.random.Philox(seed)),
                "twister": np.random.Generator(np.random.MT19937(seed)),
            }
        }

    def draw(state: dict[str, Any]) -> list[Any]:
        c = state["chance"]
        return [
            torch.randn(3, generator=c["torch"]).tolist(),
            c["python"].gauss(0, 1),
            *(c[name].random(3).tolist() for name in ("pcg", "philox", "twister")),
            c["old"].rand(3).tolist(),
        ]

    state = make(1)
    draw(state)
    path = save(tmp_path, state)
    expected = [draw(state), draw(state)]
    for into in (make(2), {"chance": None}):
        load(path, into)
        assert [draw(into), draw(into)] == expected


def test_the_rng_state_is_restored_last_so_that_what_draws_numbers_before_does_no_harm(tmp_path: Path) -> None:
    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            torch.rand(5)
            random.random()

    from jackline.checkpoint.state.rng import ProcessRandom

    state = {"random": ProcessRandom(), "drawing": Drawing()}
    path = save(tmp_path, state)
    expected = (torch.rand(2).tolist(), random.random(), np.random.rand())
    rng_state = ProcessRandom()
    load(path, {"random": rng_state, "drawing": Drawing()})
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected
    rng_state.reapply()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_numpy_arrays_and_scalars_come_back(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    state = {
        "a": {"array": array, "big": np.arange(3, dtype=">i4"), "scalar": np.float32(0.1), "flag": np.bool_(True)}
    }
    path = save(tmp_path, state)
    fresh: dict[str, Any] = {"a": None}
    load(path, fresh)
    back = fresh["a"]
    assert np.array_equal(back["array"], array) and back["array"].dtype == np.float32
    assert np.array_equal(back["big"], [0, 1, 2])
    assert back["scalar"] == np.float32(0.1) and type(back["scalar"]) is np.float32
    assert back["flag"] and type(back["flag"]) is np.bool_


def test_extra_state_and_buffers_of_modules_come_back(tmp_path: Path) -> None:
    class WithExtra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3))
            self.register_buffer("hidden", torch.zeros(2), persistent=False)
            self.note: Any = None

        def get_extra_state(self) -> Any:
            return self.note

        def set_extra_state(self, state: Any) -> None:
            self.note = state

    first = nn.Sequential(WithExtra())
    first[0].table += 5
    first[0].note = {"words": ("a", 1), "t": torch.ones(2)}
    path = save(tmp_path, {"model": first})
    other = nn.Sequential(WithExtra())
    load(path, {"model": other})
    assert torch.equal(other[0].table, first[0].table)
    assert other[0].note["words"] == ("a", 1) and torch.equal(other[0].note["t"], torch.ones(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_compiled_and_plain_models_share_their_checkpoints(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), backend="eager")
    blocks = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), nn.Linear(3, 2))
    path = save(tmp_path, {"model": compiled})
    assert set(load_file(path / "model.safetensors")) == set(plain.state_dict())
    for model in (plain, blocks):
        load(path, {"model": model})
        assert torch.equal(next(model.parameters()), next(compiled.parameters()))


def test_another_shape_or_kind_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": {"x": torch.ones(4), "y": torch.ones(2, 3)}})
    into = {"a": {"x": torch.zeros(4), "y": torch.zeros(3, 2)}}
    with pytest.raises(CannotResume) as caught:
        load(path, into)
    assert str(caught.value) == (
        "error: a.y does not fit: the checkpoint has float32[2, 3], the program float32[3, 2]\n"
        "hint: build what was saved (jackline.peek(name) gives its step and epoch before that), or start a new run"
    )
    assert (into["a"]["x"] == 0).all()
    with pytest.raises(
        CannotResume, match=r"a\.x does not fit: the checkpoint has float32\[4\], the program float16"
    ):
        load(path, {"a": {"x": torch.zeros(4, dtype=torch.float16), "y": torch.zeros(2, 3)}})


def test_another_model_is_refused_by_the_names_that_differ(tmp_path: Path) -> None:
    path = save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    with pytest.raises(CannotResume) as caught:
        load(path, {"model": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))})
    assert str(caught.value) == (
        "error: model is not the model that was saved\n"
        "       only in the checkpoint: 1.bias, 1.weight\n"
        "       only in the program: 2.bias, 2.weight\n"
        "hint: build what was saved (jackline.peek(name) gives its step and epoch before that), or start a new run"
    )


def test_what_is_not_restored_is_said(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": {"x": 1, "gone": 2}, "old": 3})
    into: dict[str, Any] = {"a": {"x": 0, "new": 5}, "fresh": 7}
    restored = load(path, into)
    assert into == {"a": {"x": 1, "gone": 2, "new": 5}, "fresh": 7}
    assert restored.not_restored == (
        "fresh (not in the checkpoint, left as it is)",
        "old (in the checkpoint, nobody asked for it)",
    )
    assert restored.notes == ("a: new not in the checkpoint, left as they are",)


def test_frozen_parameters_are_left_out_and_must_be_the_same_at_resume(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        model[0].requires_grad_(False)
        return model

    model = make(0)
    path = save(tmp_path, {"model": model}, hash_frozen=FrozenHashes())
    assert set(load_file(path / "model.safetensors")) == {"1.weight", "1.bias"}
    other = make(0)
    with torch.no_grad():
        other[1].weight.zero_()
    load(path, {"model": other})
    assert torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(CannotResume) as caught:
        load(path, {"model": make(1)})
    assert str(caught.value) == (
        "error: model.0.weight was frozen and left out of the checkpoint, and is not the same now\n"
        "hint: load the same frozen weights before resuming"
    )


def test_a_frozen_hash_follows_the_tensor_when_it_changes() -> None:
    hashes = FrozenHashes()
    tensor = torch.zeros(10)
    first = hashes(tensor)
    tensor.add_(1)
    assert hashes(tensor) != first
    assert hashes(tensor[::2]) == hashes(tensor[::2].contiguous())


def test_nested_lists_tuples_and_named_tuples_are_filled_in_place(tmp_path: Path) -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")
    path = save(tmp_path, {"a": [torch.ones(2), (torch.ones(1), 5), Pair(torch.ones(3), "x")], "n": 4})
    target, inner = torch.zeros(2), torch.zeros(3)
    outer = [target, (torch.zeros(1), 0), Pair(inner, "")]
    into: dict[str, Any] = {"a": outer, "n": 0}
    load(path, into)
    assert into["a"] is outer and outer[0] is target and (target == 1).all()
    assert outer[1][1] == 5 and isinstance(outer[2], Pair) and outer[2].left is inner and (inner == 1).all()
    assert into["n"] == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.eye(3).to_sparse(), "a.t cannot be saved: a tensor of layout sparse_coo"),
        (torch.empty(2, device="meta"), "a.t cannot be saved: a tensor on the meta device has no values"),
    ],
)
def test_a_tensor_without_plain_bytes_is_refused_by_name(tmp_path: Path, value: torch.Tensor, text: str) -> None:
    with pytest.raises(CannotSave) as caught:
        save(tmp_path, {"a": {"t": value}})
    assert str(caught.value) == f"error: {text}\nhint: save its parts as dense tensors instead"


@pytest.mark.parametrize("key", ["../up", "a/b", "", ".x", "a" * 200, 5])
def test_a_key_that_cannot_be_a_file_is_refused(key: Any) -> None:
    with pytest.raises(CannotSave, match="cannot name a part of the state"):
        capture({key: 1})


def test_two_tensors_that_would_have_the_same_name_get_two(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": {"x.y": torch.zeros(1), "x": {"y": torch.ones(1)}}})
    fresh: dict[str, Any] = {"a": None}
    load(path, fresh)
    assert fresh["a"]["x.y"].item() == 0 and fresh["a"]["x"]["y"].item() == 1


def test_a_tensor_larger_than_several_chunks_comes_back(tmp_path: Path) -> None:
    big = torch.randint(0, 256, (2 * CHUNK_BYTES + 12345,), dtype=torch.uint8)
    path = save(
        tmp_path, {"a": {"big": big, "small": torch.arange(3.0), "strided": big[: 1 << 20].view(1024, 1024).t()}}
    )
    into = {
        "a": {"big": torch.zeros_like(big), "small": torch.zeros(3), "strided": torch.zeros(1024, 1024).t().byte()}
    }
    load(path, into)
    assert torch.equal(into["a"]["big"], big) and into["a"]["small"].tolist() == [0, 1, 2]
    assert torch.equal(into["a"]["strided"], big[: 1 << 20].view(1024, 1024).t())


def test_a_wrong_byte_anywhere_is_found_while_loading(tmp_path: Path) -> None:
    state = {"a": {"x": torch.arange(9.0), "y": torch.ones(5)}}
    path = save(tmp_path, state)
    file = path / "a.safetensors"
    data = file.read_bytes()
    for position in (0, 9, len(data) - 100, len(data) - 1):
        wrong = bytearray(data)
        wrong[position] ^= 4
        file.write_bytes(wrong)
        with pytest.raises(Damage):
            load(path, {"a": {"x": torch.zeros(9), "y": torch.zeros(5)}})
        with pytest.raises(Damage):
            load(path, {})  # also in what nobody asked for


def test_a_state_that_points_at_nothing_or_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    from tests.checkpoint.test_verify import forge

    path = save(tmp_path, {"a": {"x": torch.zeros(2, 3)}})
    for node, text in (
        ({"$": "tensor", "file": "a", "name": "nowhere"}, "state.json: a refers to a tensor that is in no file"),
        (
            {"$": "tensor", "file": "a", "name": "x", "dtype": "nonsense"},
            "state.json: a has an unknown kind of number",
        ),
        ({"$": "tensor", "file": "a", "name": "x", "dtype": "save"}, "state.json: a has an unknown kind of number"),
        ({"$": "bytes", "base64": 5}, "state.json: a cannot be read as a 'bytes'"),
        ({"$": "numpy generator", "state": {"bit_generator": "os"}}, "state.json: a cannot be read (ValueError)"),
    ):
        data = json.dumps({"a": node}).encode()
        (path / STATE).write_bytes(data)
        forge(path, STATE, data)
        with pytest.raises(Damage) as caught:
            load(path, {"a": None})
        assert str(caught.value) == text
    # Strides that would need terabytes are not believed.
    data = json.dumps({"a": {"$": "tensor", "file": "a", "name": "x", "stride": [10**12, 10**11]}}).encode()
    (path / STATE).write_bytes(data)
    forge(path, STATE, data)
    fresh: dict[str, Any] = {"a": None}
    load(path, fresh)
    assert fresh["a"].stride() == (3, 1)
