"""Which processes a stack consists of, and with which settings."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dilaserve.bus.memory import MemoryBus
from dilaserve.embedded import free_port
from dilaserve.errors import DiLaServeError
from dilaserve.supervisor.child import ChildSpec
from dilaserve.supervisor.plan import StackOptions, plan_checks, plan_servers, plan_services
from dilaserve.supervisor.ports import held_port
from dilaserve.supervisor.stack import choose_endpoints

OPTIONS = StackOptions(home=Path("/h"), model=Path("/models/m"))
HOST, PORT = "127.0.0.1", 8000


def services(options: StackOptions, **environ: str) -> list[ChildSpec]:
    return plan_services(options, choose_endpoints(options, PORT), bus=MemoryBus(), environ=environ)


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


def test_what_is_asked_before_anything_starts() -> None:
    options = StackOptions(home=Path("/h"), model=Path("/models/m"), cache_mode="none", port=8001)
    environ = {
        "DILASERVE_MODEL": "/other",
        "DILASERVE_TP_DEGREE": "2",
        "DILASERVE_PORT": "x",
        "DILASERVE_CRASH_AT": "worker-1=worker.after_commit:3",
    }
    worker, gateway = plan_checks(options, environ)
    assert (worker.module, gateway.module) == ("dilaserve_gpu_worker", "dilaserve_gateway")
    for check in (worker, gateway):
        assert check.environ["DILASERVE_MODEL"] == "/models/m"
        assert check.environ["DILASERVE_CACHE_MODE"] == "none"
        assert "DILASERVE_CRASH_AT" not in check.environ, "which is read by child"
    assert worker.environ["DILASERVE_TP_DEGREE"] == "2", "the environment's"
    assert gateway.environ["DILASERVE_PORT"] == "8001", "the supervisor's"


@pytest.mark.parametrize(
    ("mix", "degrees"), [(None, ["8"]), ("4xtp1,2xtp4", ["1", "4"]), ("what", ["8"])]
)
def test_every_degree_of_the_planners_first_workers_is_asked_for(
    mix: str | None, degrees: list[str]
) -> None:
    options = StackOptions(home=Path("/h"), model=Path("/m"), planner="apply", tp_degree=8)
    environ = {"DILASERVE_INITIAL_MIX": mix} if mix else {}
    *workers, _ = plan_checks(options, environ)
    assert [check.environ["DILASERVE_TP_DEGREE"] for check in workers] == degrees


def test_planner_that_applies_takes_the_workers_place() -> None:
    options = StackOptions(
        home=Path("/h"), model=Path("/models/m"), n_workers=4, planner="apply", worker_device="cuda"
    )
    specs = services(options, DILASERVE_INITIAL_MIX="1xtp4", DILASERVE_PLANNER_MODE="advise")
    planner = next(spec for spec in specs if spec.service == "reconfigurator")
    assert [spec.service for spec in specs] == [
        *("scheduler", "predictor", "reconfigurator", "gateway")
    ]
    assert planner.is_vital
    assert planner.env["DILASERVE_PLANNER_MODE"] == "apply"
    assert planner.env["DILASERVE_NODES"] == "1x4"
    assert planner.env["DILASERVE_INITIAL_MIX"] == "1xtp4", "the environment's"
    assert planner.env["DILASERVE_WORKER_DEVICE"] == "cuda"
    assert planner.env["DILASERVE_INSTANCES_DIR"] == "/h/instances"
    assert planner.env["DILASERVE_MODEL"] == "/models/m", "for its workers"


def test_planner_has_slots_for_the_degree_that_is_asked_for() -> None:
    options = StackOptions(
        home=Path("/h"), model=Path("/m"), n_workers=2, tp_degree=4, planner="apply"
    )
    planner = next(spec for spec in services(options) if spec.service == "reconfigurator")
    assert planner.env["DILASERVE_NODES"] == "1x8"
    assert planner.env["DILASERVE_INITIAL_MIX"] == "2xtp4"


@pytest.mark.parametrize(
    ("tp_degree", "degrees"), [(1, "1,2,4"), (4, "1,2,4"), (8, "1,2,4,8"), (3, "1,3")]
)
def test_planner_may_choose_the_degree_that_is_asked_for(tp_degree: int, degrees: str) -> None:
    options = StackOptions(home=Path("/h"), model=Path("/m"), tp_degree=tp_degree, planner="apply")
    planner = next(spec for spec in services(options) if spec.service == "reconfigurator")
    assert planner.env["DILASERVE_TP_DEGREES"] == degrees


def test_planner_that_advises_stands_beside_the_workers() -> None:
    options = StackOptions(home=Path("/h"), model=Path("/models/m"), planner="advise")
    specs = services(options)
    assert [spec.name for spec in specs] == [
        *("scheduler", "predictor", "reconfigurator", "worker-1", "gateway")
    ]
    assert [spec.name for spec in specs if not spec.is_vital] == ["predictor", "reconfigurator"]


def test_crash_point_is_armed_for_the_first_start_only() -> None:
    for spec in services(OPTIONS, DILASERVE_CRASH_AT="worker.after_commit:3"):
        assert "DILASERVE_CRASH_AT" not in spec.env
        assert spec.first_env == {"DILASERVE_CRASH_AT": "worker.after_commit:3"}


def test_external_servers_are_not_started(tmp_path: Path) -> None:
    options = StackOptions(
        home=tmp_path, model=tmp_path, nats_url="nats://n:1", redis_url="redis://r:2/0"
    )
    endpoints = choose_endpoints(options, PORT)
    assert plan_servers(endpoints, data=tmp_path, environ={}) == []
    env = services(options)[0].env
    assert env["DILASERVE_NATS_URL"] == "nats://n:1"
    assert env["DILASERVE_REDIS_URL"] == "redis://r:2/0"


def test_embedded_servers_listen_where_services_look(tmp_path: Path) -> None:
    endpoints = choose_endpoints(OPTIONS, PORT)
    nats, valkey = plan_servers(endpoints, data=tmp_path, environ={})
    assert endpoints.nats_url == f"nats://{nats.address}"
    assert endpoints.redis_url == f"redis://{valkey.address}/0"
    assert str(tmp_path) in valkey.argv


def test_taken_port_is_refused_when_asked_for_and_skipped_when_not() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(DiLaServeError, match=f"port {port} on 127.0.0.1 is taken"),
            held_port(HOST, port, first=PORT),
        ):
            pass
        with held_port(HOST, None, first=port) as other:
            assert other > port


def test_of_those_who_choose_in_the_same_moment_each_gets_another_port() -> None:
    first = free_port()
    with held_port(HOST, None, first=first) as one, held_port(HOST, None, first=first) as two:
        assert first <= one < two, "nobody listens on the first one yet"
        with (
            pytest.raises(DiLaServeError, match=f"port {one} on 127.0.0.1 is taken"),
            held_port(HOST, one, first=first),
        ):
            pass
    with held_port(HOST, one, first=first) as again:
        assert again == one


def test_port_0_is_any_free_one() -> None:
    """A number that its clients can be told, not 0 itself."""
    with held_port(HOST, 0, first=PORT) as one, held_port(HOST, 0, first=PORT) as two:
        assert 0 not in (one, two)
        assert one != two


@pytest.mark.parametrize("port", [-1, 65536, 10**30])
def test_what_is_no_port_is_refused(port: int) -> None:
    with (
        pytest.raises(DiLaServeError, match=f"--port {port} is no port from 0 to 65535"),
        held_port(HOST, port, first=PORT),
    ):
        pass


def test_a_port_is_free_again_when_its_holder_is_killed() -> None:
    first = free_port()
    script = (
        "from dilaserve.supervisor.ports import held_port\n"
        f"with held_port('{HOST}', None, first={first}) as port:\n"
        "    print(port, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with held_port(HOST, None, first=port) as other:
            assert other > port
        holder.kill()
        holder.wait()
        with held_port(HOST, port, first=port) as again:
            assert again == port
