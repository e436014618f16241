"""Products with weight matrices: torch's own, or oneDNN's with matrices that were packed for it
(decision 0018). A packed matrix is a tensor like another, of a layout that nothing but `linear`
can read. Shape letters: models.model, and K inputs, N outputs of a product.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["can_pack", "linear", "packed", "packing_pays"]

CPU_INFO = Path("/proc/cpuinfo")
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
"""Of torch.ops.mkldnn: what torch.compile makes of a product. Torch does not promise them."""


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """As F.linear, for packed matrices, too; with many inputs (from some 200) these give other last
    bits, since sums are taken otherwise. Of two rows or more, a row's bits do not depend on the
    others; a single one's may, where it has more than 1,024 inputs."""
    if weight_NK.is_mkldnn:
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")
        return y_TN
    return F.linear(x_TK, weight_NK, bias_N)


def packed(weight_NK: Tensor) -> Tensor:
    """A copy of a matrix in fp32 on a CPU, packed for `linear`; see can_pack."""
    matrix: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
    return matrix


def packing_pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products are faster with packed matrices there, and such can be had."""
    return device.type == "cpu" and dtype == torch.float32 and can_pack() and _leaves_avx512()


def can_pack() -> bool:
    """Whether this torch has oneDNN, and the operators that make and take packed matrices."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in OPERATORS
    )


def _leaves_avx512() -> bool:
    """Whether MKL, which F.linear calls, leaves AVX-512 unused: on CPUs of other makers than
    Intel. oneDNN does not."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and CPU_INFO.exists()
        and "GenuineIntel" not in CPU_INFO.read_text()
    )
