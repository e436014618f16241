"""Spans of admissions and moves, and the context that commands carry."""

from __future__ import annotations

from opentelemetry.trace import format_span_id, format_trace_id

from dilaserve.messages import Admitted, Refused, StepCommand, StepItem
from dilaserve.store.records import ReassignAnswer
from dilaserve.telemetry import Telemetry
from dilaserve_scheduler.core.effects import Admit, Reassign, Send
from dilaserve_scheduler.core.events import ReassignAnswered
from dilaserve_scheduler.tracing import PlacementTraces

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
ADMITTED = Admitted(request_id="r", predicted_finish_s=1.0, threshold=0.9)


def send(*first: str, epoch: int = 1) -> Send:
    items = [
        StepItem(request_id=name, epoch=epoch, threshold=0.9, until_block=0) for name in ("r", "s")
    ]
    return Send("a-0001", StepCommand(term=1, seq=1, items=items), first)


def traceparents(traces: PlacementTraces, sent: Send) -> list[str]:
    return [item.traceparent for item in traces.decorate(sent).items]


def test_an_admission_is_a_child_of_the_gateways_span_and_the_workers_is_its() -> None:
    telemetry = Telemetry.for_tests("scheduler")
    traces = PlacementTraces(telemetry.tracer)
    traces.submitted("r", {"Traceparent": PARENT})
    traces.submitted("r", {"Traceparent": PARENT})  # asked again
    traces.calling(Admit(1, "r", "a-0001"))
    traces.answered("r", ADMITTED)
    traces.answered("r", ADMITTED)
    (span,) = telemetry.finished_spans()
    assert span.name == "scheduler.admit"
    assert span.parent is not None
    assert format_span_id(span.parent.span_id) == SPAN
    assert dict(span.attributes or {}) == {
        "dilaserve.request_id": "r",
        "dilaserve.instance_id": "a-0001",
        "dilaserve.threshold": 0.9,
        "dilaserve.outcome": "admitted",
    }
    own = f"00-{TRACE}-{format_span_id(span.context.span_id)}-01"
    assert traceparents(traces, send("r")) == [own, ""]
    assert traceparents(traces, send()) == ["", ""]


def test_a_move_is_a_child_of_the_gateways_span_and_takes_over() -> None:
    telemetry = Telemetry.for_tests("scheduler")
    traces = PlacementTraces(telemetry.tracer)
    traces.stored("r", PARENT)  # admitted by an earlier scheduler
    assert traceparents(traces, send("r")) == [PARENT, ""]
    traces.calling(Reassign(7, "r", "b-0001", 1, "died", owner_died=True))
    traces.moved(ReassignAnswered(7, "r", ReassignAnswer(outcome="reassigned", epoch=2)))
    (span,) = telemetry.finished_spans()
    assert span.name == "scheduler.reassign"
    assert span.parent is not None
    assert format_span_id(span.parent.span_id) == SPAN
    assert format_trace_id(span.context.trace_id) == TRACE
    assert dict(span.attributes or {}) == {
        "dilaserve.request_id": "r",
        "dilaserve.instance_id": "b-0001",
        "dilaserve.cause": "died",
        "dilaserve.epoch": 2,
        "dilaserve.outcome": "reassigned",
    }
    own = f"00-{TRACE}-{format_span_id(span.context.span_id)}-01"
    assert traceparents(traces, send("r", epoch=2)) == [own, ""]


def test_a_refusal_ends_its_span_and_is_forgotten() -> None:
    telemetry = Telemetry.for_tests("scheduler")
    traces = PlacementTraces(telemetry.tracer)
    for _ in range(2):
        traces.submitted("r", {})
        traces.answered("r", Refused(request_id="r", reason="full", code="overloaded"))
    assert [(s.attributes or {})["dilaserve.outcome"] for s in telemetry.finished_spans()] == [
        "overloaded",
        "overloaded",
    ]
    assert traceparents(traces, send("r")) == ["", ""]


def test_what_ends_in_between_leaves_no_span_open() -> None:
    telemetry = Telemetry.for_tests("scheduler")
    traces = PlacementTraces(telemetry.tracer)
    traces.submitted("r", {"traceparent": PARENT})
    traces.calling(Reassign(7, "r", "b-0001", 1, "died"))
    traces.forget("r")
    traces.forget("r")
    assert [s.name for s in telemetry.finished_spans()] == ["scheduler.admit", "scheduler.reassign"]
