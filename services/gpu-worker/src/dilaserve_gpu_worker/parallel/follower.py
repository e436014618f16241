"""The process of every rank but 0: loads its slice, then computes the batches that rank 0 sends.

Speaks through stdin and stdout (see frames, pulse), and ends with rank 0, whichever way that ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec
import torch

from dilaserve.errors import DiLaServeError
from dilaserve_gpu_worker.attention import choose_attention
from dilaserve_gpu_worker.device import choose_dtype
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.engine.memory import LargestPass, kv_tokens_that_fit
from dilaserve_gpu_worker.engine.runner import make_runner
from dilaserve_gpu_worker.frames import read_frame, write_frame
from dilaserve_gpu_worker.parallel.frames import Loaded, RankSpec, Start, unpack_batch
from dilaserve_gpu_worker.parallel.group import GroupPeers
from dilaserve_gpu_worker.parallel.pulse import beat
from dilaserve_gpu_worker.speedups import choose_graphs, compile_if
from dilaserve_gpu_worker.weights import load_model


def main() -> None:
    """Exit code 0 when rank 0 ends, 1 with a line on stderr when this rank cannot go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to rank 0, too
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    try:
        _serve(sys.stdin.buffer, answers)
    except DiLaServeError as error:
        sys.stderr.write(f"dilaserve-gpu-worker rank: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # a thread of the group may wait for a rank that is dead
    os._exit(0)


def _serve(orders: IO[bytes], answers: IO[bytes]) -> None:
    data = read_frame(orders)
    if data is None:
        return
    spec = msgspec.msgpack.decode(data, type=RankSpec)
    torch.set_num_threads(spec.threads)
    device = torch.device(spec.device)
    peers = GroupPeers(spec.rank, spec.degree, device)
    model = load_model(
        Path(spec.folder),
        device=device,
        dtype=choose_dtype(spec.dtype),
        peers=peers,
        packs=spec.packs,
    )
    compile_if(spec.compile_blocks, model)
    attention = choose_attention(spec.attention, model.config, device, model.dtype)
    graphs = choose_graphs(
        spec.cuda_graphs,
        device=device,
        cache_mode=spec.cache_mode,
        attention=attention,
        tp_degree=spec.degree,
    )
    largest = LargestPass(spec.max_batch_tokens, spec.block_length, attention, graphs.is_on)
    n_kv_tokens = spec.kv_tokens or kv_tokens_that_fit(model, largest)
    write_frame(answers, Loaded(n_kv_tokens=n_kv_tokens))
    if (data := read_frame(orders)) is None:
        return
    n_pages = msgspec.msgpack.decode(data, type=Start).n_kv_tokens // PAGE_TOKENS
    runner = make_runner(
        model,
        None if spec.cache_mode == "none" else n_pages,
        attention,
        mask_id=spec.mask_id,
        graphs=graphs.options(device, spec.block_length),
    )
    peers.join(spec.port)
    threading.Thread(target=beat, args=(answers,), daemon=True).start()
    while (data := read_frame(orders)) is not None:
        runner.forward(unpack_batch(msgspec.msgpack.decode(data, type=bytes)))


if __name__ == "__main__":
    main()
