"""A canvas of tokens as it is denoised, drawn as text: what is masked, what is new."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.text import Text

MASK = "░"
END = "·"
"""Stands for a special token, such as the EOS behind the answer."""
SPECIAL = re.compile(r"<\|?\w+\|?>")
WIDTH = 32


class Canvas:
    """Texts by position; it grows where an event tells of a position beyond its end."""

    def __init__(self, n_positions: int = 0) -> None:
        self.texts: list[str | None] = [None] * n_positions
        self.n_steps = 0
        self._new: frozenset[int] = frozenset()

    @property
    def n_tokens(self) -> int:
        """Positions that are no longer masked."""
        return sum(text is not None for text in self.texts)

    def apply(self, step: Mapping[str, Any]) -> None:
        """Take a `denoise.step` event."""
        positions, texts = step["positions"], step["texts"]
        self.texts += [None] * (max(positions, default=-1) + 1 - len(self.texts))
        for position, text in zip(positions, texts, strict=True):
            self.texts[position] = text
        self._new = frozenset(positions)
        self.n_steps = step["step"]

    def draw(self, *, show_new: bool = True) -> Text:
        """Lines of WIDTH tokens, what the last step brought in bold."""
        drawn = Text()
        for position, text in enumerate(self.texts):
            if position and position % WIDTH == 0:
                drawn.append("\n")
            if text is None:
                drawn.append(MASK, style="dim")
            else:
                new = show_new and position in self._new
                drawn.append(_visible(text), style="bold green" if new else "")
        return drawn


def _visible(text: str) -> str:
    """What would break the grid is shown by a sign."""
    return END if SPECIAL.fullmatch(text) else text.replace("\n", "⏎")
