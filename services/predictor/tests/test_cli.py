"""`dilaserve train-predictor`, as installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dilaserve.recording import StepWriter
from dilaserve_predictor.model import StepModel

from .made_up import runs_of

DILASERVE = Path(sys.executable).with_name("dilaserve")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    runs = runs_of(12)
    for n in range(2):
        with StepWriter(folder / f"{n}.jsonl") as writer:
            for run in runs[n::2]:
                writer.write(run)
    return folder


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DILASERVE, "train-predictor", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_of_steps_becomes_a_predictor(data: Path, tmp_path: Path) -> None:
    result = train(data, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "48 runs (12 switch their threshold) of 12 prompts" in result.stdout
    assert "DILASERVE_REFRESH_TOKENS" in result.stdout
    assert StepModel.load(tmp_path / "out").info.n_runs == 48


def test_files_and_json(data: Path, tmp_path: Path) -> None:
    result = train(data / "0.jsonl", data / "1.jsonl", "--out", tmp_path, "--json")
    info = json.loads(result.stdout)
    assert info["n_prompts"] == 12
    assert set(info["errors"]) == {"one_shot", "progress", "full"}


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_read_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = train(tmp_path / name, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.startswith("dilaserve: ")
    assert "Traceback" not in result.stderr
