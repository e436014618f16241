"""Plans as a whole: what they hold, and what follows from each outcome."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count
from math import ceil
from pathlib import Path

import msgspec
import pytest

from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_reconfigurator import planner as planning
from dilaserve_reconfigurator.explain import explain
from dilaserve_reconfigurator.monitor import Missing, Workload
from dilaserve_reconfigurator.planner import Cluster, Planner, PlannerOptions, place
from dilaserve_reconfigurator.record import PlanRecord, Plans
from dilaserve_reconfigurator.snapshot import PlanningError, RequestClass
from dilaserve_reconfigurator.solving import Outcome

from .builders import PACES, request_class

NODES = (4, 4)
PROFILES = ProfileSet(
    model="m",
    device="d",
    profiles=[
        LatencyProfile(
            tp_degree=degree,
            points=[Point(32, first_s), Point(1024, last_s)],
        )
        for degree, first_s, last_s in ((1, 0.02, 0.2), (2, 0.012, 0.12), (4, 0.008, 0.08))
    ],
)
"""TP-4 is two and a half times as fast as TP-1, on four times the GPUs."""


def planner(**changes: object) -> Planner:
    options = PlannerOptions(
        profiles=PROFILES, paces=PACES, degrees=(1, 2, 4), max_batch_tokens=1024
    )
    ids = count(1)
    return Planner(replace(options, **changes), lambda: f"p{next(ids)}")  # type: ignore[arg-type]


def workload(*classes: RequestClass) -> Workload:
    return Workload(classes=classes, seen_s=300.0, n_requests=1000)


def cluster(counts: dict[int, int]) -> Cluster:
    return Cluster(NODES, place(NODES, counts))


def light() -> Workload:
    return workload(request_class(64, 64, slo_s=5.0, rate=0.5))


def heavy() -> Workload:
    return workload(request_class(64, 64, slo_s=5.0, rate=30.0))


def test_light_load_goes_to_high_degrees() -> None:
    record = planner().plan(0.0, light(), cluster({1: 8}))
    assert record.verdict == "change"
    assert record.target.counts == {1: 0, 2: 0, 4: 2}
    assert record.transition is not None
    assert len(record.transition.terminate) == 8
    assert [slot.tp_degree for slot in record.transition.launch] == [4, 4]


def test_heavy_load_goes_to_low_degrees() -> None:
    record = planner().plan(0.0, heavy(), cluster({4: 2}))
    assert record.verdict == "change"
    assert record.target.counts == {1: 8, 2: 0, 4: 0}
    assert record.reasons[0].startswith("mean threshold 0.900 instead of 0.6")


def test_record_says_all_that_it_was_made_from() -> None:
    record = planner().plan(7.0, light(), cluster({1: 8}))
    assert (record.plan_id, record.made_at_s) == ("p1", 7.0)
    assert record.inputs is not None
    assert record.inputs.classes == list(light().classes)
    assert record.inputs.nodes == [4, 4]
    assert record.best is not None
    assert [o.name for o in record.best.objectives] == ["mean_threshold", "slo_share"]
    assert all(o.gap is not None and o.gap <= 0.01 for o in record.best.objectives)
    assert record.as_it_is is not None
    assert record.moves is not None
    assert record.present.mean_latency_s is not None
    assert record.target.mean_latency_s is not None
    assert record.target.mean_latency_s < record.present.mean_latency_s
    assert record.payback_s is not None


def test_record_survives_the_folder(tmp_path: Path) -> None:
    record = planner().plan(0.0, light(), cluster({1: 8}))
    plans = Plans(tmp_path / "plans")
    plans.save(record)
    assert plans.load("p1") == record
    with pytest.raises(PlanningError, match=r"there is no plan 'p2' .* the latest are: p1"):
        plans.load("p2")


def test_explanation_names_verdict_reasons_moves_and_solver() -> None:
    text = explain(planner().plan(0.0, light(), cluster({1: 8})))
    for part in (
        "p1: change",
        "of its SLO instead of",
        "present  8×TP-1: mean threshold 0.900",
        "target   2×TP-4",
        "launch   TP-4 on node 1, GPU 0, 1, 2, 3",
        "0.5/s of 64 + 64 tokens within 5 s",
        "solved by highs",
    ):
        assert part in text, text


def test_holds_without_data() -> None:
    record = planner().plan(0.0, Missing("nothing was heard"), cluster({1: 8}))
    assert (record.verdict, record.reasons) == ("hold", ["held: nothing was heard"])
    assert record.target == record.present
    assert "not evaluated" in explain(record)


def test_keeps_what_runs_when_there_is_no_load() -> None:
    record = planner().plan(0.0, workload(), cluster({4: 2}))
    assert (record.verdict, record.reasons) == ("keep", ["there is no load"])


def test_overload_goes_to_the_smallest_degree_alone() -> None:
    record = planner().plan(0.0, workload(request_class(rate=1e4)), cluster({4: 2}))
    assert record.best is not None
    assert record.best.status == "infeasible"
    assert record.target.counts == {1: 8, 2: 0, 4: 0}
    assert "8×TP-1 serves the most" in record.reasons[0]


def test_overload_that_is_kept_says_what_is_lacking() -> None:
    load = workload(request_class(64, 64, slo_s=5.0, rate=150.0))
    record = planner().plan(0.0, load, cluster({1: 8}))
    assert record.verdict == "keep"
    first, second = record.reasons
    assert first.startswith("no mix can serve this load within its SLOs; 8×TP-1 is kept")
    found = re.match(
        r"it lacks ([0-9.]+) instances of TP-1 \(work for ([0-9.]+), 8 there\)", second
    )
    assert found is not None, second
    assert float(found[2]) == pytest.approx(float(found[1]) + 8)
    assert "for 1.5 times the rates" in second
    n = ceil(float(found[2]))
    enough = planner().plan(0.0, load, Cluster((n,), place((n,), {1: n})))
    assert enough.as_it_is is not None
    assert enough.as_it_is.status == "solved", "with so many it does"
    fewer = planner().plan(0.0, load, Cluster((n - 1,), place((n - 1,), {1: n - 1})))
    assert fewer.as_it_is is not None
    assert fewer.as_it_is.status == "infeasible"


def test_class_that_no_mix_can_serve_in_time_leaves_the_others_their_plan() -> None:
    hopeless = request_class(64, 64, slo_s=0.01, rate=0.1)
    record = planner().plan(0.0, workload(*light().classes, hopeless), cluster({1: 8}))
    assert record.inputs is not None
    assert record.inputs.unreachable == [1]
    assert record.best is not None
    assert record.best.status == "solved"
    assert record.target.counts == {1: 0, 2: 0, 4: 2}


def test_degree_that_was_not_measured_has_two_remedies() -> None:
    with pytest.raises(
        PlanningError, match=r"no TP degree 8 and 16, only 1, 2, 4; plan with"
    ) as got:
        planner(degrees=(1, 2, 8, 16)).plan(0.0, light(), cluster({1: 8}))
    assert "--degrees 1,2, or" in str(got.value)
    assert "DILASERVE_TP_DEGREES=1,2)" in str(got.value)
    assert str(got.value).endswith("measure with `dilaserve profile --tp 8,16`")
    with pytest.raises(PlanningError, match=r"only 1, 2, 4; measure with .*--tp 8`"):
        planner(degrees=(8,)).plan(0.0, light(), cluster({1: 8}))


def test_holds_when_the_time_runs_out_before_anything_was_found() -> None:
    record = planner(budget_s=1e-6).plan(0.0, heavy(), cluster({4: 2}))
    assert record.verdict == "hold"
    assert record.target.counts == {1: 0, 2: 0, 4: 2}


def test_incumbent_at_the_time_limit_is_used_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = planning.solve

    def late(*arguments: object, **options: object) -> Outcome:
        outcome = solve(*arguments, **options)  # type: ignore[arg-type]
        return msgspec.structs.replace(outcome, status="time_limit")

    monkeypatch.setattr(planning, "solve", late)
    record = planner().plan(0.0, light(), cluster({1: 8}))
    assert record.verdict == "change"
    assert record.reasons[-1] == "the time ran out; this is the best found until then"


def test_change_is_not_undone_at_once() -> None:
    ours = planner()
    record = ours.plan(0.0, light(), cluster({1: 8}))
    ours.changed(0.0, record)
    assert record.payback_s is not None
    early = ours.plan(0.9 * record.payback_s, heavy(), cluster(record.target.counts))
    assert early.verdict == "keep"
    assert "it undoes a change" in early.reasons[-1]
    late = ours.plan(1.1 * record.payback_s, heavy(), cluster(record.target.counts))
    assert late.verdict == "change"


def test_more_classes_than_allowed_are_joined() -> None:
    many = workload(*(request_class(64 * k, 64, slo_s=5.0, rate=0.1) for k in range(1, 9)))
    record = planner(max_classes=3).plan(0.0, many, cluster({1: 8}))
    assert record.inputs is not None
    assert len(record.inputs.classes) == 3
    assert sum(each.rate for each in record.inputs.classes) == pytest.approx(0.8)


def test_records_are_json_of_plain_values() -> None:
    record = planner().plan(0.0, light(), cluster({1: 8}))
    assert msgspec.json.decode(msgspec.json.encode(record), type=PlanRecord) == record
