"""Tables and plots of docs/experiments.md, from the kept results of full runs (bench/results).

A region of the page, from `<!-- result: NAME -->` to `<!-- end -->`, belongs to the experiment of
that name; everything else is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment
from dilaserve_bench.experiments.page import as_markdown
from dilaserve_bench.experiments.registry import EXPERIMENTS, load_experiment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
REGION = re.compile(r"<!-- result: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
NOT_YET = "*No full run is kept.*"


def filled_in(page: str) -> str:
    """The page with every region as its result says."""
    return REGION.sub(lambda match: _region(match[1]), page)


def kept(name: str) -> tuple[Experiment[Any], Document[Any]] | None:
    """The experiment and its result in the repository, if there is one."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    experiment = load_experiment(name)
    return experiment, experiment.decode(path.read_bytes())


def draw_all(folder: Path) -> None:
    """Every kept result that has a plot, as NAME.svg."""
    from dilaserve_bench.experiments.plots import save

    folder.mkdir(exist_ok=True)
    for name in EXPERIMENTS:
        found = kept(name)
        if found is not None and found[0].draw is not None:
            save(found[0].draw(found[1]), folder / f"{name}.svg")


def _region(name: str) -> str:
    found = kept(name)
    body = NOT_YET if found is None else _body(*found)
    return f"<!-- result: {name} -->\n\n{body}\n\n<!-- end -->"


def _body(experiment: Experiment[Any], document: Document[Any]) -> str:
    seeds = ", ".join(map(str, document.seeds))
    if len(document.seeds) > 2:
        seeds = f"{document.seeds[0]} to {document.seeds[-1]}"
    origin = (
        f"`{document.command}`; seeds {seeds}; n = {document.n:,}; code of {document.commit}; "
        f"[all numbers](../bench/results/{experiment.name}.json)"
    )
    plot = f"![{experiment.what}](plots/{experiment.name}.svg)"
    parts = [*([plot] if experiment.draw else []), as_markdown(experiment.page(document)), origin]
    return "\n\n".join(parts)
