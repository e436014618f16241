"""Equality with the reference implementations' outputs (../shared/golden/llada-mha)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dilaserve.store.records import DecodingSpec
from dilaserve_gpu_worker.attention import Run, attention_backend
from dilaserve_gpu_worker.engine.alone import denoise_alone
from dilaserve_gpu_worker.models.llada import LLaDA


@pytest.mark.parametrize("n_prompt", [5, 13, 32])
def test_logits(golden_folder: Path, golden_model: LLaDA, n_prompt: int) -> None:
    golden = load_file(golden_folder / f"logits_{n_prompt}.safetensors")
    tokens = golden["input_ids"][0]
    run = Run(n_rows=1, n_queries=len(tokens), n_keys=len(tokens), start=0, first_key=None)
    attend = attention_backend("sdpa")
    with torch.inference_mode():
        h_TD = golden_model.hidden(
            tokens, torch.arange(len(tokens)), lambda _, q, k, v: attend(q, k, v, None, [run])
        )
        logits = golden_model.logits(h_TD)
    assert (logits - golden["logits"][0]).abs().max() < 1e-5


def test_sequences_and_forward_windows(golden_folder: Path, golden_model: LLaDA) -> None:
    cases = json.loads((golden_folder / "golden.json").read_text())["cases"]
    assert len(cases) == 54
    for case in cases:
        answer = denoise_alone(
            golden_model,
            case["prompt"],
            DecodingSpec(
                n_output=case["gen_length"],
                block_length=case["block_length"],
                seed=0,
                ignore_eos=True,
            ),
            cache_mode=case["mode"],
            threshold=case["threshold"] or 0.0,
            quota=case["gen_length"] // case["steps"] if case["threshold"] is None else None,
        )
        windows = _needed_windows(case, golden_model.config.mask_id)
        label = {key: case[key] for key in ("mode", "threshold", "block_length")}
        assert answer.sequence == case["sequence"], label
        assert answer.windows == windows, label
        assert answer.nfe == len(windows), label


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
