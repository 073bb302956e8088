"""Layers that torch leaves as they are: their model draws all weights itself, in one pass.

Torch's own draw would be thrown away at once; for 124M weights it took 0.6 of 1.6 s on two cores, at every start.
Whoever uses one must fill it. They have the names of what they are, because names stand in messages.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: see above."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: see above."""
