"""Spans of admissions and reassignments, and the trace context that goes with each placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import Span, Tracer, set_span_in_context

from dilaserve.messages import Admitted, Cancelled, Refused, StepCommand
from dilaserve.telemetry import extract, inject
from dilaserve_scheduler.core.effects import Admit, Fail, ListActive, Load, Reassign, Send
from dilaserve_scheduler.core.events import ReassignAnswered

__all__ = ["PlacementTraces"]


@dataclass(slots=True)
class _Trace:
    parent: str
    """Of the gateway's span."""
    placement: str
    """Of the span that led to the present epoch."""
    admitting: Span | None = None
    moving: Span | None = None


class PlacementTraces:
    """One entry per request that the core knows, forgotten with it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traces: dict[str, _Trace] = {}

    def submitted(self, request_id: str, headers: Mapping[str, str]) -> None:
        """A Submit came; a repeated one changes nothing."""
        if request_id in self._traces:
            return
        span = self._tracer.start_span(
            "scheduler.admit",
            context=extract(headers),
            attributes={"dilaserve.request_id": request_id},
        )
        parent = inject(set_span_in_context(span, extract(headers)))
        self._traces[request_id] = _Trace(
            parent=_traceparent(headers), placement=parent.get("traceparent", ""), admitting=span
        )

    def stored(self, request_id: str, traceparent: str) -> None:
        """A record was read: of a request that another scheduler admitted, maybe."""
        if request_id not in self._traces:
            self._traces[request_id] = _Trace(parent=traceparent, placement=traceparent)

    def answered(self, request_id: str, answer: Admitted | Refused | Cancelled) -> None:
        """The submission is decided."""
        if isinstance(answer, Cancelled):
            return
        trace = self._traces.get(request_id)
        if trace is not None and trace.admitting is not None:
            span, trace.admitting = trace.admitting, None
            if isinstance(answer, Admitted):
                span.set_attribute("dilaserve.threshold", answer.threshold)
            outcome = answer.code if isinstance(answer, Refused) else "admitted"
            span.set_attribute("dilaserve.outcome", outcome)
            span.end()
        if isinstance(answer, Refused):
            self.forget(request_id)

    def calling(self, effect: Admit | Reassign | Fail | Load | ListActive) -> None:
        """The store is about to be asked: which instance an admission names, or that a change of
        owner begins."""
        match effect:
            case Admit(request_id=request_id, owner=owner):
                trace = self._traces.get(request_id)
                if trace is not None and trace.admitting is not None:
                    trace.admitting.set_attribute("dilaserve.instance_id", owner)
            case Reassign():
                self._moving(effect)
            case _:
                pass

    def moved(self, event: ReassignAnswered) -> None:
        """The store has answered; the next command is this span's child."""
        trace = self._traces.get(event.request_id)
        if trace is None or trace.moving is None:
            return
        span, trace.moving = trace.moving, None
        context = set_span_in_context(span, extract({"traceparent": trace.parent}))
        trace.placement = inject(context).get("traceparent", "")
        span.set_attribute("dilaserve.epoch", event.answer.epoch)
        _end(span, event.answer.outcome)

    def decorate(self, send: Send) -> StepCommand:
        """The command, with the trace context of each placement that its instance is new to."""
        if not send.first:
            return send.command
        first = frozenset(send.first)
        items = [
            msgspec.structs.replace(item, traceparent=self._placement(item.request_id))
            if item.request_id in first
            else item
            for item in send.command.items
        ]
        return msgspec.structs.replace(send.command, items=items)

    def forget(self, request_id: str) -> None:
        """The core knows the request no more."""
        trace = self._traces.pop(request_id, None)
        if trace is not None:
            _end(trace.admitting, "ended")
            _end(trace.moving, "ended")

    def _moving(self, effect: Reassign) -> None:
        trace = self._traces.get(effect.request_id)
        if trace is None:
            return
        _end(trace.moving, "repeated")
        trace.moving = self._tracer.start_span(
            "scheduler.reassign",
            context=extract({"traceparent": trace.parent}),
            attributes={
                "dilaserve.request_id": effect.request_id,
                "dilaserve.instance_id": effect.owner,
                "dilaserve.cause": effect.cause,
            },
        )

    def _placement(self, request_id: str) -> str:
        trace = self._traces.get(request_id)
        return trace.placement if trace is not None else ""


def _traceparent(headers: Mapping[str, str]) -> str:
    return next((v for name, v in headers.items() if name.lower() == "traceparent"), "")


def _end(span: Span | None, outcome: str) -> None:
    if span is not None:
        span.set_attribute("dilaserve.outcome", outcome)
        span.end()
