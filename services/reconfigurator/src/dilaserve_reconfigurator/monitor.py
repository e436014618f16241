"""The workload monitor: arrival rates by class over a sliding window (paper, 3.3).

Sans-IO: told of arrivals and of signs of life, by the live service and the twin alike. It knows
when it does not know: without signs of life, no arrivals mean nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from dilaserve_reconfigurator.snapshot import RequestClass

__all__ = ["BIN_TOKENS", "Missing", "Monitor", "Workload", "coarsen"]

BIN_TOKENS = 256
"""Width of the bins of prompt and output lengths."""
SLO_RATIO = 2**0.5
"""Width of the bins of SLOs."""
N_SLOTS = 60
"""Parts of the window, the oldest of which is forgotten as a whole."""
N_REMEMBERED = 20_000
"""Request ids kept, so that a submission that is sent again counts once."""

_Key = tuple[int, int, int]
"""Bins of prompt, output and SLO."""


@dataclass(slots=True)
class _Sums:
    n: int = 0
    n_prompt: int = 0
    n_output: int = 0
    slo_s: float = math.inf

    def add(self, other: _Sums) -> None:
        self.n += other.n
        self.n_prompt += other.n_prompt
        self.n_output += other.n_output
        self.slo_s = min(self.slo_s, other.slo_s)


@dataclass(slots=True)
class _Slot:
    number: int
    seen_s: float = 0.0
    classes: dict[_Key, _Sums] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """What arrived during the window."""

    classes: tuple[RequestClass, ...]
    """Lengths are the means of what arrived, rounded up; SLOs are the tightest of a bin."""
    seen_s: float
    """How much of the window was observed."""
    n_requests: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is nothing to plan with: whoever plans holds."""

    reason: str


class Monitor:
    """Counts what arrives. Times are seconds on one clock that never goes back.

    `gap_s` is the longest silence during which the monitor still counts as listening; `coverage`
    is the share of the window that must have been observed.
    """

    def __init__(
        self,
        *,
        window_s: float = 300.0,
        gap_s: float = 5.0,
        coverage: float = 0.2,
        slo_s: float = 30.0,
    ) -> None:
        self._slot_s = window_s / N_SLOTS
        self._gap_s = gap_s
        self._least_s = coverage * window_s
        self._slo_s = slo_s
        self._slots: deque[_Slot] = deque()
        self._heard_s: float | None = None
        self._ids: OrderedDict[str, None] = OrderedDict()

    def alive(self, now: float) -> None:
        """A sign of life of the cluster, such as a heartbeat: arrivals would have been heard."""
        slot = self._slot(now)
        if self._heard_s is not None and now - self._heard_s <= self._gap_s:
            slot.seen_s += now - self._heard_s
        self._heard_s = now

    def arrived(
        self, now: float, request_id: str, n_prompt: int, n_output: int, slo_s: float | None
    ) -> None:
        """A request was submitted, for the first time or again. Refused ones count: they are what
        the cluster should have been able to serve."""
        self.alive(now)
        if request_id in self._ids or n_output < 1:
            return
        self._ids[request_id] = None
        if len(self._ids) > N_REMEMBERED:
            self._ids.popitem(last=False)
        slo_s = slo_s if slo_s is not None and slo_s > 0 else self._slo_s
        key = _bin(n_prompt), _bin(n_output), round(math.log(slo_s, SLO_RATIO))
        one = _Sums(1, n_prompt, n_output, slo_s)
        self._slot(now).classes.setdefault(key, _Sums()).add(one)

    def workload(self, now: float) -> Workload | Missing:
        """The rates as of now, by class, the most frequent first."""
        self._forget(now)
        if self._heard_s is None or now - self._heard_s > self._gap_s:
            return Missing("nothing has been heard of the cluster lately")
        seen_s = sum(slot.seen_s for slot in self._slots)
        if seen_s < self._least_s:
            return Missing(f"only {seen_s:.0f} s of the window were observed")
        totals: dict[_Key, _Sums] = {}
        for slot in self._slots:
            for key, sums in slot.classes.items():
                totals.setdefault(key, _Sums()).add(sums)
        classes = [_class_of(sums, seen_s) for sums in totals.values()]
        return Workload(
            classes=tuple(sorted(classes, key=lambda each: -each.rate)),
            seen_s=seen_s,
            n_requests=sum(sums.n for sums in totals.values()),
        )

    def _slot(self, now: float) -> _Slot:
        number = int(now / self._slot_s)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
            self._forget(now)
        return self._slots[-1]

    def _forget(self, now: float) -> None:
        oldest = int(now / self._slot_s) - N_SLOTS
        while self._slots and self._slots[0].number <= oldest:
            self._slots.popleft()


def coarsen(classes: tuple[RequestClass, ...], n: int) -> tuple[RequestClass, ...]:
    """At most `n` classes: the one with the least work joins the one most like it, over and over.
    Rates add up, lengths are means, the tighter SLO holds."""
    left = list(classes)
    while len(left) > n:
        least = min(left, key=_work)
        left.remove(least)
        nearest = min(left, key=lambda each: _distance(each, least))
        left[left.index(nearest)] = _join(nearest, least)
    return tuple(sorted(left, key=lambda each: -each.rate))


def _bin(n_tokens: int) -> int:
    return -(-n_tokens // BIN_TOKENS)


def _class_of(sums: _Sums, seen_s: float) -> RequestClass:
    return RequestClass(
        n_prompt=math.ceil(sums.n_prompt / sums.n),
        n_output=math.ceil(sums.n_output / sums.n),
        slo_s=sums.slo_s,
        rate=sums.n / seen_s,
    )


def _work(each: RequestClass) -> float:
    return each.rate * each.n_full


def _distance(a: RequestClass, b: RequestClass) -> float:
    return (
        abs(math.log(a.n_full / b.n_full))
        + abs(math.log(a.n_output / b.n_output))
        + abs(math.log(a.slo_s / b.slo_s))
    )


def _join(a: RequestClass, b: RequestClass) -> RequestClass:
    rate = a.rate + b.rate
    return RequestClass(
        n_prompt=math.ceil((a.rate * a.n_prompt + b.rate * b.n_prompt) / rate),
        n_output=math.ceil((a.rate * a.n_output + b.rate * b.n_output) / rate),
        slo_s=min(a.slo_s, b.slo_s),
        rate=rate,
    )
