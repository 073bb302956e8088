from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jackline.checkpoint.format.hashing import best_algorithm, digest
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import Interrupted, verify_checkpoint
from tests.checkpoint.states import write_small

FILES = ("model.safetensors", "state.json", "manifest.json")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_small(tmp_path, 3)


def refusal(place: Path) -> str:
    with pytest.raises(Damage) as caught:
        verify_checkpoint(place)
    return str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_every_single_flipped_bit_is_found(place: Path, file: str) -> None:
    path = place / file
    data = bytearray(path.read_bytes())
    step = 1 if len(data) < 600 else 7
    for position in range(0, len(data), step):
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        try:
            found = verify_checkpoint(place, is_direct=False, threads=1)
        except Damage:
            pass
        else:
            assert file == "manifest.json" and found.step == 3  # a blank between values became another blank
            assert json.loads(data) == json.loads(original(place, data, position))
        data[position] ^= 1 << (position % 8)
    path.write_bytes(data)
    verify_checkpoint(place)


def original(place: Path, data: bytearray, position: int) -> bytes:
    copy = bytearray(data)
    copy[position] ^= 1 << (position % 8)
    return bytes(copy)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_an_empty_a_cut_and_a_grown_file_are_found(place: Path, file: str) -> None:
    path = place / file
    data = path.read_bytes()
    for wrong in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
        path.write_bytes(wrong)
        if file == "manifest.json" and wrong == data[:-1]:
            continue  # only the line end is gone
        refusal(place)
    path.unlink()
    assert refusal(place) == f"{file} cannot be read: No such file or directory"


def test_the_texts_name_the_file_and_both_lengths(place: Path) -> None:
    path = place / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, 100)
    assert refusal(place) == "model.safetensors is 100 B, the manifest says 4.1 KiB"
    os.truncate(path, size)
    assert refusal(place) == "model.safetensors has wrong bytes between 0 B and 4.1 KiB"
    os.truncate(path, size - 1)
    assert refusal(place) == f"model.safetensors is {size - 1} bytes, the manifest says {size} bytes"


def test_files_swapped_between_two_checkpoints_are_found(tmp_path: Path) -> None:
    first, second = write_small(tmp_path, 3), write_small(tmp_path, 4)
    for file in FILES:
        shutil.copytree(first, tmp_path / "keep")
        shutil.copy(second / file, first / file)
        refusal(first)
        shutil.rmtree(first)
        (tmp_path / "keep").rename(first)
    verify_checkpoint(first)
    first.rename(tmp_path / "step-00000009")
    assert refusal(tmp_path / "step-00000009") == "manifest.json is of step 3, the folder is step-00000009"


def test_a_link_in_place_of_a_file_or_folder_is_refused(place: Path) -> None:
    target = place.parent / "elsewhere"
    (place / "model.safetensors").rename(target)
    (place / "model.safetensors").symlink_to(target)
    assert refusal(place) == "model.safetensors is not a plain file"
    link = place.parent / "step-00000007"
    link.symlink_to(place)
    assert refusal(link) == "it is not a folder"


def test_a_fifo_does_not_hang_the_reader(place: Path) -> None:
    (place / "state.json").unlink()
    os.mkfifo(place / "state.json")
    assert refusal(place) == "state.json is not a plain file"


def test_right_checksums_do_not_make_nonsense_whole(place: Path) -> None:
    """Somebody who can compute checksums still gets nothing but a refusal."""
    path = place / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[0:8] = (10**6).to_bytes(8, "little")
    path.write_bytes(data)
    forge(place, "model.safetensors", bytes(data))
    assert refusal(place) == f"model.safetensors says its header has 1000000 bytes; the file has {len(data)}"


def forge(place: Path, file: str, data: bytes) -> None:
    """Rewrites the manifest so that it vouches for `data`."""
    body = json.loads((place / "manifest.json").read_bytes())
    del body["manifest_hash"]
    body["files"][file] = {"size_bytes": len(data), "chunks": [digest(best_algorithm(), data)]}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (place / "manifest.json").write_text(json.dumps({**body, "manifest_hash": digest(best_algorithm(), text)}))


def test_the_judgement_can_be_broken_off(place: Path) -> None:
    with pytest.raises(Interrupted):
        verify_checkpoint(place, should_stop=lambda: True)


def test_a_hole_of_4_kib_in_a_large_file_is_found_and_located(tmp_path: Path) -> None:
    """What torch.load, dcp.load and safetensors all load without a word."""
    from jackline.checkpoint.format.header import build_header, lay_out
    from jackline.checkpoint.format.manifest import Manifest, Name
    from jackline.checkpoint.writer.commit import Draft
    from jackline.checkpoint.writer.disk import Disk

    placed = lay_out([("w", "F32", (9 << 20,))])
    header = build_header(placed)
    data = header + os.urandom(36 << 20)
    draft = Draft(tmp_path, Name(1), best_algorithm(), Disk())
    entries = [draft.add_small("model.safetensors", data), draft.add_small("state.json", b"{}")]
    place = draft.commit(Manifest(1, 0.0, best_algorithm(), tuple(entries)))
    verify_checkpoint(place)
    with open(place / "model.safetensors", "r+b") as file:
        file.seek(20 << 20)
        file.write(bytes(4096))
    assert refusal(place) == "model.safetensors has wrong bytes between 16.0 MiB and 32.0 MiB"
