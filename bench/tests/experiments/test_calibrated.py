"""The twin's baselines attain what was published, as far as two seeds can tell: nothing may be
claimed against a weak baseline. The kept result over eight seeds is held to the same.

Single seeds spread by 25 points near the knee; the means of these two are within two points of
those of eight at every rate that is tried.
"""

from __future__ import annotations

import pytest

from dilaserve_bench.data import PublishedCurves, gsm8k_curves
from dilaserve_bench.experiments.fitting import FITTED_OVERHEAD, crossing
from dilaserve_bench.twin.options import SimulateOptions, make_plan
from dilaserve_bench.twin.report import report_run
from dilaserve_bench.twin.simulation import Simulation

SEEDS = (0, 1)
KNEE = (1.625, 1.687, 1.75)
CROSSED = 0.75


@pytest.fixture(scope="module")
def published() -> PublishedCurves:
    return gsm8k_curves()


def attainment(policy: str, rate: float) -> float:
    options = SimulateOptions(policy=policy, rate=rate, overhead=FITTED_OVERHEAD)
    plan = make_plan(options, {})
    runs = [
        Simulation(plan.scenario, plan.workloads(seed), seed, timer=lambda: 0.0).run()
        for seed in SEEDS
    ]
    return sum(report_run(run).attainment for run in runs) / len(runs)


def test_infaas_falls_below_three_quarters_where_it_was_seen_to(
    published: PublishedCurves,
) -> None:
    theirs = zip(published.rates, published.systems["infaas"].attainment_by_rate, strict=True)
    ours = crossing([(rate, attainment("infaas", rate)) for rate in KNEE], CROSSED)
    assert ours == pytest.approx(crossing(list(theirs), CROSSED), rel=0.04)


@pytest.mark.parametrize("rate", [1.75, 1.875])
def test_tediserve_attains_what_was_published(published: PublishedCurves, rate: float) -> None:
    theirs = published.systems["tediserve"].attainment_by_rate[published.rates.index(rate)]
    assert attainment("tediserve", rate) == pytest.approx(theirs, abs=0.08)
