"""Runs a scenario under several seeds, shows how far it is, keeps what it has when interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.workload import Workloads

__all__ = ["Watch", "run_seeds", "watching"]


class Watch:
    """Shows progress, and passes on the wish to stop."""

    def __init__(self, progress: Progress) -> None:
        self.is_stopped = False
        """Whether the run under way is to be broken off, and no other to begin."""
        self._progress = progress
        self._overall: TaskID | None = None
        self._n_expected = 0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._progress.console.print(text, highlight=False)

    def expect(self, n_points: int) -> None:
        """So many more points are to come, each of which `reached` will tell of."""
        self._n_expected += n_points
        if self._overall is None:
            self._overall = self._progress.add_task("points", total=self._n_expected)
        self._progress.update(self._overall, total=self._n_expected)

    def reached(self) -> None:
        """One of the expected points is there."""
        if self._overall is not None:
            self._progress.advance(self._overall)

    @contextmanager
    def follow(self, simulation: Simulation, title: str) -> Iterator[Callable[[], bool]]:
        """Show this run whenever what is given is called; it says whether to break the run off."""
        clients = simulation.clients
        task = self._progress.add_task(title, total=len(clients.served))

        def look() -> bool:
            self._progress.update(task, completed=clients.n_ended)
            return self.is_stopped

        yield look
        self._progress.remove_task(task)


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """A watch with a progress bar, stopped by Ctrl-C; a second Ctrl-C ends the process as usual."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        watch = Watch(progress)

        def stop(*_: object) -> None:
            watch.is_stopped = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield watch
        finally:
            signal.signal(signal.SIGINT, before)


def run_seeds(
    scenario: Scenario,
    workloads: Workloads,
    seeds: Sequence[int],
    *,
    watch: Watch,
    timer: Callable[[], float],
    title: str = "simulate",
) -> Iterator[Run]:
    """One run per seed. Interrupted, it gives the run that was broken off, too, and ends."""
    for seed in seeds:
        if watch.is_stopped:
            return
        simulation = Simulation(scenario, workloads(seed), seed, timer=timer)
        with watch.follow(simulation, f"{title}, seed {seed}") as look:
            yield simulation.run(look)
