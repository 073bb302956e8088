"""Folders of torch.distributed.checkpoint: read without torch and without running their pickles; written by torch."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from jackline.checkpoint.format.dcp import Built, Named, import_folder, read_plain
from jackline.checkpoint.format.export import export_dcp
from jackline.checkpoint.format.hashing import best_algorithm
from jackline.checkpoint.format.header import build_header, lay_out
from jackline.checkpoint.format.manifest import STATE as FILE
from jackline.checkpoint.format.manifest import Damage, Manifest, Name
from jackline.checkpoint.format.regions import SHARDED
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.writer.commit import Draft
from jackline.checkpoint.writer.disk import Disk
from jackline.errors import JacklineError, UsageError


def save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


STATE = {
    "model": {
        "0.weight": torch.arange(12.0).reshape(3, 4),
        "0.bias": torch.tensor(0.5),
        "half": torch.arange(5).to(torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 3),
    },
    "optim": {"state": {"0.weight": {"exp_avg": torch.ones(3, 4, dtype=torch.float64)}}, "lr": 0.1},
    "step": 7,
}


def test_a_folder_becomes_safetensors_files_bit_by_bit(tmp_path: Path) -> None:
    save(tmp_path / "dcp", STATE)
    written, left_out = import_folder(tmp_path / "dcp", tmp_path / "out")
    assert [part.key for part in written] == ["model", "optim"]
    assert sorted(left_out) == ["optim.lr", "step"]
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == STATE["model"].keys()  # type: ignore[attr-defined]
    for name, tensor in STATE["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    assert load_file(tmp_path / "out/optim.safetensors")["state.0.weight.exp_avg"].sum() == 12


class Attack:
    def __reduce__(self) -> Any:
        return (os.system, ("touch attacked",))


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_plain(pickle.dumps({"a": Attack(), "b": [1, "x", (2.5, None)]}), "it")
    assert isinstance(found["a"], Built)
    assert (found["a"].name, found["a"].arguments) == (f"{os.name}.system", ("touch attacked",))
    assert found["b"] == [1, "x", (2.5, None)]
    save(tmp_path / "dcp", {"model": {"w": torch.ones(2)}})
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(JacklineError, match=r"\.metadata is not one of torch\.distributed\.checkpoint"):
        import_folder(tmp_path / "dcp", tmp_path / "out")
    assert not (tmp_path / "attacked").exists()
    assert read_plain(pickle.dumps(os.system), "it") == Named(f"{os.name}.system")
    for data in (
        b"",
        b"\x80\x04",
        b"\x80\x04N",
        b"\x80\x04R.",
        b"garbage",
        b"\x80\x04}\x94h\x07.",
        b"i__main__\nx\n.",
    ):
        with pytest.raises(Damage):
            read_plain(data, "it")


def test_a_folder_that_is_not_whole_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no folder of torch\.distributed\.checkpoint: it has no \.metadata"):
        import_folder(tmp_path, tmp_path / "out")
    save(tmp_path / "dcp", {"model": {"w": torch.ones(50)}})
    save(tmp_path / "turned", {"model": {"w": torch.arange(6).reshape(2, 3).t()}})
    with pytest.raises(JacklineError, match=r"a tensor of shape \[3, 2\] that is transposed or a view"):
        import_folder(tmp_path / "turned", tmp_path / "out")
    data = tmp_path / "dcp/__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(JacklineError, match=r"__0_0\.distcp cannot be read"):
        import_folder(tmp_path / "dcp", tmp_path / "out")
    data.unlink()
    with pytest.raises(JacklineError, match=r"__0_0\.distcp"):
        import_folder(tmp_path / "dcp", tmp_path / "out")
    data.write_bytes(whole)
    metadata = tmp_path / "dcp/.metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(JacklineError, match="names a file outside its folder"):
        import_folder(tmp_path / "dcp", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def write_checkpoint(folder: Path, weight: torch.Tensor) -> Path:
    """A checkpoint of a model with one weight, of which each of two ranks has stored its rows."""
    folder.mkdir(parents=True)
    draft = Draft(folder, Name(3), best_algorithm(), Disk())
    entries, parts, first = [], [], 0
    for rank, rows in enumerate(weight.split(3)):
        placed = lay_out([("weight", "F32", tuple(rows.shape))])
        data = build_header(placed) + rows.contiguous().numpy().tobytes()
        entries.append(draft.add_small(f"model.rank-{rank}.safetensors", data))
        place = {"offsets": [first, 0], "shape": list(rows.shape)}
        parts.append({"file": f"model.rank-{rank}", "name": "weight", **place})
        first += len(rows)
    node = {KIND: SHARDED, "shape": list(weight.shape), "dtype": "float32", "parts": parts}
    state = {"model": {KIND: "module", "tensors": {"weight": node}}}
    entries.append(draft.add_small(FILE, json.dumps(state).encode()))
    return draft.commit(Manifest(3, 1.0, draft.algorithm, tuple(entries)))


def test_an_exported_folder_is_loaded_by_torch_and_comes_back_equal(tmp_path: Path) -> None:
    """The checkpoint has the parts of two ranks."""
    wanted = torch.arange(20.0).reshape(5, 4)
    checkpoint = write_checkpoint(tmp_path / "runs/job/checkpoints", wanted)
    part = export_dcp(checkpoint, tmp_path / "dcp")
    assert part.lines[2] == f"dcp.load(state, checkpoint_id={str(tmp_path / 'dcp')!r})"
    state = {"model": {"weight": torch.zeros(5, 4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model"]["weight"], wanted)
    import_folder(tmp_path / "dcp", tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back/model.safetensors")["weight"], wanted)
    with pytest.raises(UsageError, match="exists already"):
        export_dcp(checkpoint, tmp_path / "dcp")
    shutil.rmtree(tmp_path / "dcp")
