"""What a pass costs in transfers between processor and device, without a GPU: the device is
torch's `meta`, whose tensors have no values, so that whoever looks at one raises.

One copy there and one back, however many requests; nothing else makes the processor wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker import transfer
from dilaserve_gpu_worker.engine import commit, runner, sampling, unmask
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.tape import WAITING
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.blocks import LayerWeights, Weights
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.peers import Alone

DEVICE = torch.device("meta")
FAR = 10**6
DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
DTYPES |= {np.dtype(np.float64): torch.float64}
NUMPY = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
USERS: tuple[ModuleType, ...] = (transfer, runner, unmask, commit, sampling)


@dataclass
class Transfers:
    """Counted where arrays go to the device and come back."""

    n_puts: int = 0
    n_fetches: int = 0

    def put(self, arrays: Sequence[Any], device: torch.device) -> list[Tensor]:
        self.n_puts += 1
        return [torch.empty(a.shape, dtype=DTYPES[a.dtype], device=device) for a in arrays]

    def fetch(self, tensors: Sequence[Tensor]) -> list[Any]:
        assert all(x.device == DEVICE for x in tensors)
        self.n_fetches += 1
        return [np.full(x.shape, 0.5).astype(NUMPY[x.dtype]) for x in tensors]


class NoWaiting(TorchDispatchMode):
    """Raises where an operator looks at values, or at tensors that are not on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITING, func
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.ndim:  # numbers become tensors without
                assert tensor.device == DEVICE, f"{func} has a tensor on {tensor.device}"
        return result


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    counted = Transfers()
    for module in USERS:
        for name in ("put", "fetch"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(counted, name))
    return counted


@pytest.fixture
def on_device(model: Model) -> Model:
    """The same model there."""
    assert isinstance(model, LLaDA)

    def there(x: Tensor | None) -> Any:
        return None if x is None else torch.empty(x.shape, dtype=torch.bfloat16, device=DEVICE)

    weights = model._weights
    layers = [
        LayerWeights(**{name: there(getattr(layer, name)) for name in LayerWeights.__slots__})
        for layer in weights.layers
    ]
    outer = weights.embedding_VD, weights.final_norm_D, weights.head_VD
    embedding_VD, final_norm_D, head_VD = map(there, outer)
    return LLaDA(model.config, Weights(embedding_VD, layers, final_norm_D, head_VD), Alone())


def request(name: str, n_prompt: int, **spec: Any) -> EngineRequest:
    of = DecodingSpec(n_output=24, block_length=8, seed=1, ignore_eos=True, **spec)
    return EngineRequest(name, [1] * n_prompt, of, 0, [MASKED] * 24, Credit(1.0, FAR))


def engine(model: Model, attention: str = "sdpa", cache_mode: Any = "dual") -> Engine:
    return Engine(
        model, cache_mode=cache_mode, n_kv_tokens=2048, max_batch_tokens=2048, attention=attention
    )


def pass_of(engine: Engine, n_requests: int) -> None:
    with NoWaiting():
        output = engine.step()
    assert output is not None
    assert len(output.steps) == n_requests


@pytest.mark.parametrize("attention", ["sdpa", "masked", "masked_paged"])
@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
@pytest.mark.parametrize("n_requests", [1, 12])
def test_a_pass_takes_one_copy_there_and_one_back(
    attention: str, cache_mode: Any, n_requests: int, on_device: Model, transfers: Transfers
) -> None:
    busy = engine(on_device, attention, cache_mode)
    for number in range(n_requests):
        busy.add(request(str(number), 5 + number))
    for _ in range(5):
        before = replace(transfers)
        pass_of(busy, n_requests)
        assert transfers.n_puts == before.n_puts + 1
        assert transfers.n_fetches == before.n_fetches + 1


@pytest.mark.parametrize("n_requests", [1, 12])
def test_sampling_takes_one_copy_more(
    n_requests: int, on_device: Model, transfers: Transfers
) -> None:
    busy = engine(on_device)
    for number in range(n_requests):
        busy.add(request(str(number), 5 + number, temperature=0.5 + number, top_p=0.9))
    pass_of(busy, n_requests)
    assert (transfers.n_puts, transfers.n_fetches) == (2, 1)


def test_the_counter_sees_what_waits_and_what_is_elsewhere() -> None:
    there = torch.ones(3, device=DEVICE)
    for waiting in (
        lambda: there.sum().item(),
        lambda: there[there > 0],
        lambda: torch.from_numpy(np.ones(3)).to(DEVICE),
        lambda: there.cpu(),
    ):
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoWaiting():
            waiting()
