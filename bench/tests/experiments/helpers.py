"""A session of one's own, for experiments that are run without the command line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dilaserve_bench.experiments.experiment import Options, Session
from dilaserve_bench.experiments.ledger import Ledger
from dilaserve_bench.twin.runner import watching


@contextmanager
def session(path: Path, *, n_seeds: int = 2, **options: object) -> Iterator[Session]:
    """Keeps its points in `path`; quick unless told otherwise."""
    given = Options(**{"quick": True, **options})  # type: ignore[arg-type]
    with watching(Console(file=io.StringIO())) as watch:
        yield Session(
            given,
            n_seeds=n_seeds,
            ledger=Ledger(path),
            watch=watch,
            timer=lambda: 0.0,
            environ={},
        )
