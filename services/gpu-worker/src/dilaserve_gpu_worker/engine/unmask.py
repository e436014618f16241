"""Unmasking, over the whole batch at once: choose a token per masked position, then which of them
to commit. Knows neither canvas nor cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilaserve_gpu_worker.engine.sampling import Keys, sample_on_device
from dilaserve_gpu_worker.engine.types import NotFiniteError
from dilaserve_gpu_worker.transfer import fetch, put

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_SAMPLED_ELEMENTS = 1 << 22
"""Logits that are sampled at a time, which bounds the memory for fp64 noise."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Candidates whose tokens are sampled, S in all."""

    candidate_S: Ints
    """Which of the candidates."""
    key_S: Keys
    temperature_S: Floats
    top_p_S: Floats


def choose(
    logits_MV: Tensor, mask_id: int, n: int, draws: Draws | None = None
) -> tuple[Ints, Floats]:
    """Token and confidence of each of the first `n`; see `choose_on_device`. Waits for the device.
    Raises NotFiniteError where the model computed NaN."""
    tokens_M1, confidence_M1 = fetch(choose_on_device(logits_MV, mask_id, draws))
    tokens_N, confidence_N = tokens_M1[:n, 0], confidence_M1[:n, 0]
    check_finite(confidence_N)
    return tokens_N, confidence_N


@torch.inference_mode()
def choose_on_device(logits_MV: Tensor, mask_id: int, draws: Draws | None) -> tuple[Tensor, Tensor]:
    """Tokens and confidences, each M1, padding included. `logits_MV` is overwritten.

    Confidence is the token's softmax probability at temperature 1 over the whole vocabulary; the
    mask token cannot be chosen. Probabilities come from fp32 exponentials, summed without the
    token's own in fp64, so that those near 1 still differ.
    """
    weights_MV = (logits_MV - logits_MV.amax(dim=-1, keepdim=True)).exp_()
    logits_MV[:, mask_id] = -torch.inf
    tokens_M1 = logits_MV.argmax(dim=-1, keepdim=True)
    if draws is not None:
        _sample(tokens_M1, logits_MV, draws)
    own_M1 = weights_MV.gather(1, tokens_M1)
    others_M1 = weights_MV.scatter_(1, tokens_M1, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return tokens_M1, own_M1 / (own_M1 + others_M1)


@torch.inference_mode()
def best_confidence(logits_KV: Tensor, mask_id: int) -> Tensor:
    """Softmax probability of each row's most likely token but the mask token, in fp32.

    Good for statistics: near 1 it is not as fine as the confidence of `choose`.
    """
    probabilities_KV = logits_KV.softmax(dim=-1)
    probabilities_KV[:, mask_id] = 0.0
    return probabilities_KV.amax(dim=-1)


def check_finite(confidences: Floats) -> None:
    """Raises NotFiniteError when the model computed NaN."""
    if math.isnan(np.add.reduce(confidences)):
        raise NotFiniteError(
            "the model's logits hold NaN: its weights are damaged, or its activations overflow; "
            "download the folder again, or set DILASERVE_DTYPE=float32"
        )


def select(confidence_N: Floats, threshold: float, quota: int | None) -> Bools:
    """Which candidates of a request to commit: those strictly above its threshold and always the
    most confident one; with a quota that many of the most confident instead. Ties go to the lowest
    position.
    """
    if quota is None:
        is_selected_N: Bools = confidence_N > threshold
        is_selected_N[confidence_N.argmax()] = True
        return is_selected_N
    is_selected_N = np.zeros(len(confidence_N), np.bool_)
    is_selected_N[np.argsort(-confidence_N, kind="stable")[:quota]] = True
    return is_selected_N


def _sample(tokens_M1: Tensor, logits_MV: Tensor, draws: Draws) -> None:
    """Replace the greedy tokens of those that are sampled."""
    arrays = [draws.candidate_S, draws.key_S.view(np.int64), draws.temperature_S, draws.top_p_S]
    index_S, key_S, temperature_S, top_p_S = put(arrays, logits_MV.device)
    has_nucleus = (draws.top_p_S < 1).any()
    n_rows = max(1, _SAMPLED_ELEMENTS // logits_MV.shape[1])
    for start in range(0, len(draws.candidate_S), n_rows):
        part = slice(start, start + n_rows)
        tokens_M1[index_S[part], 0] = sample_on_device(
            logits_MV[index_S[part]],
            key_S[part],
            temperature_S[part],
            top_p_S[part] if has_nucleus else None,
        )
