"""The twin beside a live stack: of a made-up trial whose stack is as the twin believes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve.settings import variable
from dilaserve_bench.live.beside import live_outcome, run_twin, scenario_of
from dilaserve_bench.live.fit import PassFit
from dilaserve_bench.live.load import Answer
from dilaserve_bench.live.passes import SeenPass
from dilaserve_bench.live.stack import settings_of
from dilaserve_bench.live.trial import Role, Trace
from dilaserve_bench.twin.clients import Served
from dilaserve_bench.twin.simulation import Simulation
from dilaserve_bench.twin.tiny import TinyProblems, load_problems
from dilaserve_bench.twin.workload import Arrival, RequestClass, poisson

MODEL = Path(__file__).parents[3] / "models" / "tiny"
PASSES = PassFit(
    base_s=0.004, token_s=5e-5, row_s=0.001, new_row_s=0.0, n_turns=0, mean_s=0.0, left_s=0.0
)
CLIENT_S = 0.03
ENVIRON = settings_of({variable("model"): str(MODEL)}, "infaas")


@pytest.fixture(scope="module")
def problems() -> TinyProblems:
    return load_problems(MODEL, n_per_task=2, seed=1)


def arrivals(problems: TinyProblems, rate: float, n: int, seed: int) -> list[Arrival]:
    draw = poisson([RequestClass(n_prompt=1, n_output=1, slo_s=0.3)], rate=rate, n=n, n_cases=12)
    return list(problems.sized(draw)(seed))


def as_lived(problems: TinyProblems, role: Role, rate: float, start_s: float) -> Trace:
    """A trace as a stack would have lived it whose passes take what PASSES says."""
    workload = arrivals(problems, rate, 20, seed=int(rate))
    scenario = scenario_of(PASSES, problems, ENVIRON)
    run = Simulation(scenario, workload, 0, timer=lambda: 0.0).run()
    return Trace(
        role=role,
        rate=rate,
        start_s=start_s,
        workload=workload,
        answers=[_answer(served) for served in run.served],
        passes=some_passes(),
    )


def some_passes() -> list[SeenPass]:
    sizes = [(n_rows, n_rows * tokens) for n_rows in range(1, 13) for tokens in (32, 60, 164)]
    at_s = 0.0
    passes: list[SeenPass] = []
    for batch, (n_rows, n_tokens) in enumerate(sizes):
        at_s += PASSES.of(n_tokens, n_rows, 0)
        passes.append(
            SeenPass(
                at_s=at_s, instance_id="i", batch=batch, latency_s=0.0, n_tokens=n_tokens,
                n_rows=n_rows, n_steps=n_rows, n_new=0, threshold_sum=0.9 * n_rows, goes_on=True,
            )
        )  # fmt: skip
    return passes


def _answer(served: Served) -> Answer:
    return Answer(
        request_id=served.arrival.request_id,
        due_at=served.arrival.at_s,
        sent_at=served.arrival.at_s,
        ended_at=served.ended_at + CLIENT_S,
        outcome="done",
    )


def test_a_stack_like_the_twin_is_found_again(problems: TinyProblems) -> None:
    traces = [
        as_lived(problems, "fit", 5.0, 0.0),
        as_lived(problems, "fit", 40.0, 100.0),
        as_lived(problems, "test", 30.0, 200.0),
    ]
    twin = run_twin(traces, problems, ENVIRON, timer=lambda: 0.0)
    assert twin.client_s == pytest.approx(CLIENT_S, abs=1e-3)
    assert twin.passes.of(500, 6, 0) == pytest.approx(PASSES.of(500, 6, 0), rel=1e-6)
    live, virtual = live_outcome(traces[2], problems), twin.outcomes[2]
    assert virtual.p50_s == pytest.approx(live.p50_s, rel=0.02)
    assert virtual.attainment == pytest.approx(live.attainment, abs=0.03)
    assert virtual.mean_threshold == pytest.approx(live.mean_threshold)
