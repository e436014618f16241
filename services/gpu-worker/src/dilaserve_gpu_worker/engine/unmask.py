"""Unmasking, over the whole batch at once: choose a token per masked position, then which of them
to commit. Knows neither canvas nor cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilaserve_gpu_worker.engine.sampling import Keys, sample_on_device, sampling_keys
from dilaserve_gpu_worker.engine.types import NotFiniteError
from dilaserve_gpu_worker.transfer import fetch, put

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_SAMPLED_ELEMENTS = 1 << 22
"""Logits that are sampled at a time, which bounds the memory for fp64 noise."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Masked positions of a batch, N in all, request by request and ascending within one."""

    request_N: Ints
    """Index of the request in the batch."""
    position_N: Ints
    step_N: Ints
    """Number of the step that would commit the position."""
    seed_N: Keys
    temperature_N: Floats
    top_p_N: Floats


def choose(logits_MV: Tensor, mask_id: int, candidates: Candidates) -> tuple[Ints, Floats]:
    """Token and confidence per candidate; see `choose_on_device`. Waits for the device."""
    chosen_2M = fetch(choose_on_device(logits_MV, mask_id, candidates))
    return chosen_of(chosen_2M, len(candidates.request_N))


@torch.inference_mode()
def choose_on_device(logits_MV: Tensor, mask_id: int, candidates: Candidates) -> Tensor:
    """Token ids, exact in fp64, and confidences 2M. `logits_MV` is overwritten; its rows beyond
    the candidates are padding.

    Confidence is the token's softmax probability at temperature 1 over the whole vocabulary; the
    mask token cannot be chosen. Probabilities come from fp32 exponentials, summed without the
    token's own in fp64, so that those near 1 still differ.
    """
    weights_MV = torch.exp(logits_MV - logits_MV.amax(dim=-1, keepdim=True))
    logits_MV[:, mask_id] = -torch.inf
    tokens_M = logits_MV.argmax(dim=-1)
    _sample_where_asked(tokens_M, logits_MV, candidates)
    own_M = weights_MV.gather(1, tokens_M[:, None])[:, 0].double()
    others_M = weights_MV.scatter_(1, tokens_M[:, None], 0.0).sum(dim=-1, dtype=torch.float64)
    return torch.stack((tokens_M.double(), own_M / (own_M + others_M)))


def chosen_of(chosen_2M: Floats, n: int) -> tuple[Ints, Floats]:
    """Of the first `n`. Raises NotFiniteError where the model computed NaN."""
    confidences = chosen_2M[1, :n]
    check_finite(confidences)
    return chosen_2M[0, :n].astype(np.int64), confidences


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
    if np.isnan(confidences).any():
        raise NotFiniteError(
            "the model's logits hold NaN: its weights are damaged, or its activations overflow; "
            "download the folder again, or set DILASERVE_DTYPE=float32"
        )


def select(
    candidates: Candidates, confidence_N: Floats, threshold_R: Floats, quota_R: Ints
) -> Bools:
    """Which candidates to commit: per request those strictly above its threshold and always the
    most confident one; with a quota (0: none) that many of the most confident instead. Ties go to
    the lowest position. R requests of the batch.
    """
    request_N = candidates.request_N
    order = np.lexsort((-confidence_N, request_N))  # stable: ties stay in order of position
    first_R = np.searchsorted(request_N, np.arange(len(threshold_R)))
    rank_N = np.empty_like(request_N)
    rank_N[order] = np.arange(len(order)) - first_R[request_N]
    quota_N = quota_R[request_N]
    above_N = (confidence_N > threshold_R[request_N]) | (rank_N == 0)
    return np.where(quota_N > 0, rank_N < quota_N, above_N)


def _sample_where_asked(tokens_M: Tensor, logits_MV: Tensor, candidates: Candidates) -> None:
    """Replace greedy tokens of the candidates whose temperature is above 0."""
    sampled = np.flatnonzero(candidates.temperature_N > 0)
    if not len(sampled):
        return
    keys = sampling_keys(
        candidates.seed_N[sampled], candidates.position_N[sampled], candidates.step_N[sampled]
    )
    temperatures, top_ps = candidates.temperature_N[sampled], candidates.top_p_N[sampled]
    arrays = [sampled, keys.view(np.int64), temperatures, top_ps]
    index_N, key_N, temperature_N, top_p_N = put(arrays, logits_MV.device)
    has_nucleus = (top_ps < 1).any()
    n_rows = max(1, _SAMPLED_ELEMENTS // logits_MV.shape[1])
    for start in range(0, len(sampled), n_rows):
        part = slice(start, start + n_rows)
        tokens_M[index_N[part]] = sample_on_device(
            logits_MV[index_N[part]],
            key_N[part],
            temperature_N[part],
            top_p_N[part] if has_nucleus else None,
        )
