"""One trial of a live stack: how much it takes, traces to fit the twin to, and a trace on each side
of the knee that is to be predicted."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from dilaserve.bus.nats import connect_nats
from dilaserve.supervisor.stack import Stack
from dilaserve_bench.live.cores import CoreMeter
from dilaserve_bench.live.load import Answer, drive
from dilaserve_bench.live.passes import SeenPass, watching_passes
from dilaserve_bench.twin.tiny import TinyProblems
from dilaserve_bench.twin.workload import Arrival, RequestClass, Workload, poisson

__all__ = ["SLO_S", "InterruptedTrialError", "Plan", "Trace", "Trial", "run_trial"]

SLO_S = 2.0
PATH = "/v1/completions"
BURST_RATE = 10_000.0
"""Arrivals a second that are as good as all at once."""
PAUSE_S = 3.0
LATE_S = SLO_S / 4
"""A generator that was later than this shows what else ran on the machine, not the stack: the trace
is driven again, with other arrivals."""
ATTEMPTS = 3


class InterruptedTrialError(Exception):
    """The trial was broken off between two traces."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests; rates as multiples of what the stack takes."""

    n_burst: int = 300
    n_fit: int = 200
    """At each of the loads, each time."""
    n_test: int = 1050
    fit_loads: tuple[float, ...] = (0.5, 1.5)
    """All of them before, between and after the tests, since machines have moods."""
    test_loads: tuple[float, ...] = (0.6, 1.5)
    """The first leaves every request its full threshold also where the stack takes more by lowered
    ones: so close below that the median would hang on a hundredth of the load."""
    seed: int = 0


Role = Literal["warm-up", "burst", "fit", "test", "disturbed"]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals at one rate, and what the clients and the bus saw of them."""

    role: Role
    rate: float
    start_s: float
    """When it began, from the begin of the first."""
    workload: list[Arrival]
    """Times from `start_s` on."""
    answers: list[Answer]
    passes: list[SeenPass]
    busy: float = 0.0
    """Share of the time for which the cores beside the worker's were."""

    @property
    def late_s(self) -> float:
        """By how much the generator was late, at the most."""
        return max(answer.sent_at - answer.due_at for answer in self.answers)

    @property
    def throughput(self) -> float:
        """Requests answered a second, but for the first and the last tenth of them: these were
        answered while the stack filled, and while it emptied."""
        ends = sorted(answer.ended_at for answer in self.answers)
        first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
        return (last - first) / (ends[last] - ends[first])


class Trial:
    """Drives one trace after the other, each with arrivals of its own. `passes`: those that are
    seen, as they come."""

    def __init__(
        self,
        url: str,
        problems: TinyProblems,
        model_name: str,
        passes: list[SeenPass],
        *,
        seed: int,
        say: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self.traces: list[Trace] = []
        self._url = url
        self._problems = problems
        self._model_name = model_name
        self._passes = passes
        self._seed = seed
        self._say = say
        self._interrupted = interrupted
        self._begin = time.perf_counter()

    async def run(self, plan: Plan) -> None:
        """All traces of a plan. Raises InterruptedTrialError."""
        await self._drive("warm-up", BURST_RATE, plan.n_burst // 4)
        capacity = (await self._drive("burst", BURST_RATE, plan.n_burst)).throughput
        for test_load in (*plan.test_loads, None):
            for load in plan.fit_loads:
                await self._drive_in_time("fit", load * capacity, plan.n_fit)
            if test_load is not None:
                await self._drive_in_time("test", test_load * capacity, plan.n_test)

    async def _drive_in_time(self, role: Role, rate: float, n: int) -> None:
        """Again, a few times, if the generator was late."""
        for left in reversed(range(ATTEMPTS)):
            trace = await self._drive(role, rate, n)
            if trace.late_s <= LATE_S or not left:
                return
            self.traces[-1] = msgspec.structs.replace(trace, role="disturbed")

    async def _drive(self, role: Role, rate: float, n: int) -> Trace:
        if self._interrupted():
            raise InterruptedTrialError
        self._say(f"{role}: {n} requests at {rate:.1f} a second")
        workload = _workload(self._problems, rate, n, self._seed + len(self.traces))
        body = _body(self._problems, self._model_name)
        self._passes.clear()
        meter = CoreMeter(os.sched_getaffinity(0))
        start_s = time.perf_counter() - self._begin
        answers = await drive(self._url, workload, body, path=PATH)
        busy = meter.busy()
        await asyncio.sleep(PAUSE_S)
        trace = Trace(
            role=role,
            rate=rate,
            start_s=start_s,
            workload=list(workload),
            answers=answers,
            passes=list(self._passes),
            busy=busy,
        )
        self.traces.append(trace)
        return trace


async def run_trial(
    stack: Stack,
    problems: TinyProblems,
    model_name: str,
    plan: Plan,
    *,
    say: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> list[Trace]:
    """The traces of one trial. Raises InterruptedTrialError."""
    bus = await connect_nats(stack.endpoints.nats_url, name="bench")
    try:
        async with watching_passes(bus) as passes:
            trial = Trial(
                stack.endpoints.gateway_url,
                problems,
                model_name,
                passes,
                seed=plan.seed,
                say=say,
                interrupted=interrupted,
            )
            await trial.run(plan)
    finally:
        await bus.close()
    return trial.traces


def _workload(problems: TinyProblems, rate: float, n: int, seed: int) -> Workload:
    any_size = RequestClass(n_prompt=1, n_output=1, slo_s=SLO_S)
    draw = poisson([any_size], rate=rate, n=n, n_cases=len(problems.cases))
    return problems.sized(draw)(seed)


def _body(problems: TinyProblems, model_name: str) -> Callable[[Arrival], dict[str, Any]]:
    def body(arrival: Arrival) -> dict[str, Any]:
        prompt: Sequence[int] = problems.cases[arrival.case].prompt
        return {
            "model": model_name,
            "prompt": prompt,
            "max_tokens": arrival.n_output,
            "temperature": 0,
            "ignore_eos": True,
            "slo_ms": round(1000 * SLO_S),
        }

    return body
