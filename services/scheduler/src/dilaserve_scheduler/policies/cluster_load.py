"""How much work there is, how much is coming, how much the cluster can do: the level of thresholds
that it can afford, by priority (Algorithm 2 in instance-seconds). Chooses nobody's instance.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.policy import Limit
from dilaserve_scheduler.policies.arrivals import Arrivals
from dilaserve_scheduler.policies.fastest import Fastest, tp_degree
from dilaserve_scheduler.policies.habits import Habits
from dilaserve_scheduler.policies.ledger import Course, Floats, Integers, Ledger
from dilaserve_scheduler.policies.level import Forecast, Queue, highest_level
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pricing import MANY, Batch, Pricing, Split
from dilaserve_scheduler.policies.token_load import supply_tokens_per_s

__all__ = ["ClusterLoad"]

UTILISATION = 0.97
"""Share of an instance's time that passes fill when there is enough to do."""
HOPELESS_FACTOR = 1.4
"""Once thresholds are at their lowest, a request that waits is given up when it needs its remaining
time over this. Those that would only just be late cost as much as those in time."""
SERVICE_SHARE = 0.25
"""Of a request's time in service that those behind it take from it: a half on average, less what
its deadline gains by lowering its own threshold."""
SURELY = 1.6
"""Who would be late even with so much fewer steps than predicted is given up in any case: two
deviations of the predictor's error."""
OVERLOAD_SLOS = 15.0
"""How much further ahead arrivals are reckoned with, in SLOs, for each instance-second that they
need at the lowest thresholds beyond each that there is. What is not saved while such an overload
lasts is never saved; a smaller one is met in time by lowering thresholds later."""
DEFAULT_CACHE_TOKENS = 32.0
MOST_TOGETHER = 4
"""Limits of rows that recompute together that are tried."""
LIMIT_GAIN = 0.99
"""A limit is set if steps take at most this share of what they take without."""
LIMIT_STEP = 0.1
"""Relative change from which on it is said anew."""
TOKENS = Split(row_s=0.0, token_s=1.0)
"""Work as the paper counts it."""


