"""TeDiServe, the paper as printed, with the constants of its artifact (papers/algorithms.md).

Algorithm 1 chooses thresholds by deadline, Algorithm 2 caps them by the load in tokens, Algorithm 3
places on the fastest instance and moves at recompute steps. A baseline: kept as it is on purpose,
what is known to be better is in `dilaserve`. Beyond the paper only: an SLO per request, a floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dilaserve.messages import CacheMode, StepResult, StepsPredicted
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Decision, Overload, Policy, Retune
from dilaserve_scheduler.policies.asking import Asking
from dilaserve_scheduler.policies.backlog import Backlog
from dilaserve_scheduler.policies.fastest import Fastest, tp_degree
from dilaserve_scheduler.policies.habits import Habits
from dilaserve_scheduler.policies.kinds import cache_mode, steps_by_kind
from dilaserve_scheduler.policies.llumnix import faster_elsewhere
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pace import Pace
from dilaserve_scheduler.policies.pricing import Pricing
from dilaserve_scheduler.policies.token_load import TokenLoad, caps, supply_tokens_per_s

__all__ = ["Tediserve"]

HOPELESS_FACTOR = 0.7
"""Allowance for an error of 30 % in the predicted steps."""
LOAD_CONTROL_S = 1.0
"""Interval of Algorithm 2."""


@dataclass(slots=True, eq=False)
class _Plan:
    """What is decided about a request."""

    request: Request
    steps: list[float]
    """Predicted to be left, by candidate threshold."""
    cap: int
    """Index of the highest candidate that load control allows."""
    threshold: float | None = None
    is_dirty: bool = True
    seen_version: int = -1


class Tediserve(Policy):
    """The paper's policy. Thresholds are looked at again only where the artifact does: when the
    predictions of a request were refreshed, or the requests on its instance have changed."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self._thresholds = options.thresholds
        # The artifact plans with the profile alone, whatever the system loses beside it.
        self._pricing = Pricing(options.profiles, options.overhead)
        self._habits = Habits(options.thresholds, options.steps_per_token)
        self._asking = Asking(
            options.thresholds,
            options.refresh_tokens,
            as_predicted=options.refresh_as_predicted,
        )
        self._fastest = Fastest()
        self._pace = Pace()
        self._backlog = Backlog(self._fastest.all, self._pace, options.queue_limit)
        self._plans: dict[str, _Plan] = {}
        self._versions: Counter[str] = Counter()
        """Of the set of requests on an instance."""
        self._first_cap = len(options.thresholds) - 1
        self._control_at: float | None = None

    # --- Algorithm 3: placement and migration --------------------------------------------------

    def place(self, now: float, request: Request) -> Instance | None:
        """The instance with the shortest pass, priced as one over all full lengths."""
        return self._fastest.with_room(request, self._step_s)

    def block_ending(self, now: float, request: Request) -> Instance | None:
        """The least loaded instance, if its pass is strictly shorter."""
        return faster_elsewhere(request, self._fastest.all.first(request.model_id), self._pricing)

    def _step_s(self, instance: Instance, request: Request) -> float:
        return self._pricing.seconds(tp_degree(instance), instance.n_tokens + request.n_tokens)

    # --- Algorithm 1: thresholds ---------------------------------------------------------------

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        """The highest that the cap allows and the deadline can be met with."""
        plan = self._plan(now, request)
        if instance is None:
            return self._floored(request, self._thresholds[plan.cap])
        plan.threshold, plan.is_dirty = self._choose(now, plan, instance), False
        plan.seen_version = self._versions[instance.instance_id]
        return plan.threshold

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> Iterable[Decision]:
        """Age the predictions, ask for new ones, and look at thresholds that may have changed."""
        self._pricing.observe(tp_degree(instance), result.n_tokens, result.latency_ms / 1000)
        for item in result.items:
            plan = self._plans.get(item.request_id)
            if plan is not None:
                self._habits.observe(item.request_id, item.threshold, item.n_new)
                plan.steps = [steps - 1.0 for steps in plan.steps]
                if self._options.refresh_tokens:
                    self._asking.stepped(plan.request, item.confidence)
        decisions: list[Decision] = [*self._asking.questions(now)]
        decisions += [r for request in requests if (r := self._retuned(now, request, instance))]
        return decisions

    def told(self, now: float, answer: object) -> tuple[()]:
        """Predictions have come; they count when the request runs next."""
        if isinstance(answer, StepsPredicted):
            self._asking.answered(answer)
            for each in answer.answers:
                plan = self._plans.get(each.request_id)
                if plan is not None:
                    ran_since = plan.request.step - each.step
                    plan.steps = [steps - ran_since for steps in each.p50]
                    plan.is_dirty = True
        return ()

    def _retuned(self, now: float, request: Request, instance: Instance) -> Retune | None:
        plan = self._plans.get(request.request_id)
        if plan is None or request.instance is not instance:
            return None
        version = self._versions[instance.instance_id]
        if not plan.is_dirty and plan.seen_version == version:
            return None
        plan.is_dirty, plan.seen_version = False, version
        plan.threshold = self._choose(now, plan, instance)
        return Retune(request, plan.threshold)

    def _choose(self, now: float, plan: _Plan, instance: Instance) -> float:
        request, lowest = plan.request, self._thresholds[0]
        chosen = lowest
        if not self._options.deadline_control:
            chosen = self._thresholds[plan.cap]
        elif not self._is_hopeless(now, plan):
            budget_s = self._budget_s(now, request)
            for k in range(plan.cap, -1, -1):
                if self._time_left_s(plan, instance, k) <= budget_s:
                    chosen = self._thresholds[k]
                    break
        return self._floored(request, chosen)

    def _floored(self, request: Request, threshold: float) -> float:
        return max(threshold, request.min_confidence or 0.0)

    def _time_left_s(self, plan: _Plan, instance: Instance, k: int) -> float:
        """Recompute steps as if all requests recomputed together, cache steps as if none did."""
        degree, mode = tp_degree(instance), cache_mode(instance)
        recomputes, caches = steps_by_kind(plan.request, plan.steps[k], mode)
        recompute_s = self._pricing.seconds(degree, instance.n_tokens)
        requests = instance.requests.values()
        if mode == "dual":
            n_cache = sum(r.block_length for r in requests)
        else:
            n_cache = sum(r.n_output for r in requests)
        return recomputes * recompute_s + caches * self._pricing.seconds(degree, n_cache)

    def _budget_s(self, now: float, request: Request) -> float:
        slo_s = request.slo_s if request.slo_s is not None else self._options.slo_s
        return self._options.margin * slo_s - (now - request.arrival_s)

    def _is_hopeless(self, now: float, plan: _Plan) -> bool:
        """Whether even at the lowest threshold, alone on the fastest degree, with every step a
        recompute step, it would be late."""
        request = plan.request
        degree = max(self._fastest.degrees(), default=1)
        step_s = self._pricing.seconds(degree, request.n_tokens)
        return self._budget_s(now, request) <= HOPELESS_FACTOR * plan.steps[0] * step_s

    # --- Algorithm 2: load control -------------------------------------------------------------

    def wake_at(self) -> float | None:
        """Once an interval, as long as there is anybody."""
        return self._control_at if self._plans else None

    def tick(self, now: float) -> tuple[()]:
        """New caps; a request takes notice of its own when its threshold is looked at next."""
        self._control_at = now + LOAD_CONTROL_S
        self._habits.learn()
        if not self._options.load_control:
            return ()
        plans = sorted(
            self._plans.values(), key=lambda p: (-p.request.priority, p.request.arrival_s)
        )
        mode = self._cache_mode()
        loads = [
            TokenLoad(p.request, p.steps, mode, is_hopeless=self._is_hopeless(now, p))
            for p in plans
        ]
        for plan, cap in zip(plans, caps(loads, self._supply_tokens()), strict=True):
            plan.cap = cap
        self._first_cap = min((plan.cap for plan in plans), default=self._first_cap)
        return ()

    def _supply_tokens(self) -> float:
        """What the cluster can compute within an SLO (of several, the mean)."""
        slos = [self._budget_s(p.request.arrival_s, p.request) for p in self._plans.values()]
        slo_s = sum(slos) / len(slos) / self._options.margin
        return slo_s * sum(
            supply_tokens_per_s(i, self._pricing) for i in self._fastest.instances.values()
        )

    def _cache_mode(self) -> CacheMode:
        return cache_mode(next(iter(self._fastest.instances.values()), None))

    # --- who there is --------------------------------------------------------------------------

    def _plan(self, now: float, request: Request) -> _Plan:
        plan = self._plans.get(request.request_id)
        if plan is None:
            left = request.n_output - request.n_unmasked
            steps = self._habits.steps(left, request.n_blocks - request.block)
            plan = self._plans[request.request_id] = _Plan(request, steps, self._first_cap)
            if self._control_at is None or self._control_at < now - LOAD_CONTROL_S:
                self._control_at = now
        return plan

    def predict_finish_s(self, now: float, request: Request) -> float:
        """Time left by Algorithm 1; while it waits, after those that wait before it."""
        instance = request.instance or request.target
        if instance is None:
            return self._backlog.drain_s(now, request) + self._backlog.time_left_s(request)
        plan = self._plan(now, request)
        chosen = [k for k, t in enumerate(self._thresholds) if t <= request.threshold] or [0]
        return self._time_left_s(plan, instance, chosen[-1])

    def refuse(self, now: float, request: Request) -> Overload | None:
        """Too many wait already."""
        return self._backlog.refuse(now, request)

    def parked(self, now: float, request: Request) -> None:
        """Count it."""
        self._backlog.parked(request)

    def unparked(self, now: float, request: Request) -> None:
        """Count it no more."""
        self._backlog.unparked(request)

    def joined(self, now: float, instance: Instance) -> tuple[()]:
        """Take it into the choice."""
        self._fastest.add(instance)
        return ()

    def left(self, now: float, instance: Instance) -> tuple[()]:
        """Take it out of the choice."""
        self._fastest.remove(instance)
        self._versions.pop(instance.instance_id, None)
        return ()

    def load_changed(self, now: float, instance: Instance) -> None:
        """Its requests are to look at their thresholds again."""
        self._fastest.update(instance)
        self._versions[instance.instance_id] += 1

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        """Learn the pace, and forget it."""
        if finished:
            self._pace.finished(now, request)
        self._habits.ended(request.request_id, finished=finished)
        self._plans.pop(request.request_id, None)
        self._asking.forget(request)


def _order(plan: _Plan) -> tuple[float, ...]:
    return (-plan.request.priority, plan.request.arrival_s)
