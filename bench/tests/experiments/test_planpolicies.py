"""Plan policies side by side."""

from __future__ import annotations

from pathlib import Path

from dilaserve_bench.experiments.page import as_text
from dilaserve_bench.experiments.planpolicies import EXPERIMENT, PLANS, RATES
from dilaserve_bench.experiments.registry import load_experiment
from dilaserve_gpu_worker.engine.plan_policy import PlanPolicyName

from .helpers import session


def test_it_is_known_by_name() -> None:
    assert load_experiment("planpolicies") is EXPERIMENT


def test_every_plan_policy_is_tried() -> None:
    names = {plan.get("plan_policy", "blockserve") for plan in PLANS.values()}
    assert names == set(PlanPolicyName.__args__)  # type: ignore[attr-defined]


def test_quick_run_has_a_row_for_each(tmp_path: Path) -> None:
    with session(tmp_path / "points", seeds=1, policies=("infaas",), rates=(1.0,)) as each:
        document = EXPERIMENT.run(each)
    assert [(row.n_prompt, row.plan_policy) for row in document.rows] == [
        (n_prompt, name) for n_prompt in RATES for name in PLANS
    ]
    rows = {row.plan_policy: row for row in document.rows if row.n_prompt == max(RATES)}
    assert rows["sangam, 512"].gap_ms < rows["blockserve"].gap_ms
    assert rows["static"].mean_s > rows["blockserve"].mean_s
    text = as_text(EXPERIMENT.page(document), is_quick=True, is_complete=True)
    assert "Prompts of 1,792 tokens" in text
