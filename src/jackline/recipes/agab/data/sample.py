"""`--data planted`: a table of made-up pairs with a rule in them, for a first try without data. It says what it is.

Owns the table and its rule: opposite charges of antibody and antigen attract, aromatic residues of the antibody help,
and there is noise. The same on every machine. No protein of it exists.
"""

from __future__ import annotations

import random
from pathlib import Path

from jackline.data.spec import default_cache_root
from jackline.rundir.atomic import write_whole

NAME = "planted"
NUM_ROWS = 2000
NUM_ANTIGENS = 40
_NOISE = 0.4
_LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def planted_table(root: Path | None = None) -> Path:
    """Written once; the file stays in the data cache."""
    path = (root or default_cache_root()) / "planted-pairs-1.csv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _text().encode())
    return path


def _text() -> str:
    draw = random.Random(1)
    antigens = [_protein(draw, draw.randint(120, 400), draw.uniform(-1, 1)) for _ in range(NUM_ANTIGENS)]
    lines = ["antibody_sequence,antigen_sequence,pKd"]
    for _ in range(NUM_ROWS):
        heavy, light = (_protein(draw, length, draw.uniform(-1, 1)) for length in (120, 108))
        antigen = draw.choice(antigens)
        lines.append(f"{heavy}|{light},{antigen},{_rule(heavy + light, antigen) + draw.gauss(0, _NOISE):.4f}")
    return "\n".join(lines) + "\n"


def _protein(draw: random.Random, length: int, charge: float) -> str:
    """`charge` from -1 to 1 shifts between K, R and D, E."""
    weights = [1 + charge if letter in "KR" else 1 - charge if letter in "DE" else 1 for letter in _LETTERS]
    return "".join(draw.choices(_LETTERS, weights, k=length))


def _rule(antibody: str, antigen: str) -> float:
    ring = sum(map(antibody.count, "FWY")) / len(antibody)
    pkd = 8.0 - 60.0 * _charge(antibody) * _charge(antigen) + 12.0 * (ring - 0.15)
    return min(13.0, max(5.0, pkd))


def _charge(sequence: str) -> float:
    return (sequence.count("K") + sequence.count("R") - sequence.count("D") - sequence.count("E")) / len(sequence)
