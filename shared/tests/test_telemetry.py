"""Telemetry: declared names only, exact Prometheus text, several objects side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from prometheus_client.parser import text_string_to_metric_families

from dilaserve.settings import CommonSettings
from dilaserve.telemetry import METRICS, SPANS, Telemetry, extract, inject


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry.for_tests()
    yield telemetry
    telemetry.close()


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample but target_info, by name and sorted labels, through Prometheus's own parser."""
    text, _ = telemetry.render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name != "target_info"
    }


def use(telemetry: Telemetry, name: str) -> None:
    """Emit the metric `name` once, with each label's own name as its value."""
    metric = METRICS[name]
    labels = {label: label for label in metric.labels}
    match metric.kind:
        case "counter":
            telemetry.count(name, 2, **labels)
        case "histogram":
            telemetry.observe(name, metric.buckets[0], **labels)
        case "gauge":
            telemetry.gauge(name, lambda: [(2, labels)])


@pytest.mark.parametrize("name", METRICS)
def test_each_metric_appears_under_its_exact_name_and_kind(telemetry: Telemetry, name: str) -> None:
    use(telemetry, name)

    text, content_type = telemetry.render()

    metric = METRICS[name]
    labels = tuple(sorted((label, label) for label in metric.labels))
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert f"# TYPE {name} {metric.kind}\n" in text.decode()
    assert f"# HELP {name} {metric.help}\n" in text.decode()
    found = samples(telemetry)
    if metric.kind == "histogram":
        bounds = [dict(key)["le"] for sample, key in found if sample == f"{name}_bucket"]
        assert [float(bound) for bound in bounds] == [*metric.buckets, float("inf")]
        assert found[f"{name}_count", labels] == 1
        first = tuple(sorted((*labels, ("le", str(float(metric.buckets[0]))))))
        assert found[f"{name}_bucket", first] == 1, "a bucket's bound is inclusive"
    else:
        assert found == {(name, labels): 2}
    assert telemetry.emitted() == {name}


def test_the_registry_is_well_formed() -> None:
    for metric in METRICS.values():
        assert metric.name.startswith(("vllm:", "dilaserve:")), metric.name
        assert metric.services, metric.name
        assert metric.help[0].isupper(), metric.name
        assert not metric.help.endswith("."), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert (metric.unit == "s") == metric.name.endswith(("_seconds", "_seconds_total"))
        if metric.kind == "counter":
            assert metric.name.endswith("_total"), metric.name
    for span in SPANS.values():
        assert span.parent in {"", "remote", *SPANS}, span.name
        assert span.services, span.name


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.count("dilaserve:no_such_total"),
        lambda t: t.observe("dilaserve:rebuilds_total", 1.0),
        lambda t: t.gauge("dilaserve:rebuilds_total", lambda: []),
        lambda t: t.count("dilaserve:commits_total"),
        lambda t: t.count("dilaserve:commits_total", result="fenced"),
        lambda t: t.count("dilaserve:commits_total", outcome="fenced", more=1),
        lambda t: t.tracer.start_span("worker.nothing"),
    ],
    ids=["metric", "kind", "gauge", "no label", "other label", "extra label", "span"],
)
def test_what_is_not_declared_raises(telemetry: Telemetry, wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"dilaserve/telemetry/names\.py"):
        wrong(telemetry)

    assert telemetry.emitted() == frozenset()
    assert samples(telemetry) == {}


def test_a_wrong_label_of_a_gauge_raises_when_rendered(telemetry: Telemetry) -> None:
    telemetry.gauge("dilaserve:instances", lambda: [(1, {"colour": "red"})])

    with pytest.raises(ValueError, match="takes the labels"):
        telemetry.render()


def test_a_gauge_has_one_callback(telemetry: Telemetry) -> None:
    telemetry.gauge("dilaserve:open_streams", lambda: [(1, {})])

    with pytest.raises(ValueError, match="has a callback already"):
        telemetry.gauge("dilaserve:open_streams", lambda: [(2, {})])


def test_a_gauge_is_read_at_each_rendering_and_forgets_what_is_gone(telemetry: Telemetry) -> None:
    states = {"live": 2, "dead": 1}
    telemetry.gauge(
        "dilaserve:instances", lambda: [(n, {"state": state}) for state, n in states.items()]
    )
    name = "dilaserve:instances"
    assert samples(telemetry) == {(name, (("state", "live"),)): 2, (name, (("state", "dead"),)): 1}

    states.pop("dead")

    assert samples(telemetry) == {(name, (("state", "live"),)): 2}


