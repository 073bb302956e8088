"""Settings files that came with the package, by name: `--config m7c_125m` works where there is no clone.

The same files lie in the repository's `configs`; a test holds them equal.
"""

from __future__ import annotations

from pathlib import Path

from jackline.errors import UsageError

FOLDER = Path(__file__).parent / "configs"


def find_settings_file(word: str) -> Path:
    """A file of that path, else the one that came with the package under that name."""
    path = Path(word)
    if path.exists():
        return path
    shipped = FOLDER / f"{path.stem}.yaml"
    if not shipped.is_file():
        return path  # whoever reads it says what is wrong
    if word == path.stem:
        return shipped
    raise UsageError(
        f"cannot read {word}: No such file or directory",
        hint=f"--config {path.stem} is the one that came with the package",
    )
