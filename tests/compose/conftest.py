"""One Docker engine for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import engine as docker


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.Engine]:
    with docker.start_engine() as engine:
        yield engine
