"""What is read from a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilaserve.errors import ModelFolderError
from dilaserve_gateway.model import load_model

TINY = Path(__file__).parents[3] / "models" / "tiny"
LLADA = {"model_type": "llada", "max_sequence_length": 4096, "embedding_size": 512}
DREAM = {"model_type": "Dream", "max_position_embeddings": 131072, "vocab_size": 512}


def folder_with(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> Path:
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    end = dict(tokenizer["added_tokens"][0], id=5, content="<|im_end|>")
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["id"] != 5] + [end]
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        "<|im_end|>" if i == 5 else token: i for token, i in vocab.items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_tiny() -> None:
    model = load_model(TINY)
    config = json.loads((TINY / "config.json").read_text())
    assert model.id == "tiny"
    assert model.context_length == config["max_sequence_length"]
    assert model.eos_ids == {config["eos_token_id"]}
    assert model.template is not None
    assert load_model(TINY, "other").id == "other"


@pytest.mark.parametrize(
    ("config", "generation", "eos_ids", "default_output"),
    [
        (LLADA | {"eos_token_id": 7}, None, {5, 7}, 256),
        (LLADA | {"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {5, 7, 8, 9}, 256),
        (LLADA | {"eos_token_id": None}, {"max_new_tokens": 64}, {5}, 64),
    ],
)
def test_ends_and_default_length(
    tmp_path: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    eos_ids: set[int],
    default_output: int,
) -> None:
    model = load_model(folder_with(tmp_path, config, generation))
    assert model.eos_ids == eos_ids
    assert model.default_output == default_output


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LLADA, 4096),
        (DREAM, 2048),
        (DREAM | {"max_position_embeddings": 512}, 512),
    ],
)
def test_context_length(tmp_path: Path, config: dict[str, Any], length: int) -> None:
    assert load_model(folder_with(tmp_path, config)).context_length == length


@pytest.mark.parametrize("name", ["max_sequence_length", "embedding_size"])
@pytest.mark.parametrize("value", [0, "many", None])
def test_a_config_without_sizes(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelFolderError, match=f"no positive {name}"):
        load_model(folder_with(tmp_path, LLADA | {name: value}))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist; set DILASERVE_MODEL"):
        load_model(tmp_path / "nowhere")


def test_a_tokenizer_without_the_mask_token_is_told(tmp_path: Path) -> None:
    assert load_model(folder_with(tmp_path, LLADA | {"mask_token_id": 3})).context_length == 4096
    with pytest.raises(ModelFolderError, match=r"no mask token: .* gives it the id 400"):
        load_model(folder_with(tmp_path, LLADA | {"mask_token_id": 400}))
