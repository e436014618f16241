"""One request as the engine holds it: canvas, credit, and what its next forward pass must be.

Knows no tensor library and no other request.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dilaserve.messages import CacheMode, FinishReason
from dilaserve.store.records import MASKED
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RowKind = Literal["recompute", "cache", "rebuild"]


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a forward pass."""

    sequence: Sequence
    kind: RowKind
    start: int
    """Position, from 0 at the first prompt token, of the first token computed."""
    tokens: Ints
    """Tokens computed, mask token where masked."""
    block: int
    candidates: Ints
    """Masked canvas positions of the block, ascending, whose logits are wanted; at a recompute
    step of a model with shifted logits and a cache the first one only (that step
    commits it, and no other, as the public reference does)."""
    outlook: Ints
    """The other masked canvas positions from the block on, ascending, of which only the confidence
    is wanted; none in a cache step."""
    threshold: float

    @property
    def request_id(self) -> str:
        """Whose it is."""
        return self.sequence.request_id

    @property
    def n_tokens(self) -> int:
        """Number of tokens computed."""
        return len(self.tokens)

    @property
    def n_keys(self) -> int:
        """Keys that each of its tokens sees: the whole request."""
        return self.sequence.n_tokens

    @property
    def is_full(self) -> bool:
        """Whether it computes all its tokens, and so has all its keys at hand."""
        return len(self.tokens) == self.n_keys

    @property
    def slots(self) -> Ints:
        """Pool slot per position of the request; empty without a pool."""
        return self.sequence.slots


class Sequence:
    """Canvas and credit of one request. Positions of the canvas count from 0 behind the prompt."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        mask_id: int,
        eos_ids: Set[int],
        is_shifted: bool = False,
    ) -> None:
        canvas = np.asarray(request.canvas, dtype=np.int64)
        self.request_id = request.request_id
        self.spec = request.spec
        self.quota = request.quota
        self.credit: Credit = request.credit
        self.n_prompt = len(request.prompt)
        self.step = self.n_inherited = request.step
        """Last step, and the last one that was run elsewhere."""
        self.is_masked: npt.NDArray[np.bool_] = canvas == MASKED
        self.confidences: Floats = np.array(request.confidences or [0.0] * len(canvas))
        """Per canvas position: committed with, or else of the last pass that computed its logits;
        0 if none did."""
        self.pages: list[int] = []
        self.slots: Ints = np.empty(0, np.int64)
        """Pool slot per position, while it owns pages."""
        self.cached_block: int | None = None
        """Block for whose steps the pool holds its keys and values."""
        self.last_pass = 0
        """Number of the engine's pass that it last took part in."""
        self._mask_id = mask_id
        self._is_shifted = is_shifted
        self._eos_ids = [] if request.spec.ignore_eos else sorted(eos_ids)
        self._tokens: Ints = np.concatenate(
            [
                np.asarray(request.prompt, dtype=np.int64),
                np.where(self.is_masked, mask_id, canvas),
            ]
        )
        self._update()

    @property
    def n_tokens(self) -> int:
        """Prompt and canvas."""
        return len(self._tokens)

    @property
    def n_unmasked(self) -> int:
        """Canvas positions committed."""
        return int(np.count_nonzero(~self.is_masked))

    def canvas(self) -> list[int]:
        """Committed tokens, MASKED where masked."""
        canvas: list[int] = np.where(self.is_masked, MASKED, self._tokens[self.n_prompt :]).tolist()
        return canvas

    def may_run(self) -> bool:
        """Whether its credit allows the next step. See messages.StepItem."""
        limit = self.credit.until_step
        return (
            self.finish_reason is None
            and self.block <= self.credit.until_block
            and (limit is None or self.step < limit)
        )

    def next_kind(self, cache_mode: CacheMode) -> RowKind:
        """What its next pass is (DESIGN section 3 "Rebuild")."""
        if cache_mode == "none":
            return "recompute"
        block = self._block_slice()
        if self._is_shifted and self.is_masked[block.start]:
            return "recompute"  # no cache step computes what predicts the block's first position
        if self.cached_block == self.block:
            return "cache"
        return "recompute" if self.is_masked[block].all() else "rebuild"

    def next_row(self, cache_mode: CacheMode) -> Row:
        """Its part of the next pass."""
        kind = self.next_kind(cache_mode)
        block = self._block_slice()
        start, stop = 0, self.n_tokens
        if kind == "cache":
            start = self.n_prompt + block.start
            stop = self.n_prompt + block.stop if cache_mode == "dual" else self.n_tokens
        tokens = self._tokens[start:stop].copy()
        masked = np.flatnonzero(self.is_masked)
        candidates, outlook = masked[masked < block.stop], masked[masked >= block.stop]
        if kind == "rebuild":
            tokens[self.n_prompt + block.start : self.n_prompt + block.stop] = self._mask_id
            candidates = candidates[:0]
        if kind == "cache":
            outlook = outlook[:0]
        if kind == "recompute" and self._is_shifted and cache_mode != "none":
            candidates, outlook = masked[:1], masked[1:]
        return Row(
            self, kind, start, tokens, self.block, candidates, outlook, self.credit.threshold
        )

    def n_block_masked(self, block: int) -> int:
        """Positions of `block` still masked."""
        return int(np.count_nonzero(self.is_masked[self._block_slice(block)]))

    def commit(self, positions: Ints, tokens: Ints) -> None:
        """Unmask `positions` and count a step."""
        self._tokens[self.n_prompt + positions] = tokens
        self.is_masked[positions] = False
        self.step += 1
        self._update()

    def _block_slice(self, block: int | None = None) -> slice:
        start = (self.block if block is None else block) * self.spec.block_length
        return slice(start, min(start + self.spec.block_length, len(self.is_masked)))

    def _update(self) -> None:
        n_output = len(self.is_masked)
        first = int(self.is_masked.argmax())
        if not self.is_masked[first]:
            first = n_output
        self.block = min(first, n_output - 1) // self.spec.block_length
        self.finish_reason = self._finish_reason(first)

    def _finish_reason(self, n_settled: int) -> FinishReason | None:
        """`n_settled`: length of the unmasked prefix; an EOS in it ends the request."""
        settled = self._tokens[self.n_prompt : self.n_prompt + n_settled]
        if any(np.count_nonzero(settled == eos_id) for eos_id in self._eos_ids):
            return "stop"
        return "length" if n_settled == len(self.is_masked) else None
