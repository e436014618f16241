"""What an experiment is, and what it is given: options, seeds, progress, the points it has already.

    def run(session: Session) -> Document[Row]: ...
    EXPERIMENT = Experiment(name="mine", what="...", paper="Figure 1", row=Row, run=run, page=page)

One that can be interrupted asks `session.measured` for every point and passes over those that come
back as None.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.ledger import Ledger
from dilaserve_bench.experiments.page import Page
from dilaserve_bench.experiments.parallel import measure_all
from dilaserve_bench.twin.runner import Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Experiment", "Options", "Session"]

R = TypeVar("R")
T = TypeVar("T")
K = TypeVar("K")
QUICK_SEEDS = 2


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """As on the command line, which explains them. What is empty or None is the experiment's to
    choose."""

    quick: bool = False
    jobs: int = 1
    """Processes; results do not depend on it."""
    seeds: int | None = None
    overhead: float | None = None
    policies: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()

    def given(self) -> dict[str, str]:
        """What the result depends on and is not as by default, but `quick`, as on the command
        line."""
        return {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name in ("seeds", "overhead", "policies", "rates")
            if (value := getattr(self, name)) not in ((), None)
        }


class Session:
    """One experiment under way."""

    def __init__(
        self,
        options: Options,
        *,
        n_seeds: int,
        ledger: Ledger,
        watch: Watch,
        timer: Callable[[], float],
        environ: Mapping[str, str],
    ) -> None:
        self.options = options
        self.watch = watch
        self.timer = timer
        """Seconds of the machine."""
        self.environ = environ
        self._n_seeds = n_seeds
        self._ledger = ledger

    @property
    def is_quick(self) -> bool:
        """Whether only the plumbing is tried."""
        return self.options.quick

    @property
    def seeds(self) -> list[int]:
        """From 0."""
        usual = min(QUICK_SEEDS, self._n_seeds) if self.is_quick else self._n_seeds
        return list(range(self.options.seeds or usual))

    def size(self, full: int, quick: int) -> int:
        """One of the two."""
        return quick if self.is_quick else full

    def measured(self, key: object, kind: type[T], measure: Callable[[], T | None]) -> T | None:
        """What was measured before under this key, else what `measure` gives now, which is kept
        at once unless it is None (interrupted). After an interruption nothing new is measured.
        `key` says all that the value depends on, but the code."""
        value = self._ledger.find(key, kind)
        if value is None and not self.watch.is_stopped:
            value = measure()
            if value is not None:
                self._ledger.keep(key, value)
        self.watch.reached()
        return value

    def measure_together(self, keys: Iterable[K], kind: type[T], measure: Callable[[K], T]) -> None:
        """With more than one job: measure all of these that are not kept, in processes of their
        own. `measured` finds them afterwards."""
        if self.options.jobs == 1:
            return
        missing = self._ledger.missing(keys, kind)
        self.watch.expect(len(missing))
        for key, value in measure_all(
            measure, missing, n_jobs=self.options.jobs, is_stopped=lambda: self.watch.is_stopped
        ):
            self._ledger.keep(key, value)
            self.watch.reached()

    def document(
        self,
        name: str,
        rows: Sequence[R],
        *,
        n: int,
        published: object = None,
        found: Mapping[str, Any] | None = None,
    ) -> Document[R]:
        """The document of these rows; `published` is a struct or plain data."""
        return Document(
            name=name,
            seeds=self.seeds,
            n=n,
            rows=list(rows),
            published=msgspec.to_builtins(published) if published is not None else {},
            found=dict(found or {}),
            is_quick=self.is_quick,
            is_complete=not self.watch.is_stopped,
        )


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[R]):
    """One entry of the registry."""

    name: str
    what: str
    """One line."""
    paper: str
    """The figure or table that it repeats; empty if it goes beyond."""
    row: type[R]
    run: Callable[[Session], Document[R]]
    page: Callable[[Document[R]], Page]
    draw: Callable[[Document[R]], Figure] | None = None
    takes: frozenset[str] = frozenset()
    """Which of the options overhead, policies and rates it knows; all know seeds."""
    n_seeds: int = 8

    def check(self, options: Options) -> None:
        """Raises DiLaServeError for an option that this experiment does not know."""
        for name, value in options.given().items():
            if name != "seeds" and name not in self.takes:
                knows = ", ".join(f"--{known}" for known in ["seeds", *sorted(self.takes)])
                raise DiLaServeError(
                    f"experiment {self.name} knows no --{name} {value}; it knows {knows}"
                )

    def command(self, options: Options) -> str:
        """The command line that repeats it."""
        words = ["dilaserve", "experiment", self.name, *["--quick"] * options.quick]
        for name, value in options.given().items():
            words += [f"--{name}", value]
        return shlex.join(words)

    def decode(self, data: bytes) -> Document[R]:
        """A document of this experiment from JSON. Raises msgspec.DecodeError."""
        kind: Any = Document[self.row]  # type: ignore[name-defined]
        document: Document[R] = msgspec.json.decode(data, type=kind)
        return document
