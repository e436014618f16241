"""Compiled blocks give what eager ones give, but for the last bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dilaserve.errors import SettingsError
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.blocks import TorchBlocks
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.parts import feed
from dilaserve_gpu_worker.models.transformer import Transformer
from dilaserve_gpu_worker.speedups import compile_if
from dilaserve_gpu_worker.weights import load_model

FAR = 10**6


@pytest.fixture
def compiler() -> Iterator[None]:
    if not shutil.which("g++"):
        pytest.skip("no g++ here: torch.compile cannot be tried on this CPU")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def course(model: Model, lengths: list[int]) -> tuple[list[Any], list[float]]:
    engine = Engine(model, cache_mode="dual", n_kv_tokens=2048, max_batch_tokens=2048)
    spec = DecodingSpec(n_output=20, block_length=8, seed=1, ignore_eos=True)
    for n_prompt in lengths:
        prompt = [(5 * n_prompt + index) % 50 for index in range(n_prompt)]
        engine.add(EngineRequest(str(n_prompt), prompt, spec, 0, [MASKED] * 20, Credit(0.9, FAR)))
    decided, confidences = [], []
    while (output := engine.step()) is not None:
        decided += [(s.request_id, s.kind, s.positions, s.tokens) for s in output.steps]
        confidences += [c for s in output.steps for c in s.confidences]
    return decided, confidences


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "make", ["make_folder", pytest.param("make_dream_folder", marks=pytest.mark.slow)]
)
def test_compiled_blocks_decide_the_same(make: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(make)()
    eager, compiled = (load_model(folder, packs=False) for _ in range(2))
    assert isinstance(eager, Transformer)
    assert isinstance(compiled, Transformer)
    compile_if("on", compiled)
    assert isinstance(compiled._blocks, TorchBlocks)
    assert compiled._blocks._feed is not feed
    decided, confidences = course(compiled, [3, 40, 90])  # passes of many sizes
    expected = course(eager, [3, 40, 90])
    assert decided == expected[0]
    assert confidences == pytest.approx(expected[1], abs=1e-5)


def test_off_changes_nothing(model: Model) -> None:
    assert isinstance(model, Transformer)
    before = model._blocks
    compile_if("off", model)
    assert model._blocks is before


def test_a_missing_compiler_is_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SettingsError, match=r"DILASERVE_COMPILE=on needs a C\+\+ compiler"):
        compile_if("on", model)
