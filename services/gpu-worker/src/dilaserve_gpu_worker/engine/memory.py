"""How much KV pool a device's memory holds, beside the model and its largest pass, which is
measured. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.attention import PAGED, Run, attention_backend
from dilaserve_gpu_worker.engine.batch import MIN_ROWS, Batch
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.engine.runner import Runner
from dilaserve_gpu_worker.engine.sequence import Ints
from dilaserve_gpu_worker.engine.unmask import Draws, choose
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.models.model import Model

__all__ = [
    "CudaMeter",
    "LargestPass",
    "Meter",
    "check_kv_tokens",
    "kv_bytes_per_token",
    "kv_tokens_that_fit",
]

log = logging.getLogger(__name__)

MARGIN = 0.03
"""Of a GPU's memory: what the allocator cannot use for want of a piece large enough, and what
libraries take later, those of collectives among them."""
GRAPHS_BYTES = 2 << 30
"""For captured passes: memory of their own, and what must stay free while more are captured."""
CPU_SHARE = 0.1
"""Of the memory that is free after loading: other processes live on the machine, too."""
CPU_FULL_SEQUENCES = 64
"""On a CPU the pool need not hold more sequences of full length than this."""


@dataclass(frozen=True, slots=True)
class LargestPass:
    """What the memory beside the pool must suffice for."""

    max_batch_tokens: int
    block_length: int
    attention: str
    """Name of the backend."""
    has_graphs: bool = False


class Meter(Protocol):
    """Looks at the memory of a device."""

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes that `work` holds at its worst, beyond what is held before it."""
        ...

    def free(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""
        ...


class CudaMeter:
    """See Meter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_of(self, work: Callable[[], object]) -> int:
        """See Meter."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak: int = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        return peak - before

    def free(self) -> tuple[int, int]:
        """See Meter."""
        return torch.cuda.mem_get_info(self._device)


def kv_tokens_that_fit(model: Model, largest: LargestPass, meter: Meter | None = None) -> int:
    """Size of the pool by the memory that is free now, with the model loaded. `meter`: by default
    that of a CUDA device; without one a share of the machine's memory is taken. Raises
    SettingsError where the largest pass leaves no room for a page."""
    n_bytes = kv_bytes_per_token(model.config, model.dtype)
    if meter is None and model.device.type == "cuda":
        meter = CudaMeter(model.device)
    if meter is not None:
        return _beside_the_largest_pass(model, largest, meter, n_bytes)
    fits = int(CPU_SHARE * psutil.virtual_memory().available) // n_bytes
    return min(fits, CPU_FULL_SEQUENCES * model.config.max_sequence_length)


def check_kv_tokens(n_tokens: int, model: Model, meter: Meter | None = None) -> None:
    """Raises SettingsError for a pool of that size which holds no page, or does not fit into the
    memory that is free now. `meter`: as in kv_tokens_that_fit."""
    if n_tokens < PAGE_TOKENS:
        raise SettingsError(
            f"DILASERVE_KV_TOKENS={n_tokens} is less than a page of {PAGE_TOKENS}; raise it, "
            "or use 0: sized from free memory"
        )
    if meter is None and model.device.type == "cuda":
        meter = CudaMeter(model.device)
    free = psutil.virtual_memory().available if meter is None else meter.free()[0]
    n_bytes = n_tokens * kv_bytes_per_token(model.config, model.dtype)
    if n_bytes > free:
        raise SettingsError(
            f"DILASERVE_KV_TOKENS={n_tokens} takes {n_bytes >> 20} MiB, and {free >> 20} MiB are "
            "free beside the model; lower it, or use 0: sized from free memory"
        )


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV pool per token, for sizing the pool by memory."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize


def largest_passes(config: ModelConfig, largest: LargestPass) -> Iterator[Batch]:
    """The two ways in which a pass can be large: whole requests of the model's full length, and
    blocks of which every token's logits are wanted. Without a pool."""
    length = min(config.max_sequence_length, largest.max_batch_tokens)
    n_rows = largest.max_batch_tokens // length
    block = min(largest.block_length, length)
    of_row = np.arange(n_rows)[:, None] * length
    yield _batch(
        Run(n_rows, length, length, 0, None),
        wanted=(of_row + np.arange(block)).reshape(-1),
        looked_at=(of_row + np.arange(block, length)).reshape(-1),
    )
    n_blocks = largest.max_batch_tokens // block
    yield _batch(Run(n_blocks, block, block, 0, None), wanted=np.arange(n_blocks * block))


def _beside_the_largest_pass(model: Model, largest: LargestPass, meter: Meter, n_bytes: int) -> int:
    apart = model.apart()
    mask_id = model.config.mask_id
    runner = Runner(apart, None, attention_backend(largest.attention), mask_id=mask_id)
    try:
        peak = max(
            meter.peak_of(partial(_run, runner, batch, mask_id))
            for batch in largest_passes(model.config, largest)
        )
    except torch.cuda.OutOfMemoryError as error:
        free, _ = meter.free()
        raise _too_large(largest, "does not fit at all", free) from error
    free, total = meter.free()
    rest = free - peak - int(MARGIN * total) - (GRAPHS_BYTES if largest.has_graphs else 0)
    if largest.attention not in PAGED:
        # A pass copies the keys and values of its rows, layer by layer: at most the whole pool's.
        n_bytes += n_bytes // model.config.n_layers
    if rest < n_bytes * model.config.max_sequence_length:
        raise _too_large(largest, f"takes {peak >> 20} MiB", free)
    log.info("a pass of %d tokens takes %d MiB", largest.max_batch_tokens, peak >> 20)
    return rest // n_bytes


def _too_large(largest: LargestPass, what: str, free: int) -> SettingsError:
    return SettingsError(
        f"a pass of DILASERVE_MAX_BATCH_TOKENS={largest.max_batch_tokens} {what}: of the "
        f"{free >> 20} MiB that are free beside the model, too little is left for the keys and "
        "values of a request of full length; lower it, raise DILASERVE_TP_DEGREE, or set "
        "DILASERVE_KV_TOKENS"
    )


def _run(runner: Runner, batch: Batch, mask_id: int) -> None:
    scores = runner.forward(batch)
    n = len(scores.logits_MV)
    draws = Draws(
        candidate_S=np.arange(n),
        key_S=np.zeros(n, np.uint64),
        temperature_S=np.ones(n),
        top_p_S=np.full(n, 0.9),
    )
    choose(scores.logits_MV, mask_id, n, draws)


def _batch(run: Run, *, wanted: Ints, looked_at: Ints | None = None) -> Batch:
    nothing = np.empty(0, np.int64)
    n_padded = -(-run.stop // MIN_ROWS) * MIN_ROWS
    return Batch(
        tokens_T=np.zeros(n_padded, np.int64),
        positions_T=np.pad(np.tile(np.arange(run.n_queries), run.n_rows), (0, n_padded - run.stop)),
        n_tokens=run.stop,
        write_slots=nothing,
        key_slots=nothing,
        runs=[run],
        logit_rows_M=_padded(wanted),
        outlook_rows_K=nothing if looked_at is None else _padded(looked_at),
    )


def _padded(rows: Ints) -> Ints:
    return np.pad(rows, (0, -len(rows) % MIN_ROWS))
