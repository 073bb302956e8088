from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.checkpoint.format.hashing import CHUNK_BYTES, best_algorithm, digest
from jackline.checkpoint.format.manifest import (
    Damage,
    FileEntry,
    Manifest,
    Name,
    is_safe_file_name,
    parse_manifest,
    parse_name,
)

HASH = "0" * 32


def manifest(**changes: object) -> Manifest:
    files = (FileEntry("state.json", 2, (HASH,)), FileEntry("model.safetensors", CHUNK_BYTES + 1, (HASH, HASH)))
    values = {"step": 7, "created_at_s": 12.5, "algorithm": best_algorithm(), "files": files, **changes}
    return Manifest(**values)  # type: ignore[arg-type]


def forged(**changes: object) -> bytes:
    """A manifest of somebody who wants harm: the contents are wrong, the checksum is right."""
    body = json.loads(manifest().to_bytes())
    del body["manifest_hash"]
    body.update(changes)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "manifest_hash": digest(best_algorithm(), text)}).encode()


def refusal(data: bytes, name: Name | None = None) -> str:
    with pytest.raises(Damage) as caught:
        parse_manifest(data, name=name)
    return str(caught.value)


def test_a_manifest_comes_back_as_it_was_written() -> None:
    first = manifest(metrics={"loss": 0.1}, facts={"run": "é"}, parent_step=3)
    assert parse_manifest(first.to_bytes(), name=Name(7)) == first


def test_every_single_flipped_byte_of_a_manifest_is_noticed() -> None:
    data = bytearray(manifest().to_bytes())
    for position in range(len(data) - 1):  # the last one is the line end
        data[position] ^= 1
        try:
            found = parse_manifest(bytes(data))
        except Damage:
            pass
        else:
            # Only blanks between the values may differ without changing what is said.
            assert found == manifest(), f"byte {position}"
        data[position] ^= 1


def test_a_manifest_of_another_step_is_refused() -> None:
    assert refusal(manifest().to_bytes(), Name(8)) == "manifest.json is of step 7, the folder is step-00000008"


def test_a_future_format_is_refused_by_its_number() -> None:
    assert refusal(forged(format=2)) == "manifest.json has format 2; this version reads format 1"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", ".hidden", "manifest.json", "a\nb", ""]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    files = {"state.json": {"size_bytes": 2, "chunks": [HASH]}, name: {"size_bytes": 1, "chunks": [HASH]}}
    assert refusal(forged(files=files)) == f"manifest.json names a file outside its folder: {name!r}"


@pytest.mark.parametrize("size", [-1, 2**62, 1.5, "2", True, None])
def test_an_impossible_length_is_refused(size: object) -> None:
    files = {"state.json": {"size_bytes": size, "chunks": [HASH]}}
    assert refusal(forged(files=files)) == f"manifest.json has size_bytes = {str(size)!r}"


@pytest.mark.parametrize("chunks", [[], [HASH, HASH], ["x" * 32], [HASH[:-1]], "no", [1], None])
def test_wrong_checksums_are_refused(chunks: object) -> None:
    files = {"state.json": {"size_bytes": 2, "chunks": chunks}}
    assert refusal(forged(files=files)) == "manifest.json has wrong checksums for state.json"


def test_a_missing_state_an_unknown_hash_and_a_strange_kind_are_refused() -> None:
    assert refusal(forged(files={})) == "manifest.json does not list state.json"
    assert refusal(forged(algorithm="md4")) == "checksums of kind 'md4' cannot be computed here"
    assert refusal(forged(kind="something")) == "manifest.json is not one of ours"
    assert refusal(forged(chunk_bytes=1)) == "manifest.json has chunks of 1 bytes; this version reads 16777216"
    assert refusal(b"[" * 100_000) == "manifest.json is nested too deeply"
    assert refusal(b'{"a": NaN}') == "manifest.json is not JSON (NaN is not JSON)"
    assert refusal(b"1" * 5000).startswith("manifest.json is not JSON (Exceeds the limit")


@settings(deadline=None)
@given(st.integers(0, 10**18), st.integers(0, 99_999))
def test_names_come_back_and_sort_by_step_then_retry(step: int, retry: int) -> None:
    name = Name(step, retry)
    assert parse_name(str(name)) == name
    assert Name(step, retry + 1) > name < Name(step + 1)


@pytest.mark.parametrize("text", ["step-1", "step-00000001-r0", "step-0000000x", ".tmp-1-step-00000001", "latest"])
def test_other_names_are_not_checkpoints(text: str) -> None:
    assert parse_name(text) is None


def test_equal_bytes_have_equal_content_whenever_they_were_written() -> None:
    assert manifest(created_at_s=1.0).content == manifest(created_at_s=2.0).content
    assert manifest().content != manifest(files=(FileEntry("state.json", 2, ("1" * 32,)),)).content
    assert is_safe_file_name("model.safetensors")
