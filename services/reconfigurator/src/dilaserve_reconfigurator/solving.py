"""Solves a Pyomo model for its objectives in order of declaration, the first one first.

Knows solvers by name and nothing of planning. HiGHS is always there; Gurobi is taken where it is
asked for, installed, and its licence takes the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import highspy
import msgspec
import pyomo.environ as pyo
from pyomo.contrib.solver.common.base import Availability
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import TerminationCondition
from pyomo.contrib.solver.solvers import highs

from dilaserve_reconfigurator.snapshot import PlanningError

__all__ = ["GAP", "Objective", "Outcome", "SolverName", "Status", "pick_solver", "solve"]

GAP = 0.01
"""Relative distance to the bound at which a solution is good enough."""
KEEP = 1e-6
"""By how much a later objective may worsen an earlier one, relative to it (at least to 1)."""
FIRST_SHARE = 0.6
"""Of the time left that an objective may take while others follow."""
LICENCE_LIMIT = 2000
"""Variables, and constraints, that Gurobi takes with the licence that pip installs."""

SolverName = Literal["highs", "gurobi"]
Status = Literal["solved", "time_limit", "infeasible", "no_incumbent"]
"""`time_limit`: the best found until then is used; `no_incumbent`: nothing had been found."""

_PLUGINS: dict[SolverName, str] = {"highs": "highs", "gurobi": "gurobi_direct"}
_NO_SOLUTION = {
    TerminationCondition.provenInfeasible,
    TerminationCondition.infeasibleOrUnbounded,
    TerminationCondition.locallyInfeasible,
}


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """How far one objective got."""

    name: str
    value: float
    bound: float | None
    gap: float | None
    """Distance to the bound relative to the value."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a solver made of a model, whose variables hold the solution if there is one."""

    status: Status
    solver: SolverName
    seconds: float
    objectives: list[Objective]

    @property
    def has_solution(self) -> bool:
        """Whether the model's variables hold one."""
        return self.status in ("solved", "time_limit")


def solve(
    model: pyo.ConcreteModel,
    budget_s: float,
    *,
    solver: SolverName = "highs",
    gap: float = GAP,
    n_threads: int = 1,
) -> Outcome:
    """Optimise each objective in turn, keeping what those before it reached. Leaves the best
    solution in the model. Raises PlanningError when the solver fails for another reason than the
    model or the time."""
    objectives = list(_by_priority(model))
    reached: list[Objective] = []
    seconds, status = 0.0, "solved"
    for objective in objectives:
        left = max(budget_s - seconds, 0.01 * budget_s)
        is_last = objective is objectives[-1]
        result = _run(
            model, objective, left if is_last else FIRST_SHARE * left, solver, gap, n_threads
        )
        seconds += result.timing_info.wall_time
        found = _status(result)
        if found in ("infeasible", "no_incumbent"):
            if not reached:
                return Outcome(status=found, solver=solver, seconds=seconds, objectives=[])
            status = "time_limit"  # an earlier solution stands
            break
        result.solution_loader.load_vars()
        status = "time_limit" if found == "time_limit" else status
        reached.append(_report(objective, result))
        if not is_last:
            _keep(model, objective, reached[-1].value)
    return Outcome(
        status="time_limit" if status == "time_limit" else "solved",
        solver=solver,
        seconds=seconds,
        objectives=reached,
    )


def pick_solver(wanted: SolverName, model: pyo.ConcreteModel) -> SolverName:
    """The solver that was asked for, or HiGHS where it is not there or may not take the model."""
    if wanted == "highs":
        return "highs"
    available = SolverFactory(_PLUGINS[wanted]).available()
    if available == Availability.LimitedLicense:
        return wanted if max(model.nvariables(), model.nconstraints()) <= LICENCE_LIMIT else "highs"
    return wanted if available else "highs"


def _by_priority(model: pyo.ConcreteModel) -> Iterator[Any]:
    yield from model.component_objects(pyo.Objective, descend_into=False)


def _run(
    model: pyo.ConcreteModel,
    objective: Any,
    limit_s: float,
    solver: SolverName,
    gap: float,
    n_threads: int,
) -> Any:
    for each in _by_priority(model):
        each.deactivate()
    objective.activate()
    _leave_output_alone()
    interface = SolverFactory(_PLUGINS[solver])
    return interface.solve(
        model,
        time_limit=limit_s,
        rel_gap=gap,
        threads=n_threads,
        solver_options={"output_flag": False} if solver == "highs" else {},
        load_solutions=False,
        raise_exception_on_nonoptimal_result=False,
    )


def _leave_output_alone() -> None:
    """Around HiGHS, Pyomo takes standard output and error from the whole process, by threads that
    read a pipe: what other threads log meanwhile is lost, and they can deadlock (Pyomo's issues
    3084 and 3908). HiGHS is told to be silent, so there is nothing to catch."""
    highs.capture_output = lambda *_, **__: nullcontext()
    highspy.Highs = _Silent  # type: ignore[misc]  # Pyomo names it there


class _Silent(highspy.Highs):
    """Without the banner that the first solver of a process prints to standard output, where
    `dilaserve plan --json` has its records, before Pyomo can give it an option."""

    def enableCallbacks(self) -> None:  # noqa: N802
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _status(result: Any) -> Status:
    condition = result.termination_condition
    has_incumbent = result.incumbent_objective is not None
    if condition == TerminationCondition.convergenceCriteriaSatisfied and has_incumbent:
        return "solved"
    if condition in _NO_SOLUTION:
        return "infeasible"
    if condition in (TerminationCondition.maxTimeLimit, TerminationCondition.interrupted):
        return "time_limit" if has_incumbent else "no_incumbent"
    raise PlanningError(f"{result.solver_name} gave up: {condition.name}; take the other solver")


def _report(objective: Any, result: Any) -> Objective:
    value, bound = float(pyo.value(objective)), result.objective_bound
    if bound is None:
        return Objective(name=objective.local_name, value=value, bound=None, gap=None)
    gap = abs(bound - value) / max(abs(value), 1e-9)
    return Objective(name=objective.local_name, value=value, bound=float(bound), gap=gap)


def _keep(model: pyo.ConcreteModel, objective: Any, value: float) -> None:
    """Whatever is optimised next may not lose what this objective reached."""
    allowance = KEEP * max(abs(value), 1.0)
    if objective.sense == pyo.maximize:
        kept = pyo.Constraint(expr=objective.expr >= value - allowance)
    else:
        kept = pyo.Constraint(expr=objective.expr <= value + allowance)
    model.add_component(f"keep_{objective.local_name}", kept)
