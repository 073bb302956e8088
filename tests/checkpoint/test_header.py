from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from jackline.checkpoint.format.header import ALIGNMENT, ITEM_BYTES, build_header, lay_out, parse_header
from jackline.checkpoint.format.manifest import Damage

tensors = st.lists(
    st.tuples(st.text(min_size=1), st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4)),
    max_size=8,
    unique_by=lambda tensor: tensor[0],
).filter(lambda found: all(name != "__metadata__" for name, _, _ in found))


@settings(deadline=None)
@given(tensors)
def test_a_header_comes_back_and_tensors_begin_at_a_page_and_at_their_own_multiple(
    wanted: list[tuple[str, str, list[int]]],
) -> None:
    placed = lay_out(wanted)
    data = build_header(placed)
    assert len(data) % ALIGNMENT == 0
    size = len(data) + max((tensor.end for tensor in placed), default=0)
    header = parse_header(data, size, "x")
    assert {tensor.name for tensor in header.tensors} == {name for name, _, _ in wanted}
    assert set(header.tensors) == set(placed) and header.size_bytes == size
    assert all(tensor.begin % ITEM_BYTES[tensor.dtype] == 0 for tensor in placed)


def test_the_plain_library_reads_what_we_write(tmp_path: Path) -> None:
    placed = lay_out([("b", "U8", (3,)), ("a.ä", "F32", (2, 2)), ("none", "I64", (0, 4)), ("one", "BF16", ())])
    path = tmp_path / "x.safetensors"
    values = struct.pack("<4f", 1, 2, 3, 4) + b"\x80\x3f" + b"abc"
    path.write_bytes(build_header(placed) + values)
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["a.ä", "b", "none", "one"]
        assert file.get_tensor("a.ä").tolist() == [[1, 2], [3, 4]]
        assert file.get_tensor("one").item() == 1.0
        assert file.get_tensor("none").shape == (0, 4)
        assert bytes(file.get_tensor("b").tolist()) == b"abc"


def file_with(body: object, data_bytes: int = 0) -> tuple[bytes, int]:
    text = json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + data_bytes


def refusal(data: bytes, size: int) -> str:
    with pytest.raises(Damage) as caught:
        parse_header(data, size, "m")
    return str(caught.value)


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_lying_header_is_refused_by_name() -> None:
    assert (
        refusal((2**63).to_bytes(8, "little") + b"{}", 10) == f"m says its header has {2**63} bytes; the file has 10"
    )
    assert refusal(b"abc", 3) == "m is too short for a header"
    assert refusal((200_000_000).to_bytes(8, "little"), 10**12) == (
        "m says its header has 200000000 bytes; the file has 1000000000000"
    )
    assert refusal(*file_with([])) == "the header of m is not an object"
    assert refusal(*file_with({"t": entry(0, 4, [2])}, 4)) == "m: 't' has 4 bytes; its shape needs 2"
    assert refusal(*file_with({"t": entry(4, 8, [4])}, 8)) == "m: 't' begins at 4, not at 0"
    assert refusal(*file_with({"t": entry(0, 4, [4]), "u": entry(2, 6, [4])}, 6)) == "m: 'u' begins at 2, not at 4"
    assert refusal(*file_with({"t": entry(0, 4, [4])}, 9)) == "m has 77 bytes; its header speaks of 72"
    assert refusal(*file_with({"t": entry(0, 4, [4], "PICKLE")}, 4)) == "m: the header's entry 't' cannot be read"
    assert refusal(*file_with({"t": entry(0, 4, [-4])}, 4)) == "m: the header's entry 't' has impossible numbers"
    assert refusal(*file_with({"t": entry(0, 4, [True, 4])}, 4)) == "m: the header's entry 't' has impossible numbers"
    assert refusal(*file_with({"t": None})) == "m: the header's entry 't' cannot be read"
    huge = {"t": entry(0, 0, [2**40, 2**40, 0])}
    data, size = file_with(huge)
    assert parse_header(data, size, "m").size_bytes == size  # no memory is asked for on a header's word
