"""Muon: momentum whose update is orthogonalised, for the matrices inside the blocks.

Source: Keller Jordan's description (Newton–Schulz quintic, Nesterov momentum). Each matrix is
orthogonalised on its own. Knows no model.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters; the learning rate is per parameter group."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; parameters of one shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            for params in by_shape.values():
                self._update(params, group["lr"], group["momentum"])

    def _update(self, params: list[Tensor], lr: float, momentum: float) -> None:
        updates = torch.stack([self._nesterov(param, momentum) for param in params])
        scale = max(1.0, params[0].shape[0] / params[0].shape[1]) ** 0.5
        for param, update in zip(params, orthogonalise(updates), strict=True):
            param.add_(update, alpha=-lr * scale)

    def _nesterov(self, param: Tensor, momentum: float) -> Tensor:
        assert param.grad is not None
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        average: Tensor = state["momentum"]
        average.lerp_(param.grad, 1 - momentum)
        update: Tensor = torch.lerp(param.grad, average, momentum)
        return update


def orthogonalise(matrices: Tensor) -> Tensor:
    """Five Newton–Schulz steps on a stack (n, rows, columns): singular values near 1."""
    x: Tensor = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).float()
