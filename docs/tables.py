"""Markdown tables and mermaid diagrams from plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; bars and line breaks in cells are made harmless."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def code(text: object) -> str:
    """Inline code; empty for an empty text."""
    return f"`{text}`" if str(text) else ""


def first_line(docstring: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((docstring or "").strip().partition("\n\n")[0].split())


def mermaid(transitions: Mapping[tuple[State, Event], State], *, start: State) -> str:
    """A state diagram; events between the same two states share an arrow."""
    ends = set(transitions.values()) - {state for state, _ in transitions}
    arrows: dict[tuple[State, State], list[Event]] = {}
    for (state, event), after in transitions.items():
        arrows.setdefault((state, after), []).append(event)
    return "\n".join(
        [
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {start}",
            *(f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()),
            *(f"    {end} --> [*]" for end in sorted(ends)),
            "```",
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
