"""The planner over the virtual cluster: GPUs, start-up times, and that no request is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilaserve.errors import DiLaServeError
from dilaserve_bench.twin import replanning
from dilaserve_bench.twin.configurations import Configuration, mix_at
from dilaserve_bench.twin.faults import Fault
from dilaserve_bench.twin.gpus import Gpus
from dilaserve_bench.twin.options import SimulateOptions, make_plan
from dilaserve_bench.twin.plot import save_plot
from dilaserve_bench.twin.replanning import Replanner, ReplanSpec
from dilaserve_bench.twin.report import report, report_run
from dilaserve_bench.twin.simulation import Run, Simulation
from dilaserve_bench.twin.starting import StartUp
from dilaserve_bench.twin.text import as_lines
from dilaserve_bench.twin.workload import Workload
from dilaserve_reconfigurator import stage2
from dilaserve_reconfigurator.monitor import Missing
from dilaserve_reconfigurator.monitor import Workload as Observed
from dilaserve_reconfigurator.planner import Cluster, PlannerOptions
from dilaserve_reconfigurator.record import Mix, PlanRecord
from dilaserve_reconfigurator.snapshot import Pace
from dilaserve_reconfigurator.solving import solve
from dilaserve_reconfigurator.stage2 import Slot

from .helpers import PROFILES, arrivals, infaas, scenario, spec

EVERY_S = 2.0
START_UP = StartUp(weights_gb=1.0, gb_per_s=4.0, other_s=0.25)
Counts = Mapping[int, int]


class Scripted:
    """Instead of a planner: wants one mix after the other, and then the last of them."""

    def __init__(self, *wanted: Counts) -> None:
        self._wanted = list(wanted)
        self.seen: list[Observed | Missing] = []
        self.changes = 0

    def plan(self, now: float, workload: Observed | Missing, cluster: Cluster) -> PlanRecord:
        self.seen.append(workload)
        wanted = self._wanted.pop(0) if len(self._wanted) > 1 else self._wanted[0]
        present, target = Mix(counts=cluster.counts((1, 2, 4))), Mix(counts={**ZERO, **wanted})
        is_change = present.counts != target.counts
        return PlanRecord(
            plan_id=f"plan-{len(self.seen)}",
            made_at_s=now,
            verdict="change" if is_change else "keep",
            reasons=["the script says so"],
            present=present,
            target=target,
            transition=_transition(cluster, target.counts) if is_change else None,
        )

    def changed(self, now: float, record: PlanRecord) -> None:
        self.changes += 1


ZERO = {1: 0, 2: 0, 4: 0}


def _transition(cluster: Cluster, counts: Counts) -> stage2.Transition:
    model = stage2.build_model(cluster.nodes, cluster.running, counts)
    assert solve(model, 10.0).has_solution
    return stage2.read_plan(model)


def planned(
    monkeypatch: pytest.MonkeyPatch,
    planner: Scripted,
    workload: Workload,
    *,
    mix: str = "4xtp1",
    start_up: StartUp = START_UP,
    faults: Sequence[Fault] = (),
) -> Run:
    monkeypatch.setattr(replanning, "Planner", lambda *_: planner)
    options = PlannerOptions(
        profiles=PROFILES, paces=(Pace(threshold=0.9, tokens_per_step=3.0),), degrees=(1, 2)
    )
    wanted = ReplanSpec(
        planner=options, nodes=(4,), every_s=EVERY_S, window_s=10.0, plan_s=0.1, start_up=start_up
    )
    each = scenario(
        spec(mix),
        policy=infaas(),
        faults=faults,
        replan=lambda degrees, timeline, hands: Replanner(
            wanted, degrees, timeline=timeline, hands=hands
        ),
    )
    return Simulation(each, workload, 0, timer=lambda: 0.0).run()


def load(seconds: float) -> Workload:
    return arrivals([0.1 * n for n in range(int(10 * seconds))])


def test_degrees_change_and_no_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Scripted({2: 2}, {1: 2, 2: 1}, {1: 4})
    run = planned(monkeypatch, planner, load(12.0))
    assert {served.outcome for served in run.served} == {"done"}
    assert planner.changes == 3
    assert [plan.target for plan in run.plans[:3]] == [{2: 2}, {1: 2, 2: 1}, {1: 4}]
    assert run.configurations[-1].serving == {1: 4}
    assert {2: 2} in [each.serving for each in run.configurations]
    assert report_run(run).n_rebuilds == 0, "requests leave at the ends of their blocks"


def test_no_gpu_is_used_twice_nor_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(monkeypatch, Scripted({2: 2}, {1: 4}), load(8.0))
    for each in run.configurations:
        serving = sum(degree * n for degree, n in each.serving.items())
        assert serving <= each.n_taken <= 4, each
    assert min(sum(each.serving.values()) for each in run.configurations[4:]) >= 1


def test_gpus_are_counted() -> None:
    gpus = Gpus((2, 4))
    gpus.take(0.0, "a", Slot(1, (0, 1)), serves=True)
    gpus.take(1.0, "b", Slot(1, (2, 3)))
    with pytest.raises(ValueError, match="GPU 1 of node 1"):
        gpus.take(1.0, "c", Slot(1, (1,)))
    with pytest.raises(ValueError, match="GPU 2 of node 0"):
        gpus.take(1.0, "c", Slot(0, (2,)))
    gpus.leave(2.0, "a")
    gpus.free(3.0, "a")
    gpus.take(3.0, "c", Slot(1, (1,)), serves=True)
    assert [each.n_taken for each in gpus.course] == [2, 4, 4, 2, 3]
    assert gpus.course[-1] == Configuration(at_s=3.0, serving={1: 1}, n_taken=3)
    assert mix_at(gpus.course, 0.5) == {2: 1}


def test_an_instance_serves_when_its_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StartUp(weights_gb=16.0, gb_per_s=2.0, other_s=20.0).seconds == 28.0
    run = planned(monkeypatch, Scripted({2: 1, 1: 2}), load(6.0))
    taken = [each.at_s for each in run.configurations if each.n_taken == 4 and each.at_s > 0.0]
    up = next(each.at_s for each in run.configurations if 2 in each.serving)
    assert up - max(at for at in taken if at < up) == pytest.approx(START_UP.seconds)


def test_the_same_seed_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (
        report_run(planned(monkeypatch, Scripted({2: 2}, {1: 4}), load(6.0))) for _ in range(2)
    )
    assert first == again


def test_one_plan_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take longer than an interval: the next plan waits, and comes at once then."""
    slow = StartUp(weights_gb=0.0, gb_per_s=1.0, other_s=1.5)
    run = planned(monkeypatch, Scripted({2: 2}, {1: 4}), load(16.0), start_up=slow)
    assert {served.outcome for served in run.served} == {"done"}
    first, second = [plan.at_s for plan in run.plans if plan.verdict == "change"]
    there = next(each.at_s for each in run.configurations if each.serving == {2: 2})
    assert first == EVERY_S
    assert second == there > first + EVERY_S


