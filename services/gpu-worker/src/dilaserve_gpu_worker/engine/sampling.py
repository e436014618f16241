"""Counter-based sampling: noise that is a function of (seed, position, step, token) and nothing
else, so that neither batch mates nor worker nor time can change a text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilaserve_gpu_worker.transfer import put

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


def sampling_keys(
    seeds: Keys, positions: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]
) -> Keys:
    """One 64-bit key per (seed, canvas position, step)."""
    keys = _mix(seeds)
    for counter in (positions, steps):
        keys = _mix(keys + counter.astype(np.uint64))
    return keys


def sample(logits_NV: Tensor, keys: Keys, temperatures: Floats, top_ps: Floats) -> Tensor:
    """One token per row, drawn from softmax(logits / temperature) within its top-p nucleus, by
    the Gumbel-max trick in fp64. Banned tokens have logit -inf. Ties go to the lowest token."""
    arrays = [keys.view(np.int64), temperatures, top_ps]
    key_N, temperature_N, top_p_N = put(arrays, logits_NV.device)
    has_nucleus = (top_ps < 1).any()
    return sample_on_device(logits_NV, key_N, temperature_N, top_p_N if has_nucleus else None)


def sample_on_device(
    logits_NV: Tensor, key_N: Tensor, temperature_N: Tensor, top_p_N: Tensor | None
) -> Tensor:
    """See `sample`."""
    # Below the highest logit, so that none overflows at the lowest of temperatures.
    below_NV = logits_NV.double() - logits_NV.amax(dim=-1, keepdim=True).double()
    scaled_NV = below_NV / temperature_N[:, None]
    if top_p_N is not None:
        scaled_NV = _within_nucleus(scaled_NV, top_p_N)
    return (scaled_NV + _gumbel(key_N, scaled_NV.shape[1])).argmax(dim=-1)


def _within_nucleus(scaled_NV: Tensor, top_ps: Tensor) -> Tensor:
    """-inf outside the smallest set of most likely tokens whose mass reaches top-p (Holtzman et
    al., 2020). A token stays if the mass before it is below top-p, so that one always does."""
    ordered_NV, tokens_NV = scaled_NV.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    is_outside_NV = ordered_NV.cumsum(dim=-1) - ordered_NV >= top_ps[:, None]
    is_outside_NV[:, 0] = False
    outside_NV = torch.zeros_like(is_outside_NV).scatter_(1, tokens_NV, is_outside_NV)
    return scaled_NV.masked_fill(outside_NV, -torch.inf)


def _gumbel(key_N: Tensor, n_tokens: int) -> Tensor:
    token_V = torch.arange(1, n_tokens + 1, device=key_N.device)
    bits_NV = _mix_tensor(key_N[:, None] + token_V * _signed(_GOLDEN))
    uniform_NV = (_shift_right(bits_NV, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform_NV))


def _mix(x: Keys) -> Keys:
    """SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` of int64, whose products wrap like unsigned ones; without the first addition."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, n_bits: int) -> Tensor:
    """Logical shift; int64's own is arithmetic."""
    return (x >> n_bits) & ((1 << (64 - n_bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
