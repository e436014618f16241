"""`dilaserve train-predictor`, as installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dilaserve.recording import StepWriter
from dilaserve_predictor.model import FILE_NAME, StepModel
from dilaserve_predictor.train import train as learn

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


def test_one_of_few_runs_does_not_replace_one_of_many_unasked(data: Path, tmp_path: Path) -> None:
    many, few = runs_of(30), tmp_path / "few.jsonl"
    learn(many).save(tmp_path / "out")
    before = (tmp_path / "out" / FILE_NAME).read_bytes()
    refused = train(data, "--out", tmp_path / "out")
    assert refused.returncode == 1
    assert "is of 120 runs of made-up (30 prompts, held-out WMAPE 0." in refused.stderr
    assert "of 48 runs of made-up (12 prompts" in refused.stderr
    assert "--force" in refused.stderr
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == before
    forced = train(data, "--out", tmp_path / "out", "--force")
    assert "instead of one of 120 runs of made-up" in forced.stdout
    with StepWriter(few) as writer:
        for run in many[: 4 * 10]:  # no more than a sixth fewer
            writer.write(run)
    assert train(few, "--out", tmp_path / "out").returncode == 0
    assert StepModel.load(tmp_path / "out").info.n_runs == 40


def test_one_of_another_model_is_not_replaced_unasked(tmp_path: Path, data: Path) -> None:
    kept = learn(runs_of(10))
    info = msgspec.structs.replace(kept.info, model_id="another")
    msgspec.structs.replace(kept, info=info).save(tmp_path)
    refused = train(data, "--out", tmp_path)
    assert refused.returncode == 1
    assert "40 runs of another" in refused.stderr


def test_one_that_cannot_be_read_is_no_loss(tmp_path: Path, data: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert train(data, "--out", tmp_path).returncode == 0


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_read_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = train(tmp_path / name, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert result.stderr.startswith("dilaserve: ")
    assert "Traceback" not in result.stderr
