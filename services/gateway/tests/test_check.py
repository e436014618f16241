"""What a gateway says before it is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dilaserve.errors import ModelFolderError, SettingsError
from dilaserve_gateway.check import check_start

TINY = Path(__file__).parents[3] / "models" / "tiny"


def folder_with(tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "m"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "predictor"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    return folder


def test_the_bundled_model_is_beyond_doubt() -> None:
    checked = check_start({"DILASERVE_MODEL": str(TINY)})
    assert checked.detail.startswith("tokenizer with a chat template, 1 token")
    assert checked.doubts == ()


def test_a_mask_that_is_a_letter_is_doubted(tmp_path: Path) -> None:
    vocab = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    folder = folder_with(tmp_path, mask_token_id=vocab["a"])
    (doubt,) = check_start({"DILASERVE_MODEL": str(folder)}).doubts
    assert f"mask_token_id {vocab['a']}, which is 'a' in the tokenizer" in doubt
    assert "copy the published mask_token_id" in doubt


def test_a_tokenizer_that_names_no_special_token_is_believed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, mask_token_id=40)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").unlink()
    assert check_start({"DILASERVE_MODEL": str(folder)}).doubts == ()


def test_a_mask_that_no_token_is_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, mask_token_id=127_000)
    with pytest.raises(ModelFolderError, match="no mask token"):
        check_start({"DILASERVE_MODEL": str(folder)})


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFolderError, match="git lfs pull"):
        check_start({"DILASERVE_MODEL": str(folder)})


@pytest.mark.parametrize("rows", [[1], {"x": {}}, {"9": {}}, {"9": 1}, {"9": {"content": 5}}])
def test_added_tokens_of_another_form_are_refused(tmp_path: Path, rows: object) -> None:
    folder = folder_with(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": rows}))
    with pytest.raises(ModelFolderError, match="in a form that is not known"):
        check_start({"DILASERVE_MODEL": str(folder)})


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="DILASERVE_MAX_CHOICES='0'"):
        check_start({"DILASERVE_MODEL": str(TINY), "DILASERVE_MAX_CHOICES": "0"})
