"""A kill at any step of the golden cases, and a rebuild elsewhere, leaves every text as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.alone import engine_for_one
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.model import Model

FAR = 10**6


def test_no_kill_changes_a_text(golden_folder: Path, golden_model: Model) -> None:
    assert _kill_everywhere(golden_folder, golden_model) > 300


def test_no_kill_changes_a_text_of_dream(dream_folder: Path, dream_model: Model) -> None:
    assert _kill_everywhere(dream_folder, dream_model) > 100


def _kill_everywhere(folder: Path, model: Model) -> int:
    """Number of kills."""
    n_kills = 0
    for case in json.loads((folder / "golden.json").read_text())["cases"]:
        if case["mode"] == "none" or case["threshold"] is None:
            continue
        after = _canvases(model, case, 0, [MASKED] * case["gen_length"])
        assert case["prompt"] + after[-1] == case["sequence"]
        for step, canvas in enumerate(after[:-1], start=1):
            assert _canvases(model, case, step, canvas) == after[step:]
            n_kills += 1
    return n_kills


def _canvases(model: Model, case: dict[str, Any], step: int, canvas: list[int]) -> list[list[int]]:
    """The canvas after every step from a stored state on, in a new engine. The first step, and no
    other, says that the cache was rebuilt for it, if it was."""
    n_tokens = len(case["prompt"]) + case["gen_length"]
    engine = engine_for_one(model, cache_mode=case["mode"], n_tokens=n_tokens)
    spec = DecodingSpec(
        n_output=case["gen_length"], block_length=case["block_length"], seed=0, ignore_eos=True
    )
    credit = Credit(case["threshold"], FAR)
    engine.add(EngineRequest("r", case["prompt"], spec, step, canvas, credit))
    canvases, rebuilt, n_rebuilds = [], [], 0
    while (output := engine.step()) is not None:
        canvases += [engine.canvas("r")] * len(output.steps)
        rebuilt += [each.rebuilt for each in output.steps]
        n_rebuilds += output.n_rebuilds
    assert rebuilt == [bool(n_rebuilds)] + [False] * (len(rebuilt) - 1)
    return canvases
