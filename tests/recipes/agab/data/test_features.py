"""The embedded encoder: what its docstring says, the same bits whatever is encoded beside a sequence."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from jackline.errors import UsageError
from jackline.recipes.agab.data.features import NUM_CHAIN_FEATURES, NUM_FIXED, EmbeddedEncoder
from jackline.recipes.agab.data.residues import AMINO_ACIDS, LEGAL

HEAVY, LIGHT = b"EVQLVESGGGLVQPGGSLRLSCAAS", b"DIQMTQSPSSLSASVGDRVTITCRAS"


def encode(*sequences: bytes, dim: int = 1024) -> np.ndarray:
    return EmbeddedEncoder(dim).encode(list(sequences), lambda done: None).astype(np.float64)


def test_the_chain_block_is_what_the_docstring_says() -> None:
    (row,) = encode(HEAVY + b"|" + LIGHT)
    for number, chain in enumerate((HEAVY, LIGHT)):
        block = row[number * NUM_CHAIN_FEATURES : (number + 1) * NUM_CHAIN_FEATURES]
        assert block[0] == pytest.approx((len(chain) / 200) ** 0.5 - 1, abs=1e-3)
        share = chain.count(b"S") / len(chain)
        usual = 66 / 1000
        assert block[1 + AMINO_ACIDS.index("S")] == pytest.approx((share - usual) / 0.03, abs=0.02)
        assert block[21] == 0  # no other letter
    (alone,) = encode(HEAVY)
    assert (alone[:NUM_CHAIN_FEATURES] == row[:NUM_CHAIN_FEATURES]).all()
    assert (alone[NUM_CHAIN_FEATURES : 2 * NUM_CHAIN_FEATURES] == 0).all()


def test_properties_point_the_right_way() -> None:
    greasy, charged, acid = encode(b"ILVF" * 20, b"KRKR" * 20, b"DEDE" * 20)
    hydropathy, charge = 22, 23
    assert greasy[hydropathy] > 0 > charged[hydropathy]
    assert charged[charge] > 0 > acid[charge]
    half = encode(b"K" * 40 + b"E" * 40)[0]
    regional = half[38:NUM_CHAIN_FEATURES].reshape(8, 4)
    assert (regional[:4, 1] > 1).all()
    assert (regional[4:, 1] < -1).all()


def test_dipeptides_do_not_reach_from_chain_to_chain() -> None:
    pair = 2 * NUM_CHAIN_FEATURES + AMINO_ACIDS.index("W") * 20 + AMINO_ACIDS.index("C")
    joined, apart = encode(b"AAAW" + b"CAAA", b"AAAW|CAAA")
    assert joined[pair] > 30
    assert apart[pair] < 0
    k_mers = slice(NUM_FIXED, None)
    assert not np.array_equal(joined[k_mers], apart[k_mers])


def test_the_same_bits_alone_and_in_any_company() -> None:
    rng = np.random.default_rng(0)
    letters = np.frombuffer(LEGAL.encode(), np.uint8)
    sequences = [rng.choice(letters, size).tobytes() for size in (1, 2, 3, 4, 7, 8, 9, 250, 3000, 40_000, 30)]
    sequences += [b"A|C", HEAVY + b"|" + LIGHT, b"X" * 50]
    together = encode(*sequences, dim=1280)
    alone = np.concatenate([encode(sequence, dim=1280) for sequence in sequences])
    assert np.array_equal(together, alone)
    assert np.isfinite(together).all()
    assert len(np.unique(together, axis=0)) == len(sequences)


def test_the_bits_are_those_of_version_1() -> None:
    """Caches on other machines hold these; whoever changes them raises features.VERSION."""
    rows = EmbeddedEncoder(1024).encode([HEAVY + b"|" + LIGHT, LEGAL.encode() * 9], lambda done: None)
    assert xxhash.xxh3_64_hexdigest(rows.tobytes()) == "b87267300c037825"


def test_hashed_features_have_unit_variance_for_unrelated_sequences() -> None:
    rng = np.random.default_rng(1)
    rows = encode(*(rng.choice(np.frombuffer(AMINO_ACIDS.encode(), np.uint8), 300).tobytes() for _ in range(400)))
    assert rows[:, NUM_FIXED:].std(axis=0).mean() == pytest.approx(1.0, abs=0.05)


def test_too_few_dimensions_are_refused() -> None:
    with pytest.raises(UsageError, match="the embedded encoder needs at least 604 dimensions, not 512"):
        EmbeddedEncoder(512)