def test_the_planner_sees_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Scripted({1: 4})
    planned(monkeypatch, planner, load(5.0))
    seen = planner.seen[-1]
    assert isinstance(seen, Observed)
    (only,) = seen.classes
    assert (only.n_prompt, only.n_output, only.slo_s) == (64, 64, 10.0)
    assert only.rate == pytest.approx(10.0, rel=0.2)


@pytest.mark.parametrize("at_s", [1.0, 2.2])
def test_an_instance_that_dies_is_planned_without(
    monkeypatch: pytest.MonkeyPatch, at_s: float
) -> None:
    """Before a plan, and while one is carried out."""
    dead = Fault(at_s=at_s, action="kill", instance=3)
    run = planned(monkeypatch, Scripted({2: 1, 1: 2}), load(10.0), faults=[dead])
    assert {served.outcome for served in run.served} == {"done"}
    assert run.configurations[-1].serving == {1: 2, 2: 1}
    assert max(each.n_taken for each in run.configurations) == 4


@pytest.mark.parametrize("at_s", [1.0, 2.2])
def test_an_instance_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch, at_s: float) -> None:
    """Whether nothing else is going on, or a plan is made just then that changes nothing."""
    dead = Fault(at_s=at_s, action="kill", instance=3)
    run = planned(monkeypatch, Scripted({1: 4}), load(10.0), faults=[dead])
    assert {served.outcome for served in run.served} == {"done"}
    after = [each for each in run.configurations if each.at_s >= at_s]
    assert [each.serving for each in after] == [{1: 3}, {1: 3}, {1: 4}]
    assert [each.n_taken for each in after] == [3, 4, 4]


