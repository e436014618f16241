"""From settings to an engine with its model loaded, and to what the instance says of itself."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path
from typing import Literal

import torch

from dilaserve.errors import SettingsError
from dilaserve.messages import InstanceInfo
from dilaserve_gpu_worker.attention import choose_attention
from dilaserve_gpu_worker.device import choose_device, choose_dtype
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.memory import LargestPass, check_kv_tokens, kv_tokens_that_fit
from dilaserve_gpu_worker.engine.plan_policy import build_plan_policy
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.parallel import Ranks, launch_ranks
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_gpu_worker.speedups import GraphsChoice, choose_graphs, compile_if, wants_packing
from dilaserve_gpu_worker.weights import load_model, read_config, shard_config, weights_hash

__all__ = ["graphs_of", "load_alone", "load_engine", "start_ranks", "use_cores"]


def load_alone(
    folder: Path,
    *,
    threads: int,
    device: str,
    dtype: str,
    pack_weights: Literal["auto", "off"],
) -> Model:
    """The model of a folder without ranks, as the options of a command say (see options). Raises
    ModelFolderError, SettingsError."""
    torch.set_num_threads(threads)
    return load_model(
        folder,
        device=choose_device(device),
        dtype=choose_dtype(dtype),
        packs=wants_packing(pack_weights, "off"),
    )


def start_ranks(settings: WorkerSettings) -> Ranks | None:
    """Start the other ranks of a tensor-parallel instance; None where there are none. Raises
    ModelFolderError where the degree does not divide the model, SettingsError."""
    if settings.tp_degree == 1:
        return None
    config = read_config(Path(settings.model))
    shard_config(config, settings.tp_degree)
    return launch_ranks(
        folder=settings.model,
        degree=settings.tp_degree,
        device=choose_device(settings.device),
        dtype=settings.dtype,
        threads=settings.threads,
        cache_mode=settings.cache_mode,
        mask_id=config.mask_id,
        attention=settings.attention,
        cuda_graphs=settings.cuda_graphs,
        block_length=settings.block_length,
        max_batch_tokens=settings.max_batch_tokens,
        kv_tokens=settings.kv_tokens,
        compile_blocks=settings.compile,
        packs=wants_packing(settings.pack_weights, settings.compile),
    )


def load_engine(
    settings: WorkerSettings, ranks: Ranks | None = None
) -> tuple[Engine, InstanceInfo]:
    """Load the model of `settings.model`, or the slice of rank 0 among `ranks`, and build its
    engine. Raises ModelFolderError, SettingsError, and EngineLostError when a rank has ended."""
    torch.set_num_threads(settings.threads)
    folder = Path(settings.model)
    model = load_model(
        folder,
        device=choose_device(settings.device),
        dtype=choose_dtype(settings.dtype),
        peers=ranks.peers if ranks else None,
        packs=wants_packing(settings.pack_weights, settings.compile),
    )
    compile_if(settings.compile, model)
    attention = choose_attention(settings.attention, model.config, model.device, model.dtype)
    graphs = graphs_of(settings, model.device, attention)
    n_kv_tokens = _n_kv_tokens(settings, model, attention, graphs)
    if ranks is not None:
        n_kv_tokens = ranks.join(n_kv_tokens)
    engine = Engine(
        model,
        cache_mode=settings.cache_mode,
        n_kv_tokens=n_kv_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        attention=attention,
        graphs=graphs.options(model.device, settings.block_length),
        plan_policy=build_plan_policy(settings.plan_policy, n_tokens=settings.plan_tokens),
        share=ranks.share if ranks else None,
    )
    engine.limits.check_block(settings.block_length)
    name = settings.worker_name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    return engine, InstanceInfo(
        instance_id=f"{name}-{secrets.token_hex(2)}",
        name=name,
        model_id=settings.model_name or folder.resolve().name,
        weights_hash=weights_hash(folder),
        tp_degree=settings.tp_degree,
        cache_mode=settings.cache_mode,
        block_length=settings.block_length,
        max_batch_tokens=settings.max_batch_tokens,
        n_kv_tokens=engine.n_free_kv_tokens,
        max_sequence_length=model.config.max_sequence_length,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(model.device),
    )


def use_cores(cores: str) -> None:
    """Restrict this process to the cores listed, such as "0,1"; "" changes nothing.
    Raises SettingsError. Call it before torch starts its threads."""
    if not cores:
        return
    before = os.sched_getaffinity(0)
    try:
        wanted = {int(core) for core in cores.split(",")}
        os.sched_setaffinity(0, wanted)
    except (ValueError, OverflowError, OSError) as error:
        raise _unusable(cores, str(error), before) from error
    missing = wanted - os.sched_getaffinity(0)
    if missing:  # which the system leaves out without a word, where it has others
        raise _unusable(cores, f"{min(missing)} is not there", before)


def _unusable(cores: str, why: str, usable: set[int]) -> SettingsError:
    shown = ",".join(map(str, sorted(usable)))
    return SettingsError(
        f"DILASERVE_CPU_AFFINITY={cores!r} is no list of usable cores ({why}); usable here: {shown}"
    )


def graphs_of(settings: WorkerSettings, device: torch.device, attention: str) -> GraphsChoice:
    """Whether the instance has CUDA graphs, with its attention backend. Raises SettingsError."""
    return choose_graphs(
        settings.cuda_graphs,
        device=device,
        cache_mode=settings.cache_mode,
        attention=attention,
        tp_degree=settings.tp_degree,
    )


def _n_kv_tokens(
    settings: WorkerSettings, model: Model, attention: str, graphs: GraphsChoice
) -> int:
    if settings.cache_mode == "none":
        return 0
    if settings.kv_tokens:
        check_kv_tokens(settings.kv_tokens, model)
    largest = LargestPass(settings.max_batch_tokens, settings.block_length, attention, graphs.is_on)
    return settings.kv_tokens or kv_tokens_that_fit(model, largest)
