"""What a worker's settings refuse together, where each alone is right."""

from __future__ import annotations

import pytest

from dilaserve.errors import SettingsError
from dilaserve.settings import load
from dilaserve_gpu_worker.settings import WorkerSettings

BLOCK = {"DILASERVE_MODEL": "m", "DILASERVE_BLOCK_LENGTH": "64"}


def test_a_pass_has_room_for_a_prompt_and_a_block() -> None:
    assert load(WorkerSettings, BLOCK | {"DILASERVE_MAX_BATCH_TOKENS": "65"}).block_length == 64
    with pytest.raises(SettingsError, match=r"DILASERVE_MAX_BATCH_TOKENS=64 is no room for a"):
        load(WorkerSettings, BLOCK | {"DILASERVE_MAX_BATCH_TOKENS": "64"})
