"""Objectives in order, limits, outcomes by name, and the same answers from both solvers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import highspy
import pyomo.environ as pyo
import pytest

from dilaserve_reconfigurator import solving, stage1
from dilaserve_reconfigurator.solving import pick_solver, solve

from .builders import request_class, snapshot, speed


def knapsack(n: int = 3) -> pyo.ConcreteModel:
    """As much value as possible, then as few things: {5} rather than {2, 3} fill a sack of 5."""
    model = pyo.ConcreteModel()
    weights = [2, 3, 5][:n]
    model.take = pyo.Var(range(n), within=pyo.Binary)
    total = sum(w * model.take[i] for i, w in enumerate(weights))
    model.room = pyo.Constraint(expr=total <= 5)
    model.value = pyo.Objective(expr=total, sense=pyo.maximize)
    model.number = pyo.Objective(expr=sum(model.take[i] for i in range(n)), sense=pyo.minimize)
    return model


def test_later_objective_decides_among_the_best() -> None:
    model = knapsack()
    outcome = solve(model, 10.0, gap=0.0)
    assert outcome.status == "solved"
    assert [(o.name, o.value) for o in outcome.objectives] == [
        ("value", pytest.approx(5.0)),
        ("number", pytest.approx(1.0)),
    ]
    assert all(o.gap is not None and o.gap <= 1e-6 for o in outcome.objectives)
    assert model.take[2].value == pytest.approx(1.0)


def test_output_stays_the_process_own_while_it_solves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pyomo would take it away, with what other threads log meanwhile."""

    def streams() -> tuple[object, ...]:
        return sys.stdout, sys.stderr, os.fstat(1).st_ino, os.fstat(2).st_ino

    seen, run = [], highspy.Highs.run

    def look(solver: highspy.Highs) -> object:
        seen.append(streams())
        return run(solver)

    monkeypatch.setattr(highspy.Highs, "run", look)
    solve(knapsack(), 10.0)
    assert seen == [streams()] * 2
    assert capfd.readouterr() == ("", "")


def test_the_first_solver_of_a_process_prints_nothing() -> None:
    script = (
        "from dilaserve_reconfigurator.solving import solve\n"
        "import pyomo.environ as pyo\n"
        "model = pyo.ConcreteModel()\n"
        "model.x = pyo.Var(within=pyo.Binary)\n"
        "model.most = pyo.Objective(expr=model.x, sense=pyo.maximize)\n"
        "assert solve(model, 10.0).objectives[0].value == 1.0\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")


def test_infeasible_is_named() -> None:
    model = knapsack()
    model.more = pyo.Constraint(expr=model.take[2] + model.take[1] == 2)
    outcome = solve(model, 10.0)
    assert (outcome.status, outcome.objectives) == ("infeasible", [])
    assert not outcome.has_solution


def hard_model() -> pyo.ConcreteModel:
    """Ten classes on three degrees: takes HiGHS far more than a millisecond."""
    classes = [request_class(32 * k, 32 * k, slo_s=0.9 * k, rate=0.5) for k in range(1, 11)]
    sizes = [64 * k for k in range(1, 13)]
    speeds = [
        speed(d, {b: (5 + b / 40 / d) / 1e3 for b in sizes}, {b: (4 + b / 50) / 1e3 for b in sizes})
        for d in (1, 2, 4)
    ]
    return stage1.build_model(snapshot(classes, speeds, nodes=(4, 4, 4)))


def test_no_time_and_no_incumbent_is_named() -> None:
    outcome = solve(hard_model(), 1e-4)
    assert outcome.status == "no_incumbent"
    assert not outcome.has_solution


def test_time_limit_leaves_the_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first objective is solved, and the time runs out in the second."""
    run = solving._run
    limits = iter([30.0, 1e-4])

    def out_of_time(model: object, objective: object, _: float, *rest: object) -> object:
        return run(model, objective, next(limits), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(solving, "_run", out_of_time)
    model = hard_model()
    outcome = solve(model, 30.0)
    assert outcome.status == "time_limit"
    assert outcome.has_solution
    assert outcome.objectives[0].name == "mean_threshold"
    assert stage1.read_plan(model).mean_threshold == pytest.approx(outcome.objectives[0].value)


def test_highs_is_taken_when_asked_for() -> None:
    assert pick_solver("highs", knapsack()) == "highs"


@pytest.mark.parametrize("build", [knapsack, hard_model])
def test_gurobi_agrees(build: Callable[[], pyo.ConcreteModel]) -> None:
    pytest.importorskip("gurobipy")
    model = build()
    if pick_solver("gurobi", model) != "gurobi":
        pytest.skip("Gurobi has no licence here")
    theirs = solve(model, 60.0, solver="gurobi")
    ours = solve(build(), 60.0)
    assert theirs.status == ours.status == "solved"
    for mine, yours in zip(ours.objectives, theirs.objectives, strict=True):
        assert mine.value == pytest.approx(yours.value, rel=0.02)


def test_gurobi_is_left_alone_where_its_licence_ends() -> None:
    pytest.importorskip("gurobipy")
    model = knapsack()
    model.many = pyo.Var(range(2001))
    model.all = pyo.Constraint(expr=sum(model.many[i] for i in range(2001)) == 0)
    limited = solving.SolverFactory("gurobi_direct").available()
    if limited != solving.Availability.LimitedLicense:
        pytest.skip("Gurobi has a full licence here, or none")
    assert pick_solver("gurobi", model) == "highs"
