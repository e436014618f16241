"""Which of the optional speed-ups an instance has, from the words that settings use."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from dilaserve.errors import SettingsError
from dilaserve.messages import CacheMode
from dilaserve_gpu_worker.attention import STATIC
from dilaserve_gpu_worker.engine.cuda_graphs import CudaCapture
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.models.model import Model

__all__ = ["AutoOnOff", "GraphsChoice", "choose_graphs", "compile_if", "wants_packing"]

AutoOnOff = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class GraphsChoice:
    """Whether passes of cache steps are captured as CUDA graphs, and why not."""

    is_on: bool
    words: str

    def options(self, device: torch.device, block_length: int) -> GraphOptions | None:
        """For the engine; None where they are off."""
        return GraphOptions(CudaCapture(device), block_length) if self.is_on else None


def choose_graphs(
    setting: AutoOnOff,
    *,
    device: torch.device,
    cache_mode: CacheMode,
    attention: str,
    tp_degree: int,
) -> GraphsChoice:
    """`auto`: where they can be had and do no harm. Raises SettingsError for an `on` that cannot
    be. Of several ranks each may decide by itself: a replay and an eager pass have the same
    collectives."""
    if setting == "off":
        return GraphsChoice(False, "off")
    obstacle = _obstacle(device, cache_mode, attention)
    if obstacle and setting == "on":
        raise SettingsError(f"DILASERVE_CUDA_GRAPHS=on cannot be: {obstacle}; use auto or off")
    if obstacle:
        return GraphsChoice(False, f"off ({obstacle})")
    if setting == "auto" and tp_degree > 1:
        return GraphsChoice(
            False, "off (collectives in graphs are not measured yet; DILASERVE_CUDA_GRAPHS=on)"
        )
    return GraphsChoice(True, "on")


def compile_if(setting: Literal["off", "on"], model: Model) -> None:
    """Have a model compiled where that is asked for. Raises SettingsError where what compiles is
    missing."""
    if setting == "off":
        return
    missing = _missing_compiler(model.device)
    if missing:
        raise SettingsError(f"DILASERVE_COMPILE=on needs {missing}; install it, or use off")
    model.compile()


def wants_packing(setting: Literal["auto", "off"], compile_blocks: Literal["off", "on"]) -> bool:
    """Whether matrices are to be packed where that pays; torch.compile needs them plain."""
    return setting == "auto" and compile_blocks == "off"


def _missing_compiler(device: torch.device) -> str:
    if device.type == "cuda":
        return "" if find_spec("triton") else "the package triton"
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    return "" if any(map(shutil.which, compilers)) else "a C++ compiler, g++ or that of CXX"


def _obstacle(device: torch.device, cache_mode: CacheMode, attention: str) -> str:
    if device.type != "cuda":
        return f"the device is {device}"
    if cache_mode == "none":
        return "without a cache there are no cache steps"
    if attention not in STATIC:
        return f"the calls of attention backend {attention} follow each pass"
    return ""
