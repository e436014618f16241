"""From settings to an engine with its model loaded, and to what the instance says of itself."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from dilaserve.errors import SettingsError
from dilaserve.messages import InstanceInfo
from dilaserve_gpu_worker.device import choose_device, choose_dtype
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.kv_pool import kv_bytes_per_token
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_gpu_worker.weights import load_model, weights_hash

__all__ = ["load_engine", "use_cores"]

GPU_SHARE = 0.8
"""Of the memory that is free after loading; the rest is for activations and logits."""
CPU_SHARE = 0.1
"""Of the memory that is free after loading: other processes live on the machine, too."""
CPU_FULL_SEQUENCES = 64
"""On a CPU the pool need not hold more sequences of full length than this."""


def load_engine(settings: WorkerSettings) -> tuple[Engine, InstanceInfo]:
    """Load the model of `settings.model` and build its engine.
    Raises ModelFolderError, SettingsError."""
    torch.set_num_threads(settings.threads)
    folder = Path(settings.model)
    model = load_model(
        folder, device=choose_device(settings.device), dtype=choose_dtype(settings.dtype)
    )
    n_kv_tokens = _n_kv_tokens(settings, model)
    engine = Engine(
        model,
        cache_mode=settings.cache_mode,
        n_kv_tokens=n_kv_tokens,
        max_batch_tokens=settings.max_batch_tokens,
    )
    name = settings.worker_name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    return engine, InstanceInfo(
        instance_id=f"{name}-{secrets.token_hex(2)}",
        name=name,
        model_id=settings.model_name or folder.resolve().name,
        weights_hash=weights_hash(folder),
        tp_degree=1,
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
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        usable = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        raise SettingsError(
            f"DILASERVE_CPU_AFFINITY={cores!r} is no list of usable cores ({error}); "
            f"usable here: {usable}"
        ) from error


def _n_kv_tokens(settings: WorkerSettings, model: Model) -> int:
    if settings.cache_mode == "none":
        return 0
    if settings.kv_tokens:
        return settings.kv_tokens
    n_bytes = kv_bytes_per_token(model.config, model.dtype)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        return int(GPU_SHARE * free) // n_bytes
    fits = int(CPU_SHARE * psutil.virtual_memory().available) // n_bytes
    return min(fits, CPU_FULL_SEQUENCES * model.config.max_sequence_length)
