"""A predictor trained once, on made-up runs."""

from __future__ import annotations

import pytest

from dilaserve_predictor.model import Predictor, StepModel
from dilaserve_predictor.train import train

from .made_up import runs_of


@pytest.fixture(scope="session")
def trained() -> StepModel:
    return train(runs_of(60))


@pytest.fixture(scope="session")
def predictor(trained: StepModel) -> Predictor:
    return Predictor(trained)
