"""Whole runs: a schedule worked out by hand, and what must hold in every run."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from dilaserve.messages import CacheMode, StepItem
from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_bench.twin.engine import VirtualPlan
from dilaserve_bench.twin.faults import Fault
from dilaserve_bench.twin.options import core_settings, recorded_source
from dilaserve_bench.twin.recorded import StepTable
from dilaserve_bench.twin.report import report_run
from dilaserve_bench.twin.simulation import Run, Scenario, Simulation
from dilaserve_bench.twin.worker import VirtualWorker
from dilaserve_bench.twin.workload import Workload
from dilaserve_gpu_worker.engine.types import StepOutput
from dilaserve_scheduler.core.effects import Send

from .helpers import TABLE, arrivals, infaas, run, scenario, spec

TICK = 1 / 128
"""The bus takes one, the store two: times are exact in binary."""


def steps_at(threshold: float, case: int) -> int:
    return TABLE.steps(case, threshold, n_output=64, n_blocks=4)


def busy_hour(n: int = 60, seed: int = 1) -> Workload:
    """Arrivals that keep two small instances busy and let some wait."""
    rng, time_s, times = random.Random(seed), 0.5, []
    for _ in range(n):
        time_s += rng.expovariate(6.0)
        times.append(time_s)
    return arrivals(times)


# --- by hand -----------------------------------------------------------------------------------


def by_hand() -> Scenario:
    """One instance with room for two requests of 16 tokens; a pass takes n/16 s. A request has two
    blocks of 4 tokens, two steps each."""
    return Scenario(
        cluster=spec(
            "1xtp1",
            max_batch_tokens=32,
            n_kv_tokens=128,
            block_length=4,
            bus_s=TICK,
            store_s=2 * TICK,
        ),
        profiles=ProfileSet(
            model="m",
            device="d",
            profiles=[LatencyProfile(tp_degree=1, points=[Point(4, 0.25), Point(64, 4.0)])],
        ),
        policy=infaas(),
        source=lambda workload: recorded_source(
            StepTable(
                model="m",
                what="",
                source="",
                licence="",
                n_output=8,
                block_length=4,
                thresholds=[0.9],
                rows=[[4]] * 4,
            ),
            workload,
        ),
        core=core_settings(0.25, None),
    )


def test_three_requests_end_when_they_should() -> None:
    """A comes at 1.0: Submit one tick, admit two, command one, load two; its passes are recompute
    (16 tokens, 1 s), cache (4 tokens, 0.25 s), recompute, cache.

    B comes at 1.5, while A's first pass runs, and is loaded when that has ended, at 2.0 + 6 ticks.
    From 2.0 + 8 ticks on they share passes: A's cache step with B's recompute step (20 tokens,
    1.25 s), then the other way round, until 5.75 + 8; B's last step alone, until 6.0 + 8.

    C comes at 2.0 and waits: there is room for two. The scheduler hears of A's end 3 ticks after
    it, at 5.75 + 11; reassign 2, command 1. The pass under way ends at 6.0 + 8; load 2, then four
    passes alone, 2.5 s. The client hears of an end 3 ticks later.
    """
    times = [1.0, 1.5, 2.0]
    done = run(by_hand(), arrivals(times, n_prompt=8, n_output=8))
    ended_at = [served.ended_at for served in done.served]
    assert ended_at == [5.75 + 11 * TICK, 6.0 + 11 * TICK, 8.5 + 13 * TICK]
    measured = done.measured
    assert (measured.n_passes, measured.n_rows, measured.n_steps) == (9, 12, 12)
    assert measured.n_computed == 16 + 3 * 20 + 4 + 2 * 20
    assert dict(measured.moves) == {"placed": 1}


def test_overhead_lengthens_every_pass() -> None:
    slow = by_hand()
    slow = replace(slow, cluster=msgspec.structs.replace(slow.cluster, overhead=2.0))
    (served,) = run(slow, arrivals([1.0], n_prompt=8, n_output=8)).served
    assert served.ended_at == 1.0 + 6 * TICK + 2 * 2.5 + 3 * TICK


# --- in every run ------------------------------------------------------------------------------


def test_every_arrival_ends_once() -> None:
    workload = busy_hour()
    done = run(scenario(), workload)
    assert done.is_complete
    assert [served.arrival for served in done.served] == list(workload)
    assert {served.outcome for served in done.served} == {"done"}
    assert done.measured.n_tokens == 64 * len(workload)
    assert done.measured.moves["placed"] > 0, "somebody had to wait"


@pytest.mark.parametrize("threshold", TABLE.thresholds)
@pytest.mark.parametrize("run_ahead", [None, 1, 3])
def test_steps_at_a_fixed_threshold_are_the_recorded_ones(
    threshold: float, run_ahead: int | None
) -> None:
    workload = busy_hour()
    settings = core_settings(0.25, run_ahead)
    done = run(scenario(policy=infaas(threshold), core=settings), workload)
    assert done.measured.n_steps == sum(steps_at(threshold, a.case) for a in workload)
    assert done.measured.n_recompute == 4 * len(workload)
    assert done.measured.n_rebuilds == 0
    assert report_run(done).mean_threshold == pytest.approx(threshold)


@pytest.mark.parametrize("cache_mode", ["none", "prefix", "dual"])
def test_a_cache_saves_tokens(cache_mode: CacheMode) -> None:
    done = run(scenario(spec(cache_mode=cache_mode)), busy_hour(n=4))
    cost = {"none": lambda b: 128, "prefix": lambda b: 64 - 16 * b, "dual": lambda b: 16}
    assert done.measured.n_computed == sum(
        128 + (n_steps - 1) * cost[cache_mode](block)
        for case in range(4)
        for block, n_steps in enumerate(steps_by_block(case))
    )


def steps_by_block(case: int) -> list[int]:
    """At 0.9: a block ends with the step that passes its share."""
    ends = [math.ceil(steps_at(0.9, case) * quarter / 4) for quarter in range(5)]
    return [end - begin for begin, end in pairwise(ends)]


def test_a_run_can_be_repeated() -> None:
    faults = (Fault(at_s=3.0, action="kill", instance=1, for_s=2.0),)
    first = report_run(run(scenario(faults=faults), busy_hour()))
    assert report_run(run(scenario(faults=faults), busy_hour())) == first
    assert report_run(run(scenario(faults=faults), busy_hour(seed=2))) != first


def test_a_higher_degree_is_faster() -> None:
    one, two = (
        run(scenario(spec(mix)), arrivals([1.0])).served[0].latency_s for mix in ("1xtp1", "1xtp2")
    )
    assert two < one


def test_all_groups_of_a_mix_work() -> None:
    simulation = Simulation(scenario(spec("2xtp1,1xtp2")), busy_hour(), 0, timer=lambda: 0.0)
    busy: set[int] = set()

    def note(worker: VirtualWorker, *_: object) -> None:
        busy.add(worker.info.tp_degree)

    simulation.measured.passed = note  # type: ignore[assignment, method-assign]
    assert simulation.run().is_complete
    assert busy == {1, 2}


def test_time_goes_on_only_as_far_as_the_horizon() -> None:
    done = run(scenario(horizon_s=4.0), busy_hour())
    assert not done.is_complete
    assert done.virtual_s <= 4.0
    figures = report_run(done)
    assert figures.n_requests == figures.n_done < 60, "whose time is not up does not count"


@pytest.mark.parametrize("run_ahead", [None, 1, 2])
def test_no_step_without_credit(run_ahead: int | None) -> None:
    settings = core_settings(0.25, run_ahead)
    faults = (Fault(at_s=3.0, action="kill", instance=1, for_s=2.0),)
    simulation = Simulation(
        scenario(core=settings, faults=faults), busy_hour(), 0, timer=lambda: 0.0
    )
    given: dict[tuple[str, str], StepItem] = {}
    n_blocks_seen = defaultdict(set)

    def note(sent: Send) -> None:
        given.update({(sent.instance_id, item.request_id): item for item in sent.command.items})
        deliver(sent)

    def check(
        worker: VirtualWorker, seconds: float, plan: VirtualPlan, steps: list[StepOutput]
    ) -> None:
        for step in steps:
            item = given[worker.info.instance_id, step.request_id]
            assert step.block <= item.until_block
            assert item.until_step is None or step.step <= item.until_step
            n_blocks_seen[step.request_id].add(step.block)

    deliver = simulation.cluster.command
    simulation.cluster.command = note  # type: ignore[method-assign]
    simulation.measured.passed = check  # type: ignore[method-assign]
    assert simulation.run().is_complete
    assert all(blocks == {0, 1, 2, 3} for blocks in n_blocks_seen.values())
    assert (run_ahead is None) == all(item.until_step is None for item in given.values())


# --- faults ------------------------------------------------------------------------------------

FAULTS = [
    (Fault(at_s=3.0, action="kill", instance=0, for_s=2.0),),
    (Fault(at_s=3.0, action="kill", instance=0),),
    (Fault(at_s=3.0, action="kill", instance=0, for_s=0.1),),
    (Fault(at_s=3.0, action="leave", instance=1, for_s=3.0),),
    (Fault(at_s=3.0, action="pause", for_s=2.5),),
    (Fault(at_s=3.0, action="restart", for_s=1.0),),
    (
        Fault(at_s=2.0, action="kill", instance=0, for_s=1.0),
        Fault(at_s=2.2, action="restart", for_s=1.5),
        Fault(at_s=6.0, action="leave", instance=1, for_s=1.0),
        Fault(at_s=6.1, action="kill", instance=0, for_s=1.0),
    ),
]


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "-".join(f.action for f in faults))
@pytest.mark.parametrize("run_ahead", [None, 1])
def test_faults_cost_time_and_nothing_else(
    faults: tuple[Fault, ...], run_ahead: int | None
) -> None:
    workload = busy_hour()
    settings = core_settings(0.25, run_ahead)
    done: Run = run(scenario(faults=faults, core=settings, horizon_s=200.0), workload)
    assert done.is_complete
    assert {served.outcome for served in done.served} == {"done"}
    assert done.measured.n_steps == sum(steps_at(0.9, a.case) for a in workload)
    assert done.measured.n_tokens == 64 * len(workload)
    undisturbed = run(scenario(core=settings), workload)
    assert report_run(done).mean_s > report_run(undisturbed).mean_s  # type: ignore[operator]
    if any(fault.action in ("kill", "leave") for fault in faults):
        assert done.measured.n_rebuilds > 0
        assert done.measured.moves["died"] + done.measured.moves["left"] > 0


def test_a_request_that_kills_three_instances_fails() -> None:
    faults = [Fault(at_s=at_s, action="kill", instance=0, for_s=0.05) for at_s in (1.1, 1.25, 1.4)]
    done = run(scenario(spec("1xtp1"), faults=faults), arrivals([1.0], n_prompt=300))
    assert [served.outcome for served in done.served] == ["failed"]
    assert report_run(done).attainment == 0.0


def test_nobody_there_is_a_refusal() -> None:
    faults = [Fault(at_s=1.0, action="kill", instance=0)]
    done = run(scenario(spec("1xtp1"), faults=faults), arrivals([10.0]))
    assert [served.outcome for served in done.served] == ["refused"]
    assert report_run(done).n_refused == 1


def test_too_long_for_any_instance_is_a_refusal() -> None:
    done = run(scenario(), arrivals([1.0, 1.1], n_prompt=1000))
    assert [served.outcome for served in done.served] == ["refused", "refused"]
