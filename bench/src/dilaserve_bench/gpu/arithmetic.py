"""How many floating-point operations a pass needs, and how many a card can do."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dilaserve_gpu_worker.models.config import ModelConfig

__all__ = ["measured_peak", "nominal_peak", "operations"]

NOMINAL_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Per second, dense, by what the card's name holds; from the vendor's data sheets."""


def nominal_peak(device_name: str) -> float | None:
    """What the data sheet says of a card; None for others than these."""
    return next((peak for name, peak in NOMINAL_BF16.items() if name in device_name), None)


def measured_peak(
    device: torch.device,
    dtype: torch.dtype,
    *,
    size: int = 8192,
    n_products: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Operations per second of large square products one after the other."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    _wait(device)
    start = clock()
    for _ in range(n_products):
        a @ b
    _wait(device)
    return 2 * size**3 * n_products / (clock() - start)


def operations(config: ModelConfig, *, n_tokens: int, n_pairs: int, n_logit_rows: int) -> float:
    """Of one pass: products with weights, attention over `n_pairs` pairs of query and key, and
    the head. Additions count as much as multiplications; norms and the like are left out."""
    d, f = config.d_model, config.d_ff
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    of_layer = d * (n_q + 2 * n_kv) + n_q * d + 3 * d * f
    per_layer = 2 * n_tokens * of_layer + 4 * n_pairs * n_q
    return float(config.n_layers * per_layer + 2 * n_logit_rows * d * config.vocab_size)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
