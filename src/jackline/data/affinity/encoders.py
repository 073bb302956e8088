"""Encoders by name: `embedded`, a protein language model on the hub, or one in a local folder.

Owns what every encoder is to the cache (name, revision, width) and which one a setting stands for.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jackline.data.affinity.features import EmbeddedEncoder
from jackline.data.affinity.pairs import Side
from jackline.errors import UsageError

EMBEDDED_DIMS: dict[Side, int] = {"antibody": 1024, "antigen": 1280}


class Encoder(Protocol):
    """Turns canonical sequences into vectors; the same sequences always into the same ones."""

    name: str
    revision: str
    dim: int
    shard_rows: int

    def encode(self, sequences: list[bytes]) -> NDArray[np.float16]:
        """A row for each sequence, in their order."""


def open_encoder(name: str, side: Side) -> Encoder:
    if name == "embedded":
        return EmbeddedEncoder(EMBEDDED_DIMS[side])
    raise UsageError(f"unknown encoder '{name}'")
