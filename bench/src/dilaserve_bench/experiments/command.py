"""`dilaserve experiment`: the paper's figures and tables, and ours, by name."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from dilaserve.addresses import stack_home
from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Options, Session
from dilaserve_bench.experiments.ledger import Ledger, code_fingerprint
from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.registry import EXPERIMENTS, load_experiment
from dilaserve_bench.experiments.results import as_json, check_target, commit_of, write_result
from dilaserve_bench.twin.checks import LARGEST_OVERHEAD
from dilaserve_bench.twin.runner import watching

LIST = "list"
PLOTS = (".svg", ".png", ".pdf")
SOURCES = Path(__file__).parents[4]
"""In a checkout, its root: what runs comes from all its distributions."""

Name = Annotated[str, typer.Argument(help="Which one; list names them all.")]
Quick = Annotated[bool, typer.Option("--quick", help="Try the plumbing; shows nothing.")]
Jobs = Annotated[
    int, typer.Option(min=1, help="Processes that measure at a time, where points are of one kind.")
]
Seeds = Annotated[int | None, typer.Option(min=1, help="How many; default: the experiment's.")]
Overhead = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=LARGEST_OVERHEAD,
        help="Factor on the profiled seconds; default: fitted.",
    ),
]
Policies = Annotated[str, typer.Option(help="Separated by commas; fixed-0.7 is a threshold.")]
Rates = Annotated[str, typer.Option(help="Arrivals a second and GPU, separated by commas.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Out = Annotated[Path | None, typer.Option(help="Keep the result in this file, as JSON.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw it into this file (.svg, .png, .pdf) or folder.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure anew what an earlier run has measured.")
]


def experiment(
    name: Name,
    quick: Quick = False,
    jobs: Jobs = 1,
    seeds: Seeds = None,
    overhead: Overhead = None,
    policies: Policies = "",
    rates: Rates = "",
    as_json: AsJson = False,
    out: Out = None,
    plot: Plot = None,
    fresh: Fresh = False,
) -> None:
    """Repeat a figure or table of the paper, or one of ours; Ctrl-C keeps what there is.

    Points that were measured are kept in DILASERVE_HOME/experiments, and are not measured again
    while the code stays the same.
    """
    if name == LIST:
        return _list(as_json=as_json)
    options = Options(
        quick=quick, jobs=jobs, seeds=seeds, overhead=overhead,
        policies=tuple(filter(None, policies.split(","))), rates=_numbers(rates),
    )  # fmt: skip
    chosen = load_experiment(name)
    chosen.check(options)
    if out is not None:
        check_target(out, is_quick=quick)
    if plot is not None:
        _check_plot(chosen, plot)
    _show(chosen, _run(chosen, options, os.environ, is_fresh=fresh), as_json, out, plot)
    return None


def _run(
    chosen: Experiment[Any], options: Options, environ: Mapping[str, str], *, is_fresh: bool
) -> Document[Any]:
    folder = stack_home(environ) / "experiments"
    ledger = Ledger(folder / f"points-{code_fingerprint()}.jsonl", is_fresh=is_fresh)
    with watching(Console(stderr=True)) as watch:
        session = Session(
            options,
            n_seeds=chosen.n_seeds,
            ledger=ledger,
            watch=watch,
            timer=time.perf_counter,
            environ=environ,
        )
        document = chosen.run(session)
    return msgspec.structs.replace(
        document, command=chosen.command(options), commit=commit_of(SOURCES)
    )


def _show(
    chosen: Experiment[Any],
    document: Document[Any],
    is_json: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    if is_json:
        typer.echo(as_json(document))
    else:
        page = chosen.page(document)
        typer.echo(as_text(page, is_quick=document.is_quick, is_complete=document.is_complete))
    if out is not None and not write_result(document, out):
        typer.echo(f"interrupted: the full result in {out} was left as it was", err=True)
    if plot is not None:
        _draw(chosen, document, plot)


def _check_plot(chosen: Experiment[Any], path: Path) -> None:
    if chosen.draw is None:
        raise DiLaServeError(f"experiment {chosen.name} has no plot; leave out --plot")
    if not path.is_dir() and (path.suffix not in PLOTS or not path.absolute().parent.is_dir()):
        raise DiLaServeError(
            f"plot {path} cannot be written; give a folder that exists, or a file in one that "
            f"ends in {', '.join(PLOTS)}"
        )


def _draw(chosen: Experiment[Any], document: Document[Any], path: Path) -> None:
    assert chosen.draw is not None
    from dilaserve_bench.experiments.plots import save

    save(chosen.draw(document), path / f"{chosen.name}.svg" if path.is_dir() else path)


def _list(*, as_json: bool) -> None:
    entries = [(name, load_experiment(name)) for name in EXPERIMENTS]
    if as_json:
        listed = [{"name": name, "what": e.what, "paper": e.paper} for name, e in entries]
        typer.echo(msgspec.json.encode(listed).decode())
        return
    for name, e in entries:
        typer.echo(f"{name:<14}{e.paper:<17}{e.what}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise DiLaServeError(
            f"--rates {text!r} are no numbers above 0; write for example 1.75,1.875"
        )
    return numbers
