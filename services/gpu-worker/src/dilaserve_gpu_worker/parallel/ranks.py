"""The other ranks, as rank 0 sees them: starts, feeds and ends their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

import msgspec
import torch

from dilaserve.embedded import die_with_parent, free_port
from dilaserve.errors import SettingsError
from dilaserve.messages import CacheMode
from dilaserve_gpu_worker.engine.batch import Batch
from dilaserve_gpu_worker.engine.types import EngineLostError
from dilaserve_gpu_worker.frames import read_frame, write_frame
from dilaserve_gpu_worker.parallel.frames import Loaded, RankSpec, Start, pack_batch
from dilaserve_gpu_worker.parallel.group import TIMEOUT_S, GroupPeers
from dilaserve_gpu_worker.parallel.pulse import BEAT_S, Pulse
from dilaserve_gpu_worker.speedups import AutoOnOff

EXIT_TIMEOUT_S = 5.0
"""For the exit of a rank that has closed its pipe, to know its code."""
END_TIMEOUT_S = 2.0
"""For the exit of all ranks that have been told to end."""
N_SILENT = 2
"""Beats that a rank may miss before it counts as silent."""
N_LOST = round(TIMEOUT_S / BEAT_S)
"""Those after which it is given up, as in a collective: a pipe that is full waits for ever."""


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    orders: IO[bytes]
    answers: IO[bytes]


class Ranks:
    """Ranks 1 and up of one instance; a context manager that ends them. See `launch_ranks`."""

    def __init__(self, peers: GroupPeers, port: int, ranks: list[_Rank]) -> None:
        self.peers = peers
        self._port = port
        self._ranks = ranks
        self._pulses: dict[int, Pulse] = {}
        self._closing = threading.Event()
        self._feeling: threading.Thread | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1."""
        return [rank.process.pid for rank in self._ranks]

    def join(self, n_kv_tokens: int) -> int:
        """Wait until every rank has loaded, then meet them all. `n_kv_tokens` is what fits into
        rank 0; returns what fits into each. Raises EngineLostError when one has ended."""
        n_fit = min([n_kv_tokens, *(self._loaded(rank).n_kv_tokens for rank in self._ranks)])
        for rank in self._ranks:
            _send(rank, Start(n_kv_tokens=n_fit))
        self.peers.join(self._port)
        return n_fit

    def share(self, batch: Batch) -> None:
        """Have every rank compute `batch`. Raises EngineLostError when one has ended."""
        data = pack_batch(batch)
        for rank in self._ranks:
            _send(rank, data)

    def watch(self, lost: Callable[[EngineLostError], None]) -> None:
        """Call `lost`, in a thread of its own, when a rank ends, or hangs for long, before
        `close`. Call it after `join`."""
        for rank in self._ranks:
            watching = threading.Thread(target=self._await_end, args=(rank, lost), daemon=True)
            watching.start()
        self._pulses = {rank.number: Pulse(rank.answers) for rank in self._ranks}
        self._feeling = threading.Thread(target=self._feel, args=(lost,), daemon=True)
        self._feeling.start()

    @property
    def is_silent(self) -> bool:
        """Whether the process of a rank that is watched has not been heard lately."""
        return any(pulse.n_missed > N_SILENT for pulse in self._pulses.values())

    def close(self) -> None:
        """End all ranks. Those that do not end by themselves in time are killed."""
        self._closing.set()
        if self._feeling is not None:
            self._feeling.join()
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # it has ended already
                rank.orders.close()
        deadline = time.monotonic() + END_TIMEOUT_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            rank.answers.close()
        self.peers.leave()

    def _loaded(self, rank: _Rank) -> Loaded:
        data = read_frame(rank.answers)
        if data is None:
            raise _ended(rank)
        return msgspec.msgpack.decode(data, type=Loaded)

    def _await_end(self, rank: _Rank, lost: Callable[[EngineLostError], None]) -> None:
        rank.process.wait()
        if not self._closing.is_set():
            lost(_ended(rank))

    def _feel(self, lost: Callable[[EngineLostError], None]) -> None:
        while not self._closing.wait(BEAT_S):
            for number, pulse in self._pulses.items():
                pulse.feel()
                if pulse.n_missed == N_LOST:
                    lost(_hangs(number))


def launch_ranks(
    *,
    folder: str,
    degree: int,
    device: torch.device,
    dtype: str,
    threads: int,
    cache_mode: CacheMode,
    mask_id: int,
    attention: str = "auto",
    cuda_graphs: AutoOnOff = "off",
    block_length: int = 32,
    max_batch_tokens: int = 8192,
    kv_tokens: int = 0,
    compile_blocks: Literal["off", "on"] = "off",
    packs: bool = True,
) -> Ranks:
    """Start ranks 1 to `degree` - 1, which begin to load. `device` is that of rank 0; the others
    take the CUDA devices behind it. Raises SettingsError when there are not enough of them.
    Call it from the main thread: the ranks die with the thread that started them."""
    _check_devices(device, degree)
    port = free_port()
    ranks = []
    for number in range(1, degree):
        spec = RankSpec(
            rank=number,
            degree=degree,
            port=port,
            folder=folder,
            device=_device_of(device, number),
            dtype=dtype,
            threads=threads,
            cache_mode=cache_mode,
            attention=attention,
            cuda_graphs=cuda_graphs,
            block_length=block_length,
            max_batch_tokens=max_batch_tokens,
            kv_tokens=kv_tokens,
            compile_blocks=compile_blocks,
            packs=packs,
            mask_id=mask_id,
        )
        ranks.append(_start(spec))
    return Ranks(GroupPeers(0, degree, torch.device(_device_of(device, 0))), port, ranks)


def _start(spec: RankSpec) -> _Rank:
    process = subprocess.Popen(
        [sys.executable, "-m", "dilaserve_gpu_worker.parallel.follower"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent(os.getpid()),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    rank = _Rank(spec.rank, process, process.stdin, process.stdout)
    _send(rank, spec)
    return rank


def _send(rank: _Rank, value: object) -> None:
    """Raises EngineLostError when it has ended."""
    try:
        write_frame(rank.orders, value)
    except (BrokenPipeError, ValueError) as error:  # ValueError: closed by `close`
        raise _ended(rank) from error


def _ended(rank: _Rank) -> EngineLostError:
    try:
        code: int | None = rank.process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    return EngineLostError(
        f"rank {rank.number} of the tensor-parallel group has ended (exit code {code}); see its "
        "own words in the log; the instance has to be started again"
    )


def _hangs(number: int) -> EngineLostError:
    return EngineLostError(
        f"rank {number} of the tensor-parallel group is not heard any more: it is stopped, or it "
        "hangs; the instance has to be started again"
    )


def _check_devices(device: torch.device, degree: int) -> None:
    n_devices = torch.cuda.device_count() - (device.index or 0)
    if device.type == "cuda" and n_devices < degree:
        raise SettingsError(
            f"DILASERVE_TP_DEGREE={degree} needs as many CUDA devices from {device} on, torch sees "
            f"{n_devices}; lower it, or set DILASERVE_DEVICE"
        )


def _device_of(device: torch.device, rank: int) -> str:
    return f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else str(device)
