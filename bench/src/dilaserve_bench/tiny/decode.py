"""Cacheless block-wise decoding of a dense batch, for watching the tiny model while it trains.

All prompts have one length and all canvases too. The published figures come from the serving
engine; this knows neither its caches nor its ragged batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]


@torch.inference_mode()
def decode(
    forward: Forward,
    prompts: Tensor,
    canvas_length: int,
    block_length: int,
    mask_id: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Canvases (B, C) and steps taken (B,); `forward` maps ids (B, L) to logits (B, L, V).

    Each step unmasks, in each row's first unfinished block, the positions whose confidence
    exceeds `threshold`, and always the most confident one. A threshold of 1 is one token a step.
    """
    n_rows, prompt_length = prompts.shape
    canvas = torch.full((n_rows, canvas_length), mask_id)
    steps = torch.zeros(n_rows, dtype=torch.long)
    while True:
        masked = canvas == mask_id
        active = masked.any(1).nonzero().flatten()
        if not active.numel():
            return canvas, steps
        logits = forward(torch.cat([prompts[active], canvas[active]], 1))[:, prompt_length:].float()
        candidates = _current_block(masked[active], block_length)
        chosen, tokens = _choose(logits, candidates, mask_id, threshold)
        canvas[active] = torch.where(chosen, tokens, canvas[active])
        steps[active] += 1


def _current_block(masked: Tensor, block_length: int) -> Tensor:
    """The masked positions of each row's first unfinished block."""
    positions = torch.arange(masked.shape[1])
    first = masked.int().argmax(1, keepdim=True)
    return masked & (positions // block_length == first // block_length)


def _choose(
    logits: Tensor, candidates: Tensor, mask_id: int, threshold: float
) -> tuple[Tensor, Tensor]:
    probabilities = logits.softmax(-1)
    tokens = logits.index_fill(-1, torch.tensor([mask_id]), -torch.inf).argmax(-1)
    confidence = probabilities.gather(-1, tokens[..., None])[..., 0]
    confidence = confidence.masked_fill(~candidates, -1.0)
    best = confidence.argmax(1, keepdim=True)
    return (confidence > threshold).scatter(1, best, True), tokens
