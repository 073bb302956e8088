"""Layers whose weights torch does not initialise: the model draws all weights itself, in one pass.

The values that torch draws would be thrown away at once; for 124M weights that took 0.6 of 1.6 s on two cores, at
every start. A model that uses these layers must fill them. They keep the class names of torch's layers, because
messages show them.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: the model fills the weights itself."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing: the model fills the weights itself."""
