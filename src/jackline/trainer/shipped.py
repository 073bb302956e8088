"""Settings files that came with the package, by name: `--config m7c_125m` works where there is no clone.

Each recipe's lie in `configs` of its package. The same files lie in the repository's `configs`; a test holds them
equal.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from jackline.errors import UsageError

RECIPES = Path(__file__).parents[1] / "recipes"


def find_settings_file(word: str) -> Path:
    """A file of that path, else the one that came with the package under that name."""
    path = Path(word)
    shipped = {found.stem: found for found in RECIPES.glob("*/configs/*.yaml")}
    if word in shipped and (path.is_dir() or not path.exists()):  # runs of before lie in folders of these names
        return shipped[word]
    near = get_close_matches(path.stem, shipped, n=1, cutoff=0.8)
    if path.exists() or not near:
        return path  # whoever reads it says what is wrong
    raise UsageError(
        f"cannot read {word}: No such file or directory",
        hint=f"--config {near[0]} is one that came with the package",
    )
