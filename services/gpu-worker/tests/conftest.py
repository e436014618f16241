"""Fixtures of the engine's tests: small random checkpoints, and the golden ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.products import packing_pays
from dilaserve_gpu_worker.weights import load_model

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"

CONFIG: dict[str, Any] = {
    "model_type": "llada",
    "d_model": 48,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "mlp_hidden_size": 72,
    "vocab_size": 61,
    "max_sequence_length": 512,
    "rope_theta": 500.0,
    "mask_token_id": 60,
    "eos_token_id": 59,
}

DREAM_CONFIG: dict[str, Any] = {
    "model_type": "Dream",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 72,
    "vocab_size": 62,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
    "mask_token_id": 60,
    "eos_token_id": 59,
}

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Writes a random checkpoint in LLaDA's format; keywords override config.json."""

    def make(**overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        config = CONFIG | overrides
        (folder / "config.json").write_text(json.dumps(config))
        save_file(random_tensors(config), folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def make_dream_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Likewise in Dream's format."""

    def make(**overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("dream")
        config = DREAM_CONFIG | overrides
        (folder / "config.json").write_text(json.dumps(config))
        save_file(random_dream_tensors(config), folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def random_dream(make_dream_folder: MakeFolder) -> Model:
    return load_model(make_dream_folder())


@pytest.fixture(scope="session")
def model(make_folder: MakeFolder) -> Model:
    return load_model(make_folder())


@pytest.fixture(scope="session")
def grouped_model(make_folder: MakeFolder) -> Model:
    """Four query heads over two key/value heads."""
    return load_model(make_folder(n_kv_heads=2))


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return golden("llada-mha")


@pytest.fixture(scope="session")
def dream_folder() -> Path:
    return golden("dream-gqa")


@pytest.fixture(scope="session", params=["packed", "plain"])
def packs(request: pytest.FixtureRequest) -> bool:
    """Whether the matrices of golden models are packed."""
    if request.param == "packed" and not packing_pays(torch.device("cpu"), torch.float32):
        pytest.skip("packing does not pay on this CPU, so that models are loaded plain")
    return bool(request.param == "packed")


@pytest.fixture(scope="session")
def golden_model(golden_folder: Path, packs: bool) -> Model:
    return load_model(golden_folder, packs=packs)


@pytest.fixture(scope="session")
def dream_model(dream_folder: Path, packs: bool) -> Model:
    """Four query heads over two key/value heads, shifted logits."""
    return load_model(dream_folder, packs=packs)


@pytest.fixture
def packed_matrices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The matrices that are packed from now on, if only in name, on a CPU where that pays."""
    matrices: list[torch.Tensor] = []

    def pack(matrix: torch.Tensor) -> torch.Tensor:
        matrices.append(matrix)
        return matrix

    monkeypatch.setattr("dilaserve_gpu_worker.weights.packing_pays", lambda *_: True)
    monkeypatch.setattr("dilaserve_gpu_worker.weights.packed", pack)
    return matrices


def golden(name: str) -> Path:
    if not (GOLDEN / name).is_dir():
        pytest.skip(f"../shared/golden/{name} is absent: no reference outputs to compare with")
    return GOLDEN / name


def random_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights whose predictions are spread from unsure to sure, as a trained model's are."""
    generator = torch.Generator().manual_seed(7)
    d, f, v = config["d_model"], config["mlp_hidden_size"], config["vocab_size"]
    kv = d // config["n_heads"] * config["n_kv_heads"]

    def matrix(n_rows: int, n_columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(n_rows, n_columns, generator=generator) * gain / n_columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(d, generator=generator)

    tensors = {
        "wte": torch.randn(v, d, generator=generator),
        "ln_f": norm(),
        "ff_out": matrix(v, d, gain=5.0),
    }
    for index in range(config["n_layers"]):
        block = {
            "attn_norm": norm(),
            "q_proj": matrix(d, d, gain=2.0),
            "k_proj": matrix(kv, d, gain=2.0),
            "v_proj": matrix(kv, d),
            "attn_out": matrix(d, d),
            "ff_norm": norm(),
            "ff_proj": matrix(f, d),
            "up_proj": matrix(f, d),
            "ff_out": matrix(d, f),
        }
        tensors |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    return {f"model.transformer.{name}.weight": tensor for name, tensor in tensors.items()}


def random_dream_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`random_tensors` under Dream's names, and biases."""
    as_llada = {
        "d_model": config["hidden_size"],
        "mlp_hidden_size": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "n_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
    }
    names = {
        "transformer.wte": "embed_tokens",
        "transformer.ln_f": "norm",
        "transformer.ff_out": "lm_head",
        "transformer.blocks": "layers",
        "attn_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
    }
    generator = torch.Generator().manual_seed(8)
    tensors = {}
    for name, tensor in random_tensors(as_llada).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs, 1)
        name = name.replace("model.lm_head", "lm_head")
        tensors[name] = tensor
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = 0.3 * torch.randn(len(tensor), generator=generator)
            tensors[name.replace(".weight", ".bias")] = bias
    return tensors
