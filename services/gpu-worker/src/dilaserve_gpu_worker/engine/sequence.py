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


@dataclass(slots=True)  # one for each request and pass: frozen, it would take 2.5 times as long
class Row:
    """One request's part of a forward pass; as its request was planned, until its step commits."""

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
    """Canvas and credit of one request. Positions of the canvas count from 0 behind the prompt.

    Its masked positions are kept in order, those of the block apart: what a pass asks for then is
    there, however long the canvas is.
    """

    def __init__(
        self,
        request: EngineRequest,
        *,
        mask_id: int,
        eos_ids: Set[int],
        is_shifted: bool = False,
    ) -> None:
        canvas = np.asarray(request.canvas, dtype=np.int64)
        is_masked = canvas == MASKED
        self.request_id = request.request_id
        self.spec = request.spec
        self.quota = request.quota
        self.credit: Credit = request.credit
        self.n_prompt = len(request.prompt)
        self.n_output = len(canvas)
        self.n_tokens = self.n_prompt + self.n_output
        """Prompt and canvas."""
        self.step = self.n_inherited = request.step
        """Last step, and the last one that was run elsewhere."""
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
        self.finish_reason: FinishReason | None = None
        self._mask_id = mask_id
        self._is_shifted = is_shifted
        self._eos_ids = set() if request.spec.ignore_eos else eos_ids
        prompt = np.asarray(request.prompt, dtype=np.int64)
        self._tokens: Ints = np.concatenate([prompt, np.where(is_masked, mask_id, canvas)])
        self._output = self._tokens[self.n_prompt :]
        self._masked: Ints
        """Positions of the block still masked, ascending; `_later`: those behind it."""
        self._later: Ints
        self._n_settled = 0
        """Length of the unmasked prefix of the canvas."""
        self._start_block(np.flatnonzero(is_masked))
        self._settle()

    @property
    def n_unmasked(self) -> int:
        """Canvas positions committed."""
        return self.n_output - len(self._masked) - len(self._later)

    def canvas(self) -> list[int]:
        """Committed tokens, MASKED where masked."""
        canvas = self._output.copy()
        canvas[self._masked] = canvas[self._later] = MASKED
        tokens: list[int] = canvas.tolist()
        return tokens

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
        if self._is_shifted and self._n_settled == self._block_start:
            return "recompute"  # no cache step computes what predicts the block's first position
        if self.cached_block == self.block:
            return "cache"
        is_fresh = len(self._masked) == self._block_stop - self._block_start
        return "recompute" if is_fresh else "rebuild"

    def next_row(self, cache_mode: CacheMode) -> Row:
        """Its part of the next pass."""
        kind = self.next_kind(cache_mode)
        start, tokens = 0, self._tokens
        candidates, outlook = self._masked, self._later
        if kind == "cache":
            start = self.n_prompt + self._block_start
            stop = self.n_prompt + self._block_stop if cache_mode == "dual" else self.n_tokens
            tokens, outlook = tokens[start:stop], outlook[:0]
        elif kind == "rebuild":
            tokens, candidates = self._with_block_masked(), candidates[:0]
        elif self._is_shifted and cache_mode != "none":
            candidates, outlook = candidates[:1], np.concatenate([candidates[1:], outlook])
        return Row(
            self, kind, start, tokens, self.block, candidates, outlook, self.credit.threshold
        )

    def n_block_masked(self, block: int) -> int:
        """Positions still masked of `block`, its own or one before."""
        return len(self._masked) if block == self.block else 0

    def commit(self, positions: Ints, tokens: Ints, left: Ints) -> None:
        """Unmask `positions` and count a step. `left`: the other candidates of its row."""
        self._output[positions] = tokens
        self.step += 1
        n_candidates = len(positions) + len(left)
        if n_candidates < len(self._masked):
            left = np.concatenate([left, self._masked[n_candidates:]])
        self._masked = left
        if not len(left):
            self._start_block(self._later)
        self._settle()

    def _with_block_masked(self) -> Ints:
        tokens = self._tokens.copy()
        tokens[self.n_prompt + self._block_start : self.n_prompt + self._block_stop] = self._mask_id
        return tokens

    def _start_block(self, masked: Ints) -> None:
        """Go to the block of the first of all the masked positions; without any, to the last."""
        first = int(masked[0]) if len(masked) else self.n_output - 1
        length = self.spec.block_length
        self.block = first // length
        self._block_start = self.block * length
        self._block_stop = min(self._block_start + length, self.n_output)
        n_of_block = int(masked.searchsorted(self._block_stop))
        self._masked, self._later = masked[:n_of_block], masked[n_of_block:]

    def _settle(self) -> None:
        """Look at what the unmasked prefix has gained; an EOS in it ends the request."""
        n_settled = int(self._masked[0]) if len(self._masked) else self.n_output
        if n_settled == self._n_settled:
            return
        gained = self._output[self._n_settled : n_settled].tolist()
        self._n_settled = n_settled
        if not self._eos_ids.isdisjoint(gained):
            self.finish_reason = "stop"
        elif n_settled == self.n_output:
            self.finish_reason = "length"
