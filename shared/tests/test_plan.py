"""Which processes a stack consists of, and with which settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dilaserve.bus.memory import MemoryBus
from dilaserve.errors import DiLaServeError
from dilaserve.supervisor import ports
from dilaserve.supervisor.child import ChildSpec
from dilaserve.supervisor.plan import StackOptions, plan_servers, plan_services
from dilaserve.supervisor.stack import choose_endpoints

OPTIONS = StackOptions(home=Path("/h"), model=Path("/models/m"))


def services(options: StackOptions, **environ: str) -> list[ChildSpec]:
    return plan_services(options, choose_endpoints(options), bus=MemoryBus(), environ=environ)


def test_services_and_their_settings() -> None:
    options = StackOptions(
        home=Path("/h"), model=Path("/models/m"), n_workers=2, cache_mode="none", run_ahead="1"
    )
    specs = services(options, DILASERVE_LOG_LEVEL="debug")
    assert [(spec.name, spec.argv[-1]) for spec in specs] == [
        ("scheduler", "dilaserve_scheduler"),
        ("predictor", "dilaserve_predictor"),
        ("worker-1", "dilaserve_gpu_worker"),
        ("worker-2", "dilaserve_gpu_worker"),
        ("gateway", "dilaserve_gateway"),
    ]
    for spec in specs:
        assert spec.env["DILASERVE_MODEL"] == "/models/m"
        assert spec.env["DILASERVE_LOG_LEVEL"] == "debug"
        assert spec.env["DILASERVE_CACHE_MODE"] == "none"
        assert spec.env["DILASERVE_RUN_AHEAD"] == "1"
        assert "DILASERVE_THREADS" not in spec.env, "what is not asked for keeps its default"
    assert specs[3].env["DILASERVE_WORKER_NAME"] == "worker-2"
    assert [spec.name for spec in specs if not spec.is_vital] == ["predictor"]


def test_crash_point_is_armed_for_the_first_start_only() -> None:
    for spec in services(OPTIONS, DILASERVE_CRASH_AT="worker.after_commit:3"):
        assert "DILASERVE_CRASH_AT" not in spec.env
        assert spec.first_env == {"DILASERVE_CRASH_AT": "worker.after_commit:3"}


def test_external_servers_are_not_started(tmp_path: Path) -> None:
    options = StackOptions(
        home=tmp_path, model=tmp_path, nats_url="nats://n:1", redis_url="redis://r:2/0"
    )
    endpoints = choose_endpoints(options)
    assert plan_servers(endpoints, data=tmp_path, environ={}) == []
    env = services(options)[0].env
    assert env["DILASERVE_NATS_URL"] == "nats://n:1"
    assert env["DILASERVE_REDIS_URL"] == "redis://r:2/0"


def test_embedded_servers_listen_where_services_look(tmp_path: Path) -> None:
    endpoints = choose_endpoints(OPTIONS)
    nats, valkey = plan_servers(endpoints, data=tmp_path, environ={})
    assert endpoints.nats_url == f"nats://{nats.address}"
    assert endpoints.redis_url == f"redis://{valkey.address}/0"
    assert str(tmp_path) in valkey.argv


def test_taken_port_is_refused_when_asked_for_and_skipped_when_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DiLaServeError, match=f"port {port} on 127.0.0.1 is taken"):
            ports.exactly("127.0.0.1", port)
        assert ports.next_free("127.0.0.1", port) > port
