"""Encoders by name: `embedded`, a protein language model on the hub, or one in a local folder.

Owns what every encoder is to the cache (name, revision, width) and which one a setting stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jackline.data.spec import default_cache_root
from jackline.recipes.agab.data.features import EmbeddedEncoder
from jackline.recipes.agab.data.language_models import LanguageModelEncoder
from jackline.recipes.agab.data.pairs import Side
from jackline.recipes.agab.data.weights import find_weights

EMBEDDED_DIMS: dict[Side, int] = {"antibody": 1024, "antigen": 1280}


class Encoder(Protocol):
    """Turns canonical sequences into vectors; the same sequences always into the same ones."""

    name: str
    revision: str
    dim: int
    shard_rows: int  # sequences encoded and written at a time
    max_residues: int | None  # what is beyond is not looked at

    def load(self) -> None:
        """Get ready; may take minutes the first time. `encode` does it too."""

    def encode(self, sequences: list[bytes], moved: Callable[[int], None]) -> NDArray[np.float16]:
        """A row for each sequence, in their order; `moved` is told how many are done, now and then."""

    def release(self) -> None:
        """Give the memory back."""


def open_encoder(name: str, side: Side, root: Path | None = None, device: str = "cpu") -> Encoder:
    """`embedded`, `igt5`, `esm2-650m`, OWNER/NAME[@REVISION] or a folder. Loads no weights."""
    if name == "embedded":
        return EmbeddedEncoder(EMBEDDED_DIMS[side])
    memo = (root or default_cache_root()) / "embeddings" / "folders.json"
    return LanguageModelEncoder(find_weights(name, memo), device)
