"""The KV pool's size by a GPU's memory, with a meter in the place of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.engine.memory import (
    GRAPHS_BYTES,
    MARGIN,
    LargestPass,
    check_kv_tokens,
    kv_bytes_per_token,
    kv_tokens_that_fit,
    largest_passes,
)
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.transformer import Transformer

GIB = 1 << 30


class FakeMeter:
    """Runs what it is to measure, and says what it was told to."""

    def __init__(self, peaks: list[int], free: int, total: int = 100 * GIB) -> None:
        self._peaks = iter(peaks)
        self._free = free, total
        self.n_runs = 0

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        self.n_runs += 1
        return next(self._peaks)

    def free(self) -> tuple[int, int]:
        return self._free


def fit(model: Model, meter: FakeMeter, attention: str = "masked_paged", **more: bool) -> int:
    return kv_tokens_that_fit(model, LargestPass(600, 8, attention, **more), meter)


def test_what_the_largest_pass_leaves_is_the_pool(model: Model) -> None:
    n_bytes = kv_bytes_per_token(model.config, model.dtype)
    meter = FakeMeter([2 * GIB, 3 * GIB], free=50 * GIB)
    rest = 50 * GIB - 3 * GIB - int(MARGIN * 100 * GIB)
    assert fit(model, meter) == rest // n_bytes
    assert meter.n_runs == 2


def test_graphs_and_copies_of_keys_are_reserved(model: Model) -> None:
    n_bytes = kv_bytes_per_token(model.config, model.dtype)
    rest = 50 * GIB - GIB - int(MARGIN * 100 * GIB)
    with_graphs = fit(model, FakeMeter([GIB, GIB], 50 * GIB), has_graphs=True)
    assert with_graphs == (rest - GRAPHS_BYTES) // n_bytes
    gathered = fit(model, FakeMeter([GIB, GIB], 50 * GIB), attention="masked")
    assert gathered == rest // (n_bytes + n_bytes // model.config.n_layers)


def test_too_large_a_pass_is_told(model: Model) -> None:
    with pytest.raises(SettingsError, match=r"DILASERVE_MAX_BATCH_TOKENS=600 takes 5120 MiB: of"):
        fit(model, FakeMeter([5 * GIB, GIB], 6 * GIB))


def test_a_pass_that_does_not_fit_at_all_is_told(model: Model) -> None:
    class Full(FakeMeter):
        def peak_of(self, work: Callable[[], object]) -> int:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(SettingsError, match="600 does not fit at all: of the 1024 MiB"):
        fit(model, Full([], GIB))


@pytest.mark.parametrize("budget", [600, 2048, 100])
def test_the_largest_passes_use_the_whole_budget(model: Model, budget: int) -> None:
    whole, blocks = largest_passes(model.config, LargestPass(budget, 8, "sdpa"))
    length = min(budget, 512)
    assert whole.n_tokens == budget // length * length
    assert blocks.n_tokens == budget // 8 * 8
    assert len(whole.outlook_rows_K) >= whole.n_tokens - 8 * len(whole.runs) * whole.runs[0].n_rows
    assert len(blocks.logit_rows_M) >= blocks.n_tokens
    for batch in (whole, blocks):
        assert len(batch.tokens_T) % 32 == 0
        assert max(batch.positions_T) < model.config.max_sequence_length


def test_a_rank_is_measured_without_the_others(golden_model: Model) -> None:
    class Peers:
        rank, degree = 1, 2

        def reduce(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("no rank answers yet")

        gather = reduce

    assert isinstance(golden_model, Transformer)
    rank = type(golden_model)(golden_model.config, golden_model._weights, Peers())
    meter = FakeMeter([GIB, GIB], 50 * GIB)
    assert fit(rank, meter) > 0
    assert meter.n_runs == 2


def test_a_pool_that_is_asked_for_has_to_fit(model: Model) -> None:
    n_bytes = kv_bytes_per_token(model.config, model.dtype)
    meter = FakeMeter([], free=1000 * n_bytes)
    check_kv_tokens(1000, model, meter)
    with pytest.raises(SettingsError, match=r"DILASERVE_KV_TOKENS=1001 takes \d+ MiB"):
        check_kv_tokens(1001, model, meter)
    with pytest.raises(SettingsError, match=r"DILASERVE_KV_TOKENS=10{15} takes \d+ MiB"):
        check_kv_tokens(10**15, model)
    with pytest.raises(SettingsError, match="KV_TOKENS=31 is less than a page of 32"):
        check_kv_tokens(31, model)
