"""The service over both buses: answers, nonsense, other models, drift, reloading, recording."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from dilaserve import subjects
from dilaserve.bus import Bus
from dilaserve.errors import ResponderFailedError
from dilaserve.messages import (
    PredictSteps,
    StepItemResult,
    StepQuestion,
    StepResult,
    StepsPredicted,
    decode_from_predictor,
    encode,
)
from dilaserve.process import Identity
from dilaserve.recording import is_complete, read_runs
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import DecodingSpec
from dilaserve.telemetry import METRICS, Telemetry
from dilaserve.testing import new_request, settled
from dilaserve_predictor.loading import PredictorFolder
from dilaserve_predictor.model import FILE_NAME, Predictor, StepModel
from dilaserve_predictor.recording import BoundedFolder, TrafficRecorder
from dilaserve_predictor.service import PredictorService

from .made_up import THRESHOLDS, item_of, question_of, run_of

RUN = run_of(7, lambda _: 0.9, run_id="r")


@pytest.fixture
def telemetry() -> AsyncIterator[Telemetry]:
    telemetry = Telemetry.for_tests("predictor")
    yield telemetry
    telemetry.close()


@asynccontextmanager
async def serving(
    bus: Bus, folder: Path, telemetry: Telemetry, *, recorder: TrafficRecorder | None = None
) -> AsyncIterator[PredictorService]:
    service = PredictorService(
        bus,
        PredictorFolder(folder, "made-up"),
        Identity("predictor-0000", 1, "here"),
        telemetry=telemetry,
        clock=time.perf_counter,
        recorder=recorder,
    )
    task = asyncio.create_task(service.run())
    await until_served(bus)
    try:
        yield service
    finally:
        service.stop("the test has ended")
        async with asyncio.timeout(5):
            await task


async def until_served(bus: Bus) -> None:
    async with asyncio.timeout(5):
        while not await bus.request_many("$SRV.PING.predictor", b"", wait_s=0.02):
            await asyncio.sleep(0)


async def ask(bus: Bus, *questions: StepQuestion, model_id: str = "made-up") -> StepsPredicted:
    query = PredictSteps(model_id=model_id, thresholds=list(THRESHOLDS), questions=list(questions))
    reply = await bus.request(subjects.PREDICT_STEPS, encode(query), timeout_s=5)
    return decode_from_predictor(reply.data)


async def tell(bus: Bus, items: Sequence[StepItemResult]) -> None:
    for item in items:
        result = StepResult(instance_id="w-0", batch=1, latency_ms=5.0, n_tokens=96, items=[item])
        await bus.publish(subjects.event_step("w-0"), encode(result))
    await settled(bus)


def shown(telemetry: Telemetry) -> str:
    return telemetry.render()[0].decode()


async def until_shown(telemetry: Telemetry, line: str) -> None:
    async with asyncio.timeout(5):
        while line not in shown(telemetry):
            await asyncio.sleep(0.02)


async def test_it_answers_what_its_trees_say(
    bus: Bus, trained: StepModel, predictor: Predictor, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    questions = [question_of(RUN, step) for step in (1, 4)]
    async with serving(bus, tmp_path, telemetry):
        answer = await ask(bus, *questions)
    median, upper = predictor.predict(questions, THRESHOLDS)
    assert [(each.request_id, each.step) for each in answer.answers] == [("r", 1), ("r", 4)]
    assert [each.p50 for each in answer.answers] == median.tolist()
    assert [each.upper for each in answer.answers] == upper.tolist()
    assert answer.refresh_tokens == predictor.info.refresh_tokens


async def test_many_askers_each_get_their_own_answer(
    bus: Bus, trained: StepModel, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    runs = [run_of(n, lambda _: 0.9, run_id=f"r{n}") for n in range(30)]
    async with serving(bus, tmp_path, telemetry):
        answers = await asyncio.gather(*(ask(bus, question_of(run, 1)) for run in runs))
        nobody = await ask(bus)
    assert [answer.answers[0].request_id for answer in answers] == [f"r{n}" for n in range(30)]
    assert nobody.answers == []


async def test_nonsense_is_counted_and_answered_with_an_error(
    bus: Bus, trained: StepModel, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    async with serving(bus, tmp_path, telemetry):
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for data in (b"", b"{}", b'{"type": "predict_steps"}', b"\xff" * 100):
            with pytest.raises(ResponderFailedError, match="made no sense"):
                await bus.request(subjects.PREDICT_STEPS, data, timeout_s=5)
        await bus.publish(subjects.event_step("w-0"), b"{")
        await settled(bus)
        assert len((await ask(bus, question_of(RUN, 1))).answers) == 1
    assert 'dilaserve:messages_dropped_total{reason="invalid"} 5.0' in shown(telemetry)


async def test_another_model_is_not_predicted(
    bus: Bus,
    trained: StepModel,
    tmp_path: Path,
    telemetry: Telemetry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained.save(tmp_path)
    async with serving(bus, tmp_path, telemetry):
        assert (await ask(bus, question_of(RUN, 1), model_id="other")).answers == []
    assert "asked about model 'other', but serving 'made-up'; start a predictor" in caplog.text
    assert 'prediction_requests_total{outcome="other_model"} 1.0' in shown(telemetry)


async def test_a_predictor_is_waited_for_and_taken_when_it_comes(
    bus: Bus,
    trained: StepModel,
    tmp_path: Path,
    telemetry: Telemetry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(bus, tmp_path / "later", telemetry):
        assert (await ask(bus, question_of(RUN, 1))).answers == []
        trained.save(tmp_path / "later")
        await until_shown(telemetry, 'predictor_loads_total{outcome="loaded"} 1.0')
        assert len((await ask(bus, question_of(RUN, 1))).answers) == 1
    assert "no step predictor in" in caplog.text
    assert "dilaserve train-predictor" in caplog.text


async def test_a_broken_replacement_leaves_the_former_in_force(
    bus: Bus, trained: StepModel, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    async with serving(bus, tmp_path, telemetry):
        before = await ask(bus, question_of(RUN, 1))
        (tmp_path / FILE_NAME).write_bytes(b"{}")
        await until_shown(telemetry, 'predictor_loads_total{outcome="unusable"} 1.0')
        assert await ask(bus, question_of(RUN, 1)) == before


async def test_drift_is_what_became_of_predictions(
    bus: Bus, trained: StepModel, predictor: Predictor, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    items = [item_of(step) for step in RUN]
    async with serving(bus, tmp_path, telemetry):
        await tell(bus, items[:2])
        answer = await ask(bus, question_of(RUN, 2))
        await tell(bus, items[2:])
        await until_shown(telemetry, 'basis="served"')
    truth = len(RUN) - 2
    said = answer.answers[0].p50[THRESHOLDS.index(0.9)]
    wmape = abs(said - truth) / truth
    text = shown(telemetry)
    lines = [line for line in text.splitlines() if line.startswith("dilaserve:predictor_wmape{")]
    by_basis = {line.partition('basis="')[2].partition('"')[0]: line.split()[1] for line in lines}
    assert float(by_basis["served"]) == pytest.approx(wmape)
    assert float(by_basis["trained"]) == predictor.info.errors["full"].wmape
    assert 'predictions_compared_total{until="end"} 1.0' in text


async def test_a_new_predictor_starts_without_the_errors_of_the_former(
    bus: Bus, trained: StepModel, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    items = [item_of(step) for step in RUN]
    async with serving(bus, tmp_path, telemetry):
        await tell(bus, items[:2])
        await ask(bus, question_of(RUN, 2))
        await tell(bus, items[2:])
        await until_shown(telemetry, 'basis="served"')
        trained.save(tmp_path)
        await until_shown(telemetry, 'predictor_loads_total{outcome="loaded"} 2.0')
        async with asyncio.timeout(5):
            while 'basis="served"' in shown(telemetry):
                await asyncio.sleep(0.02)


async def test_served_traffic_is_recorded(bus: Bus, tmp_path: Path, telemetry: Telemetry) -> None:
    store = MemoryStore()
    spec = DecodingSpec(n_output=64, block_length=32, seed=1)
    await store.new(new_request(request_id="r", model_id="made-up", spec=spec))
    recorder = TrafficRecorder(
        store, BoundedFolder(tmp_path / "served", 10**6, name=lambda: "served-1")
    )
    items = [item_of(step) for step in RUN]
    lost = [msgspec.structs.replace(item, request_id="s") for item in items[1:]]
    gone = [msgspec.structs.replace(item, request_id="t") for item in items]
    async with serving(bus, tmp_path, telemetry, recorder=recorder):
        await tell(bus, [*items, *lost, *gone])
        for outcome in ("written", "incomplete", "failed"):
            await until_shown(telemetry, f'recorded_runs_total{{outcome="{outcome}"}} 1.0')
    (run,) = read_runs([tmp_path / "served" / "served-1.jsonl"])
    assert is_complete(run)
    assert [step.step for step in run] == [step.step for step in RUN]


async def test_what_is_declared_is_emitted(
    bus: Bus, trained: StepModel, tmp_path: Path, telemetry: Telemetry
) -> None:
    trained.save(tmp_path)
    recorder = TrafficRecorder(
        MemoryStore(), BoundedFolder(tmp_path / "served", 10**6, name=lambda: "served-1")
    )
    async with serving(bus, tmp_path, telemetry, recorder=recorder):
        await bus.publish(subjects.event_step("w-0"), b"{")
        await tell(bus, [item_of(step) for step in RUN[:1]])
        await ask(bus, question_of(RUN, 1))
        await tell(bus, [item_of(step) for step in RUN[1:]])
        await until_shown(telemetry, "dilaserve:recorded_runs_total{")
        await until_shown(telemetry, 'basis="served"')
    declared = {metric.name for metric in METRICS.values() if "predictor" in metric.services}
    assert declared == telemetry.emitted()
