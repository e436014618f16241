"""The predictor on the bus: questions in, answers out, and an eye on what became of them.

Whoever asks waits for nobody here: the trees, the folder and the disk are other threads' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from dilaserve import __version__, subjects
from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.messages import (
    PredictSteps,
    StepResult,
    StepsPredicted,
    decode_to_predictor,
    decode_worker_event,
    encode,
)
from dilaserve.process import Identity
from dilaserve.recording import RecordingError
from dilaserve.telemetry import Telemetry
from dilaserve_predictor.batching import Batcher
from dilaserve_predictor.drift import Drift, Score
from dilaserve_predictor.loading import PredictorFolder
from dilaserve_predictor.model import PredictorError
from dilaserve_predictor.observe import PredictorMetrics
from dilaserve_predictor.predicting import nothing_known, predict
from dilaserve_predictor.recording import Collector, Timed, TrafficRecorder

__all__ = ["PredictorService"]

QUEUE = "predictor"
LOOK_EVERY_S = 1.0
"""How often the folder is looked at, and the gauges are refreshed."""

log = logging.getLogger(__name__)


class PredictorService:
    """Answers until it is stopped."""

    def __init__(
        self,
        bus: Bus,
        folder: PredictorFolder,
        identity: Identity,
        *,
        telemetry: Telemetry,
        clock: Callable[[], float],
        recorder: TrafficRecorder | None = None,
    ) -> None:
        """`clock`: seconds, for durations."""
        self._bus = bus
        self._folder = folder
        self._identity = identity
        self._address = telemetry.address
        self._clock = clock
        self._recorder = recorder
        self._metrics = PredictorMetrics(telemetry, folder.model_id)
        self._batcher = Batcher(self._predict)
        self._drift = Drift()
        self._served = Score()
        self._collector = Collector()
        self._ended: asyncio.Queue[list[Timed]] = asyncio.Queue()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`. Raises PredictorError for a predictor that cannot be used."""
        await asyncio.to_thread(self._load)
        if self._folder.predictor is None:
            log.warning("%s", self._folder.absence())
        listening = [
            await self._bus.subscribe(subjects.ALL_STEP_RESULTS, self._receive),
            await self._bus.serve(self._card(), [self._endpoint()]),
        ]
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._batcher.run()), tasks.create_task(self._look())]
            if self._recorder is not None:
                beside.append(tasks.create_task(self._record(self._recorder)))
            await self._stopped.wait()
            for subscription in listening:
                await subscription.unsubscribe()
            for task in beside:
                task.cancel()

    def stop(self, reason: str) -> None:
        """End `run` soon."""
        log.info("stopping: %s", reason)
        self._stopped.set()

    # --- questions -----------------------------------------------------------------------------

    async def _answer(self, message: BusMessage) -> bytes:
        try:
            query = decode_to_predictor(message.data)
        except msgspec.DecodeError as error:
            self._metrics.dropped()
            raise PredictorError(f"a question made no sense: {error}; ask PredictSteps") from error
        answer = await self._answer_query(query)
        return encode(answer)

    async def _answer_query(self, query: PredictSteps) -> StepsPredicted:
        n_requests = len(query.questions)
        if query.model_id != self._folder.model_id:
            log.warning(
                "asked about model %r, but serving %r; start a predictor with "
                "DILASERVE_MODEL_NAME=%s and its DILASERVE_MODEL",
                *(query.model_id, self._folder.model_id, query.model_id),
            )
            self._metrics.asked("other_model", n_requests)
            return nothing_known(query)
        if self._folder.predictor is None:
            self._metrics.asked("untrained", n_requests)
            return nothing_known(query)
        answer = await self._batcher.ask(query)
        self._metrics.asked("answered", n_requests)
        self._drift.answered(answer)
        return answer

    def _predict(self, queries: Sequence[PredictSteps]) -> list[StepsPredicted]:
        """On the batcher's thread."""
        predictor = self._folder.predictor
        assert predictor is not None  # once there is one, there always is
        began = self._clock()
        answers = predict(predictor, queries)
        self._metrics.evaluated(sum(len(q.questions) for q in queries), self._clock() - began)
        return answers

    # --- what happened -------------------------------------------------------------------------

    def _receive(self, message: BusMessage) -> None:
        try:
            result = decode_worker_event(message.data)
        except msgspec.DecodeError as error:
            self._metrics.dropped()
            log.warning("dropped a message on %s: %s", message.subject, error)
            return
        if isinstance(result, StepResult):
            self._learn(result)

    def _learn(self, result: StepResult) -> None:
        for item in result.items:
            comparisons = self._drift.stepped(item)
            self._served.add(comparisons)
            self._metrics.compared(comparisons)
            if self._recorder is None:
                continue
            run = self._collector.stepped(item, result.latency_ms)
            if run is not None:
                self._ended.put_nowait(run)
            elif item.finish_reason is not None:
                self._metrics.recorded("incomplete")

    async def _record(self, recorder: TrafficRecorder) -> None:
        try:
            while True:
                steps = await recorder.describe(await self._ended.get())
                if steps is None:
                    self._metrics.recorded("failed")
                    continue
                try:
                    await asyncio.to_thread(recorder.write, steps)
                except (RecordingError, OSError) as error:
                    self._metrics.recorded("failed")
                    log.warning("a served request is not recorded: %s", error)
                else:
                    self._metrics.recorded("written")
        finally:
            recorder.close()

    # --- the predictor in force ----------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            predictor = self._folder.predictor
            info = predictor.info if predictor is not None else None
            self._metrics.refresh(info, self._served)
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                if await asyncio.to_thread(self._load):  # what is compared is the one in force
                    self._drift, self._served = Drift(), Score()
            except PredictorError as error:
                self._metrics.loaded("unusable")
                log.warning("keeping the predictor in force: %s", error)

    def _load(self) -> bool:
        """Whether there is a new predictor."""
        is_new = self._folder.refresh()
        if is_new and self._folder.predictor is not None:
            info = self._folder.predictor.info
            self._metrics.loaded("loaded")
            log.info(
                "predicting for %s with trees from %d runs of %d prompts; WMAPE %.3f held out",
                *(info.model_id, info.n_runs, info.n_prompts, info.errors["full"].wmape),
            )
        return is_new

    # --- who it is -----------------------------------------------------------------------------

    def _endpoint(self) -> Endpoint:
        return Endpoint("steps", subjects.PREDICT_STEPS, self._answer, queue=QUEUE)

    def _card(self) -> ServiceCard:
        return ServiceCard(
            name="predictor",
            version=__version__,
            description="Predicts how many denoising steps requests still need",
            metadata=self._identity.card(self._address, model=self._folder.model_id),
        )
