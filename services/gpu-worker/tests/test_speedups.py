from __future__ import annotations

import shutil
from typing import Any

import msgspec
import pytest
import torch

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker import loading
from dilaserve_gpu_worker.loading import load_engine, start_ranks
from dilaserve_gpu_worker.models.products import packing_pays
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_gpu_worker.speedups import choose_graphs

GPU = torch.device("cuda:0")


def choice(setting: Any, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "device": GPU, "cache_mode": "dual", "attention": "torch_varlen", "tp_degree": 1
    }  # fmt: skip
    return choose_graphs(setting, **given | changed)


def test_graphs_are_on_where_they_can_be() -> None:
    assert choice("auto").is_on
    assert choice("on", tp_degree=4).is_on
    assert choice("auto", cache_mode="prefix").is_on
    assert not choice("off").is_on


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": torch.device("cpu")}, "off (the device is cpu)"),
        ({"cache_mode": "none"}, "off (without a cache there are no cache steps)"),
        ({"attention": "sdpa"}, "off (the calls of attention backend sdpa follow each pass)"),
    ],
)
def test_where_they_cannot_be_it_is_said(changed: dict[str, Any], words: str) -> None:
    assert choice("auto", **changed).words == words
    assert not choice("auto", **changed).is_on
    with pytest.raises(SettingsError, match="DILASERVE_CUDA_GRAPHS=on cannot be: "):
        choice("on", **changed)


def test_over_several_ranks_they_are_asked_for() -> None:
    assert choice("auto", tp_degree=2).words.startswith("off (collectives in graphs are not")


def test_no_graphs_on_a_cpu(make_folder: Any) -> None:
    folder = str(make_folder())
    engine, _ = load_engine(WorkerSettings(model=folder, kv_tokens=64))
    assert engine.attention == "sdpa"
    with pytest.raises(SettingsError, match="the device is cpu; use auto or off"):
        load_engine(WorkerSettings(model=folder, kv_tokens=64, cuda_graphs="on"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize(
    ("given", "is_wanted"),
    [({}, True), ({"pack_weights": "off"}, False), ({"compile": "on"}, False)],
)
def test_every_rank_packs_where_it_pays_unless_told(
    make_folder: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], is_wanted: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)  # nothing is compiled before a pass
    settings = WorkerSettings(model=str(make_folder(vocab_size=62)), kv_tokens=64, **given)
    engine, _ = load_engine(settings)
    is_packed = is_wanted and packing_pays(torch.device("cpu"), torch.float32)
    assert engine.products == ("packed" if is_packed else "plain")
    told: dict[str, Any] = {}
    monkeypatch.setattr(loading, "launch_ranks", lambda **options: told.update(options))
    start_ranks(msgspec.structs.replace(settings, tp_degree=2))
    assert told["packs"] == is_wanted
