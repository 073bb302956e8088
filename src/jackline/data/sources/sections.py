"""Sections of a text file that is one long document: a validation split inside the file.

Owns: how long a section is, where it may end (a blank line, else a line), and which sections are validation: one of
every 1/fraction neighbours, chosen by a fixed seed, so that they are spread over the whole file. Does not own reading
(records.py) or what becomes of a section (documents.py).
"""

from __future__ import annotations

from fractions import Fraction

import xxhash

from jackline.data.sources.runs import BLANK_LINES, safe_cut

MIN_BYTES, MAX_BYTES = 1 << 11, 1 << 16
_UNKNOWN_SIZE_BYTES = 1 << 14
_WANTED = 8  # validation sections of a small file
_USUAL_RATIO = 3  # text to compressed bytes


def section_bytes(file_bytes: int | None, fraction: float, *, is_compressed: bool) -> int:
    """The length of the sections of a file: short enough that a small file has several for validation."""
    if file_bytes is None:
        return _UNKNOWN_SIZE_BYTES
    text_bytes = file_bytes * (_USUAL_RATIO if is_compressed else 1)
    return min(MAX_BYTES, max(MIN_BYTES, int(text_bytes * fraction / _WANTED)))


def enough_bytes(fraction: float, window_bytes: int) -> int:
    """The size of a file whose validation set has a window of `window_bytes` for certain."""
    return int(max(2 * window_bytes, 1.5 * MIN_BYTES) / fraction)


def is_validation_section(file: int, number: int, fraction: float) -> bool:
    """Whether a section belongs to validation. Each stratum of about 1/fraction sections has exactly one."""
    share = Fraction(fraction).limit_denominator(1_000_000)  # exact, whatever the rounding of the float
    part, whole = share.numerator, share.denominator
    if not part:
        return False
    stratum = number * part // whole
    first, end = -(-stratum * whole // part), -(-(stratum + 1) * whole // part)
    key: int = xxhash.xxh3_64_intdigest(f"{file} {stratum}".encode())
    return number == first + key % max(1, end - first)


def section_cut(data: bytes, limit: int) -> int:
    """Where a section ends: after the last blank line of its second half, else after its last line."""
    half = limit // 2
    ends = [found.end() for found in BLANK_LINES.finditer(data, half, limit)]
    if ends and ends[-1] < limit:
        return ends[-1]
    newline = data.rfind(b"\n", half, limit)
    return newline + 1 if newline >= 0 else safe_cut(data, limit)
