"""From tokens to text that never changes again: incremental detokenising, and stop strings.

Knows no request and no stream; gives the same text however the tokens are cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no whole character (yet)."""

Decode = Callable[[Sequence[int]], str]
"""Ids → text, special tokens skipped."""


class Detokenizer:
    """Feeds on one token at a time; what it returns is final.

    Decoders treat a first token in their own way (a leading space, say), so each token is decoded
    together with those before it, back to the last but one place where text was given out. Text
    that ends within a character is held back.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._n_given = 0
        """Tokens of the window whose text was given out."""
        self._given = ""
        """Their text."""

    def push(self, token: int) -> str:
        """The text that `token`, no special one, completes; often empty."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """What is still held back, at the end: broken characters as U+FFFD."""
        if self._n_given == len(self._window):
            return ""
        return self._give_out(self._decode(self._window))

    def _give_out(self, text: str) -> str:
        """Text given out before stays, should the decoder think better of it."""
        fresh = text[len(self._given) :]
        self._window = self._window[self._n_given :]
        self._n_given = len(self._window)
        self._given = self._decode(self._window)
        return fresh


class StopFinder:
    """Cuts text at the stop string that is complete first, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is safe to give out; sets `found`, after which the rest is dropped."""
        if self.found:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        start = self._first_stop(buffer)
        if start is not None:
            self.found, self._held = True, ""
            return buffer[:start]
        n_held = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - n_held :]
        return buffer[: len(buffer) - n_held]

    def flush(self) -> str:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str) -> int | None:
        """Where the stop string begins that ends first; the longest of several."""
        found = [(buffer.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(ends)[1] if ends else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, less than all of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
