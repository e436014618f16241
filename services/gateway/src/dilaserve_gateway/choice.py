"""One choice of a call: canvas → contiguous text, cut at EOS and stop strings. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dilaserve.messages import FinishReason, TokenDelta
from dilaserve.store.records import Delta, RequestRecord
from dilaserve_gateway.assembly import AppliedStep, Assembly
from dilaserve_gateway.course import Course
from dilaserve_gateway.text import Detokenizer, StopFinder
from dilaserve_gateway.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the answer, its confidence, and where its text begins in the choice's."""

    token: int
    confidence: float
    offset: int


@dataclass(frozen=True, slots=True)
class Update:
    """What one step brought to one choice."""

    index: int
    request_id: str
    step: AppliedStep
    text: str
    """New contiguous text; never changes again."""
    tokens: tuple[Scored, ...]
    """New tokens of the contiguous prefix, before EOS."""
    finish_reason: FinishReason | None = None
    """Set in the choice's last update."""


class Choice:
    """Follows one request. `finish_reason` is set when its text is complete."""

    def __init__(
        self,
        index: int,
        request_id: str,
        tokenizer: ModelTokenizer,
        *,
        n_output: int,
        eos_ids: frozenset[int],
        stops: Sequence[str] = (),
    ) -> None:
        """`eos_ids` is empty where EOS is to be ignored."""
        self.index = index
        self.request_id = request_id
        self.n_tokens = 0
        """Tokens before EOS so far."""
        self.finish_reason: FinishReason | None = None
        self.course = Course()
        """Of the steps up to the one that completed the text."""
        self._special_ids = tokenizer.special_ids
        self._eos_ids = eos_ids
        self._assembly = Assembly(n_output)
        self._detokenizer = Detokenizer(tokenizer.decode)
        self._stop_finder = StopFinder(stops)
        self._n_read = 0
        self._offset = 0

    @property
    def step(self) -> int:
        """Last step applied."""
        return self._assembly.step

    @property
    def is_cut_short(self) -> bool:
        """A stop string ended it, while its request goes on."""
        return self._stop_finder.found and self._assembly.finish_reason is None

    @property
    def is_behind(self) -> bool:
        """Its request's last step is applied, and yet text is missing: steps were lost."""
        return self.finish_reason is None and self._assembly.finish_reason is not None

    def offer(self, delta: TokenDelta) -> Update | Literal["duplicate", "gap"]:
        """A delta from the bus; see Assembly."""
        applied = self._assembly.offer(delta)
        return applied if isinstance(applied, str) else self._advance(applied)

    def catch_up(self, deltas: Sequence[Delta]) -> list[Update]:
        """Deltas from the store, up to the one that completes the text."""
        updates: list[Update] = []
        for applied in self._assembly.catch_up(deltas):
            updates.append(self._advance(applied))
            if self.finish_reason is not None:
                break
        return updates

    def settle(self, record: RequestRecord) -> Update:
        """End with the canvas of a record that is done, whose deltas have been read."""
        return self._advance(self._assembly.settle(record.canvas, record.finish_reason), last=True)

    def _advance(self, applied: AppliedStep, *, last: bool = False) -> Update:
        if applied.source is not None:
            self.course.add(applied.source)
        scored: list[Scored] = []
        text = self._read_prefix(scored)
        if self.finish_reason is None and (last or self._is_complete()):
            self.finish_reason = self._assembly.finish_reason or "length"
        if self.finish_reason is not None and not self._stop_finder.found:
            text += self._stop_finder.push(self._detokenizer.flush())
            text += self._stop_finder.flush()
            self.finish_reason = "stop" if self._stop_finder.found else self.finish_reason
        return Update(self.index, self.request_id, applied, text, tuple(scored), self.finish_reason)

    def _read_prefix(self, scored: list[Scored]) -> str:
        """Text of the tokens that have become contiguous, up to EOS or a stop string."""
        text = ""
        assembly = self._assembly
        while self.finish_reason is None and self._n_read < assembly.n_prefix:
            position, self._n_read = self._n_read, self._n_read + 1
            token = assembly.tokens[position]
            if token in self._eos_ids:
                self.finish_reason = "stop"
                break
            self.n_tokens += 1
            scored.append(Scored(token, assembly.confidences[position], self._offset))
            text += self._read_token(token)
        return text

    def _read_token(self, token: int) -> str:
        if token in self._special_ids:
            return ""
        piece = self._detokenizer.push(token)
        self._offset += len(piece)
        text = self._stop_finder.push(piece)
        if self._stop_finder.found:
            self.finish_reason = "stop"
        return text

    def _is_complete(self) -> bool:
        """No position is missing."""
        return self._assembly.n_prefix == len(self._assembly.tokens)
