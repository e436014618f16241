"""A trial of a real stack on two cores. Figures of time are noise here, so none is looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dilaserve.settings import load, variable
from dilaserve_bench.experiments import live
from dilaserve_bench.live import trial
from dilaserve_bench.live.load import Answer
from dilaserve_bench.live.stack import settings_of
from dilaserve_bench.live.trial import Plan, Trial
from dilaserve_bench.twin.tiny import load_problems
from dilaserve_bench.twin.workload import Workload
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_scheduler.settings import SchedulerSettings

from ..experiments.helpers import session

MODEL = Path(__file__).parents[3] / "models" / "tiny"


def environ(**settings: str) -> Mapping[str, str]:
    return {**os.environ, **{variable(name): value for name, value in settings.items()}}


def test_stack_and_twin_read_the_same_settings() -> None:
    given = settings_of(environ(model=str(MODEL), policy="proteus"), "dilaserve")
    assert load(SchedulerSettings, given).policy == "dilaserve"
    assert load(SchedulerSettings, given).queue_limit >= Plan().n_test
    worker = load(WorkerSettings, given)
    assert (worker.max_batch_tokens, worker.cache_mode) == (2048, "dual")


async def test_a_trace_is_driven_again_while_the_generator_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_s: Iterator[float] = iter([9, 9, 0.1, 0.1, 9, 0.1, 9, 9, 9, 0.1, 0.1, 0.1, 0.1])

    async def drive(url: str, workload: Workload, *_: object, path: str) -> list[Answer]:
        late = next(late_s)
        return [
            Answer(request_id=a.request_id, due_at=a.at_s, sent_at=a.at_s + late,
                   ended_at=a.at_s + late + 0.1, outcome="done")
            for a in workload
        ]  # fmt: skip

    monkeypatch.setattr(trial, "drive", drive)
    monkeypatch.setattr(trial, "PAUSE_S", 0.0)
    problems = load_problems(MODEL, n_per_task=2, seed=1)
    run = Trial("", problems, "tiny", [], seed=0, say=lambda _: None, interrupted=lambda: False)
    await run.run(Plan(n_burst=20, n_fit=20, n_test=20))
    assert [trace.role for trace in run.traces] == [
        "warm-up", "burst",  # these ask for what no generator can do
        "fit", "fit", "disturbed", "test",
        "disturbed", "disturbed", "fit",  # not for ever
        "fit", "test", "fit", "fit",
    ]  # fmt: skip
    assert len({trace.workload[0].at_s for trace in run.traces}) == len(run.traces)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_every_request_is_answered_and_answers_are_the_twins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUICK_REQUESTS", 24)
    with session(tmp_path / "points", policies=("infaas",)) as asked:
        asked.environ = environ(model=str(MODEL))
        document = live.EXPERIMENT.run(asked)
    below, above = document.rows
    assert above.load > below.load
    for row in document.rows:
        assert (row.n, row.n_failed) == (24, 0)
        assert row.accuracy == row.twin_accuracy  # the same tokens, whatever the batches were
        assert row.mean_threshold == pytest.approx(0.9)
