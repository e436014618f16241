"""Measures an engine on one device: a table of its passes, with and without captured ones, and what
batching brings. The same code runs on a CPU with a small model, to be tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_bench.gpu.arithmetic import measured_peak, nominal_peak, operations
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.profiling import Effort, Grid, Load, loads_of, measure

__all__ = ["Batching", "GpuReport", "Passes", "TableRow", "Workload", "measure_gpu"]

WITHOUT_END = 2**31
BF16_PEAK_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured."""

    grid: Grid
    effort: Effort
    n_concurrent: int
    n_prompt: int
    n_output: int
    """Of the requests that are served one by one, and together. One token is unmasked a step."""
    peak_size: int = BF16_PEAK_SIZE
    """Of the products by which the device's peak is measured."""


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """The median pass of a load."""

    kind: str
    n_rows: int
    length: int
    """Tokens of each request, prompt and output."""
    n_tokens: int
    """Computed."""
    ms: float
    graphs: bool
    tflops: float
    """10^12 operations per second."""
    of_measured_peak: float
    of_nominal_peak: float | None


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """Requests served one by one, and together."""

    graphs: bool
    n_requests: int
    one_by_one_s: float
    together_s: float
    gain: float
    tokens_per_s: float
    """Unmasked, together."""
    n_replays: int
    """Passes that were replayed, of both."""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    device: str
    torch_version: str
    dtype: str
    attention: str
    n_parameters: int
    n_kv_tokens: int
    measured_peak_tflops: float
    nominal_peak_tflops: float | None
    table: list[TableRow]
    batching: list[Batching]
    seconds: float


@dataclass(frozen=True, slots=True)
class Passes:
    """How engines are built."""

    model: Model
    n_kv_tokens: int
    max_batch_tokens: int
    attention: str = "auto"

    def engine(self, graphs: GraphOptions | None) -> Engine:
        """With a pool of its own: drop one before the next is built."""
        return Engine(
            self.model,
            cache_mode="dual",
            n_kv_tokens=self.n_kv_tokens,
            max_batch_tokens=self.max_batch_tokens,
            attention=self.attention,
            graphs=graphs,
        )


def measure_gpu(
    passes: Passes,
    workload: Workload,
    graphs: GraphOptions | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> GpuReport:
    """Both without captured passes and, where `graphs` says how, with them."""
    start = clock()
    model = passes.model
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    peak = measured_peak(device, model.dtype, size=workload.peak_size)
    nominal = nominal_peak(name)
    table: list[TableRow] = []
    batching: list[Batching] = []
    attention = ""
    for options in [None] if graphs is None else [None, graphs]:
        engine = passes.engine(options)
        attention = engine.attention
        has_graphs = options is not None
        table += _table(passes, engine, workload, has_graphs, (peak, nominal))
        requests = list(_requests(model.config.vocab_size, workload))
        batching.append(_batching(engine, requests, has_graphs, clock))
        del engine  # its pool, before the next one
    return GpuReport(
        device=name,
        torch_version=str(torch.__version__),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=attention,
        n_parameters=_n_parameters(model),
        n_kv_tokens=passes.n_kv_tokens,
        measured_peak_tflops=peak / 1e12,
        nominal_peak_tflops=nominal and nominal / 1e12,
        table=table,
        batching=batching,
        seconds=clock() - start,
    )


def _table(
    passes: Passes,
    engine: Engine,
    workload: Workload,
    has_graphs: bool,
    peaks: tuple[float, float | None],
) -> Iterator[TableRow]:
    config = passes.model.config
    for load in loads_of(workload.grid, "dual", engine.limits):
        if has_graphs and load.kind != "cache":
            continue
        seconds = measure(engine, config, workload.grid, load, workload.effort).seconds
        per_s = _operations(passes.model, workload, load) / seconds
        yield TableRow(
            kind=load.kind,
            n_rows=load.n_rows,
            length=load.length,
            n_tokens=load.n_tokens,
            ms=1000 * seconds,
            graphs=has_graphs,
            tflops=per_s / 1e12,
            of_measured_peak=per_s / peaks[0],
            of_nominal_peak=peaks[1] and per_s / peaks[1],
        )


def _operations(model: Model, workload: Workload, load: Load) -> float:
    """Of a load's median pass: a recompute step makes logits of the whole output, a cache step of
    what is still masked of the block."""
    n_looked_at = min(workload.grid.n_output, load.length // 2)
    if load.kind == "cache":
        effort = workload.effort
        n_looked_at = workload.grid.block_length - effort.n_warm_up - effort.n_passes // 2 - 1
    return operations(
        model.config,
        n_tokens=load.n_tokens,
        n_pairs=load.n_tokens * load.length,
        n_logit_rows=load.n_rows * max(n_looked_at, 1),
    )


def _batching(
    engine: Engine,
    requests: Sequence[EngineRequest],
    has_graphs: bool,
    clock: Callable[[], float],
) -> Batching:
    _serve(engine, requests)  # what is set up or captured at first is no part of it
    _serve(engine, requests[:1])
    _serve(engine, requests[:1])
    start = clock()
    for request in requests:
        _serve(engine, [request])
    between = clock()
    _serve(engine, requests)
    one_by_one_s, together_s = between - start, clock() - between
    return Batching(
        graphs=has_graphs,
        n_requests=len(requests),
        one_by_one_s=one_by_one_s,
        together_s=together_s,
        gain=one_by_one_s / together_s,
        tokens_per_s=sum(each.spec.n_output for each in requests) / together_s,
        n_replays=engine.n_replays,
    )


def _requests(vocab_size: int, workload: Workload) -> Iterator[EngineRequest]:
    spec = DecodingSpec(
        n_output=workload.n_output,
        block_length=workload.grid.block_length,
        seed=0,
        ignore_eos=True,
    )
    for number in range(workload.n_concurrent):
        prompt = [(7919 * number + 31 * i) % vocab_size for i in range(workload.n_prompt)]
        canvas = [MASKED] * workload.n_output
        yield EngineRequest(str(number), prompt, spec, 0, canvas, Credit(1.0, WITHOUT_END))


def _serve(engine: Engine, requests: Sequence[EngineRequest]) -> None:
    """To their ends; every pass ends with what the device sends back, so that no clock is early."""
    for request in requests:
        engine.add(request)
    while engine.step() is not None:
        pass
    for request in requests:
        engine.remove(request.request_id)


def _n_parameters(model: Model) -> int:
    config = model.config
    d, heads = config.d_model, config.n_heads + config.n_kv_heads
    of_layer = 2 * d * heads * config.head_dim + 3 * d * config.d_ff + 2 * d
    return config.n_layers * of_layer + (2 - config.tied_head) * config.vocab_size * d + d
