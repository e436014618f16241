"""Saving, loading, and files that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dilaserve_predictor.loading import PredictorFolder
from dilaserve_predictor.model import FILE_NAME, PredictorError, StepModel

DEEP = b'{"info":{"parameters":{"a":' + 100_000 * b"["


def test_what_is_saved_is_loaded(trained: StepModel, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "new")
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == [FILE_NAME]
    assert path.stat().st_size < 500_000
    assert StepModel.load(tmp_path / "new") == trained


def broken(path: Path, change: str) -> None:
    """Write a predictor with one fault."""
    content = msgspec.json.decode(path.read_bytes())
    match change:
        case "features":
            content["info"]["features"][0] = "other"
        case "format":
            content["info"]["format"] = 99
        case "trees":
            content["median"] = "no trees"
        case "tree features":
            content["upper"][0]["features"][0] = 11
        case "field":
            del content["info"]["model_id"]
        case "errors":
            del content["info"]["errors"]["full"]
        case "refresh":
            content["info"]["refresh_tokens"] = -1
    path.write_bytes(msgspec.json.encode(content))


@pytest.mark.parametrize(
    "change", ["features", "format", "trees", "tree features", "field", "errors", "refresh"]
)
def test_a_file_with_a_fault_is_named(trained: StepModel, tmp_path: Path, change: str) -> None:
    broken(trained.save(tmp_path), change)
    with pytest.raises(PredictorError, match=r"predictor\.json cannot be read: .*train it by"):
        StepModel.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", DEEP])
def test_what_is_no_predictor_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(PredictorError, match="cannot be read"):
        StepModel.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"No such file.*dilaserve train-predictor"):
        StepModel.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(trained: StepModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PredictorError, match="cannot be written"):
        trained.save(tmp_path / "file")


def test_a_folder_is_waited_for_and_read_once(trained: StepModel, tmp_path: Path) -> None:
    folder = PredictorFolder(tmp_path / "later", "made-up")
    assert not folder.refresh()
    assert folder.predictor is None
    assert "dilaserve train-predictor" in folder.absence()
    trained.save(tmp_path / "later")
    assert folder.refresh()
    first = folder.predictor
    assert not folder.refresh()
    assert folder.predictor is first


def test_a_replaced_predictor_is_read_again(trained: StepModel, tmp_path: Path) -> None:
    trained.save(tmp_path)
    folder = PredictorFolder(tmp_path, "made-up")
    folder.refresh()
    first = folder.predictor
    trained.save(tmp_path)
    assert folder.refresh()
    assert folder.predictor is not first


def test_one_that_cannot_be_used_leaves_the_former(trained: StepModel, tmp_path: Path) -> None:
    trained.save(tmp_path)
    folder = PredictorFolder(tmp_path, "made-up")
    folder.refresh()
    first = folder.predictor
    (tmp_path / "bad").write_bytes(b"{")
    os.replace(tmp_path / "bad", tmp_path / FILE_NAME)
    with pytest.raises(PredictorError):
        folder.refresh()
    assert folder.predictor is first
    assert not folder.refresh(), "said once"


def test_one_for_another_model_is_refused(trained: StepModel, tmp_path: Path) -> None:
    trained.save(tmp_path)
    with pytest.raises(PredictorError, match=r"for the model 'made-up', not for 'tiny'.*train one"):
        PredictorFolder(tmp_path, "tiny").refresh()
