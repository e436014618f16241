"""The clients and their gateway: write records, submit until answered, see the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dilaserve.messages import Admitted, Cancelled, Refused, Submit
from dilaserve.store.records import DecodingSpec, NewRequest, ServiceLevel
from dilaserve_bench.twin.cluster import MODEL_ID
from dilaserve_bench.twin.store import EndedRecord, TwinStore
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.workload import Arrival, Workload

__all__ = ["Clients", "Judge", "Outcome", "Served"]

ASK_AGAIN_S = 1.0
"""A submission that has no answer by then is sent again."""

Outcome = Literal["done", "failed", "refused", "unfinished"]

Judge = Callable[[Arrival, list[int]], bool]
"""Whether the tokens answer a request rightly; masked positions are MASKED."""


@dataclass(slots=True)
class Served:
    """What became of a request."""

    arrival: Arrival
    outcome: Outcome = "unfinished"
    ended_at: float = 0.0
    right: bool | None = None
    """None where nobody can say."""

    @property
    def latency_s(self) -> float:
        """From its arrival to its end."""
        return self.ended_at - self.arrival.at_s

    @property
    def in_time(self) -> bool:
        """Whether it had its last token within its SLO, or at all if it has none."""
        slo_s = self.arrival.slo_s
        return self.outcome == "done" and (slo_s is None or self.latency_s <= slo_s)


class Clients:
    """All requests of a run; when they have ended, so has time. What the store commits last reaches
    the client `tell_s` later."""

    def __init__(
        self,
        workload: Workload,
        *,
        timeline: Timeline,
        store: TwinStore,
        submit: Callable[[Submit], None],
        block_length: int,
        ignore_eos: bool,
        tell_s: float,
        judge: Judge | None = None,
    ) -> None:
        self.served = {a.request_id: Served(a) for a in workload}
        self.n_ended = 0
        self._coming = iter(workload)
        self._unanswered: set[str] = set()
        self._prompts: dict[int, list[int]] = {}
        self._timeline = timeline
        self._store = store
        self._submit = submit
        self._block_length = block_length
        self._ignore_eos = ignore_eos
        self._tell_s = tell_s
        self._judge = judge

    def start(self) -> None:
        """Let the first one come; each brings the next."""
        self._await_next()

    def all_ended(self) -> bool:
        """Whether every request has come and gone."""
        return self.n_ended == len(self.served)

    def reply(self, answer: Admitted | Refused | Cancelled) -> None:
        """The scheduler's answer arrives."""
        if answer.request_id not in self._unanswered:
            return
        self._unanswered.discard(answer.request_id)
        if isinstance(answer, Refused) and answer.code != "finished":
            self._end(answer.request_id, "refused", 0.0)

    def ended(self, record: EndedRecord) -> None:
        """A record has ended in the store."""
        done = record.state == "done"
        served = self._end(record.request_id, "done" if done else "failed", self._tell_s)
        if done and self._judge is not None:
            served.right = self._judge(served.arrival, record.canvas)

    def _await_next(self) -> None:
        arrival = next(self._coming, None)
        if arrival is not None:
            self._timeline.at(arrival.at_s, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._unanswered.add(arrival.request_id)
        self._store.new(self._record(arrival))
        self._ask(arrival)
        self._await_next()

    def _ask(self, arrival: Arrival) -> None:
        if arrival.request_id in self._unanswered:
            self._submit(self._submission(arrival))
            self._timeline.after(ASK_AGAIN_S, self._ask, arrival)

    def _end(self, request_id: str, outcome: Outcome, tell_s: float) -> Served:
        served = self.served[request_id]
        if served.outcome == "unfinished":
            served.outcome = outcome
            served.ended_at = self._timeline.now + tell_s
            self.n_ended += 1
            if self.all_ended():
                self._timeline.stop()
        return served

    def _record(self, arrival: Arrival) -> NewRequest:
        return NewRequest(
            request_id=arrival.request_id,
            model_id=MODEL_ID,
            prompt=self._placeholder(arrival.n_prompt),
            spec=DecodingSpec(
                n_output=arrival.n_output,
                block_length=self._block_length,
                seed=0,
                ignore_eos=self._ignore_eos,
            ),
            level=ServiceLevel(
                slo_ms=_milliseconds(arrival.slo_s),
                priority=arrival.priority,
                min_confidence=arrival.min_confidence,
            ),
            gateway_id="clients",
            arrival_s=arrival.at_s,
        )

    def _placeholder(self, n_tokens: int) -> list[int]:
        """A prompt of which only the length counts; shared, and never changed."""
        return self._prompts.setdefault(n_tokens, [0] * n_tokens)

    def _submission(self, arrival: Arrival) -> Submit:
        return Submit(
            request_id=arrival.request_id,
            model_id=MODEL_ID,
            n_prompt=arrival.n_prompt,
            n_output=arrival.n_output,
            block_length=self._block_length,
            arrival_s=arrival.at_s,
            slo_ms=_milliseconds(arrival.slo_s),
            priority=arrival.priority,
            min_confidence=arrival.min_confidence,
        )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
