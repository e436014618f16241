"""Equality with the reference implementations' outputs (../shared/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dilaserve.store.records import DecodingSpec
from dilaserve_gpu_worker.attention import Ragged, Run, attention_backend, on_device
from dilaserve_gpu_worker.engine.alone import denoise_alone
from dilaserve_gpu_worker.models.model import Model


@pytest.mark.parametrize("n_prompt", [5, 13, 32])
def test_logits(golden_folder: Path, golden_model: Model, n_prompt: int) -> None:
    golden = load_file(golden_folder / f"logits_{n_prompt}.safetensors")
    logits = _logits(golden_model, golden["input_ids"][0])
    assert (logits - golden["logits"][0]).abs().max() < 1e-5


def test_logits_of_dream(dream_folder: Path, dream_model: Model) -> None:
    golden = load_file(dream_folder / "logits_13.safetensors")
    logits = _logits(dream_model, golden["input_ids"][0])
    assert (logits - golden["logits_unshifted"][0]).abs().max() < 1e-5


def test_sequences_and_forward_windows(golden_folder: Path, golden_model: Model) -> None:
    assert _check_cases(golden_folder, golden_model) == 54


def test_sequences_and_forward_windows_of_dream(dream_folder: Path, dream_model: Model) -> None:
    assert _check_cases(dream_folder, dream_model) == 12


def _logits(model: Model, tokens: Tensor) -> Tensor:
    run = Run(n_rows=1, n_queries=len(tokens), n_keys=len(tokens), start=0, first_key=None)
    nothing = np.empty(0, np.int64)
    ragged = Ragged([run], nothing, nothing)
    attend = on_device(attention_backend("sdpa"), ragged, torch.device("cpu"))
    with torch.inference_mode():
        h_TD = model.hidden(
            tokens, torch.arange(len(tokens)), lambda _, q, k, v: attend(q, k, v, None)
        )
        return model.logits(h_TD)


def _check_cases(folder: Path, model: Model) -> int:
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    for case in cases:
        quota = case["gen_length"] // case["steps"] if case["threshold"] is None else None
        answer = denoise_alone(
            model,
            case["prompt"],
            DecodingSpec(
                n_output=case["gen_length"],
                block_length=case["block_length"],
                seed=0,
                ignore_eos=True,
            ),
            cache_mode=case["mode"],
            threshold=case["threshold"] or 0.0,
            quota=quota,
        )
        windows = _needed_windows(case, model.config.mask_id)
        label = {key: case[key] for key in ("mode", "threshold", "block_length")}
        assert answer.sequence == case["sequence"], label
        assert answer.windows == windows, label
        assert answer.nfe == len(windows), label
    return len(cases)


def _needed_windows(case: dict[str, Any], mask_id: int) -> list[list[int]]:
    """The reference's windows, but for the superfluous ones: those of a block that is finished."""
    n_full = len(case["prompt"]) + case["gen_length"]
    windows, n_refreshes = [], 0
    for call in case["calls"]:
        ids = call["ids"]
        n_refreshes += len(ids) == n_full
        window_start = len(case["prompt"]) + (n_refreshes - 1) * case["block_length"]
        block_start = window_start if len(ids) == n_full else 0
        block = ids[block_start : block_start + case["block_length"]]
        if case["mode"] == "none" or mask_id in block:
            windows.append(ids)
    return windows
