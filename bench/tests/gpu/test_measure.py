"""The measurement of a GPU, dry: on a CPU, with a small model and a tape in the place of graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dilaserve_bench.gpu.arithmetic import measured_peak, nominal_peak, operations
from dilaserve_bench.gpu.measure import GpuReport, Passes, Workload, measure_gpu
from dilaserve_bench.gpu.random_model import LLADA_8B, random_llada
from dilaserve_bench.gpu.report import lines, save
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.engine.tape import TapeCapture
from dilaserve_gpu_worker.models.llada import LLaDA
from dilaserve_gpu_worker.profiling import Effort, Grid

CPU = torch.device("cpu")
SMALL = replace(
    LLADA_8B,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    head_dim=16,
    d_ff=96,
    vocab_size=300,
    max_sequence_length=256,
    mask_id=299,
    eos_ids=frozenset({298}),
)
WORKLOAD = Workload(
    grid=Grid(lengths=(32, 64), rows=(1, 4), n_output=32, block_length=16),
    effort=Effort(n_warm_up=2, n_passes=3, seconds=10),
    n_concurrent=4,
    n_prompt=10,
    n_output=20,
    peak_size=64,
)


@pytest.fixture(scope="module")
def model() -> LLaDA:
    torch.set_num_threads(1)
    return random_llada(SMALL, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def report(model: LLaDA) -> GpuReport:
    passes = Passes(model, n_kv_tokens=1024, max_batch_tokens=512, attention="masked")
    return measure_gpu(passes, WORKLOAD, GraphOptions(TapeCapture(), block_length=16))


def test_every_load_is_in_the_table_and_cache_steps_are_there_twice(report: GpuReport) -> None:
    loads = [(row.kind, row.length, row.n_rows, row.graphs) for row in report.table]
    sizes = [(length, rows) for length in (32, 64) for rows in (1, 4)]
    assert sorted(loads) == sorted(
        [("recompute", *size, False) for size in sizes]
        + [("cache", *size, graphs) for size in sizes for graphs in (False, True)]
    )
    for row in report.table:
        assert row.ms > 0
        assert row.of_measured_peak == pytest.approx(
            row.tflops / report.measured_peak_tflops, rel=1e-6
        )
        assert row.of_nominal_peak is None  # a CPU has no data sheet here


def test_requests_are_served_one_by_one_and_together(report: GpuReport) -> None:
    without, with_graphs = report.batching
    assert (without.graphs, with_graphs.graphs) == (False, True)
    assert without.n_replays == 0
    assert with_graphs.n_replays > 100
    for each in report.batching:
        assert each.n_requests == 4
        assert each.gain == pytest.approx(each.one_by_one_s / each.together_s)


def test_the_report_is_printed_and_kept(report: GpuReport, tmp_path: Path) -> None:
    text = "\n".join(lines(report))
    assert "4 requests, graphs on: one by one" in text
    assert text.count("cache") == 8
    path = save(report, tmp_path / "new", "small")
    kept = json.loads(path.read_text())
    assert kept["n_parameters"] == report.n_parameters
    assert len(kept["table"]) == len(report.table)


def test_parameters_are_counted(model: LLaDA, report: GpuReport) -> None:
    weights = model._weights
    outer = [weights.embedding_VD, weights.head_VD, weights.final_norm_D]
    tensors = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    assert report.n_parameters == sum(x.numel() for x in [*outer, *tensors] if x is not None)
    assert 8.0e9 < 32 * (4 * 4096**2 + 3 * 4096 * 12288) + 2 * 126464 * 4096 < 8.1e9


def test_operations_are_those_that_torch_counts(model: LLaDA) -> None:
    """Of one row of 48 tokens that attends to itself, with the logits of 32."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        h_TD = model.hidden(
            torch.zeros(48, dtype=torch.int64),
            torch.arange(48),
            lambda _, q, k, v: torch.einsum(
                "hqk,khd->qhd", torch.einsum("qhd,khd->hqk", q, k).softmax(-1), v
            ),
        )
        model.logits(h_TD[:32])
    expected = operations(SMALL, n_tokens=48, n_pairs=48 * 48, n_logit_rows=32)
    assert counter.get_total_flops() == expected


def test_peaks() -> None:
    assert measured_peak(CPU, torch.float32, size=64, n_products=2) > 0
    assert nominal_peak("NVIDIA H200") == 989e12
    assert nominal_peak("NVIDIA H100 PCIe") == 756e12
    assert nominal_peak("abacus") is None


def test_the_same_seed_draws_the_same_model(model: LLaDA) -> None:
    again = random_llada(SMALL, device=CPU, dtype=torch.float32)
    assert torch.equal(again._weights.head_VD, model._weights.head_VD)
