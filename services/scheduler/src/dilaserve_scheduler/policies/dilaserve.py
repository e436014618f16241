"""DiLaServe's own policy: the paper's three algorithms, acting before the slack is gone.

Load is measured in instance-seconds of the batches that will really run; the level of thresholds
that the cluster can afford, with the arrivals to come, holds from the next step on; deadlines are
checked at every step against an upper quantile. What each difference buys: docs/decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dilaserve.messages import StepAnswer, StepResult, StepsPredicted
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import (
    Decision,
    Overload,
    Policy,
    Requeue,
    Retune,
    Shelve,
)
from dilaserve_scheduler.policies.asking import Asking
from dilaserve_scheduler.policies.backlog import Backlog
from dilaserve_scheduler.policies.cluster_load import SURELY, ClusterLoad
from dilaserve_scheduler.policies.fastest import Fastest, tp_degree
from dilaserve_scheduler.policies.habits import Habits
from dilaserve_scheduler.policies.kinds import cache_mode, cache_tokens
from dilaserve_scheduler.policies.ledger import Course, Ledger
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pace import Pace
from dilaserve_scheduler.policies.pricing import Batch, Pricing

__all__ = ["Dilaserve"]

CONTROL_S = 0.25
"""Interval of load control."""
MIGRATION_GAIN = 0.9
"""A request moves if its steps take at most this share of what they take where it is."""
RISK = 1.2
"""Upper quantile of the remaining steps over their median while there is no predictor's."""
RAISE_AT = 0.95
"""A request goes back to a higher threshold only if that needs at most this share of its budget."""
DELIVERY_SHARE = 0.1
"""Of its SLO, at most, that is kept free before a deadline for the delivery of the answer."""
SHARE_SMOOTHING = 0.02
"""Weight of a pass in the share of recompute rows."""


@dataclass(slots=True)  # one for each pass: frozen, it would take twice as long
class Tempo:
    """Seconds on one instance: of a step, of a recompute step beside that, and of each token that
    a recompute step has more, as far as a request has more of these than their mean share."""

    step_s: float
    recompute_s: float
    token_s: float
    share: float

    def left_s(self, course: Course, steps: float) -> float:
        """Until a request has run so many steps."""
        more = (course.recomputes - self.share * steps) * course.extra
        return steps * self.step_s + course.recomputes * self.recompute_s + more * self.token_s


