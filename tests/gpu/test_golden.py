"""The golden checkpoints on a GPU, in fp32: the CPU's tokens, on one GPU and over several.

Kernels sum in another order: a difference is allowed only where two candidates, two confidences or
a confidence and the threshold lie close together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.cuda_graphs import CudaCapture
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.parallel import launch_ranks
from dilaserve_gpu_worker.weights import load_model, read_config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

CLOSE = 1e-4
FAR = 10**6
LONGEST_BLOCK = 16
"""Of the golden cases."""


def test_one_by_one(golden_folder: Path, cuda: torch.device) -> None:
    for cache_mode, cases in by_mode(golden_folder):
        one, other = (engine(golden_folder, device, cache_mode) for device in ("cpu", cuda))
        assert n_differences(one, other, cases) <= 1 + len(cases) // 10


def test_half_precision_runs_to_the_end(golden_folder: Path, cuda: torch.device) -> None:
    model = load_model(golden_folder, device=cuda, dtype=torch.bfloat16)
    for cache_mode, cases in by_mode(golden_folder):
        half = Engine(model, cache_mode=cache_mode, n_kv_tokens=8192, max_batch_tokens=8192)
        for number, case in enumerate(cases):
            half.add(replace(request(case), request_id=str(number)))
        finished = 0
        while (output := half.step()) is not None:
            finished += sum(step.finish_reason == "length" for step in output.steps)
        assert finished == len(cases)


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks(golden_folder: Path, cuda: torch.device, degree: int) -> None:
    if torch.cuda.device_count() < degree:
        pytest.skip(f"{degree} CUDA devices are needed, {torch.cuda.device_count()} are here")
    if read_config(golden_folder).n_kv_heads % degree:
        pytest.skip(f"degree {degree} does not divide the model's key/value heads")
    for cache_mode, cases in by_mode(golden_folder):
        with group(golden_folder, cuda, degree, cache_mode) as many:
            one = engine(golden_folder, "cpu", cache_mode)
            assert n_differences(one, many, cases) <= 1 + len(cases) // 10


@pytest.mark.parametrize("has_graphs", [False, True])
def test_ranks_replay_their_collectives(
    golden_folder: Path, cuda: torch.device, has_graphs: bool
) -> None:
    """NCCL's sums inside CUDA graphs, on every rank."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"2 CUDA devices are needed, {torch.cuda.device_count()} are here")
    cases = [case for mode, some in by_mode(golden_folder) if mode == "dual" for case in some]
    masked = Masked(has_graphs)
    with group(golden_folder, cuda, 2, "dual", masked) as many:
        one = engine(golden_folder, "cpu", "dual")
        assert n_differences(one, many, cases) <= 1 + len(cases) // 10
        assert (many.n_replays > len(cases)) == has_graphs


class Masked(NamedTuple):
    """The attention backend that runs in fp32 and can be captured."""

    has_graphs: bool
    attention: str = "masked"

    def graphs(self, device: torch.device) -> GraphOptions | None:
        return GraphOptions(CudaCapture(device), LONGEST_BLOCK) if self.has_graphs else None


def n_differences(one: Engine, other: Engine, cases: list[Any]) -> int:
    """Cases whose course differs; each must part where a decision was close."""
    n_different = 0
    for case in cases:
        for each in (one, other):
            each.add(request(case))
        while (plan := one.plan()) is not None:
            scores = one.forward(plan)
            n_candidates = len(plan.rows[0].candidates)
            best = scores.logits_MV[:n_candidates].double().softmax(-1).topk(2).values.numpy()
            one.unmask(plan, scores)
            other.step()
            if one.canvas("r") != other.canvas("r"):
                assert smallest_gap(best, case["threshold"]) < CLOSE, case
                n_different += 1
                break
        for each in (one, other):
            each.remove("r")
    return n_different


def smallest_gap(best: np.ndarray[Any, Any], threshold: float | None) -> float:
    confidences = np.sort(best[:, 0])
    gaps = [*(best[:, 0] - best[:, 1]), *np.diff(confidences)]
    if threshold is not None:
        gaps += [*np.abs(confidences - threshold)]
    return float(min(gaps))


def engine(folder: Path, device: torch.device | str, cache_mode: CacheMode) -> Engine:
    model = load_model(folder, device=device, dtype=torch.float32)
    return Engine(model, cache_mode=cache_mode, n_kv_tokens=4096, max_batch_tokens=8192)


@contextmanager
def group(
    folder: Path,
    cuda: torch.device,
    degree: int,
    cache_mode: CacheMode,
    masked: Masked | None = None,
) -> Iterator[Engine]:
    attention = masked.attention if masked else "auto"
    with launch_ranks(
        folder=str(folder),
        degree=degree,
        device=cuda,
        dtype="float32",
        threads=1,
        cache_mode=cache_mode,
        mask_id=read_config(folder).mask_id,
        attention=attention,
        cuda_graphs="on" if masked and masked.has_graphs else "off",
        block_length=LONGEST_BLOCK,
        kv_tokens=4096,
    ) as ranks:
        model = load_model(folder, device=cuda, dtype=torch.float32, peers=ranks.peers)
        n_kv_tokens = ranks.join(4096)
        yield Engine(
            model,
            cache_mode=cache_mode,
            n_kv_tokens=n_kv_tokens,
            max_batch_tokens=8192,
            attention=attention,
            graphs=masked.graphs(cuda) if masked else None,
            share=ranks.share,
        )


def by_mode(folder: Path) -> list[tuple[CacheMode, list[Any]]]:
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    modes: list[CacheMode] = sorted({case["mode"] for case in cases})
    return [(mode, [case for case in cases if case["mode"] == mode]) for mode in modes]


def request(case: dict[str, Any]) -> EngineRequest:
    n_output = case["gen_length"]
    spec = DecodingSpec(
        n_output=n_output, block_length=case["block_length"], seed=0, ignore_eos=True
    )
    quota = n_output // case["steps"] if case["threshold"] is None else None
    credit = Credit(case["threshold"] or 0.0, FAR)
    return EngineRequest("r", case["prompt"], spec, 0, [MASKED] * n_output, credit, quota)
