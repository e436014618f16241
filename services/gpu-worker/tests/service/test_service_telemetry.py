"""The worker's part of a trace, and its metrics."""

from __future__ import annotations

from opentelemetry import trace

from dilaserve.telemetry import METRICS, SPANS, inject


def traced(rig, request_id: str) -> tuple[str, int]:
    """The traceparent of a placement, as the scheduler makes it, and its span's id."""
    span = rig.telemetry.tracer.start_span("scheduler.admit")
    headers = inject(trace.set_span_in_context(span))
    span.end()
    return headers["traceparent"], span.get_span_context().span_id


def spans(rig, name: str):
    return [span for span in rig.telemetry.finished_spans() if span.name == name]


async def test_a_request_is_a_child_of_its_placement_and_linked_from_its_steps(rig):
    traceparent, parent_id = traced(rig, "r")
    await rig.new("r")
    await rig.credit("r", traceparent=traceparent)
    await rig.until(lambda: spans(rig, "worker.request"))
    (request,) = spans(rig, "worker.request")
    assert request.parent.span_id == parent_id
    assert request.attributes == {
        "dilaserve.request_id": "r",
        "dilaserve.instance_id": rig.instance_id,
        "dilaserve.epoch": 1,
        "dilaserve.steps": 4,
        "dilaserve.outcome": "finished",
    }
    steps = spans(rig, "worker.step")
    assert len(steps) == 4
    assert all(step.parent is None for step in steps)
    linked = [link.context.span_id for step in steps for link in step.links]
    assert linked == [request.context.span_id] * 4


async def test_one_step_span_serves_a_whole_batch(rig):
    rig.engine.passing.clear()
    for name in ("first", "a", "b"):
        await rig.new(name, n_output=1)
        await rig.credit(name)
    rig.engine.passing.set()
    await rig.until(lambda: len(spans(rig, "worker.request")) == 3)
    assert sum(len(step.links) for step in spans(rig, "worker.step")) == 3
    assert len(spans(rig, "worker.step")) < 3


async def test_each_epoch_has_a_span_under_its_own_placement(rig):
    first, first_id = traced(rig, "r")
    second, second_id = traced(rig, "r")
    await rig.new("r")
    await rig.credit("r", until_step=1, traceparent=first)
    await rig.until(lambda: rig.steps("r") == [1])
    await rig.store.reassign("r", term=1, owner=rig.instance_id, expected_epoch=1)
    await rig.credit("r", epoch=2, traceparent=second)
    await rig.until(lambda: len(spans(rig, "worker.request")) == 2)
    old, new = spans(rig, "worker.request")
    assert (old.parent.span_id, new.parent.span_id) == (first_id, second_id)
    assert (old.attributes["dilaserve.steps"], new.attributes["dilaserve.steps"]) == (1, 3)
    assert old.attributes["dilaserve.outcome"] == "superseded"


async def test_every_declared_name_is_emitted(rig):
    await rig.new("r")
    await rig.credit("r")
    await rig.until(lambda: len(rig.items) == 4)
    await rig.bus.publish(f"dlm.v1.cmd.{rig.instance_id}.step", b"{}")
    await rig.until(lambda: rig.metric("dilaserve:messages_dropped_total") == 1)
    rig.telemetry.render()
    declared = {m.name for m in METRICS.values() if "gpu-worker" in m.services}
    declared |= {s.name for s in SPANS.values() if "gpu-worker" in s.services}
    assert declared <= rig.telemetry.emitted()


async def test_metrics_count_what_happened(rig):
    await rig.new("r", n_output=6)
    await rig.credit("r", until_step=5)
    await rig.until(lambda: len(rig.items) == 5)
    await rig.quiet()
    assert rig.metric("dilaserve:steps_total", kind="recompute", tp_degree="1") == 2
    assert rig.metric("dilaserve:steps_total", kind="cache", tp_degree="1") == 3
    assert rig.metric("dilaserve:tokens_unmasked_total") == 5
    assert rig.metric("dilaserve:commits_total", outcome="committed") == 5
    assert rig.metric("dilaserve:step_seconds_count") == 5
    assert rig.metric("vllm:num_requests_running") == 1
    assert abs(rig.metric("vllm:kv_cache_usage_perc") - 0.009) < 1e-9


async def test_no_span_is_made_for_a_pass_where_spans_go_nowhere(rig):
    rig.telemetry.is_tracing = False
    await rig.new("r")
    await rig.credit("r")
    await rig.until(lambda: spans(rig, "worker.request"))
    assert not spans(rig, "worker.step")