def test_labels_of_any_type_with_the_same_text_are_one_series(telemetry: Telemetry) -> None:
    telemetry.count("dilaserve:steps_total", kind="cache", tp_degree=1)
    telemetry.count("dilaserve:steps_total", kind="cache", tp_degree="1")

    key = ("dilaserve:steps_total", (("kind", "cache"), ("tp_degree", "1")))
    assert samples(telemetry) == {key: 2}


def test_counters_lose_nothing_between_threads(telemetry: Telemetry) -> None:
    def work() -> None:
        for _ in range(2000):
            telemetry.count("dilaserve:rebuilds_total")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        telemetry.render()
    for thread in threads:
        thread.join()

    assert samples(telemetry) == {("dilaserve:rebuilds_total", ()): 16000}


def test_several_telemetries_share_nothing() -> None:
    one, two = Telemetry.for_tests(), Telemetry.for_tests()
    one.count("dilaserve:rebuilds_total")
    with one.tracer.start_as_current_span("worker.step"):
        pass

    assert samples(two) == {}
    assert two.finished_spans() == ()
    assert two.emitted() == frozenset()
    one.close()
    two.count("dilaserve:rebuilds_total", 3)
    assert samples(two) == {("dilaserve:rebuilds_total", ()): 3}
    two.close()
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"


def test_a_service_shows_its_unlabelled_counters_from_zero_on() -> None:
    telemetry = Telemetry.start(
        service="gpu-worker", service_id="w-0001", settings=CommonSettings()
    )
    try:
        assert samples(telemetry) == {
            ("dilaserve:rebuilds_total", ()): 0,
            ("dilaserve:tokens_unmasked_total", ()): 0,
        }
        assert telemetry.emitted() == frozenset()
    finally:
        telemetry.close()


def test_a_trace_crosses_the_bus_in_its_headers(telemetry: Telemetry) -> None:
    with telemetry.tracer.start_as_current_span("gateway.request") as request:
        headers = inject()
    other = Telemetry.for_tests()
    with other.tracer.start_as_current_span("scheduler.admit", context=extract(headers)):
        inner = inject()
    other.tracer.start_span("worker.request", context=extract(inner)).end()

    admit, worker = other.finished_spans()
    assert set(headers) == {"traceparent"}
    assert admit.parent is not None
    assert worker.parent is not None
    assert admit.context.trace_id == worker.context.trace_id == request.get_span_context().trace_id
    assert admit.parent.span_id == request.get_span_context().span_id
    assert worker.parent.span_id == admit.context.span_id
    assert telemetry.emitted() == {"gateway.request"}
    assert other.emitted() == {"scheduler.admit", "worker.request"}
    other.close()


@pytest.mark.parametrize("headers", [{}, {"traceparent": ""}, {"traceparent": "00-xyz"}])
def test_without_a_valid_parent_a_span_is_a_root(
    telemetry: Telemetry, headers: dict[str, str]
) -> None:
    with telemetry.tracer.start_as_current_span("gateway.request"):
        telemetry.tracer.start_span("scheduler.admit", context=extract(headers)).end()

    assert telemetry.finished_spans()[0].parent is None


def test_header_names_are_read_in_any_case(telemetry: Telemetry) -> None:
    with telemetry.tracer.start_as_current_span("gateway.request") as request:
        context = extract({"Traceparent": inject()["traceparent"]})

    parent = trace.get_current_span(context).get_span_context()
    assert parent.span_id == request.get_span_context().span_id


def test_no_span_no_headers() -> None:
    assert inject() == {}


def test_a_parent_that_is_not_sampled_is_respected_and_passed_on(telemetry: Telemetry) -> None:
    parent = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-00"}

    with telemetry.tracer.start_as_current_span("gateway.request", context=extract(parent)):
        headers = inject()

    assert headers["traceparent"].startswith("00-11111111111111111111111111111111-")
    assert headers["traceparent"].endswith("-00")
    assert telemetry.finished_spans() == ()


def test_spans_say_whose_they_are() -> None:
    telemetry = Telemetry.for_tests(service="scheduler")
    telemetry.tracer.start_span("scheduler.admit").end()

    resource = telemetry.finished_spans()[0].resource.attributes
    assert resource["service.name"] == "dilaserve-scheduler"
    assert resource["service.instance.id"] == "scheduler-0000"
    assert resource["service.version"]
    telemetry.close()


def test_closing_twice_does_no_harm(telemetry: Telemetry) -> None:
    telemetry.close()
    telemetry.close()
