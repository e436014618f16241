"""What a model's code needs to know of its checkpoint. Knows no file and no tensor name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a masked diffusion transformer, and its special token ids."""

    model_type: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    """Fewer than `n_heads` means grouped queries."""
    head_dim: int
    """Width of one attention head."""
    d_ff: int
    vocab_size: int
    """Rows of embedding and head; may exceed the tokenizer's vocabulary."""
    max_sequence_length: int
    """Longest prompt plus output, in tokens."""
    rope_theta: float
    rms_norm_eps: float
    tied_head: bool
    """The head is the embedding."""
    mask_id: int
    eos_ids: frozenset[int]
    logit_shift: int = 0
    """The token at position i is predicted by the hidden state at i - logit_shift of the same
    request; that at position 0 by its own."""
