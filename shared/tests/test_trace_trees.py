"""Traces as `dilaserve trace` prints them."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dilaserve.embedded import free_port
from dilaserve.settings import CommonSettings
from dilaserve.telemetry import Telemetry
from dilaserve.telemetry.trees import KEEP_S, SETTLE_S, TraceTrees

DILASERVE = Path(sys.executable).with_name("dilaserve")
MS = 1_000_000


def body(service_id: str, *spans: tuple[str, int, int, int]) -> bytes:
    """Spans of one process: (name, id, parent's id, start in ms), 5 ms long, of trace 7."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.add(key="service.instance.id").value.string_value = service_id
    scope = group.scope_spans.add()
    for name, span_id, parent_id, start_ms in spans:
        span = scope.spans.add(name=name, trace_id=b"\7" * 16, span_id=bytes([span_id]) * 8)
        span.parent_span_id = bytes([parent_id]) * 8 if parent_id else b""
        span.start_time_unix_nano, span.end_time_unix_nano = start_ms * MS, (start_ms + 5) * MS
        span.attributes.add(key="dilaserve.epoch").value.int_value = start_ms
        span.attributes.add(key="dilaserve.request_id").value.string_value = "r-1"
    return request.SerializeToString()


def test_spans_of_several_processes_become_one_tree() -> None:
    trees = TraceTrees()
    trees.add(body("worker-1", ("worker.request", 3, 2, 102), ("worker.step", 9, 0, 103)), 0.0)
    trees.add(gzip.compress(body("gateway", ("gateway.request", 1, 8, 100))), 0.1)
    trees.add(
        body("scheduler", ("scheduler.reassign", 4, 1, 103), ("scheduler.admit", 2, 1, 101)), 0.5
    )
    [lines] = trees.take_complete(0.5 + SETTLE_S)
    assert lines[0] == f"trace {'07' * 16} r-1"
    assert [line[:24].rstrip() for line in lines[1:]] == [
        "gateway.request",
        "  scheduler.admit",
        "    worker.request",
        "  scheduler.reassign",
    ]
    assert lines[3].split() == [
        "worker.request",
        "worker-1",
        "at",
        "2.0",
        "ms",
        "took",
        "5.0",
        "ms",
        "epoch=102",
    ]
    assert list(trees.take_complete(1e9)) == [], "each trace is given once"


def test_trace_waits_for_its_gateway_and_is_forgotten_without_one() -> None:
    trees = TraceTrees()
    trees.add(body("scheduler", ("scheduler.admit", 2, 1, 101)), 0.0)
    assert list(trees.take_complete(2 * SETTLE_S)) == []
    trees.add(body("gateway", ("gateway.request", 1, 0, 100)), 10.0)
    assert list(trees.take_complete(10.0 + SETTLE_S / 2)) == [], "others may still come"
    assert len(list(trees.take_complete(10.0 + SETTLE_S))) == 1
    trees.add(body("scheduler", ("scheduler.admit", 2, 1, 101)), 0.0)
    assert list(trees.take_complete(KEEP_S)) == []
    trees.add(body("gateway", ("gateway.request", 1, 0, 100)), KEEP_S)
    [lines] = trees.take_complete(KEEP_S + SETTLE_S)
    assert len(lines) == 2, "the lone admission was forgotten"


def test_command_prints_what_a_service_exports(tmp_path: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [DILASERVE, "trace", "--port", str(port), "--count", "1"],
        env={**os.environ, "DILASERVE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert f"http://127.0.0.1:{port}" in process.stderr.readline()
        settings = CommonSettings(otlp_endpoint=f"http://127.0.0.1:{port}")
        telemetry = Telemetry.start(service="gateway", service_id="gateway-1a2b", settings=settings)
        with telemetry.tracer.start_as_current_span("gateway.request"):
            pass
        telemetry.close()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert output.startswith("trace ")
    assert "gateway.request          gateway-1a2b" in output


def test_taken_port_has_a_remedy() -> None:
    port = free_port()
    with subprocess.Popen(
        [DILASERVE, "trace", "--port", str(port)], stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stderr is not None
        first.stderr.readline()
        second = subprocess.run(
            [DILASERVE, "trace", "--port", str(port)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        first.kill()
    assert second.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken; give another one by --port" in second.stderr
