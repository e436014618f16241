from __future__ import annotations

import pytest
import torch

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.attention import attention_backend
from dilaserve_gpu_worker.device import choose_device, choose_dtype, default_dtype


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SettingsError, match="'cuda:2' is not there, torch sees 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    "name", ["gpu", "meta", "mps", "mkldnn", "cpu:5", "cuda:-1", "cuda:007", "cuda:128", "", "CPU"]
)
def test_a_device_that_the_engine_does_not_run_on(name: str) -> None:
    with pytest.raises(SettingsError, match=f"'{name}' is unknown; use auto"):
        choose_device(name)


def test_types() -> None:
    assert choose_dtype("auto") is None
    assert choose_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(SettingsError, match="'int8' is unknown; use auto, float32"):
        choose_dtype("int8")


def test_an_unknown_attention_backend() -> None:
    with pytest.raises(SettingsError, match="'flesh' is unknown; use auto, sdpa"):
        attention_backend("flesh")


def test_a_gpu_computes_in_16_bits() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert default_dtype(cpu, torch.bfloat16) is torch.float32
    assert default_dtype(gpu, torch.bfloat16) is torch.bfloat16
    assert default_dtype(gpu, torch.float16) is torch.float16
    assert default_dtype(gpu, torch.float32) is torch.bfloat16
