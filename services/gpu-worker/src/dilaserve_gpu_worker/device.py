"""Which device and type a model runs in, from the words that settings and options use."""

from __future__ import annotations

import logging
import re

import torch

from dilaserve.errors import SettingsError

log = logging.getLogger(__name__)

KNOWN = re.compile("cpu|cuda(:(0|[1-9][0-9]?))?")
"""Of all that torch knows, what the engine runs on."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU. Raises SettingsError for a device that is
    unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not KNOWN.fullmatch(name):
        raise SettingsError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:0")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"device {name!r} is not there, torch sees {torch.cuda.device_count()} CUDA devices; "
            "use auto or cpu"
        )
    return device


def choose_dtype(name: str) -> torch.dtype | None:
    """The torch type called `name`; None for `auto`, see `default_dtype`."""
    if name != "auto" and name not in _DTYPES:
        raise SettingsError(f"dtype {name!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def default_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """fp32 on a CPU; elsewhere 16 bits: as the checkpoint stores them, or else bf16."""
    if device.type == "cpu":
        return torch.float32
    return stored if stored.itemsize == 2 else torch.bfloat16


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of our own (see kernels) run there, as fast as they should and with torch's
    bits."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    if not _can_compile():
        log.warning("passes take longer without numba; install it, and unset NUMBA_DISABLE_JIT")
        return False
    return True


def _can_compile() -> bool:
    try:
        import numba
    except ImportError:
        return False
    return not numba.config.DISABLE_JIT
