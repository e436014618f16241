"""A predictor trained once, on made-up runs."""

from __future__ import annotations

import pytest

from dilaserve_predictor.model import StepModel
from dilaserve_predictor.train import train

from .made_up import runs_of


@pytest.fixture(scope="session")
def trained() -> StepModel:
    return train(runs_of(60))
