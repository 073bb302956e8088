"""Tables of pairs with known properties: a planted rule with its noise ceiling, and a small one with bad rows.

`write_planted` makes pKd a function of what sequences are made of (charge, hydropathy, aromatics), so that any
encoder that carries composition can find it, and adds Gaussian noise. Antigens differ along two axes only (charge and
hydropathy), so that a few dozen of them tell how a new one behaves. The ceiling is the Spearman correlation of the
noiseless rule with the noisy values: no model can do better on average.

    python -m tests.recipes.agab.data.planted OUT.csv 20000 200
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

import numpy as np

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
_LETTERS = np.frombuffer(AMINO_ACIDS.encode(), np.uint8)
_USUAL = np.array([83, 14, 55, 67, 39, 71, 23, 59, 58, 97, 24, 41, 47, 39, 55, 66, 53, 69, 11, 29], np.float64)
_POSITIVE, _NEGATIVE, _GREASY, _RING = "KR", "DE", "AILMV", "FWY"
_BENT = np.array([[letter in group for letter in AMINO_ACIDS] for group in (_POSITIVE, _NEGATIVE, _GREASY, _RING)])


def _sequence(rng: np.random.Generator, length: int, charge: float, grease: float, ring: float) -> str:
    """Residues drawn from the usual composition, bent by three wishes of about -1 to 1."""
    weights = _USUAL * np.exp(0.8 * (np.array([charge, -charge, grease, ring]) @ _BENT))
    ends = np.cumsum(weights)
    return _LETTERS[np.searchsorted(ends[:-1], rng.random(length) * ends[-1])].tobytes().decode()


def _share(sequence: str, letters: str) -> float:
    return sum(map(sequence.count, letters)) / len(sequence)


def _properties(sequence: str) -> tuple[float, float, float]:
    """Charge, grease and rings of a sequence as it came out, each about -2 to 2."""
    charge = (_share(sequence, _POSITIVE) - _share(sequence, _NEGATIVE)) / 0.1
    return charge, (_share(sequence, _GREASY) - 0.33) / 0.1, (_share(sequence, _RING) - 0.08) / 0.04


def planted_rule(heavy: str, light: str, antigen: str) -> float:
    """pKd without noise: opposite charges attract, rings of the heavy chain help, grease helps against grease."""
    heavy_charge, heavy_grease, heavy_ring = _properties(heavy)
    light_charge, _, _ = _properties(light)
    antigen_charge, antigen_grease, _ = _properties(antigen)
    pull = -0.35 * (heavy_charge + 0.5 * light_charge) * antigen_charge
    return 8.0 + 0.55 * heavy_ring + pull + 0.25 * heavy_grease * antigen_grease - 0.3 * antigen_charge


def write_planted(path: Path, rows: int, antigens: int, seed: int, noise: float) -> float:
    """Write `rows` pairs over `antigens` antigens of very different shares; returns the ceiling's Spearman."""
    rng = np.random.default_rng(seed)
    targets = [_sequence(rng, int(rng.integers(120, 500)), *rng.uniform(-1, 1, 2), 0.0) for _ in range(antigens)]
    shares = 1.0 / np.arange(1, antigens + 1) ** 0.5  # a few antigens have many rows, as in life
    chosen = rng.choice(antigens, rows, p=shares / shares.sum())
    rule, values = np.empty(rows), np.empty(rows)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["antibody_sequence", "antigen_sequence", "pKd"])
        for row in range(rows):
            wishes = rng.uniform(-1, 1, 3)
            heavy = _sequence(rng, int(rng.integers(112, 130)), *wishes)
            light = _sequence(rng, int(rng.integers(104, 114)), float(rng.uniform(-1, 1)), 0.0, 0.0)
            target = targets[chosen[row]]
            rule[row] = planted_rule(heavy, light, target)
            values[row] = np.clip(rule[row] + rng.normal(0, noise), 4.05, 13.95)
            writer.writerow([f"{heavy}|{light}", target, f"{values[row]:.6f}"])
    return spearman(rule, values)


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's correlation of the ranks, ties sharing theirs."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def write_small(path: Path, seed: int = 0) -> Path:
    """`agab_small.csv`: 500 rows, 12 antigens, 5 rows NaN, 10 with a negative pKd, one antigen of 3,000 residues."""
    draw = random.Random(seed)

    def protein(length: int) -> str:
        return "".join(draw.choices(AMINO_ACIDS, k=length))

    targets = [protein(3000 if number == 0 else draw.randint(90, 400)) for number in range(12)]
    lines = ["antibody_sequence,antigen_sequence,pKd"]
    wrong = draw.sample(range(500), 15)
    for row in range(500):
        antibody = f"{protein(draw.randint(112, 128))}|{protein(draw.randint(104, 112))}"
        pkd = (
            "nan"
            if row in wrong[:5]
            else f"{-draw.uniform(0.1, 2.9):.4f}"
            if row in wrong
            else f"{draw.gauss(7.9, 1):.4f}"
        )
        lines.append(f"{antibody},{targets[row % 12]},{pkd}")
    path.write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    out, num_rows, num_antigens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(f"ceiling: Spearman {write_planted(out, num_rows, num_antigens, seed=1, noise=0.4):.4f}")
