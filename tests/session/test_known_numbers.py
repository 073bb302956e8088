"""The numbers that go with a checkpoint are those of its own step, where they can be had without waiting."""

from __future__ import annotations

import torch

from jackline.session.metrics.scalars import Scalars


def test_a_number_of_the_host_is_known_at_once_and_written_down_later() -> None:
    scalars = Scalars()
    scalars.log(10, {"val_loss": 3.9, "loss": torch.tensor(4.0)})
    scalars.send(1e9)
    scalars.resolve(wait=True)
    scalars.log(20, {"val_loss": 3.2})

    assert scalars.latest == {"val_loss": 3.9, "loss": 4.0}
    assert scalars.known() == {"val_loss": 3.2, "loss": 4.0}
