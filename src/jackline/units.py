"""Formats and parses bytes, durations and lists of ranks in a form for people, and folds long lines."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jackline.errors import UsageError

_BYTE_STEPS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_BYTE_WORDS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_PRICE = 1e9
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Negative counts keep their sign."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    for name, step in _BYTE_STEPS:
        if size >= step:
            value = size / step
            return f"{sign}{value:.0f} {name}" if value >= 100 else f"{sign}{value:.1f} {name}"
    return f"{sign}{size:.0f} B"


def format_limit(count: float, source: str | None) -> str:
    """'23.5 GiB RAM' for the machine's own memory; else where the limit comes from: '8.0 GiB (cgroup /job)'."""
    size = format_bytes(count)
    return f"{size} RAM" if source == "MemTotal" else f"{size} ({source})" if source else size


def format_duration(seconds: float) -> str:
    """0.25 -> '0.3 s', 41 -> '41 s', 95 -> '1 min 35 s', 11520 -> '3 h 12 min', 200000 -> '2 d 7 h'."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return _two(total, 60, "min", 1, "s")
    if total < 2 * 86400:
        return _two(total, 3600, "h", 60, "min")
    return _two(total, 86400, "d", 3600, "h")


def format_short(seconds: float) -> str:
    """For lines with little room: 0.25 -> '0.3s', 41 -> '41s', 95 -> '1m35s', 11520 -> '3h12m', 200000 -> '2d7h'."""
    if seconds < 0:
        return "-" + format_short(-seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 2 * 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600}h"


def count_of(count: int, word: str) -> str:
    """'1 document', '1,200 documents'."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def fold(text: str, columns: int | None, indent: int = 0) -> str:
    """`text` in lines of at most `columns`, broken between words; later lines begin with `indent` spaces. A word that
    is longer than a line, such as a path, is not broken. `columns` None: as it is."""
    if columns is None or len(text) <= columns:
        return text
    start = len(text) - len(text.lstrip(" "))  # spaces at the beginning belong to the text
    first, *words = text[start:].split(" ")
    lines, line = [], text[:start] + first
    for word in words:
        if len(line) + 1 + len(word) > columns and line.strip():
            lines.append(line.rstrip())
            line = " " * indent + word
        else:
            line += f" {word}"
    return "\n".join([*lines, line])


def _two(total: int, big: int, big_name: str, small: int, small_name: str) -> str:
    rest = total % big // small
    return f"{total // big} {big_name} {rest} {small_name}" if rest else f"{total // big} {big_name}"


def parse_duration(text: str) -> float:
    """'90', '90s', '1h30m', '2d' -> seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?\s*", text.strip().lower())
    joined = re.sub(r"(\d+(?:\.\d+)?)\s*(min|[smhd])?\s*", "", text.strip().lower())
    bare = [number for number, unit in parts if not unit]
    if not parts or joined or (bare and len(parts) > 1):
        raise UsageError(f"'{text}' is not a duration", hint="write 90, 90s, 15m, 1h30m or 2d")
    return sum(float(number) * _SECONDS[unit or "s"] for number, unit in parts)


def parse_price(text: str) -> float:
    """'2.1/h', '2.1', '$2.1/h', '0.5 EUR/h' or '60/d' -> money for an hour."""
    match = re.fullmatch(r"[^\d.\-+]*(\d+(?:\.\d+)?)\s*[^\d./]*(?:/\s*(h|hour|d|day|min|s))?", text.strip().lower())
    if match is None or float(match[1]) >= _MAX_PRICE:
        raise UsageError(f"'{text}' is not a price", hint="write 2.1/h, 2.1 (an hour) or 60/d")
    return float(match[1]) * 3600 / _SECONDS[{"hour": "h", "day": "d"}.get(match[2], match[2]) or "h"]


def parse_bytes(text: str) -> int:
    """'512', '20G', '1.5 GiB' -> bytes (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise UsageError(f"'{text}' is not a size", hint="write 512, 300M, 20G or 1.5GiB")
    return int(float(match[1]) * _BYTE_WORDS[match[2]])


def rank_words(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 0, 2-5'."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(parts)}"
