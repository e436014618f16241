"""How far a measurement is, on stderr: drawn between what is timed, never meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Watch", "watching"]


class Watch:
    """Counts the parts of a measurement."""

    def __init__(self, progress: Progress, n_parts: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=n_parts)

    def begins(self, what: str) -> None:
        """What the next parts are of; without a terminal, a line of its own."""
        self._progress.update(self._task, description=what, refresh=True)
        if not self._progress.console.is_terminal:
            self._progress.console.print(what, highlight=False)

    def reached(self) -> None:
        """A part is there."""
        self._progress.update(self._task, advance=1, refresh=True)


@contextmanager
def watching(console: Console, n_parts: int) -> Iterator[Watch]:
    """A bar, where the console is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,  # a thread that draws would be timed
        disable=not console.is_terminal,
    ) as progress:
        yield Watch(progress, n_parts)
