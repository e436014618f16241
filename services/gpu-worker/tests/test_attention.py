"""Attention backends against attention written out plainly, and their choice. Kernels that need a
GPU are under tests/gpu; here plain ones stand in for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.attention import (
    Attention,
    PooledKeys,
    Ragged,
    Run,
    attention_backend,
    backends,
    choose_attention,
    on_device,
)
from dilaserve_gpu_worker.attention.trial import (
    plain_attention,
    plain_gathered,
    plain_paged,
    random_case,
)
from dilaserve_gpu_worker.attention.varlen import Lengths, prepare_gathered, prepare_paged
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.models.model import Model

CPU = torch.device("cpu")
HALF = torch.bfloat16
BACKENDS: dict[str, Attention] = {
    "sdpa": attention_backend("sdpa"),
    "gathered": partial(prepare_gathered, kernel=plain_gathered),
    "paged": partial(prepare_paged, kernel=plain_paged),
}

lengths = st.integers(1, 100)
whole_rows = st.tuples(st.integers(1, 3), lengths).map(lambda t: (t[0], t[1], t[1]))
cached_rows = st.tuples(st.integers(1, 3), st.integers(1, 40), lengths).map(
    lambda t: (t[0], t[1], t[1] + t[2])
)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(whole_rows | cached_rows, min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    seed=st.integers(0, 999),
)
def test_ragged_batches_over_a_pool(
    name: str, shapes: list[tuple[int, int, int]], heads: tuple[int, int], seed: int
) -> None:
    case = random_case(shapes, seed=seed, n_heads=heads[0], n_kv_heads=heads[1])
    attend = on_device(BACKENDS[name], case.ragged, CPU)
    mixed = attend(case.q_THA, case.k_TGA, case.v_TGA, case.pooled)
    assert mixed.shape == case.q_THA.shape
    torch.testing.assert_close(mixed.double(), plain_attention(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_ragged_batches_without_a_pool(name: str) -> None:
    case = random_case([(2, 40, 40), (1, 7, 7), (3, 65, 65)], seed=3, has_pool=False)
    attend = on_device(BACKENDS[name], case.ragged, CPU)
    mixed = attend(case.q_THA, case.k_TGA, case.v_TGA, None)
    torch.testing.assert_close(mixed.double(), plain_attention(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("tables", "copied"),
    [
        # the second pair lies as far apart as it likes; one row between is torn apart
        ([[3, 4], [5, 6], [9, 7], [0, 1], [10, 11]], [[], [9, 7], []]),
        # neighbours; even distances; three whose distances differ; a way back; a row twice
        ([[0, 1], [2, 3], [4, 5]], [[]]),
        ([[0, 1], [5, 6], [10, 11]], [[]]),
        ([[0, 1], [2, 3], [7, 8]], [[], []]),
        ([[4, 5], [2, 3]], [[], []]),
        ([[4, 5], [4, 5], [6, 7]], [[], []]),
        ([[1, 0], [3, 2]], [[1, 0, 3, 2]]),
    ],
)
def test_keys_are_read_where_they_lie(tables: list[list[int]], copied: list[list[int]]) -> None:
    """Cached rows of two pages each, in as few calls as their places in the pool allow."""
    case = random_case([(len(tables), 8, 50)], seed=1)
    assert case.pooled is not None
    slots = [page * PAGE_TOKENS + np.arange(PAGE_TOKENS) for row in tables for page in row]
    rows = [np.concatenate(slots[i : i + 2])[:50] for i in range(0, len(slots), 2)]
    run = Run(len(tables), 8, 50, 0, first_key=0)
    ragged = Ragged([run], np.arange(run.stop), np.concatenate(rows))
    prepared = attention_backend("sdpa")(ragged)
    assert [pages.tolist() for pages in prepared.arrays] == copied
    shape = (12 * PAGE_TOKENS, *case.k_TGA.shape[1:])
    pool = PooledKeys(torch.randn(shape), torch.randn(shape))
    found = on_device(attention_backend("sdpa"), ragged, CPU)(
        case.q_THA, case.k_TGA, case.v_TGA, pool
    )
    as_given = replace(case, ragged=ragged, pooled=pool)
    torch.testing.assert_close(found.double(), plain_attention(as_given), atol=2e-6, rtol=1e-5)


def test_the_choice_on_a_cpu(model: Model) -> None:
    for name in ("auto", "sdpa"):
        for dtype in (torch.float32, torch.bfloat16):
            assert choose_attention(name, model.config, CPU, dtype) == "sdpa"


@pytest.mark.parametrize(
    ("working", "chosen"),
    [
        ({"flash_attn": plain_gathered, "torch_varlen": plain_gathered}, "flash_attn"),
        ({"torch_varlen": plain_gathered}, "torch_varlen"),
        ({"torch_paged": plain_paged, "torch_varlen": plain_gathered}, "torch_paged"),
        ({}, "sdpa"),
    ],
)
def test_auto_takes_the_first_that_passes_a_trial(
    working: dict[str, Any], chosen: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device stands for a GPU: a CPU, for which the kernels that do not work raise."""

    def backend(name: str) -> Attention:
        if name not in working:
            raise RuntimeError("no kernel image is available for execution on the device")
        prepare: Any = prepare_paged if name == "torch_paged" else prepare_gathered
        return partial(prepare, kernel=working[name])

    monkeypatch.setattr(backends, "attention_backend", backend)
    found = next(n for n in backends.ON_GPU if backends._passes(n, model.config, CPU, HALF))
    assert found == chosen


def test_a_backend_that_attends_wrongly_does_not_pass(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def causal(q: Tensor, k: Tensor, v: Tensor, of: Lengths) -> Tensor:
        mixed = plain_gathered(q, k, v, of)
        mixed[0] = v[0].repeat_interleave(q.shape[1] // v.shape[1], 0)  # sees itself only
        return mixed

    monkeypatch.setattr(
        backends, "attention_backend", lambda _: partial(prepare_gathered, kernel=causal)
    )
    assert not backends._passes("flash_attn", model.config, CPU, HALF)
    assert "flash_attn is off by" in caplog.text


@pytest.mark.parametrize("name", ["torch_varlen", "torch_paged"])
def test_a_backend_that_cannot_run_there_is_told(name: str, model: Model) -> None:
    gpu = torch.device("cuda:0")
    with pytest.raises(SettingsError, match=f"'{name}' needs a CUDA device and a 16-bit type, .*"):
        choose_attention(name, model.config, gpu, torch.float32)
    assert choose_attention(name, model.config, gpu, HALF) == name
    with pytest.raises(SettingsError, match="this is cpu with float32; use sdpa or auto"):
        Engine(model, cache_mode="dual", n_kv_tokens=64, max_batch_tokens=64, attention=name)


def test_flash_attn_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(SettingsError, match=r"needs the package flash-attn .*use torch_varlen"):
        attention_backend("flash_attn")


def test_the_engine_says_which_it_took(model: Model) -> None:
    engine = Engine(model, cache_mode="dual", n_kv_tokens=64, max_batch_tokens=64)
    assert engine.attention == "sdpa"
