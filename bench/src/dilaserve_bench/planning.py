"""How long a plan takes: both stages with HiGHS on one thread, for ShareGPT's classes on H100s, in
seconds of one core.

`python -m dilaserve_bench.planning` prints a row for each size and load: the whole plan, that is
the best mix, the present one and the way from one to the other, with what building the programs
takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file, sharegpt_classes
from dilaserve_reconfigurator.monitor import Workload
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place
from dilaserve_reconfigurator.record import PlanRecord
from dilaserve_reconfigurator.snapshot import RequestClass
from dilaserve_reconfigurator.spare import only

__all__ = ["main", "measure"]

DEGREES = (1, 2, 4)
SLO_S = 12.5
N_CLASSES = 20
RATES_PER_GPU = (0.0625, 0.3, 0.6, 0.9, 1.2, 1.4, 1.75, 2.5)
"""From an almost idle cluster to one that cannot serve its load."""


def measure(nodes: tuple[int, ...], timer: Callable[[], float]) -> Iterator[dict[str, object]]:
    """A row for each load, from a cluster of TP-1 and from one of the largest instances."""
    options = PlannerOptions(
        profiles=load_profiles(data_file("h100_llada.json")),
        paces=load_paces(data_file("gsm8k_llada_steps.json")),
        degrees=DEGREES,
        max_classes=N_CLASSES,
    )
    for rate in RATES_PER_GPU:
        for degree in (DEGREES[0], DEGREES[-1]):
            cluster = Cluster(nodes, place(nodes, only(nodes, DEGREES, degree)))
            started = timer()
            record = Planner(options, lambda: "").plan(0.0, _load(rate * sum(nodes)), cluster)
            yield _row(sum(nodes), rate, record, timer() - started)


def _load(rate: float) -> Workload:
    classes = sharegpt_classes().classes
    total = sum(weight for _, _, weight in classes)
    return Workload(
        classes=tuple(
            RequestClass(n_prompt=p, n_output=o, slo_s=SLO_S, rate=rate * weight / total)
            for p, o, weight in classes
        ),
        seen_s=300.0,
        n_requests=0,
    )


def _row(n_gpus: int, rate: float, record: PlanRecord, seconds: float) -> dict[str, object]:
    outcomes = [each for each in (record.best, record.as_it_is, record.moves) if each is not None]
    gaps = [o.gap for each in outcomes for o in each.objectives if o.gap is not None]
    return {
        "gpus": n_gpus,
        "rate_per_gpu": rate,
        "verdict": record.verdict,
        "present": record.present.counts,
        "target": record.target.counts,
        "seconds": round(seconds, 3),
        "solving": [f"{each.status} {each.seconds:.2f} s" for each in outcomes],
        "largest_gap": round(max(gaps, default=0.0), 5),
    }


def main() -> None:
    """Print the rows, and the slowest plan of each size."""
    for nodes in ((4,) * 4, (8,) * 128):
        slowest = 0.0
        for row in measure(nodes, time.process_time):
            print(json.dumps(row))
            slowest = max(slowest, float(str(row["seconds"])))
        print(json.dumps({"gpus": sum(nodes), "slowest_s": slowest}))


if __name__ == "__main__":
    main()