class ClusterLoad:
    """Levels by priority, as of the last `control`."""

    def __init__(
        self,
        ledger: Ledger,
        habits: Habits,
        pricing: Pricing,
        fastest: Fastest,
        options: PolicyOptions,
    ) -> None:
        self._ledger = ledger
        self._habits = habits
        self._pricing = pricing
        self._fastest = fastest
        self._options = options
        self._top = len(options.thresholds) - 1
        self._levels: dict[int, float] = {}
        self._lowest_level = float(self._top)
        self._arrivals: dict[int, Arrivals] = {}
        self._splits: dict[int, Split] = {}
        self._by_level: list[Split] = []
        """Of the reference degree, when all run at a candidate."""
        self._n_rows = 1
        """Of a full instance."""
        self._together: dict[int, int] = {}
        self._said: dict[int, int | None] = {}
        """Limits of recomputing rows that the instances of a degree know of."""
        self._pass_s = self._present_pass_s = 0.0
        """Of a full instance, and of one with an equal part of the requests that are there."""
        self.recompute_share = 0.1
        """Of the rows of recent passes."""
        self.n_cache = DEFAULT_CACHE_TOKENS
        """Tokens of a recent request's cache step."""
        self.n_hopeful = 0
        """Who wait and can be in time."""
        self.wait_s = 0.0
        """Until all work that is there is done."""

    # --- what is seen --------------------------------------------------------------------------

    def arrived(self, now: float, request: Request, n_cache: int, slo_s: float) -> None:
        """A request has come."""
        arrivals = self._arrivals.setdefault(request.priority, Arrivals())
        arrivals.observe(now, request, n_cache=n_cache, slo_s=slo_s)

    def observe_share(self, share: float, weight: float) -> None:
        """Share of a pass's rows that recomputed."""
        self.recompute_share += weight * (share - self.recompute_share)

    def token_s(self, degree: int) -> float:
        """Seconds that a token more adds to a pass."""
        split = self._splits.get(degree)
        if split is None:
            split = self._splits[degree] = self._pricing.split(degree, self._full_batch(degree, 1))
        return split.token_s

    def n_together(self, degree: int) -> int:
        """Most rows that are to recompute in one pass."""
        return self._together.get(degree, MANY)

    def limits(self) -> list[Limit]:
        """What has to be said anew to instances: the same in tokens."""
        n_full, found = self._n_full(), []
        for degree in self._fastest.degrees():
            n = self.n_together(degree)
            wanted = None if n >= MANY else math.ceil(n * n_full)
            if degree not in self._said or _differ(wanted, self._said[degree]):
                self._said[degree] = wanted
                found += [Limit(i, wanted) for i in self._told_otherwise(degree, wanted)]
        return found

    def joined(self, degree: int) -> None:
        """An instance that was told nothing yet."""
        self._said.pop(degree, None)

    def _told_otherwise(self, degree: int, wanted: int | None) -> list[Instance]:
        instances = self._fastest.instances.values()
        of_degree = [i for i in instances if tp_degree(i) == degree]
        return [i for i in of_degree if i.recompute_tokens != wanted]

    def service_s(self, course: Course) -> float:
        """Seconds from its placement to its last token, at its level."""
        return course.steps(self.cap(course)) * self._pass_s

    def least_service_s(self, course: Course) -> float:
        """The same at its lowest threshold in a full instance, of a request that has just come; 0
        before the first `control`."""
        if not self._by_level:
            return 0.0
        k, more = course.floor, course.recomputes * course.extra
        split = self._by_level[k] if self._options.instance_seconds else TOKENS
        steps = max(course.p50[k], course.recomputes, 1.0)
        work = steps * split.row_s + (steps * course.n_cache + more) * split.token_s
        return work * self._n_rows

    @property
    def is_free(self) -> bool:
        """Whether everybody may use the highest threshold."""
        return self._lowest_level == self._top and self._options.load_control

    @property
    def is_short(self) -> bool:
        """Whether thresholds are as low as load control can have them."""
        return self._lowest_level == 0.0 or not self._options.load_control

    def cap(self, course: Course) -> int:
        """Highest candidate of a request: its priority's level, rounded up for as many as the
        fraction says; never below its quality floor; the lowest for the hopeless (until they are
        placed)."""
        if course.is_hopeless:
            return course.floor
        level = self._lowest_level
        if len(self._levels) > 1:
            level = self._level(course.request.priority)
        whole = int(level)
        return max(whole + (course.spread < level - whole), course.floor)

    def _level(self, priority: int) -> float:
        return self._levels.get(priority, self._lowest_level)

    # --- control -------------------------------------------------------------------------------

    def control(self, now: float) -> list[Request]:
        """Find the levels anew. Gives those that wait and have become hopeless."""
        ledger = self._ledger
        ledger.refresh()
        slots = ledger.active()
        if not self._fastest.instances or not slots.size:
            return []
        self.n_cache = float(ledger.n_cache[slots].mean())
        self._price()
        slots = self._in_order(slots[~ledger.is_hopeless[slots]])
        newly = self._find_hopeless(now, slots)
        slots = slots[~ledger.is_hopeless[slots]]
        self.n_hopeful = int(np.count_nonzero(ledger.is_waiting[slots]))
        if self._options.load_control:
            self._find_levels(now, slots)
        return [course.request for course in newly]

    def _in_order(self, slots: Integers) -> Integers:
        """Those that run, then those that wait in the order of their line."""
        ledger = self._ledger
        waits = ledger.is_waiting[slots]
        waiting = slots[waits]
        order = np.lexsort((ledger.start_by[waiting], -ledger.priority[waiting]))
        return np.concatenate([slots[~waits], waiting[order]])

    def _price(self) -> None:
        """What rows and tokens cost at each degree while instances are full."""
        n_rows = self._n_rows = self._rows_per_pass()
        for degree in self._fastest.degrees():
            if self._options.limit_recomputes:
                self._together[degree] = self._best_together(degree, n_rows)
            self._splits[degree] = self._pricing.split(degree, self._full_batch(degree, n_rows))
        reference = self._reference()
        full = self._full_batch(reference, n_rows)
        self._by_level = [
            self._pricing.split(reference, replace(full, recompute_share=share))
            for share in self._shares()
        ]
        self._pass_s = self._pricing.mean_s(reference, full)
        rows = -(-len(self._ledger) // len(self._fastest.instances))
        now = replace(full, n_rows=min(rows, n_rows))
        self._present_pass_s = self._pricing.mean_s(reference, now)

    def _best_together(self, degree: int, n_rows: int) -> int:
        """How many rows may recompute in one pass so that a full instance is fastest: all, unless
        fewer are a real gain."""
        batch = self._full_batch(degree, n_rows)
        prices = {
            n: self._pricing.mean_s(degree, replace(batch, n_together=n))
            for n in (MANY, *range(1, min(MOST_TOGETHER, n_rows - 1) + 1))
        }
        best = min(prices, key=prices.__getitem__)
        return best if prices[best] <= LIMIT_GAIN * prices[MANY] else MANY

    def _shares(self) -> list[float]:
        """Of steps that recompute, by candidate, of the mean request that arrives."""
        steps, blocks = np.zeros(self._top + 1), 0.0
        for arrivals in self._arrivals.values():
            rate = arrivals.count
            output, _, _, n_blocks, _ = arrivals.mean()
            steps += rate * np.array(self._habits.steps(output, math.ceil(n_blocks)))
            blocks += rate * n_blocks
        shares: list[float] = (blocks / np.maximum(steps, 1e-9)).tolist()
        return shares

    def _find_hopeless(self, now: float, slots: Integers) -> list[Course]:
        """Who waits, and could not be in time at the lowest threshold if it were placed now: surely
        or, where lower thresholds help nobody any more, probably."""
        ledger = self._ledger
        slots = slots[ledger.is_waiting[slots]]
        if not self._options.give_up_hopeless:
            return []
        factor = HOPELESS_FACTOR if self.is_short else 1.0 / SURELY
        lowest = ledger.floor[slots]
        steps = np.take_along_axis(ledger.steps(slots), lowest[None, :], axis=0)[0]
        late = now + factor * steps * self._pass_s > ledger.deadline[slots]
        newly = [course for slot in slots[late] if (course := ledger.by_slot[slot]) is not None]
        ledger.give_up(newly)
        return newly

    def _find_levels(self, now: float, slots: Integers) -> None:
        """From the highest priority to the lowest: each gets the highest level that those above
        leave it while those below stay at the lowest threshold."""
        ledger = self._ledger
        work = self._work_s(slots)
        slack = np.where(ledger.is_waiting[slots], ledger.deadline[slots] - now, np.inf)
        capacity, reserve = self._capacity(), self._reserve_s()
        priority = ledger.priority[slots]
        classes = sorted(ledger.n_by_priority.keys() | self._arrivals.keys(), reverse=True)
        settled = np.repeat(work[:1], len(work), axis=0)
        levels: dict[int, float] = {}
        for each in classes:
            mine = priority == each
            np.copyto(settled, work, where=mine)
            forecast = self._forecast(now, each, levels)
            level = highest_level(
                Queue(settled, slack), forecast, capacity=capacity, reserve_s=reserve
            )
            levels[each] = level
            np.copyto(settled, _at_level(work, level), where=mine)
        self._levels = levels
        self._lowest_level = min(levels.values(), default=float(self._top))
        self.wait_s = float(settled[0].sum()) / capacity

    def _work_s(self, slots: Integers) -> Floats:
        """(K × requests) instance-seconds of the reference degree that are left, floors kept."""
        ledger = self._ledger
        n_cache = ledger.n_cache[slots]
        more = ledger.recomputes[slots] * (ledger.n_full[slots] - n_cache)
        work = self._cost(ledger.steps(slots), n_cache, more)
        floor = ledger.floor[slots]
        bound = np.flatnonzero(floor)
        if bound.size:
            allowed = np.maximum(np.arange(len(work))[:, None], floor[bound])
            work[:, bound] = np.take_along_axis(work[:, bound], allowed, axis=0)
        return work

    def _cost(self, steps: Floats, n_cache: Floats | float, more: Floats | float) -> Floats:
        """Work of so many steps, by candidate first: `n_cache` tokens each, and `more` beside
        them."""
        splits = self._by_level if self._options.instance_seconds else [TOKENS] * (self._top + 1)
        shape = (-1,) + (1,) * (steps.ndim - 1)
        row_s = np.array([split.row_s for split in splits]).reshape(shape)
        token_s = np.array([split.token_s for split in splits]).reshape(shape)
        tokens = steps * n_cache
        tokens += more
        tokens *= token_s
        tokens += steps * row_s
        return tokens

    def _forecast(self, now: float, priority: int, settled: dict[int, float]) -> Forecast:
        """Arrivals of all priorities: those above as settled, those below at the lowest."""
        rate, slo_s, work = 0.0, math.inf, np.zeros(self._top + 1)
        for each, arrivals in self._arrivals.items():
            own = arrivals.rate(now)
            output, full, cache, blocks, slo = arrivals.mean()
            steps = np.array(self._habits.steps(output, math.ceil(blocks)))
            cost = self._cost(steps, cache, blocks * (full - cache))
            if each == priority:
                slo_s = slo
            else:
                level = settled.get(each, 0.0)
                cost = np.full(cost.size, float(_at_level(cost, level)))
            rate += own
            work += own * cost
        return Forecast(
            rate=rate,
            work_s=work / rate if rate else work,
            slack_s=slo_s,
            horizon_s=self._horizon_s(slo_s, float(work[0])) if slo_s < math.inf else 0.0,
        )

    def _horizon_s(self, slo_s: float, lowest: float) -> float:
        """How far ahead arrivals are reckoned with that need so many instance-seconds a second at
        the lowest thresholds."""
        if not self._options.forecast:
            return 0.0
        beyond = max(lowest / self._capacity() - 1.0, 0.0)
        return (self._options.horizon_slos + OVERLOAD_SLOS * beyond) * slo_s

    def _capacity(self) -> float:
        """Instance-seconds of the reference degree a second: a faster degree counts for more."""
        if not self._options.instance_seconds:
            instances = self._fastest.instances.values()
            return sum(supply_tokens_per_s(i, self._pricing) for i in instances)
        reference = self._mean_cost_s(self._reference())
        return UTILISATION * sum(
            n * reference / self._mean_cost_s(degree)
            for degree, n in self._fastest.n_by_degree.items()
            if n
        )

    def _mean_cost_s(self, degree: int) -> float:
        """Instance-seconds of the typical row."""
        split, share = self._splits[degree], self.recompute_share
        n_row = self.n_cache + share * (self._n_full() - self.n_cache)
        return split.row_s + n_row * split.token_s

    def _reserve_s(self) -> Floats:
        """What those behind it cost the mean arrival, by candidate."""
        total, n = np.zeros(self._top + 1), 0.0
        for arrivals in self._arrivals.values():
            output, _, _, blocks, _ = arrivals.mean()
            total += np.array(self._habits.steps(output, math.ceil(blocks)))
            n += 1.0
        result: Floats = SERVICE_SHARE * self._present_pass_s * total / max(n, 1.0)
        return result

    def _reference(self) -> int:
        return self._fastest.degrees()[-1]

    def _n_full(self) -> float:
        return self._ledger.mean_full() if len(self._ledger) else 2 * self.n_cache

    def _rows_per_pass(self) -> int:
        """Of a full instance."""
        instances = self._fastest.instances.values()
        budget = sum(i.token_budget for i in instances) / len(instances)
        return max(int(budget / self._n_full()), 1)

    def _full_batch(self, degree: int, n_rows: int) -> Batch:
        n_full = max(self._n_full(), self.n_cache)
        together = self.n_together(degree)
        return Batch(n_rows, n_full, self.n_cache, self.recompute_share, together)


def _differ(wanted: int | None, present: int | None) -> bool:
    if wanted is None or present is None:
        return wanted is not present
    return abs(wanted - present) > LIMIT_STEP * present


def _at_level(work: Floats, level: float) -> Floats:
    """(K × …) work by candidate → at a level between two of them."""
    low = int(level)
    high = min(low + 1, len(work) - 1)
    result: Floats = work[low] + (level - low) * (work[high] - work[low])
    return result
