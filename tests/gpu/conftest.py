"""Tests that need CUDA devices, on a GPU host: `pytest -m gpu tests/gpu`. Not in `make test`.

With DILASERVE_GPU_RESULTS=FOLDER what is measured is written there, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of whatever driver and compiler are there are shown; here they are no errors."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("default"))


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


@pytest.fixture
def full_precision() -> Iterator[None]:
    """TF32 would round the factors of products to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def results() -> Path | None:
    folder = os.environ.get("DILASERVE_GPU_RESULTS")
    return Path(folder) if folder else None