MIXES = [{1: 4}, {1: 2, 2: 1}, {2: 2}, {1: 1, 2: 1}, {2: 1}, {1: 1}]
"""Of 4 GPUs, not all of which need be used."""


@settings(max_examples=12, deadline=None)
@given(
    wanted=st.lists(st.sampled_from(MIXES), min_size=1, max_size=4),
    deaths=st.dictionaries(st.integers(0, 3), st.floats(0.5, 8.0), max_size=2),
    other_s=st.floats(0.0, 3.0),
)
@example(wanted=[{1: 2, 2: 1}, {1: 4}], deaths={}, other_s=0.0)
def test_whatever_is_wanted_and_whoever_dies(
    wanted: list[Counts], deaths: dict[int, float], other_s: float
) -> None:
    """No GPU twice, none too many, no request lost."""
    faults = [Fault(at_s=at_s, action="kill", instance=number) for number, at_s in deaths.items()]
    start_up = StartUp(weights_gb=0.0, gb_per_s=1.0, other_s=other_s)
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = planned(monkeypatch, Scripted(*wanted), load(6.0), start_up=start_up, faults=faults)
    assert {served.outcome for served in run.served} == {"done"}
    assert all(each.n_taken <= 4 for each in run.configurations)
    for each in run.configurations:
        assert sum(degree * n for degree, n in each.serving.items()) <= each.n_taken


def small(**changes: object) -> SimulateOptions:
    values: dict[str, object] = {
        "instances": "2xtp4",
        "replan": True,
        "replan_every_s": 15.0,
        "rate": 0.9,
        "requests": 250,
        "slo_s": 12.5,
        "sizes": "sharegpt",
        "overhead": 1.6,
        **changes,
    }
    return SimulateOptions(**values)  # type: ignore[arg-type]


def test_the_real_planner_takes_low_degrees_under_load(tmp_path: Path) -> None:
    plan = make_plan(small(start_up="16/8+0"), {})
    run = Simulation(plan.scenario, plan.workloads(0), 0, timer=lambda: 0.0).run()
    assert {served.outcome for served in run.served} == {"done"}
    change = next(each for each in run.plans if each.verdict == "change")
    assert change.present == {4: 2}
    assert change.target == {1: 8}
    assert run.configurations[-1].serving.get(1, 0) >= 1
    whole = report({}, [report_run(run)])
    save_plot(whole, tmp_path / "page.svg")
    assert (tmp_path / "page.svg").read_text().startswith("<?xml")
    assert any("change" in line for line in as_lines(whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": "1x4"}, "have 4 GPUs"),
        ({"nodes": "four"}, "4x8"),
        ({"source": "model"}, "recorded steps"),
        ({"start_up": "16/0+20"}, "16/2"),
        ({"start_up": "soon"}, "16/2"),
        ({"replan_every_s": 0.0}, "replan-every"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DiLaServeError, match=message):
        make_plan(small(**changes), {})
