"""What infra/ and the compose files say agrees with the code: metric names, labels, variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from dilaserve.messages import CommitOutcome
from dilaserve.settings import variable
from dilaserve.telemetry import METRICS, SPANS, Metric
from dilaserve_reconfigurator.settings import ReconfiguratorSettings
from dilaserve_scheduler.core.effects import MoveCause

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "infra/grafana/dashboards/dilaserve.json"
ALERTS = ROOT / "infra/prometheus/alerts.yaml"
PROMETHEUS_LABELS = {"le", "job", "instance"}
LABEL_VALUES = {
    ("dilaserve:commits_total", "outcome"): get_args(CommitOutcome),
    ("dilaserve:reassignments_total", "cause"): get_args(MoveCause),
    ("dilaserve:instances", "state"): ("live", "dead"),
    ("dilaserve:slo_total", "outcome"): ("met", "missed"),
    ("dilaserve:predictor_wmape", "basis"): ("trained", "served"),
}
SET_BY_COMPOSE = {"COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME", "PWD"}
METRIC_NAME = re.compile(r"\b(?:vllm|dilaserve):[a-z0-9_]+")


def compose() -> Any:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def expressions() -> Iterator[str]:
    """Every PromQL expression of the dashboard and the alerts."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []) if "expr" in target)
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def metric_of(series: str) -> Metric | None:
    """The declared metric behind a series name; a histogram's series end in one of three ways."""
    if series in METRICS and METRICS[series].kind != "histogram":
        return METRICS[series]
    name = re.sub(r"_(bucket|sum|count)$", "", series)
    metric = METRICS.get(name)
    return metric if name != series and metric and metric.kind == "histogram" else None


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_expressions_name_declared_metrics_and_labels(expression: str) -> None:
    series = METRIC_NAME.findall(expression)
    assert series, "an expression without a metric of ours"
    metrics = {name: metric_of(name) for name in series}
    assert None not in metrics.values(), metrics
    known = PROMETHEUS_LABELS.union(*(m.labels for m in metrics.values() if m))
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    assert used <= known, used - known


def test_label_values_in_expressions_are_ones_that_the_code_uses() -> None:
    found = 0
    for expression in expressions():
        for series, selectors in re.findall(r"([a-z]+:[a-z0-9_]+)\{([^}]*)\}", expression):
            for label, value in re.findall(r"(\w+)=\"([^\"]+)\"", selectors):
                assert value in LABEL_VALUES[series, label], expression
                found += 1
    assert found >= len(LABEL_VALUES)


def test_counters_are_shown_as_rates() -> None:
    for expression in expressions():
        for series in METRIC_NAME.findall(expression):
            metric = metric_of(series)
            if metric and metric.kind != "gauge":
                assert re.search(rf"(rate|increase)\({re.escape(series)}", expression), expression


def test_the_dashboard_shows_every_metric() -> None:
    shown = {metric_of(name) for e in expressions() for name in METRIC_NAME.findall(e)}
    assert {m.name for m in METRICS.values()} == {m.name for m in shown if m}


def test_the_dashboard_is_sound() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    sources = yaml.safe_load(
        (ROOT / "infra/grafana/provisioning/datasources/datasources.yaml").read_text()
    )
    uids = {source["uid"] for source in sources["datasources"]}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or panel["datasource"]["uid"] in uids, panel["title"]
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] in uids
            for name in re.findall(r'name="([^"]+)"', target.get("query", "")):
                assert name in SPANS


def test_every_yaml_file_parses() -> None:
    files = [*(ROOT / "infra").rglob("*.yaml"), *ROOT.glob("docker-compose*.yml")]
    assert len(files) >= 8
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


def test_mounted_files_exist() -> None:
    for name, service in compose()["services"].items():
        for volume in service.get("volumes", []):
            source = volume if isinstance(volume, str) else volume["source"]
            source = re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", source).split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), f"{name}: {source}"


def test_prometheus_scrapes_every_service_of_ours() -> None:
    config = yaml.safe_load((ROOT / "infra/prometheus/prometheus.yaml").read_text())
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    ours = {name for name, s in compose()["services"].items() if "build" in s}
    emitting = {service for metric in METRICS.values() for service in metric.services}
    assert set(jobs) == ours == emitting
    dockerfile = (ROOT / "infra/Dockerfile").read_text()
    for name, found in jobs.items():
        stage = dockerfile.split(f"FROM runtime AS {name}\n")[1].split("\nFROM ")[0]
        assert found["names"] == [name]
        assert f"EXPOSE {found['port']}\n" in stage


def test_every_container_is_hardened_and_the_core_has_healthchecks() -> None:
    for name, service in compose()["services"].items():
        assert service["init"] is True, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["restart"] == "unless-stopped", name
        if "profiles" not in service:
            assert service["healthcheck"]["test"][0] == "CMD", name
        for needed, condition in dict.fromkeys(service.get("depends_on", [])).items():
            assert needed in compose()["services"], (name, needed, condition)


def test_published_ports_are_on_loopback_by_default() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${GATEWAY_BIND:-127.0.0.1}:")), (name, port)


def test_planner_that_applies_starts_no_worker_and_reads_settings_that_there_are() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.planner.yml").read_text())["services"]
    assert services["gpu-worker"]["deploy"]["replicas"] == 0
    known = {variable(name) for name in get_type_hints(ReconfiguratorSettings)}
    environment = set(services["reconfigurator"]["environment"])
    assert environment - known == {"DILASERVE_MODEL"}, "that one is the workers'"
    labels = services["reconfigurator"]["environment"]["DILASERVE_DOCKER_LABELS"]
    assert " " not in labels


def test_variables_of_the_compose_files_are_documented() -> None:
    text = "".join(file.read_text() for file in ROOT.glob("docker-compose*.yml"))
    used = set(re.findall(r"\$\{([A-Z_]+)", text)) - SET_BY_COMPOSE
    table = (ROOT / "infra/README.md").read_text()
    documented = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([A-Z_]+)`", line.split("|")[1])
    }
    assert used == documented
