"""A GPU's context is opened before the first test: torch warns when a backward pass has to do it."""

from __future__ import annotations

import warnings

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def open_gpu() -> None:
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            square = torch.ones(2, 2, device="cuda", requires_grad=True)
            (square @ square).sum().backward()
