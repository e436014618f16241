"""Telemetry of a running process: the OTLP exporter, the Prometheus listener, the log lines."""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dilaserve.errors import SettingsError
from dilaserve.settings import CommonSettings
from dilaserve.telemetry import Telemetry, logs


def start(**settings: object) -> Telemetry:
    return Telemetry.start(
        service="scheduler",
        service_id="scheduler-0001",
        settings=CommonSettings(**settings),  # type: ignore[arg-type]
    )


class Collector:
    """An OTLP/HTTP collector that keeps what it was sent."""

    def __init__(self) -> None:
        received = self.received = []  # type: list[ExportTraceServiceRequest]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def names(self) -> list[str]:
        return [
            span.name
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_spans_reach_the_collector_at_the_latest_on_closing(collector: Collector) -> None:
    telemetry = start(otlp_endpoint=collector.url + "/")
    for _ in range(3):
        telemetry.tracer.start_span("scheduler.admit").end()

    telemetry.close()

    assert collector.names() == ["scheduler.admit"] * 3
    resource = collector.received[0].resource_spans[0].resource
    values = {a.key: a.value.string_value for a in resource.attributes}
    assert values["service.name"] == "dilaserve-scheduler"
    assert values["service.instance.id"] == "scheduler-0001"


def test_a_dead_collector_loses_spans_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    telemetry = start(otlp_endpoint=f"http://127.0.0.1:{port}")
    for _ in range(5000):
        telemetry.tracer.start_span("scheduler.admit").end()
    telemetry.count("dilaserve:admissions_total", outcome="admitted")

    assert b'dilaserve:admissions_total{outcome="admitted"} 1.0' in telemetry.render()[0]
    telemetry.close()


@pytest.mark.timeout(25)
def test_a_collector_that_never_answers_does_not_hold_up_the_end(black_hole: str) -> None:
    telemetry = start(otlp_endpoint=black_hole)
    for _ in range(5000):
        telemetry.tracer.start_span("scheduler.admit").end()
    telemetry.close()


def test_a_complaint_of_the_exporter_is_written_once_a_minute() -> None:
    stream = io.StringIO()
    handler = logs.install("info", "x-0001", stream)
    try:
        for _ in range(5):
            logging.getLogger("opentelemetry.exporter").error("Failed to export %s", "spans")
            logging.getLogger("dilaserve").error("ours")
    finally:
        logs.remove(handler)

    assert stream.getvalue().count("Failed to export spans") == 1
    assert stream.getvalue().count("ours") == 5


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://"])
def test_an_endpoint_that_is_no_http_url_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="DILASERVE_OTLP_ENDPOINT"):
        start(otlp_endpoint=endpoint)


def get(url: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_listener_answers_metrics_and_health() -> None:
    telemetry = start(metrics_port=0)
    telemetry.count("dilaserve:admissions_total", outcome="admitted")
    url = f"http://{telemetry.address}"

    status, content_type, text = get(f"{url}/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'dilaserve:admissions_total{outcome="admitted"} 1.0\n' in text
    assert 'service_instance_id="scheduler-0001"' in text
    assert get(f"{url}/healthz")[0] == 200
    status, _, text = get(f"{url}/")
    assert (status, text) == (404, "try /metrics or /healthz\n")

    telemetry.close()
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/healthz")


def test_without_a_port_nothing_listens() -> None:
    telemetry = start()
    assert telemetry.address == ""
    telemetry.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SettingsError, match=f"DILASERVE_METRICS_PORT={port}.*use a free port"):
            start(metrics_port=port)


@pytest.mark.parametrize("host", ["203.0.113.7", "::1", "no host"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(SettingsError, match=f"DILASERVE_METRICS_HOST='{host}'.*use 127.0.0.1"):
        start(metrics_host=host, metrics_port=0)


def test_a_failed_start_leaves_no_log_handler_behind() -> None:
    before = list(logging.getLogger().handlers)

    with pytest.raises(SettingsError):
        start(metrics_port=70000)

    assert logging.getLogger().handlers == before


def test_a_line_holds_time_level_service_text_and_trace() -> None:
    stream = io.StringIO()
    telemetry = Telemetry.for_tests()
    handler = logs.install("INFO", "gateway-1a2b", stream)
    log = logging.getLogger("dilaserve.somewhere")
    try:
        log.debug("too fine")
        log.info("two\nlines of %s", "text")
        with telemetry.tracer.start_as_current_span("gateway.request") as span:
            log.warning("in a span")
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.exception("failed")
    finally:
        logs.remove(handler)
        telemetry.close()

    first, second, third = stream.getvalue().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(stamp + r" INFO gateway-1a2b two\\nlines of text", first)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert re.fullmatch(stamp + rf" WARNING gateway-1a2b in a span trace={trace_id}", second)
    assert re.fullmatch(
        stamp + r" ERROR gateway-1a2b failed\\nTraceback .*RuntimeError: boom", third
    )


def test_a_log_level_that_there_is_not_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"DILASERVE_LOG_LEVEL='loud'.*use for example info"):
        start(log_level="loud")


def test_a_flood_of_one_kind_of_line_is_cut_and_counted() -> None:
    bursts = logs.Bursts()

    def lines(template: str, n: int, at_s: float, level: int = logging.WARNING) -> list[str]:
        records = [logging.LogRecord("x", level, "x.py", 1, template, (i,), None) for i in range(n)]
        for record in records:
            record.created = at_s
        formatter = logs.LineFormatter("x-0001")
        return [formatter.format(record) for record in records if bursts.filter(record)]

    assert len(lines("dropped %d", 500, 0.0)) == logs.BURST
    assert len(lines("another %d", 5, 0.0)) == 5
    assert len(lines("in detail %d", 500, 0.0, logging.DEBUG)) == 500
    after = lines("dropped %d", 2, logs.WINDOW_S)
    assert after[0].endswith("dropped 0 (480 more like this were left out before)")
    assert after[1].endswith("dropped 1")


def test_bursts_remember_a_bounded_number_of_kinds() -> None:
    bursts = logs.Bursts()
    for n in range(3 * logs.N_KINDS):
        record = logging.LogRecord("x", logging.WARNING, "x.py", 1, f"kind {n}", (), None)
        assert bursts.filter(record)
    assert len(bursts._seen) == logs.N_KINDS
