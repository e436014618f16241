"""Spans and metrics of the worker, so that the service reads without them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Tracer

from dilaserve.messages import CommitOutcome, InstanceInfo, StepItem
from dilaserve.telemetry import Telemetry, extract
from dilaserve_gpu_worker.engine.types import BatchOutput, StepOutput

__all__ = ["RequestTrace", "RequestTraces", "WorkerMetrics"]


class RequestTrace:
    """The span `worker.request`: one request at one epoch, from load to release."""

    def __init__(self, span: Span, step: int) -> None:
        self._span = span
        self._first_step = step

    @property
    def link(self) -> Link:
        """For the span of a batch in which the request takes part."""
        return Link(self._span.get_span_context())

    def end(self, outcome: str, step: int) -> None:
        """Say how it ended, at which committed step. Ending twice does no harm."""
        if self._span.is_recording():
            self._span.set_attribute("dilaserve.outcome", outcome)
            self._span.set_attribute("dilaserve.steps", step - self._first_step)
            self._span.end()


class RequestTraces:
    """Begins the traces of requests on one instance."""

    def __init__(self, tracer: Tracer, instance_id: str) -> None:
        self._tracer = tracer
        self._instance_id = instance_id

    def begin(self, item: StepItem, step: int) -> RequestTrace:
        """A span under the placement that the scheduler made; `step` is the last committed."""
        span = self._tracer.start_span(
            "worker.request",
            context=extract({"traceparent": item.traceparent}),
            attributes={
                "dilaserve.request_id": item.request_id,
                "dilaserve.instance_id": self._instance_id,
                "dilaserve.epoch": item.epoch,
            },
        )
        return RequestTrace(span, step)


class WorkerMetrics:
    """Counts passes, steps and commits of one instance."""

    def __init__(self, telemetry: Telemetry, info: InstanceInfo) -> None:
        self._telemetry = telemetry
        self._info = info
        self._n_passes = 0

    def gauges(self, n_held: Callable[[], int], n_free_kv: Callable[[], int]) -> None:
        """Have the two gauges read at each rendering. Once per process."""
        labels = {"model_name": self._info.model_id}
        size = self._info.n_kv_tokens
        self._telemetry.gauge("vllm:num_requests_running", lambda: [(n_held(), labels)])
        self._telemetry.gauge(
            "vllm:kv_cache_usage_perc",
            lambda: [(1 - n_free_kv() / size if size else 0.0, labels)],
        )

    def pass_done(self, output: BatchOutput, traces: Iterable[RequestTrace]) -> None:
        """One forward pass has ended just now; `traces` are those of its requests."""
        telemetry, degree = self._telemetry, self._info.tp_degree
        telemetry.observe("dilaserve:step_seconds", output.latency_s, tp_degree=degree)
        telemetry.observe(
            "vllm:iteration_tokens_total", output.n_tokens, model_name=self._info.model_id
        )
        telemetry.count("dilaserve:rebuilds_total", output.n_rebuilds)
        for kind, n_steps in Counter(step.kind for step in output.steps).items():
            telemetry.count("dilaserve:steps_total", n_steps, kind=kind, tp_degree=degree)
        if output.steps:
            # One of them, in turn: all would take longer than everything else here.
            self._n_passes += 1
            step = output.steps[self._n_passes % len(output.steps)]
            telemetry.observe("dilaserve:step_threshold", step.threshold)
        if telemetry.is_tracing:
            self._trace_pass(output, traces)

    def answered(self, seconds: float, outcomes: Iterable[CommitOutcome]) -> None:
        """The store answered a batch of commits, in one round trip of `seconds`."""
        self._telemetry.observe("dilaserve:commit_seconds", seconds)
        for outcome, n_commits in Counter(outcomes).items():
            self._telemetry.count("dilaserve:commits_total", n_commits, outcome=outcome)

    def committed(self, outputs: Iterable[StepOutput]) -> None:
        """These steps are in the store."""
        n_tokens = sum(len(output.tokens) for output in outputs)
        self._telemetry.count("dilaserve:tokens_unmasked_total", n_tokens)

    def dropped(self, reason: str) -> None:
        """A message was dropped: `invalid`, `stale`, or `unsent` (the bus was down)."""
        self._telemetry.count("dilaserve:messages_dropped_total", reason=reason)

    def _trace_pass(self, output: BatchOutput, traces: Iterable[RequestTrace]) -> None:
        end_ns = time.time_ns()
        span = self._telemetry.tracer.start_span(
            "worker.step",
            context=Context(),
            links=[trace.link for trace in traces],
            start_time=end_ns - int(output.latency_s * 1e9),
            attributes={
                "dilaserve.instance_id": self._info.instance_id,
                "dilaserve.n_requests": len(output.steps),
                "dilaserve.n_tokens": output.n_tokens,
                "dilaserve.n_rebuilds": output.n_rebuilds,
                "dilaserve.tp_degree": self._info.tp_degree,
            },
        )
        span.end(end_ns)
