"""Amino-acid sequences as text: which letters are legal, one spelling for each sequence, and its hash.

Legal are the 20 amino acids and the six other letters of the IUPAC code: X (any), B (D or N), Z (E or Q), J (I or L),
U (selenocysteine) and O (pyrrolysine). Lower case is taken as upper case, white space around a chain is dropped.
Gaps (-), stops (*), digits and everything else are illegal: what they mean is not for a reader to guess. A chain of
more than 100,000 residues is no protein. `nan`, `NA`, `None` and `null` are what programs write for no sequence,
although every letter of them is a residue.
An antibody is `heavy|light` or `heavy` alone. Does not own what a model makes of the six (features, language_models).
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
OTHER_LETTERS = "XBZJUO"
LEGAL = AMINO_ACIDS + OTHER_LETTERS
SEPARATOR = "|"
EMPTY = "empty sequence"
ILLEGAL = "illegal residue"
TOO_MANY_CHAINS = "more than two chains"
MAX_RESIDUES = 100_000  # the longest protein known has 38,000: what is longer is no protein
TOO_LONG = f"longer than {MAX_RESIDUES:,} residues"

_LEGAL_BYTES = LEGAL.encode()
_ABSENT = frozenset(("", "NAN", "NA", "N/A", "<NA>", "NONE", "NULL"))


@dataclass(frozen=True)
class Refused:
    """Why a sequence cannot be used; `shown` names the letters or whatever a person wants to see."""

    reason: str
    shown: str = ""


def canonical_chain(text: str) -> bytes | Refused:
    """One chain in its one spelling."""
    if _is_absent(text):
        return Refused(EMPTY)
    chain = text.strip().upper().encode("utf-8", "replace")
    if len(chain) > MAX_RESIDUES:
        return Refused(TOO_LONG, f"{len(chain):,}")
    wrong = chain.translate(None, _LEGAL_BYTES)
    if wrong:
        return Refused(ILLEGAL, repr("".join(sorted(set(wrong.decode("utf-8", "replace"))))[:8]))
    return chain


def canonical_antibody(text: str) -> bytes | Refused:
    """`heavy|light` with both chains in their one spelling, `heavy` when there is no light one."""
    heavy, bar, light = text.partition(SEPARATOR)
    if not bar:
        return canonical_chain(text)
    if SEPARATOR in light:
        return Refused(TOO_MANY_CHAINS)
    first = canonical_chain(heavy)
    if isinstance(first, Refused) or _is_absent(light):
        return first
    second = canonical_chain(light)
    return second if isinstance(second, Refused) else first + b"|" + second


def _is_absent(text: str) -> bool:
    return (len(text) < 16 and text.strip().upper() in _ABSENT) or text.isspace()


def sequence_hash(sequence: bytes) -> bytes:
    """The 16 bytes that stand for a canonical sequence."""
    return bytes(xxhash.xxh3_128_digest(sequence))
