"""docker-compose.yml for real: built, started, asked, hurt, taken down (`make test-compose`)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dilaserve.telemetry import METRICS

from . import engine as docker
from .clients import FETCH, LONG, complete, instances, report, stream, timed, wait_for

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(docker.why_not()), reason=docker.why_not() or "an engine can run"),
]

OURS = ("gateway", "scheduler", "predictor", "gpu-worker")


@pytest.fixture(scope="module")
def stack(engine: docker.Engine, request: pytest.FixtureRequest) -> Iterator[docker.Project]:
    """The stack with two workers, up and healthy; its logs are shown if anything failed."""
    project = docker.Project(engine, "dilaserve-test")
    timed("build", lambda: project.compose("build", "-q"))
    for service in OURS:
        size = int(engine.run("image", "inspect", "-f", "{{.Size}}", f"dilaserve/{service}:test"))
        report(f"image dilaserve/{service}: {size / 1e6:.0f} MB")
    is_up = False
    try:
        timed(
            "up until healthy",
            lambda: project.compose("up", "-d", "--wait", "--scale", "gpu-worker=2"),
        )
        is_up = True
        yield project
    finally:
        if not is_up or request.session.testsfailed:
            report(project.compose("ps", "-a") + project.compose("logs", "--tail", "80"))
        timed("down", lambda: project.compose("down", "-v", "--timeout", "20"))


@pytest.fixture
def client(stack: docker.Project) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url("gateway", 8000), timeout=120) as client:
        yield client


def test_all_containers_are_healthy_and_run_as_they_should(stack: docker.Project) -> None:
    for service in (*OURS, "nats", "redis"):
        found = stack.containers(service)
        assert len(found) == (2 if service == "gpu-worker" else 1)
        for container in found:
            assert container["State"]["Health"]["Status"] == "healthy"
            assert container["HostConfig"]["ReadonlyRootfs"] is True
            assert container["HostConfig"]["CapDrop"] == ["ALL"]
            assert container["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
            uid, *_ = container["Config"]["User"].split(":")
            assert int(uid) > 0, f"{service} runs as root"


def test_a_completion_whole_and_streamed(client: httpx.Client) -> None:
    whole = complete(client, seed=1)
    assert whole
    assert stream(client, seed=1) == whole
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]


def test_metrics_of_every_service_are_reachable(
    stack: docker.Project, client: httpx.Client
) -> None:
    complete(client, seed=2)
    fetch = ("python", "-c", FETCH)
    texts = {
        "gateway": client.get("/metrics").text,
        "scheduler": stack.inside("gateway", *fetch, "http://scheduler:9464/metrics"),
        "predictor": stack.inside("gateway", *fetch, "http://predictor:9464/metrics"),
        "gpu-worker": stack.inside("gateway", *fetch, "http://gpu-worker:9464/metrics"),
    }
    for service, text in texts.items():
        names = {family.name for family in text_string_to_metric_families(text)}
        ours = {m.name for m in METRICS.values() if service in m.services}
        shown = {name for name in ours if names & {name, name.removesuffix("_total")}}
        assert shown, service


def test_a_killed_worker_container_costs_no_stream_and_comes_back(
    stack: docker.Project, client: httpx.Client
) -> None:
    seeds = range(10, 26)
    with ThreadPoolExecutor(len(seeds)) as pool:
        undisturbed = list(pool.map(lambda seed: complete(client, seed, **LONG), seeds))
        victim = stack.containers("gpu-worker")[0]
        hostname = victim["Config"]["Hostname"]
        streams = [pool.submit(stream, client, seed, **LONG) for seed in seeds]
        wait_for(
            "the victim's first request",
            lambda: any(
                i["info"]["host"] == hostname and i["n_requests"] for i in instances(stack)
            ),
        )
        os.kill(victim["State"]["Pid"], signal.SIGKILL)
        texts = [future.result() for future in streams]

    assert texts == undisturbed
    wait_for(
        "the restart of the container",
        lambda: (
            stack.engine.run("inspect", "-f", "{{.RestartCount}}", victim["Id"]).strip() == "1"
            and len(instances(stack)) == 2
        ),
    )


def test_the_gpu_override_reserves_one_gpu(engine: docker.Engine, stack: docker.Project) -> None:
    project = docker.Project(
        engine,
        "dilaserve-test-gpu",
        files=(*stack.files, "docker-compose.gpu.yml"),
        environ={"GPU_ID": "3"},
    )
    try:
        project.compose("create", "--no-build", "gpu-worker")
        (worker,) = project.containers("gpu-worker")
    finally:
        project.compose("down", "-v")
    (request,) = worker["HostConfig"]["DeviceRequests"]
    assert (request["Driver"], request["DeviceIDs"]) == ("nvidia", ["3"])
    assert request["Capabilities"] == [["gpu"]]
    assert "DILASERVE_DEVICE=cuda" in worker["Config"]["Env"]


def test_the_observability_profile_is_valid(engine: docker.Engine) -> None:
    project = docker.Project(
        engine, "dilaserve-test", environ={"COMPOSE_PROFILES": "observability"}
    )
    config = json.loads(project.compose("config", "--format", "json"))
    endpoint = "http://otel-collector:4318"
    assert {"otel-collector", "tempo", "prometheus", "grafana"} <= set(config["services"])
    for service in OURS:
        assert config["services"][service]["environment"]["DILASERVE_OTLP_ENDPOINT"] == endpoint
