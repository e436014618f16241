"""A result for people: tables and sentences, as text for a terminal or as markdown for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Page", "Table", "as_markdown", "as_text", "interval", "number", "percent", "points"]

QUICK = "QUICK: this tries the plumbing and shows nothing"
INCOMPLETE = "INCOMPLETE: it was interrupted"


@dataclass(frozen=True)
class Table:
    """Cells are text already; an empty one says that there is nothing."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Page:
    """What a document says."""

    tables: Sequence[Table]
    notes: Sequence[str] = field(default=())
    """Sentences, each standing by itself."""


def as_text(page: Page, *, is_quick: bool, is_complete: bool) -> str:
    """Aligned columns."""
    warnings = [QUICK] * is_quick + [INCOMPLETE] * (not is_complete)
    parts = ["\n".join(warnings)] if warnings else []
    parts += ["\n".join(_titled(table)) for table in page.tables]
    if page.notes:
        parts.append("\n".join(page.notes))
    return "\n\n".join(parts)


def as_markdown(page: Page) -> str:
    """Markdown tables, their titles as bold lines, and the notes as a list."""
    parts = []
    for table in page.tables:
        lines = [f"**{table.title}**", ""] if table.title else []
        lines += [_line(table.head), _line(["---"] * len(table.head)), *map(_line, table.rows)]
        parts.append("\n".join(lines))
    if page.notes:
        parts.append("\n".join(f"- {note}" for note in page.notes))
    return "\n\n".join(parts)


def number(value: float | None, digits: int = 3) -> str:
    """Empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Of a share; empty for None."""
    return "" if value is None else f"{100 * value:.{digits}f} %"


def interval(value: float | None, ci95: float | None) -> str:
    """A share and half the width of its interval."""
    return number(value) + (f" ± {ci95:.3f}" if ci95 is not None and value is not None else "")


def points(ours: float | None, published: float | None) -> str:
    """How far a share is from the published one, in points; empty if there is none."""
    return "" if ours is None or published is None else f"{100 * (ours - published):+.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _titled(table: Table) -> list[str]:
    return [table.title, *_aligned(table)] if table.title else _aligned(table)


def _aligned(table: Table) -> list[str]:
    """The first column to the left, the others to the right."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
