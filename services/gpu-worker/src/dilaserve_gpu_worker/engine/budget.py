"""What one pass may compute. Knows no request and no tensor."""

from __future__ import annotations

from dilaserve_gpu_worker.engine.sequence import RowKind

__all__ = ["PassBudget"]


class PassBudget:
    """Tokens of one pass, and of those of its rows that compute their whole length (recompute and
    rebuild steps; `n_full_tokens` None: no limit of their own). The first of these may exceed
    their limit, so that each has its turn: who is put off is the least recently run."""

    __slots__ = ("_has_full", "_n_full_left", "_n_left")

    def __init__(self, n_tokens: int, n_full_tokens: int | None) -> None:
        self._n_left = n_tokens
        self._n_full_left = n_tokens if n_full_tokens is None else n_full_tokens
        self._has_full = False

    @property
    def n_left(self) -> int:
        """Tokens that still fit, of whichever kind."""
        return self._n_left

    def take(self, kind: RowKind, n_tokens: int) -> bool:
        """Whether a row fits; if so, it is in."""
        if n_tokens > self._n_left:
            return False
        if kind != "cache":
            if self._has_full and n_tokens > self._n_full_left:
                return False
            self._has_full = True
            self._n_full_left -= n_tokens
        self._n_left -= n_tokens
        return True
