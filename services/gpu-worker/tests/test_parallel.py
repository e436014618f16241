"""Tensor parallelism on gloo: TP-1's tokens, sliced weights, and what becomes of a group that loses
a rank. Each rank is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from dilaserve.errors import ModelFolderError, SettingsError
from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import Credit, EngineLostError, EngineRequest
from dilaserve_gpu_worker.loading import start_ranks
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.products import packing_pays
from dilaserve_gpu_worker.parallel import Ranks, launch_ranks
from dilaserve_gpu_worker.parallel.frames import pack_batch, unpack_batch
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_gpu_worker.weights import load_model, read_config

MakeFolder = Callable[..., Path]
FAR = 10**6
CLOSE = 1e-5
"""Sums of different order differ by less than this, relative to probabilities."""


@contextmanager
def group(
    folder: Path, degree: int, cache_mode: CacheMode = "dual", *, packs: bool = True
) -> Iterator[tuple[Engine, Ranks, Model]]:
    """An engine over `degree` ranks, rank 0 in this process."""
    mask_id = read_config(folder).mask_id
    with launch_ranks(
        folder=str(folder),
        degree=degree,
        device=torch.device("cpu"),
        dtype="auto",
        threads=1,
        cache_mode=cache_mode,
        mask_id=mask_id,
        packs=packs,
    ) as ranks:
        model = load_model(folder, peers=ranks.peers, packs=packs)
        n_kv_tokens = ranks.join(4096)
        assert n_kv_tokens == 4096
        yield (
            Engine(
                model,
                cache_mode=cache_mode,
                n_kv_tokens=n_kv_tokens,
                max_batch_tokens=8192,
                share=ranks.share,
            ),
            ranks,
            model,
        )


# --- the same tokens -----------------------------------------------------------------------------


@dataclass
class Margin:
    """How close a step of TP-1 was to another decision."""

    step: int
    gap: float


def compare(one: Engine, many: Engine, case: dict[str, Any]) -> Margin | None:
    """Denoise a case on both; the first step at which they part, None if there is none."""
    for engine in (one, many):
        engine.add(request(case))
    difference = None
    while (plan := one.plan()) is not None:
        scores = one.forward(plan)
        gap = smallest_gap(scores.logits_MV, len(plan.rows[0].candidates), case, one)
        one.unmask(plan, scores)
        many.step()
        if one.canvas("r") != many.canvas("r"):
            difference = Margin(one.step_of("r"), gap)
            break
    for engine in (one, many):
        engine.remove("r")
    return difference


def smallest_gap(logits: Tensor, n_candidates: int, case: dict[str, Any], engine: Engine) -> float:
    """Least distance between two best tokens, two most confident positions, or a confidence and
    the threshold."""
    if n_candidates == 0:
        return float("inf")
    probabilities = logits[:n_candidates].double().softmax(-1)
    best = probabilities.topk(2).values.numpy()
    confidences = np.sort(best[:, 0])[::-1]
    gaps = [(best[:, 0] - best[:, 1]).min()]
    if case["threshold"] is not None:
        gaps.append(np.abs(confidences - case["threshold"]).min())
    if n_candidates > 1:
        gaps.append(np.abs(np.diff(confidences)).min())
    return float(min(gaps))


def request(case: dict[str, Any]) -> EngineRequest:
    n_output = case["gen_length"]
    spec = DecodingSpec(
        n_output=n_output, block_length=case["block_length"], seed=0, ignore_eos=True
    )
    quota = n_output // case["steps"] if case["threshold"] is None else None
    credit = Credit(case["threshold"] or 0.0, FAR)
    return EngineRequest("r", case["prompt"], spec, 0, [MASKED] * n_output, credit, quota)


@pytest.mark.parametrize(("name", "degree"), [("llada-mha", 2), ("llada-mha", 4), ("dream-gqa", 2)])
def test_the_tokens_are_those_of_one_rank(
    name: str, degree: int, golden_folder: Path, dream_folder: Path, packs: bool
) -> None:
    """But where two candidates, or the threshold, lie within 1e-5; such cases are few."""
    if degree == 4 and not packs and packing_pays(torch.device("cpu"), torch.float32):
        pytest.skip("four ranks take a minute; here in the form that is served, packed")
    folder = golden_folder if name == "llada-mha" else dream_folder
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    differences = []
    for cache_mode in sorted({case["mode"] for case in cases}):
        whole = Engine(
            load_model(folder, packs=packs),
            cache_mode=cache_mode,
            n_kv_tokens=4096,
            max_batch_tokens=8192,
        )
        with group(folder, degree, cache_mode, packs=packs) as (engine, _, model):
            assert model.is_packed == packs
            of_mode = [case for case in cases if case["mode"] == cache_mode]
            differences += [d for case in of_mode if (d := compare(whole, engine, case))]
    assert all(difference.gap < CLOSE for difference in differences)
    assert len(differences) <= len(cases) // 10


@pytest.mark.timeout(600)
def test_eight_ranks_of_one_head_each() -> None:
    """The bundled model, whose heads divide by eight."""
    folder = find_model(None, {})
    prompts = np.random.default_rng(8).integers(4, 100, (4, 40)).tolist()
    shape = {"gen_length": 64, "block_length": 32, "threshold": 0.7}
    whole = Engine(load_model(folder), cache_mode="dual", n_kv_tokens=4096, max_batch_tokens=8192)
    with group(folder, 8) as (engine, _, model):
        assert model.config.n_heads == 1
        found = [compare(whole, engine, {**shape, "prompt": prompt}) for prompt in prompts]
    assert all(difference is None or difference.gap < CLOSE for difference in found)


def test_batch_mates_change_nothing_here_either(golden_folder: Path) -> None:
    cases = json.loads((golden_folder / "golden.json").read_text())["cases"]
    cases = [case for case in cases if case["mode"] == "dual" and case["threshold"] == 0.6]
    with group(golden_folder, 4) as (engine, _, _):
        alone = []
        for case in cases:
            engine.add(request(case))
            alone.append([(s.positions, s.confidences, s.stats) for s in run(engine)])
            engine.remove("r")
        for number, case in enumerate(cases):
            engine.add(replace(request(case), request_id=str(number)))
        together: dict[str, list[Any]] = {str(number): [] for number in range(len(cases))}
        for step in run(engine):
            together[step.request_id].append((step.positions, step.confidences, step.stats))
    assert list(together.values()) == alone


def run(engine: Engine) -> list[Any]:
    steps = []
    while (output := engine.step()) is not None:
        steps += output.steps
    return steps


# --- slices --------------------------------------------------------------------------------------


class Slice:
    """Peers that never meet."""

    def __init__(self, rank: int, degree: int) -> None:
        self.rank, self.degree = rank, degree

    def reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, x_NV: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_rank_holds_its_slice_and_no_more(
    family: str, make_folder: MakeFolder, make_dream_folder: MakeFolder
) -> None:
    folder = make_folder(vocab_size=62) if family == "llada" else make_dream_folder()
    whole = weights_of(load_model(folder, packs=False))
    slices = [weights_of(load_model(folder, peers=Slice(rank, 2), packs=False)) for rank in (0, 1)]
    for part in slices:
        for tensor in part:
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    n_norms = 5 * 48
    n_elements = [sum(tensor.numel() for tensor in tensors) for tensors in (whole, *slices)]
    assert n_elements[1] == n_elements[2] == (n_elements[0] - n_norms) // 2 + n_norms
    for tensor, *parts in zip(whole, *slices, strict=True):
        is_shared = parts[0].shape == tensor.shape
        values = parts[0] if is_shared else torch.cat([part.flatten() for part in parts])
        assert torch.equal(values.flatten().sort().values, tensor.flatten().sort().values)


def weights_of(model: Any) -> list[Tensor]:
    weights = model._weights
    tensors = [weights.embedding_VD, weights.final_norm_D, weights.head_VD]
    parts = (getattr(layer, name) for layer in weights.layers for name in layer.__slots__)
    return tensors + [part for part in parts if part is not None]  # LLaDA has no biases


@pytest.mark.parametrize(
    ("sizes", "degree", "words"),
    [
        ({}, 3, r"degree 3 does not divide the model's query heads \(4\)"),
        ({"n_kv_heads": 2, "vocab_size": 64}, 4, r"key/value heads \(2\)"),
        ({}, 2, r"vocabulary \(61\)"),
    ],
)
def test_a_degree_that_does_not_divide_is_told(
    make_folder: MakeFolder, sizes: dict[str, int], degree: int, words: str
) -> None:
    settings = WorkerSettings(model=str(make_folder(**sizes)), tp_degree=degree)
    with pytest.raises(ModelFolderError, match=words):
        start_ranks(settings)


def test_too_few_gpus_are_told(golden_folder: Path) -> None:
    with pytest.raises(SettingsError, match="DILASERVE_TP_DEGREE=64 needs as many CUDA devices"):
        launch_ranks(
            folder=str(golden_folder),
            degree=64,
            device=torch.device("cuda:0"),
            dtype="auto",
            threads=1,
            cache_mode="dual",
            mask_id=0,
        )


def test_a_batch_survives_the_pipe(model: Model) -> None:
    from dilaserve_gpu_worker.engine.batch import build_batch

    engine = Engine(model, cache_mode="dual", n_kv_tokens=1024, max_batch_tokens=1024)
    case = {"gen_length": 20, "block_length": 8, "threshold": 0.9, "prompt": [1, 2, 3]}
    engine.add(request(case))
    for _ in range(3):
        plan = engine.plan()
        assert plan is not None
        batch = build_batch(plan.rows, 0)
        copied = unpack_batch(pack_batch(batch))
        assert copied.runs == batch.runs
        for name in ("tokens_T", "positions_T", "write_slots", "key_slots", "logit_rows_M"):
            assert (getattr(copied, name) == getattr(batch, name)).all()
        assert (copied.outlook_rows_K == batch.outlook_rows_K).all()
        assert copied.n_tokens == batch.n_tokens
        engine.unmask(plan, engine.forward(plan))


# --- ends ----------------------------------------------------------------------------------------


def test_a_rank_that_dies_is_noticed_at_once(golden_folder: Path) -> None:
    lost: list[EngineLostError] = []
    noticed = threading.Event()

    def on_lost(error: EngineLostError) -> None:
        lost.append(error)
        noticed.set()

    with group(golden_folder, 4) as (engine, ranks, _):
        ranks.watch(on_lost)
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert noticed.wait(5)
        assert "rank 2 of the tensor-parallel group has ended (exit code -9)" in str(lost[0])
        case = {"gen_length": 8, "block_length": 8, "threshold": 0.9, "prompt": [1]}
        engine.add(request(case))
        with pytest.raises(EngineLostError, match="rank"):
            run(engine)
        pids = ranks.pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_rank_that_hangs_is_given_up(golden_folder: Path) -> None:
    """As one in a collective that never ends: it is stopped in the middle of its life."""
    with group(golden_folder, 2) as (engine, ranks, _):
        os.kill(ranks.pids[0], signal.SIGSTOP)
        case = {"gen_length": 8, "block_length": 8, "threshold": 0.9, "prompt": [1]}
        engine.add(request(case))
        began = time.monotonic()
        with pytest.raises(EngineLostError, match="does not answer"):
            run(engine)
        assert time.monotonic() - began < 60


def test_a_rank_that_ends_before_it_is_told_anything_is_named(
    golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_and_kill(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        started[0].kill()
        started[0].wait()
        return started[0]

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    with pytest.raises(EngineLostError, match="rank 1 of"), group(golden_folder, 2):
        pass
    with suppress(BrokenPipeError), started[0]:
        pass  # closes its pipes


def test_a_rank_that_is_stopped_is_silent_and_in_the_end_lost(
    golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pass, and also where one would wait for it with a pipe that is full."""
    lost: list[EngineLostError] = []
    with group(golden_folder, 2) as (_, ranks, _):
        ranks.watch(lost.append)
        wait_until(lambda: not ranks.is_silent)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        wait_until(lambda: ranks.is_silent)
        os.kill(ranks.pids[0], signal.SIGCONT)
        wait_until(lambda: not ranks.is_silent)
        assert lost == []
        monkeypatch.setattr("dilaserve_gpu_worker.parallel.ranks.N_LOST", 4)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        wait_until(lambda: lost)
        assert "rank 1 of the tensor-parallel group is not heard any more" in str(lost[0])
        pids = ranks.pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():  # the test's time-out ends one that waits in vain
        time.sleep(0.01)


def test_a_rank_that_cannot_load_is_told(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(vocab_size=62)
    with launch_ranks(
        folder=str(tmp_path / "nowhere"),
        degree=2,
        device=torch.device("cpu"),
        dtype="auto",
        threads=1,
        cache_mode="dual",
        mask_id=60,
    ) as ranks:
        load_model(folder, peers=ranks.peers)
        with pytest.raises(EngineLostError, match=r"rank 1 .* has ended \(exit code 1\)"):
            ranks.join(1024)


PARENT = """
import sys, time, torch
from dilaserve_gpu_worker.parallel import launch_ranks
from dilaserve_gpu_worker.weights import load_model
ranks = launch_ranks(folder=sys.argv[1], degree=3 - 1, device=torch.device("cpu"), dtype="auto",
                     threads=1, cache_mode="dual", mask_id=255)
model = load_model(__import__("pathlib").Path(sys.argv[1]), peers=ranks.peers)
ranks.join(1024)
print(*ranks.pids, flush=True)
time.sleep(600)
"""


def test_the_ranks_die_with_rank_0(golden_folder: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(golden_folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        [child] = map(psutil.Process, map(int, parent.stdout.readline().split()))
        parent.kill()
        child.wait(5)
