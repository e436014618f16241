"""Proteus as the paper adapts it (section 5.1): thresholds are the model's variants. Every now and
then it picks the mixture with the best accuracy whose capacity is above the arrival rate; each
arriving request gets a threshold of it and keeps that.

Placement is INFaaS's. Knows no deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

from dilaserve.messages import StepResult
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies.arrivals import Arrivals
from dilaserve_scheduler.policies.fastest import tp_degree
from dilaserve_scheduler.policies.habits import Habits
from dilaserve_scheduler.policies.infaas import Infaas
from dilaserve_scheduler.policies.kinds import cache_mode, cache_tokens
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pricing import Batch, Pricing

__all__ = ["Proteus", "best_mixture"]

PLAN_EVERY_S = 10.0


class Proteus(Infaas):
    """The third baseline. Capacities come from the profile and the one-shot step table."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._pricing = Pricing(options.profiles, options.overhead)
        self._habits = Habits(options.thresholds, options.steps_per_token)
        self._arrivals = Arrivals()
        self._live: dict[str, Instance] = {}
        self._fixed: dict[str, float] = {}
        self._mixture = [0.0] * (len(options.thresholds) - 1) + [1.0]
        self._given = [0.0] * len(options.thresholds)
        self._plan_at: float | None = None

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        """The one that was drawn for it when it came."""
        fixed = self._fixed.get(request.request_id)
        if fixed is None:
            fixed = self._fixed[request.request_id] = self._deal(now, request)
        return max(fixed, request.min_confidence or 0.0)

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> tuple[()]:
        """Learn what passes and steps are like."""
        self._pricing.observe(tp_degree(instance), result.n_tokens, result.latency_ms / 1000)
        for item in result.items:
            if item.request_id in self._fixed:
                self._habits.observe(item.request_id, item.threshold, item.n_new)
        return ()

    def wake_at(self) -> float | None:
        """Once an interval, as long as there is anybody."""
        return self._plan_at if self._fixed else None

    def tick(self, now: float) -> tuple[()]:
        """A new mixture for those that come from now on."""
        self._plan_at = now + PLAN_EVERY_S
        self._habits.learn()
        rate = self._arrivals.rate(now)
        if self._live and rate > 0:
            capacities = [len(self._live) / work_s for work_s in self._work_s()]
            self._mixture = best_mixture(self._options.accuracies(), capacities, rate)
        return ()

    def joined(self, now: float, instance: Instance) -> tuple[()]:
        """More capacity."""
        self._live[instance.instance_id] = instance
        return super().joined(now, instance)

    def left(self, now: float, instance: Instance) -> tuple[()]:
        """Less capacity."""
        self._live.pop(instance.instance_id, None)
        return super().left(now, instance)

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        """Forget it."""
        super().ended(now, request, finished=finished)
        self._habits.ended(request.request_id, finished=finished)
        self._fixed.pop(request.request_id, None)

    def _deal(self, now: float, request: Request) -> float:
        """The candidate that is most behind its share of the mixture."""
        mode = cache_mode(self._instances.first(request.model_id))
        n_cache = cache_tokens(request, mode)
        self._arrivals.observe(now, request, n_cache=n_cache, slo_s=0.0)
        if self._plan_at is None or self._plan_at < now - PLAN_EVERY_S:
            self._plan_at = now + PLAN_EVERY_S
        behind = [share + due for share, due in zip(self._mixture, self._given, strict=True)]
        chosen = max(range(len(behind)), key=behind.__getitem__)
        behind[chosen] -= 1.0
        self._given = behind
        return self._options.thresholds[chosen]

    def _work_s(self) -> list[float]:
        """Instance-seconds of the mean arrival by candidate, instances being full of its like."""
        output, n_full, n_cache, blocks, _ = self._arrivals.mean()
        budget = sum(i.token_budget for i in self._live.values()) / len(self._live)
        n_rows = max(int(budget / n_full), 1)
        degrees = [tp_degree(i) for i in self._live.values()]
        work = []
        for steps in self._habits.steps(output, math.ceil(blocks)):
            batch = Batch(n_rows, n_full, n_cache, min(blocks / steps, 1.0))
            speed = sum(1.0 / self._pricing.mean_s(d, batch) for d in degrees) / len(degrees)
            work.append(steps / (n_rows * speed))
        return work


def best_mixture(
    accuracies: Sequence[float], capacities: Sequence[float], rate: float
) -> list[float]:
    """Shares of the variants with the best mean accuracy whose capacity, 1 ÷ Σ share ÷ capacity,
    is at least `rate` (both requests a second). Two variants are enough for the best; of equal
    mixtures the one of higher variants. Out of reach: all to the variant with most capacity."""
    n = len(accuracies)
    budget = 1.0 / rate
    costs = [1.0 / capacity for capacity in capacities]
    best: tuple[float, float, list[float]] | None = None
    for low, high in combinations_with_replacement(range(n), 2):
        share = _share_of_higher(costs[low], costs[high], budget)
        if share is None:
            continue
        accuracy = (1.0 - share) * accuracies[low] + share * accuracies[high]
        rank = (1.0 - share) * low + share * high
        if best is None or (accuracy, rank) > best[:2]:
            shares = [0.0] * n
            shares[low] += 1.0 - share
            shares[high] += share
            best = accuracy, rank, shares
    if best is not None:
        return best[2]
    cheapest = min(range(n), key=costs.__getitem__)
    return [float(k == cheapest) for k in range(n)]


def _share_of_higher(low: float, high: float, budget: float) -> float | None:
    """The largest share of the higher variant within the budget; None if none fits."""
    if high <= budget:
        return 1.0
    if low > budget:
        return None
    return (budget - low) / (high - low)
