"""docker-compose.planner.yml for real: the planner's container launches the workers' containers,
changes their mix under streams, and is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest

from . import engine as docker
from .clients import FETCH, complete, instances, report, stream, timed, wait_for

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(docker.why_not()), reason=docker.why_not() or "an engine can run"),
]

WANTED = "/var/lib/dilaserve/instances/wanted.json"
N_STREAMS = 6


@pytest.fixture(scope="module")
def planned(engine: docker.Engine, request: pytest.FixtureRequest) -> Iterator[docker.Project]:
    """A stack without workers of its own, and a planner with two cores; up and healthy."""
    socket = engine.environ["DOCKER_HOST"].removeprefix("unix://")
    files = ("docker-compose.yml", "tests/compose/build.yml", "docker-compose.planner.yml")
    environ = {
        "COMPOSE_PROFILES": "planner",
        "OTLP_ENDPOINT": "",
        "DOCKER_SOCKET": socket,
        "DOCKER_GID": str(os.stat(socket).st_gid),
        "PLANNER_NODES": "1x2",
        "INITIAL_MIX": "2xtp1",
        "POLICY": "infaas",
        "SLO_MS": "120000",
    }
    project = docker.Project(engine, "dilaserve-planned", files=files, environ=environ)
    timed("build with the planner", lambda: project.compose("build", "-q"))
    is_up = False
    try:
        timed("up until healthy", lambda: project.compose("up", "-d", "--wait"))
        is_up = True
        yield project
    finally:
        if not is_up or request.session.testsfailed:
            report(project.compose("ps", "-a") + project.compose("logs", "--tail", "80"))
        project.compose("down", "-v", "--remove-orphans", "--timeout", "20")


@pytest.fixture
def client(planned: docker.Project) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=None)
    url = planned.url("gateway", 8000)
    with httpx.Client(base_url=url, timeout=120, limits=limits) as client:
        yield client


def workers(planned: docker.Project) -> dict[str, Any]:
    """`docker inspect` of the planner's containers by worker's name."""
    label = f"label=dilaserve.cluster={planned.name}"
    ids = planned.engine.run("ps", "-q", "--filter", label).split()
    found = json.loads(planned.engine.run("inspect", *ids)) if ids else []
    return {each["Config"]["Labels"]["dilaserve.name"]: each for each in found}


def degrees(planned: docker.Project) -> list[int]:
    return sorted(each["info"]["tp_degree"] for each in instances(planned))


def kill_planner(planned: docker.Project) -> None:
    """Its process as the host sees it; the container starts again."""
    (container,) = planned.containers("reconfigurator")
    os.kill(container["State"]["Pid"], signal.SIGKILL)


def want(planned: docker.Project, counts: dict[int, int]) -> None:
    """As a planner leaves it that is killed when it has just decided on a change."""
    before = dict(Counter(degrees(planned)))
    text = json.dumps({"counts": counts, "before": before})
    script = f"import pathlib; pathlib.Path({WANTED!r}).write_text({text!r})"
    planned.inside("reconfigurator", "python", "-c", script)
    kill_planner(planned)


@contextmanager
def streaming(client: httpx.Client) -> Iterator[list[str]]:
    """Streams, one after the other in each of some threads, until the context ends; their texts
    so far. Raises what a stream has raised."""
    texts: list[str] = []
    seeds, over = count(100), threading.Event()

    def run() -> None:
        while not over.is_set():
            texts.append(stream(client, next(seeds)))

    with ThreadPoolExecutor(N_STREAMS) as pool:
        running = [pool.submit(run) for _ in range(N_STREAMS)]
        try:
            yield texts
        finally:
            over.set()
    for future in running:
        future.result()


def test_the_planner_launches_the_workers(planned: docker.Project, client: httpx.Client) -> None:
    wait_for("both workers", lambda: degrees(planned) == [1, 1])
    found = workers(planned)
    assert planned.containers("gpu-worker") == []
    assert {each["HostConfig"]["CpusetCpus"] for each in found.values()} == {"0", "1"}
    assert {each["Config"]["User"] for each in found.values()} == {"10001:10001"}
    assert complete(client, seed=1)
    url = "http://gpu-worker:9464/metrics"  # where Prometheus looks
    assert "dilaserve:" in planned.inside("gateway", "python", "-c", FETCH, url)


def test_its_next_life_finds_its_containers_and_replaces_the_dead(
    planned: docker.Project, client: httpx.Client
) -> None:
    wait_for("both workers", lambda: degrees(planned) == [1, 1])
    before = workers(planned)
    kill_planner(planned)
    victim, survivor = sorted(before)
    os.kill(before[victim]["State"]["Pid"], signal.SIGKILL)
    wait_for("a new worker", lambda: victim not in workers(planned) and len(workers(planned)) == 2)
    wait_for("both workers", lambda: degrees(planned) == [1, 1])
    assert workers(planned)[survivor]["Id"] == before[survivor]["Id"]
    assert complete(client, seed=2)


@pytest.mark.parametrize("mix", [{2: 1}, {1: 2}], ids=["1xtp2", "2xtp1"])
def test_the_mix_changes_under_streams_and_none_fails(
    planned: docker.Project, client: httpx.Client, mix: dict[int, int]
) -> None:
    wanted = [degree for degree, n in mix.items() for _ in range(n)]
    with streaming(client) as texts:
        wait_for("the first texts", lambda: len(texts) >= N_STREAMS)
        want(planned, mix)
        wait_for(f"{wanted}", lambda: degrees(planned) == wanted, timeout_s=180)
        n_before = len(texts)
        wait_for("further texts", lambda: len(texts) >= n_before + N_STREAMS)
    assert all(texts)
    report(f"{mix}: {len(texts)} streams")


def test_down_ends_the_workers_too(planned: docker.Project) -> None:
    assert workers(planned)
    planned.compose("down", "--remove-orphans", "--timeout", "20")
    assert workers(planned) == {}
