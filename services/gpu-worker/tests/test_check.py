"""What a worker says before it is started: the same as it would say then, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dilaserve.checks import Check, Checked, ask
from dilaserve.errors import DiLaServeError, ModelFolderError, SettingsError
from dilaserve_gpu_worker.check import check_start

MakeFolder = Callable[..., Path]


def test_a_folder_that_loads_is_described(make_folder: MakeFolder) -> None:
    checked = check_start({"DILASERVE_MODEL": str(make_folder())})
    assert checked.detail.startswith("llada of 2 layers, 21 tensors in 1 file of ")
    assert "not checked: the tensors' values" in checked.detail


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TP_DEGREE", "8", r"query heads \(4\); use a degree of"),
        ("THREADS", "many", "DILASERVE_THREADS='many'"),
        ("MAX_BATCH_TOKENS", "8", "DILASERVE_MAX_BATCH_TOKENS=8 is no room"),
        ("CRASH_AT", "nowhere:1", "DILASERVE_CRASH_AT='nowhere:1'"),
    ],
)
def test_a_wrong_setting_is_refused(
    make_folder: MakeFolder, variable: str, value: str, words: str
) -> None:
    environ = {"DILASERVE_MODEL": str(make_folder()), f"DILASERVE_{variable}": value}
    with pytest.raises((SettingsError, ModelFolderError), match=words):
        check_start(environ)


def test_cut_off_weights_are_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFolderError, match="is no readable safetensors file"):
        check_start({"DILASERVE_MODEL": str(folder)})


def test_as_a_process(make_folder: MakeFolder) -> None:
    good, bad = make_folder(), make_folder(model_type="gpt")
    answers = ask(
        Check("dilaserve_gpu_worker", {**os.environ, "DILASERVE_MODEL": str(folder)})
        for folder in (good, bad)
    )
    assert isinstance(answers[0], Checked)
    assert isinstance(answers[1], DiLaServeError)
    assert "model_type 'gpt', which is unknown; use a folder" in str(answers[1])


def test_a_service_that_is_not_installed_is_no_refusal() -> None:
    (answer,) = ask([Check("dilaserve_nowhere", os.environ)])
    assert isinstance(answer, DiLaServeError)
    assert "No module named 'dilaserve_nowhere'" in str(answer)
    assert str(answer).endswith("; see whether all packages are installed: `dilaserve doctor`")


def test_it_imports_no_torch(make_folder: MakeFolder) -> None:
    script = (
        "import sys; from dilaserve_gpu_worker.check import main; main()\n"
        "print(); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "DILASERVE_MODEL": str(make_folder())},
        capture_output=True,
        text=True,
        check=True,
    )
    said, torch_is_there = result.stdout.splitlines()
    assert "llada" in json.loads(said)["detail"]
    assert torch_is_there == "False"