class Dilaserve(Policy):
    """Composes: ledger (who there is), pricing (what a step costs), cluster load (Algorithm 2)."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self._thresholds = np.array(options.thresholds)
        self._habits = Habits(
            options.thresholds, options.steps_per_token, is_guess=options.is_guess
        )
        self._pricing = Pricing(options.profiles, options.overhead)
        self._ledger = Ledger(len(options.thresholds))
        self._fastest = Fastest()
        self._load = ClusterLoad(self._ledger, self._habits, self._pricing, self._fastest, options)
        self._asking = Asking(
            options.thresholds,
            options.refresh_tokens,
            as_predicted=options.refresh_as_predicted,
        )
        self._pace = Pace()
        self._backlog = Backlog(self._fastest.all, self._pace, options.queue_limit)
        self._control_at: float | None = None

    # --- placement (Algorithm 3) ---------------------------------------------------------------

    def place(self, now: float, request: Request) -> Instance | None:
        """The instance whose mean pass is shortest with the request in it."""
        self._enter(now, request)
        return self._best(request)

    def block_ending(self, now: float, request: Request) -> Instance | None:
        """The fastest instance, for a real gain."""
        present = request.instance
        best = self._best(request)
        if present is None or best is None or best is present:
            return None
        now_s = self._pass_s(present)
        return best if self._step_s(best, request) <= MIGRATION_GAIN * now_s else None

    def _best(self, request: Request) -> Instance | None:
        if self._options.all_candidates:
            return self._fastest.with_room(request, self._step_s)
        return self._fastest.all.first_with_room(request)

    def rank(self, request: Request) -> tuple[float, ...]:
        """Priority, then the latest time to start; those that cannot be in time any more come
        last."""
        ledger, course = self._ledger, self._ledger.courses.get(request.request_id)
        if course is None:
            return (0.0, -request.priority, self._deadline(request))
        start_by = float(ledger.start_by[course.slot])
        return (float(course.is_hopeless), -request.priority, start_by)

    # --- thresholds (Algorithm 1) --------------------------------------------------------------

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        """The highest that the level allows and the deadline can be met with."""
        course = self._enter(now, request)
        (course.current,) = self._choose(now, [course], instance)
        return self._value(request, course.current)

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> Iterable[Decision]:
        """Learn from the pass; look at the thresholds of all that were in it."""
        self._learn(instance, result)
        courses = self._ledger.courses_of(requests)
        self._ledger.progressed(courses)
        self._asking.passed(requests, result.items)
        decisions: list[Decision] = [*self._asking.questions(now)]
        decisions += self._retuned(now, courses, instance)
        hopeless = self._find_hopeless(now, courses, instance)
        decisions += [Shelve(course.request) for course in hopeless]
        return decisions

    def told(self, now: float, answer: object) -> list[Retune]:
        """Predictions have come. They count from the next step on; of those who have not run yet,
        from the first."""
        if not isinstance(answer, StepsPredicted):
            return []
        self._asking.answered(answer)
        retuned: list[Retune] = []
        for each in answer.answers:
            course = self._ledger.courses.get(each.request_id)
            if course is None:
                continue
            self._predicted(course, each)
            if each.step == 0:
                # A few slow ones put the mean above the median, about half way to the quantile.
                mean = [(p50 + up) / 2 for p50, up in zip(each.p50, each.upper, strict=True)]
                self._habits.foretold(mean, course.request.n_output)
                if course.request.placed:
                    retuned += self._retuned(now, [course], course.request.instance)
        return retuned

    def _predicted(self, course: Course, answer: StepAnswer) -> None:
        request = course.request
        left = request.n_output - self._asking.n_unmasked(request.request_id)
        self._ledger.predict(course, answer.p50, answer.upper, left)

    def _retuned(
        self, now: float, courses: Sequence[Course], instance: Instance | None
    ) -> list[Retune]:
        """Those of an instance whose thresholds are others than they were."""
        retuned = []
        for course, k in zip(courses, self._choose(now, courses, instance), strict=True):
            if k != course.current:
                course.current = k
                retuned.append(Retune(course.request, self._value(course.request, k)))
        return retuned

    def _choose(
        self, now: float, courses: Sequence[Course], instance: Instance | None
    ) -> list[int]:
        """Candidate of each request: the highest within its cap at which it is in time, else the
        lowest."""
        cap_of = self._load.cap if self._options.caps_at_next_step else self._cap
        caps = [cap_of(course) for course in courses]
        if instance is None or not self._options.deadline_control:
            return caps
        tempo = self._tempo(instance)
        # While load control holds nobody back, whoever turns out slow has lower thresholds left.
        upper = self._options.risk_aware and not self._load.is_free
        margin, chosen = self._options.margin, []
        for course, cap in zip(courses, caps, strict=True):
            budget_s, k = margin * (course.deadline - now), cap
            while k > course.floor:
                left_s = tempo.left_s(course, course.steps(k, upper=upper))
                if left_s <= (RAISE_AT * budget_s if k > course.current else budget_s):
                    break
                k -= 1
            chosen.append(k)
        return chosen

    def _find_hopeless(
        self, now: float, courses: Sequence[Course], instance: Instance
    ) -> list[Course]:
        """Which of these will surely be late, have blocks left to start, and hold a place that one
        who waits could still use, while lower thresholds help nobody any more."""
        can_help = self._load.n_hopeful > 0 and self._load.is_short
        if not can_help or not self._options.give_up_hopeless:
            return []
        pass_s = self._pass_s(instance) / SURELY
        found = [
            course
            for course in courses
            if course.recomputes >= 1
            and not course.is_hopeless
            and now + course.steps(course.floor) * pass_s > course.deadline
        ]
        self._ledger.give_up(found)
        return found

    def _cap(self, course: Course) -> int:
        """As of the last refresh or change of the batch."""
        if course.is_stale:
            course.cap, course.is_stale = self._load.cap(course), False
        return course.cap

    def _tempo(self, instance: Instance) -> Tempo:
        """Every step takes the mean pass of the instance, corrected for the recompute steps that a
        request has more than others; or, as the paper has it, everybody recomputes together, or
        nobody does."""
        degree = tp_degree(instance)
        if self._options.mixed_batches:
            step_s = self._pricing.mean_s(degree, self._batch(instance))
            return Tempo(step_s, 0.0, self._load.token_s(degree), self._load.recompute_share)
        n_cached = round(len(instance.requests) * self._load.n_cache)
        cache_s = self._pricing.seconds(degree, n_cached, n_full=0)
        recompute_s = self._pricing.seconds(degree, instance.n_tokens, n_full=instance.n_tokens)
        return Tempo(cache_s, recompute_s - cache_s, 0.0, 0.0)

    # --- load control (Algorithm 2) ------------------------------------------------------------

    def wake_at(self) -> float | None:
        """Once an interval, as long as there is anybody."""
        return self._control_at if self._ledger.courses else None

    def tick(self, now: float) -> Iterable[Decision]:
        """A new level; whoever waits and cannot be in time any more lets the others pass."""
        self._control_at = now + CONTROL_S
        self._habits.learn()
        given_up = [Requeue(request) for request in self._load.control(now)]
        arrivals = self._asking.questions(now) if self._habits.is_new else []
        return [*given_up, *self._load.limits(), *arrivals]

    # --- what is known -------------------------------------------------------------------------

    def _enter(self, now: float, request: Request) -> Course:
        course = self._ledger.courses.get(request.request_id)
        if course is not None:
            return course
        if self._control_at is None or self._control_at < now - CONTROL_S:
            self._control_at = now
        mode = cache_mode(self._fastest.all.first(request.model_id))
        n_cache = cache_tokens(request, mode)
        left = request.n_output - request.n_unmasked
        steps = self._habits.steps(left, request.n_blocks - request.block)
        deadline = self._deadline(request)
        self._load.arrived(now, request, n_cache, deadline - request.arrival_s)
        course = self._ledger.add(
            request,
            steps=steps,
            upper=[RISK * each for each in steps],
            deadline=deadline,
            n_cache=n_cache,
            floor=self._floor(request),
        )
        self._ledger.start_by[course.slot] -= self._load.least_service_s(course)
        if self._habits.is_new and not request.step:
            self._asking.arrived(request)
        return course

    def _learn(self, instance: Instance, result: StepResult) -> None:
        n_recomputes, n_full = result.n_rebuilds, result.n_tokens
        for item in result.items:
            course = self._ledger.courses.get(item.request_id)
            if course is not None:
                self._habits.observe(item.request_id, item.threshold, item.n_new)
                n_full -= course.n_cache if item.kind == "cache" else 0
            n_recomputes += item.kind == "recompute"
        latency_s, n_full = result.latency_ms / 1000, max(n_full, 0)
        self._pricing.observe(tp_degree(instance), result.n_tokens, latency_s, n_full=n_full)
        n_rows = len(result.items) + result.n_rebuilds
        if n_rows:
            self._load.observe_share(n_recomputes / n_rows, SHARE_SMOOTHING)

    def _deadline(self, request: Request) -> float:
        """When its last step has to be done, so that the client has the answer in time."""
        slo_s = request.slo_s if request.slo_s is not None else self._options.slo_s
        delivery_s = min(self._options.delivery_s, DELIVERY_SHARE * slo_s)
        return request.arrival_s + slo_s - delivery_s

    def _floor(self, request: Request) -> int:
        least = request.min_confidence or 0.0
        allowed = np.flatnonzero(self._thresholds >= least - 1e-9)
        return int(allowed[0]) if allowed.size else len(self._thresholds) - 1

    def _value(self, request: Request, k: int) -> float:
        return max(self._options.thresholds[k], request.min_confidence or 0.0)

    def _batch(self, instance: Instance, more: Request | None = None) -> Batch:
        n_rows = len(instance.requests) + (more is not None)
        n_tokens = instance.n_tokens + (more.n_tokens if more is not None else 0)
        n_cache = self._load.n_cache
        n_full = max(n_tokens / max(n_rows, 1), n_cache)
        share, together = self._load.recompute_share, self._load.n_together(tp_degree(instance))
        return Batch(max(n_rows, 1), n_full, n_cache, share, together)

    def _pass_s(self, instance: Instance) -> float:
        return self._pricing.mean_s(tp_degree(instance), self._batch(instance))

    def _step_s(self, instance: Instance, request: Request) -> float:
        """Of the mean pass with the request in it."""
        return self._pricing.mean_s(tp_degree(instance), self._batch(instance, request))

    # --- who there is --------------------------------------------------------------------------

    def predict_finish_s(self, now: float, request: Request) -> float:
        """Time left at its threshold; while it waits, after the work ahead of it."""
        course = self._enter(now, request)
        instance = request.instance or request.target
        if instance is None:
            return self._load.wait_s + self._load.service_s(course)
        steps = course.steps(course.current, upper=self._options.risk_aware)
        return self._tempo(instance).left_s(course, steps)

    def refuse(self, now: float, request: Request) -> Overload | None:
        """Too many wait already."""
        return self._backlog.refuse(now, request)

    def parked(self, now: float, request: Request) -> None:
        """It waits."""
        self._backlog.parked(request)
        self._ledger.is_waiting[self._enter(now, request).slot] = True

    def unparked(self, now: float, request: Request) -> None:
        """It waits no more; if it was given up, its own threshold will say so again."""
        self._backlog.unparked(request)
        course = self._enter(now, request)
        self._ledger.is_waiting[course.slot] = False
        self._ledger.hope_again(course)

    def joined(self, now: float, instance: Instance) -> tuple[()]:
        """Take it into the choice."""
        self._fastest.add(instance)
        self._load.joined(tp_degree(instance))
        return ()

    def left(self, now: float, instance: Instance) -> tuple[()]:
        """Take it out of the choice."""
        self._fastest.remove(instance)
        return ()

    def load_changed(self, now: float, instance: Instance) -> None:
        """Sort it in anew."""
        self._fastest.update(instance)
        if not self._options.caps_at_next_step:
            known = [r for r in instance.requests.values() if r in self._ledger]
            for course in self._ledger.courses_of(known):
                course.is_stale = True

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        """Learn the pace, and forget it."""
        if finished:
            self._pace.finished(now, request)
        if finished and self._options.is_guess:
            self._habits.complete(
                request.request_id,
                request.threshold,
                n_steps=request.step,
                n_tokens=request.n_output,
            )
        self._habits.ended(request.request_id, finished=finished)
        self._ledger.remove(request)
        self._asking.forget(request)
