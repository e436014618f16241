"""Assembles the canvas of one request from deltas that come in any order, twice, or not at all.

Sans-IO: says when something is missing, and the caller reads it from the store. Knows no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dilaserve.messages import FinishReason, TokenDelta
from dilaserve.store.records import LOST_CONFIDENCE, MASKED, Delta


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """What one step added to the canvas, in the order of its positions as sent."""

    step: int
    positions: list[int]
    tokens: list[int]
    confidences: list[float]
    source: TokenDelta | Delta | None = field(default=None, compare=False)
    """The step itself; None for what was taken from the record, whose steps are lost."""


class Assembly:
    """A canvas as far as it is known. A position once written never changes."""

    def __init__(self, n_output: int) -> None:
        self.tokens = [MASKED] * n_output
        self.confidences = [0.0] * n_output
        self.step = 0
        """Last step applied."""
        self.n_prefix = 0
        """Tokens before the first masked position."""
        self.finish_reason: FinishReason | None = None
        """Set by the request's last step."""

    def offer(self, delta: TokenDelta) -> AppliedStep | Literal["duplicate", "gap"]:
        """Apply the next step. `gap`: steps before it are missing, read them from the store."""
        if delta.step <= self.step:
            return "duplicate"
        if delta.step > self.step + 1 or not self._is_sound(delta):
            return "gap"
        return self._apply(delta)

    def catch_up(self, deltas: Sequence[Delta]) -> Iterator[AppliedStep]:
        """Apply what the store has, in order and one by one; steps applied before are skipped."""
        return (self._apply(delta) for delta in deltas if delta.step > self.step)

    def settle(self, canvas: Sequence[int], finish_reason: FinishReason | None) -> AppliedStep:
        """Take what is still unknown from the record of a finished request, whose stream has
        lost entries. The confidences are lost with them."""
        positions = [p for p, token in enumerate(canvas) if token != MASKED]
        tokens = [canvas[p] for p in positions]
        self.finish_reason = self.finish_reason or finish_reason or "length"
        return self._write(self.step, positions, tokens, [LOST_CONFIDENCE] * len(tokens))

    def _apply(self, delta: TokenDelta | Delta) -> AppliedStep:
        self.step = delta.step
        self.finish_reason = self.finish_reason or delta.finish_reason
        return self._write(
            delta.step, delta.positions, delta.tokens, delta.confidences, source=delta
        )

    def _write(
        self,
        step: int,
        positions: Sequence[int],
        tokens: Sequence[int],
        confidences: Sequence[float],
        source: TokenDelta | Delta | None = None,
    ) -> AppliedStep:
        rows = zip(positions, tokens, confidences, strict=False)
        fresh = [row for row in rows if self._is_masked(row[0])]
        for position, token, confidence in fresh:
            self.tokens[position] = token
            self.confidences[position] = confidence
        while self._is_known(self.n_prefix):
            self.n_prefix += 1
        return AppliedStep(
            step, [r[0] for r in fresh], [r[1] for r in fresh], [r[2] for r in fresh], source
        )

    def _is_sound(self, delta: TokenDelta) -> bool:
        n = len(delta.positions)
        return n == len(delta.tokens) == len(delta.confidences) and all(
            0 <= position < len(self.tokens) for position in delta.positions
        )

    def _is_masked(self, position: int) -> bool:
        return 0 <= position < len(self.tokens) and self.tokens[position] == MASKED

    def _is_known(self, position: int) -> bool:
        return position < len(self.tokens) and self.tokens[position] != MASKED
