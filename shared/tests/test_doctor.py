"""Each check says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from dilaserve import doctor
from dilaserve.errors import ModelFolderError
from dilaserve.model_folder import find_model, missing_parts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"mask_token_id": 3}))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder


def test_old_python_is_wrong() -> None:
    finding = doctor.check_python((3, 10))
    assert finding.verdict == "wrong"
    assert "install Python 3.11" in finding.remedy


def test_this_environment_is_complete() -> None:
    assert doctor.check_packages().verdict == "ok"


def test_missing_binary_names_the_package() -> None:
    finding = doctor.check_binary("x", ["no-such-server"], "no-such-package")
    assert finding.verdict == "wrong"
    assert "no-such-server" in finding.detail
    assert "pip install" in finding.remedy


def test_taken_port_is_a_note() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = doctor.check_port(taken.getsockname()[1])
    assert finding.verdict == "note"


def test_command_that_is_missing_or_fails_says_nothing(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho out; exit 1\n")
    failing.chmod(0o755)
    assert doctor._output(("no-such-command",)) is None
    assert doctor._output((str(failing),)) is None


def test_gpu_that_torch_cannot_use_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n")
    smi.chmod(0o755)
    torch = tmp_path / "torch"
    torch.write_text("#!/bin/sh\necho 0\n")
    torch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "ASK_TORCH", (str(torch),))
    finding = doctor.check_gpu()
    assert finding.verdict == "note"
    assert "H200" in finding.detail
    assert "CUDA build" in finding.remedy
    torch.write_text("#!/bin/sh\necho 1\n")
    assert doctor.check_gpu().verdict == "ok"


def test_complete_model_folder_is_found(model: Path) -> None:
    assert find_model(model, {}) == model
    assert find_model(None, {"DILASERVE_MODEL": str(model)}) == model


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no *.safetensors"),
        ("tokenizer.json", "no tokenizer.json or vocab.json with merges.txt"),
    ],
)
def test_missing_part_of_a_model_is_named(model: Path, name: str, fault: str) -> None:
    (model / name).unlink()
    assert missing_parts(model) == [fault]
    with pytest.raises(ModelFolderError, match="give a folder"):
        find_model(model, {})
    (finding,) = doctor.check_model(model, {})
    assert finding.verdict == "wrong"


def test_a_tokenizer_in_two_files_is_one(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").touch()
    assert missing_parts(model) == ["no tokenizer.json or vocab.json with merges.txt"]
    (model / "merges.txt").touch()
    assert missing_parts(model) == []


def test_config_without_a_mask_token_is_wrong(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert missing_parts(model) == ["config.json has no mask_token_id"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", "config.json holds no JSON object"),
        ("{", "config.json is not JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "config.json is a pointer of Git LFS"),
    ],
)
def test_config_that_is_none_is_wrong(model: Path, text: str, fault: str) -> None:
    (model / "config.json").write_text(text)
    (found,) = missing_parts(model)
    assert found.startswith(fault)


def test_links_to_nothing_are_named(model: Path) -> None:
    (model / "picture.png").symlink_to("nowhere")
    assert missing_parts(model) == [], "nobody reads it"
    for name in ("config.json", "tokenizer.json"):
        (model / name).unlink()
        (model / name).symlink_to(f"../blobs/{name}")
    assert missing_parts(model) == ["config.json, tokenizer.json: links to what does not exist"]


def test_a_file_is_no_folder(model: Path) -> None:
    assert missing_parts(model / "config.json") == ["it is no folder, but a file"]
    assert missing_parts(model / "none") == ["it does not exist"]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model folder that can be served."""
    folder = tmp_path / "whole"
    shutil.copytree(find_model(None, {}), folder)
    return folder


def verdicts(folder: Path) -> dict[str, tuple[str, str]]:
    """Of the folder and of the services that load it: (verdict, all words)."""
    return {
        finding.name: (finding.verdict, f"{finding.detail}; {finding.remedy}")
        for finding in doctor.check_model(folder, os.environ)
    }


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_services_say_what_they_find_and_what_they_did_not_check(whole: Path) -> None:
    found = verdicts(whole)
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "model": "ok",
        "gpu-worker": "ok",
        "gateway": "ok",
    }
    assert "not checked: the tensors' values" in found["gpu-worker"][1]


def test_what_the_worker_would_refuse_is_wrong(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "model-00001-of-00002.safetensors")
    verdict, words = verdicts(whole)["gpu-worker"]
    assert verdict == "wrong"
    assert "no model.safetensors.index.json" in words
    rewrite(whole, model_type="gpt")
    verdict, words = verdicts(whole)["gpu-worker"]
    assert (verdict, "model_type 'gpt', which is unknown" in words) == ("wrong", True)


def test_what_the_gateway_would_refuse_is_wrong(whole: Path) -> None:
    (whole / "tokenizer.json").write_text("{}")
    found = verdicts(whole)
    assert found["gateway"][0] == "wrong"
    assert "is no tokenizer" in found["gateway"][1]
    assert found["model"][0] == "ok"


def test_what_the_gateway_would_warn_of_is_a_note(whole: Path) -> None:
    rewrite(whole, mask_token_id=60)
    verdict, words = verdicts(whole)["gateway"]
    assert verdict == "note"
    assert "mask_token_id 60" in words


def test_bundled_model_is_the_default() -> None:
    assert find_model(None, {}).parts[-2:] == ("models", "tiny")
