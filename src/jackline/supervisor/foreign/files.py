"""Checks whether a checkpoint file in a foreign format is complete, from its ends and its table of contents.

Reads kilobytes, never the tensors, and never unpickles. So it detects a file that was cut off by a kill or a full
disk, but not a flipped bit in the middle.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it costs 10 ms, so only where there is a zip to check
    import zipfile

_CHECKED_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".h5", ".hdf5", ".keras", ".npz"})
_PICKLE_SUFFIXES = frozenset({".pkl", ".pickle"})
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_JSON_BYTES = 64 << 20
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
_ZIP_RECORD = b"PK\x03\x04"
_MAX_HEADER_BYTES = 100 << 20  # safetensors itself refuses longer headers

Wholeness = tuple[bool, str]


def check_file(path: Path, open_paths: set[str]) -> Wholeness:
    """Raises OSError when the file cannot be read."""
    if os.path.realpath(path) in open_paths or str(path) in open_paths:
        return False, "it is still open for writing"
    size = path.stat().st_size
    if size == 0:
        return False, "it has 0 bytes"
    if path.suffix == ".safetensors":
        return _check_safetensors(path, size)
    with open(path, "rb") as file:
        start = file.read(64)
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
    if start.startswith(_ZIP_RECORD):
        return _check_zip(path, size)
    if start.startswith(_HDF5_SIGNATURE):
        return _check_hdf5(start, size)
    if path.suffix in _CHECKED_SUFFIXES and not start[:4].strip(b"\0"):
        return False, "it begins with zeros: its data never reached the disk"
    if path.suffix in _PICKLE_SUFFIXES and start.startswith(b"\x80") and last != b".":
        return False, f"it ends after {size} bytes without the mark that ends a pickle: it was cut off"
    is_json = path.suffix == ".json" and start[:1] in (b"{", b"[") and size <= _MAX_JSON_BYTES
    if is_json and _read_json(path) is None:
        return False, "it is not whole JSON"
    return True, "nobody has it open; this kind of file cannot be checked further"


def check_directory(folder: Path, open_paths: set[str]) -> Wholeness:
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    if not files:
        return False, "the folder is empty"
    inside = {str(file.relative_to(folder)) for file in files}
    verdict = _check_marks(folder, inside)
    if not verdict[0]:
        return verdict
    real_open = {os.path.realpath(path) for path in open_paths}
    for file in sorted(files):
        name = file.relative_to(folder)
        if os.path.realpath(file) in real_open:
            return False, f"{name}: it is still open for writing"
        if file.suffix in _CHECKED_SUFFIXES:
            is_good, why = check_file(file, open_paths)
            if not is_good:
                return False, f"{name}: {why}"
    return True, f"all {len(files)} files were checked" if len(files) > 1 else "its one file was checked"


def _check_marks(folder: Path, inside: set[str]) -> Wholeness:
    """Check for the files that known trainers write last or list in an index."""
    if any(name.endswith(".distcp") for name in inside) and not any(
        os.path.basename(name) == ".metadata" for name in inside
    ):
        return False, "it has no .metadata, which torch writes last"
    missing = _missing_shard(inside) or _missing_from_index(folder, inside)
    if missing:
        return False, f"{missing} is missing"
    # accelerate's save_state uses the same folder name without trainer_state.json, but always writes RNG states.
    is_accelerate = any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in inside)
    if re.fullmatch(r"checkpoint-\d+", folder.name) and not is_accelerate:
        if "trainer_state.json" not in inside:
            return False, "it has no trainer_state.json, which the Trainer writes last"
        if _read_json(folder / "trainer_state.json") is None:
            return False, "trainer_state.json is not whole"
    return True, ""


def _missing_shard(inside: set[str]) -> str | None:
    seen: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in inside:
        match = _SHARD.fullmatch(name)
        if match:
            seen[match[1], match[3], match[4]].add(int(match[2]))
    for (stem, total, suffix), numbers in sorted(seen.items()):
        # Most trainers number the shards from 1, some from 0.
        first = 0 if 0 in numbers else 1
        for number in range(first, first + int(total)):
            if number not in numbers:
                return f"{stem}-{number:05d}-of-{total}{suffix}"
    return None


def _missing_from_index(folder: Path, inside: set[str]) -> str | None:
    for name in sorted(inside):
        if not name.endswith((".safetensors.index.json", ".bin.index.json")):
            continue
        index = _read_json(folder / name)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            return f"a whole {name}"
        beside = os.path.dirname(name)
        for file in sorted({str(value) for value in files.values()}):
            if os.path.normpath(os.path.join(beside, file)) not in inside:
                return file
    return None


def _check_zip(path: Path, size: int) -> Wholeness:
    """torch.save writes a zip whose table of contents comes last, so a cut-off file has none."""
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            lost = next((entry.filename for entry in entries if not _has_record(archive, entry)), None)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False, f"it ends after {size} bytes without a zip directory: it was cut off"
    if lost is not None:
        return False, f"its zip directory lists {lost}, which is not there"
    if not entries:
        return False, "its zip directory is empty"
    return True, f"its zip directory lists {len(entries)} records and all are there"


def _has_record(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    """Whether the record begins where the directory says and ends before the directory begins."""
    # zipfile shifts all offsets when bytes are missing before the directory, so an offset may even be negative.
    if entry.header_offset < 0 or entry.header_offset + entry.compress_size > archive.start_dir:
        return False
    assert archive.fp is not None
    archive.fp.seek(entry.header_offset)
    return archive.fp.read(4) == _ZIP_RECORD


def _check_hdf5(start: bytes, size: int) -> Wholeness:
    """The third address in the superblock is the end of the file; where that address is depends on the version."""
    version = start[8]
    address = {0: 24, 1: 28}.get(version, 12)
    width = start[13] if version < 2 else start[9]
    end = int.from_bytes(start[address + 2 * width : address + 3 * width], "little")
    if width not in (4, 8) or version > 3:
        return True, "nobody has it open; its version of HDF5 cannot be checked further"
    if end > size:
        return False, f"its HDF5 header promises {end} bytes, the file has {size}: it was cut off"
    return True, f"its HDF5 header promises {end} bytes and they are there"


def _check_safetensors(path: Path, size: int) -> Wholeness:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            return False, f"its header should have {length} bytes, the file has {size}: it was cut off"
        text = file.read(length)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False, "its header is not whole"
    if expected != size:
        return False, f"its header promises {expected} bytes, the file has {size}"
    return True, f"its header and its size agree on {len(ends)} tensors"


def _read_json(path: Path) -> object | None:
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value
