"""May the copy run beside the next step? For our own trainer yes, because it says where state changes.

A stranger's loop has to prove it: on its first saves the state is copied at once, and when the optimizer is about to
step it must still be the same, bit for bit. Three proofs in a row and the copy may overlap; one failure and it never
may. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

PROOFS_NEEDED = 3


@dataclass(frozen=True)
class Trust:
    """How far a loop has shown that it changes its state only behind the barrier."""

    num_proofs: int = 0
    broken_by: str = ""
    has_torn: bool = False  # an overlapped copy was found not to be exact: nobody may overlap any more

    @property
    def is_earned(self) -> bool:
        return not self.broken_by and self.num_proofs >= PROOFS_NEEDED

    @property
    def is_open(self) -> bool:
        return not self.broken_by and self.num_proofs < PROOFS_NEEDED


def after_trial(trust: Trust, changed: str) -> Trust:
    """`changed` names a tensor that was not the same any more; empty when all were."""
    return Trust(trust.num_proofs, changed) if changed else Trust(trust.num_proofs + 1, trust.broken_by)


def after_tear(trust: Trust) -> Trust:
    """A tensor's version moved while it was being copied."""
    return Trust(trust.num_proofs, "a tensor changed while it was being copied", has_torn=True)
