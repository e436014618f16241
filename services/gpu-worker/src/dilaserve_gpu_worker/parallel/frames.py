"""What goes through the pipes between rank 0 and another rank, frame by frame."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from dilaserve.messages import CacheMode
from dilaserve_gpu_worker.attention import Run
from dilaserve_gpu_worker.engine.batch import Batch
from dilaserve_gpu_worker.engine.sequence import Ints
from dilaserve_gpu_worker.speedups import AutoOnOff


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told at its start."""

    rank: int
    degree: int
    port: int
    """Of the loopback, where the ranks meet."""
    folder: str
    device: str
    dtype: str
    """As the setting says, `auto` included."""
    threads: int
    cache_mode: CacheMode
    attention: str
    cuda_graphs: AutoOnOff
    block_length: int
    max_batch_tokens: int
    kv_tokens: int
    """0: as many as fit."""
    compile_blocks: Literal["off", "on"]
    packs: bool
    """Whether matrices are packed where that pays."""
    mask_id: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer: it has its slice of the model."""

    n_kv_tokens: int
    """Size of the KV pool that its memory holds."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks have loaded: join the group."""

    n_kv_tokens: int


class _BatchFrame(msgspec.Struct, frozen=True, array_like=True):
    tokens_T: bytes
    positions_T: bytes
    n_tokens: int
    write_slots: bytes
    key_slots: bytes
    runs: list[Run]
    logit_rows_M: bytes
    outlook_rows_K: bytes


def pack_batch(batch: Batch) -> bytes:
    """A frame's content."""
    return msgspec.msgpack.encode(
        _BatchFrame(
            batch.tokens_T.tobytes(),
            batch.positions_T.tobytes(),
            batch.n_tokens,
            batch.write_slots.tobytes(),
            batch.key_slots.tobytes(),
            batch.runs,
            batch.logit_rows_M.tobytes(),
            batch.outlook_rows_K.tobytes(),
        )
    )


def unpack_batch(data: bytes) -> Batch:
    """What `pack_batch` has packed."""
    frame = msgspec.msgpack.decode(data, type=_BatchFrame)
    return Batch(
        tokens_T=_ints(frame.tokens_T),
        positions_T=_ints(frame.positions_T),
        n_tokens=frame.n_tokens,
        write_slots=_ints(frame.write_slots),
        key_slots=_ints(frame.key_slots),
        runs=frame.runs,
        logit_rows_M=_ints(frame.logit_rows_M),
        outlook_rows_K=_ints(frame.outlook_rows_K),
    )


def _ints(data: bytes) -> Ints:
    return np.frombuffer(bytearray(data), np.int64)
