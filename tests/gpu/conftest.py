"""Tests that need CUDA devices, on a GPU host: `pytest -m gpu tests/gpu`. Not in `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda:0")


@pytest.fixture(scope="session", params=["llada-mha", "dream-gqa"])
def golden_folder(request: pytest.FixtureRequest) -> Path:
    folder = GOLDEN / str(request.param)
    if not folder.is_dir():
        pytest.skip(f"../shared/golden/{request.param} is absent: no reference to compare with")
    return folder
