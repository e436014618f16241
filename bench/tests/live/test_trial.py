"""A trial of a real stack on two cores. Figures of time are noise here, so none is looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dilaserve.settings import load, variable
from dilaserve_bench.experiments import live
from dilaserve_bench.live.stack import settings_of
from dilaserve_bench.live.trial import Plan
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
