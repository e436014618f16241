"""Takes a planner's place where nothing is known of the served model: the mix stays as it is."""

from __future__ import annotations

from collections.abc import Callable

from dilaserve_reconfigurator.monitor import Missing, Workload
from dilaserve_reconfigurator.planner import Cluster
from dilaserve_reconfigurator.record import Mix, PlanRecord

__all__ = ["HoldingPlanner"]

REASON = (
    "held: no profile of the served model, so the mix is kept; plans need DILASERVE_PROFILE "
    "(dilaserve profile) and DILASERVE_RECORDED_STEPS (dilaserve record)"
)


class HoldingPlanner:
    """See Planner."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id

    def changed(self, now: float, record: PlanRecord) -> None:
        """See Planner. Never so."""

    def plan(self, now: float, workload: Workload | Missing, cluster: Cluster) -> PlanRecord:
        """See Planner. Holds."""
        present = Mix(counts=cluster.counts(()))
        return PlanRecord(
            plan_id=self._new_id(),
            made_at_s=now,
            verdict="hold",
            reasons=[REASON],
            present=present,
            target=present,
        )
