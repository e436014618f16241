"""The attention backends by name, and which of them a device can run."""

from __future__ import annotations

import logging
from functools import partial

import torch

from dilaserve.errors import SettingsError
from dilaserve_gpu_worker.attention.runs import Attention, LayerAttention, Ragged
from dilaserve_gpu_worker.attention.sdpa import prepare_sdpa
from dilaserve_gpu_worker.attention.trial import (
    masked_gathered,
    masked_paged,
    plain_attention,
    random_case,
)
from dilaserve_gpu_worker.attention.varlen import (
    flash_attn_kernel,
    prepare_gathered,
    prepare_paged,
    torch_kernel,
    torch_paged_kernel,
)
from dilaserve_gpu_worker.models.config import ModelConfig
from dilaserve_gpu_worker.transfer import put

log = logging.getLogger(__name__)

BACKENDS = ("sdpa", "torch_varlen", "torch_paged", "flash_attn")
ON_GPU = ("flash_attn", "torch_paged", "torch_varlen", "sdpa")
"""The order in which `auto` tries them there."""
ANYWHERE = ("sdpa", "masked", "masked_paged")
CLOSE = 0.05
"""Of values of unit variance in 16 bits: a wrong key or mask shows far above it."""


PAGED = ("torch_paged", "masked_paged")
"""Those that find keys by a table of pages."""
STATIC = ("torch_varlen", "torch_paged", "flash_attn", "masked", "masked_paged")
"""Those whose calls depend on nothing but a Room and what is on the device; can be captured."""


def on_device(attention: Attention, ragged: Ragged, device: torch.device) -> LayerAttention:
    """Attention of a batch, ready to run."""
    prepared = attention(ragged)
    return prepared.bind(put(prepared.arrays, device))


def attention_backend(name: str) -> Attention:
    """The backend called `name`; `masked` and `masked_paged` are for trials of what is written for
    the others, on any device, at small sizes. Raises SettingsError for an unknown one, and for one
    whose package is missing."""
    match name:
        case "sdpa":
            return prepare_sdpa
        case "torch_varlen":
            return partial(prepare_gathered, kernel=torch_kernel())
        case "torch_paged":
            return partial(prepare_paged, kernel=torch_paged_kernel())
        case "flash_attn":
            return partial(prepare_gathered, kernel=flash_attn_kernel())
        case "masked":
            return partial(prepare_gathered, kernel=masked_gathered)
        case "masked_paged":
            return partial(prepare_paged, kernel=masked_paged)
    raise SettingsError(f"attention backend {name!r} is unknown; use auto, {', '.join(BACKENDS)}")


def choose_attention(
    name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> str:
    """The name of the backend to use for a model: `auto` is the first of a GPU's that passes a
    trial there. Raises SettingsError for one that cannot run."""
    if name == "auto":
        can_varlen = device.type == "cuda" and dtype.itemsize == 2
        names = ON_GPU if can_varlen else ("sdpa",)
        return next(each for each in names if _passes(each, config, device, dtype))
    if name not in ANYWHERE:
        attention_backend(name)
        _check_device(name, device, dtype)
    return name


def _check_device(name: str, device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda" or dtype.itemsize != 2:
        raise SettingsError(
            f"attention backend {name!r} needs a CUDA device and a 16-bit type, this is {device} "
            f"with {str(dtype).removeprefix('torch.')}; use sdpa or auto"
        )


def _passes(name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend attends rightly on a small batch; sdpa is not tried, it runs anywhere."""
    if name == "sdpa":
        return True
    case = random_case(
        [(1, 40, 40), (2, 32, 100)],
        seed=0,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
    ).to(device, dtype)
    try:
        attend = on_device(attention_backend(name), case.ragged, device)
        mixed = attend(case.q_THA, case.k_TGA, case.v_TGA, case.pooled)
    except (SettingsError, RuntimeError, NotImplementedError) as error:
        log.info("attention backend %s does not run on %s: %s", name, device, error)
        return False
    distance = (mixed.double() - plain_attention(case)).abs().max().item()
    if distance > CLOSE:
        log.warning("attention backend %s is off by %.3g on %s", name, distance, device)
    return distance <= CLOSE
