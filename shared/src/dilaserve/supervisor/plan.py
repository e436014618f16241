"""What the embedded stack consists of: options → command lines and environments."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from dilaserve.bus import Bus
from dilaserve.checks import Check
from dilaserve.embedded import nats_argv, valkey_argv
from dilaserve.messages import CacheMode
from dilaserve.settings import variable
from dilaserve.supervisor.child import ChildSpec, Probe
from dilaserve.supervisor.probes import http_probe, nats_probe, service_probe, valkey_probe

__all__ = [
    "Endpoints",
    "PlannerRole",
    "StackOptions",
    "plan_checks",
    "plan_servers",
    "plan_services",
]

LOOPBACK = "127.0.0.1"
DEGREES = (1, 2, 4)
MODULES = {
    "scheduler": "dilaserve_scheduler",
    "predictor": "dilaserve_predictor",
    "gpu-worker": "dilaserve_gpu_worker",
    "gateway": "dilaserve_gateway",
    "reconfigurator": "dilaserve_reconfigurator",
}
CRASH_AT = variable("crash_at")

PlannerRole = Literal["none", "advise", "apply"]
"""There is no planner; it proposes; it also launches and ends the workers."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What the user asked for. None leaves a setting to the environment or its default."""

    home: Path
    model: Path
    n_workers: int = 1
    """Or those that the planner begins with, in as many slots as their degrees take."""
    tp_degree: int = 1
    """Of the planner's first workers."""
    planner: PlannerRole = "none"
    worker_device: str = "cpu"
    """What the planner launches workers on: cuda or cpu."""
    threads: int | None = None
    cache_mode: CacheMode | None = None
    policy: str | None = None
    run_ahead: str | None = None
    """`block`, or a number of steps."""
    host: str = LOOPBACK
    port: int | None = None
    """The gateway's port; None: the first free one from 8000 on."""
    nats_url: str | None = None
    """An external NATS; None: an embedded one."""
    redis_url: str | None = None

    @property
    def instances(self) -> Path:
        """Where the planner notes what it has launched, and keeps their logs."""
        return self.home / "instances"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the parts of a stack listen; fixed for its life, so a restart changes nothing."""

    gateway_url: str
    gateway_port: int
    nats_url: str
    nats_port: int | None
    """None: external."""
    redis_url: str
    redis_port: int | None


def plan_checks(options: StackOptions, environ: Mapping[str, str]) -> list[Check]:
    """What to ask before anything is started: workers of each degree, and the gateway."""
    env = {**_without_crash(environ), **_option_settings(options)}
    workers = [
        _variables(worker_name="worker-1", metrics_port=0, tp_degree=degree)
        for degree in _first_degrees(options, environ)
    ]
    gateway = _variables(host=options.host, port=options.port or 0, metrics_port=-1)
    return [
        *(Check(MODULES["gpu-worker"], {**env, **settings}) for settings in workers),
        Check(MODULES["gateway"], {**env, **gateway}),
    ]


def plan_servers(
    endpoints: Endpoints, *, data: Path, environ: Mapping[str, str]
) -> list[ChildSpec]:
    """The embedded servers, none for those that are external."""
    specs = []
    if endpoints.nats_port is not None:
        specs.append(
            ChildSpec(
                name="nats",
                service="nats",
                argv=tuple(nats_argv(endpoints.nats_port)),
                env=environ,
                probe=nats_probe(endpoints.nats_port),
                address=f"{LOOPBACK}:{endpoints.nats_port}",
            )
        )
    if endpoints.redis_port is not None:
        specs.append(
            ChildSpec(
                name="valkey",
                service="valkey",
                argv=tuple(valkey_argv(endpoints.redis_port, data)),
                env=environ,
                probe=valkey_probe(endpoints.redis_port),
                address=f"{LOOPBACK}:{endpoints.redis_port}",
            )
        )
    return specs


def plan_services(
    options: StackOptions,
    endpoints: Endpoints,
    *,
    bus: Bus,
    environ: Mapping[str, str],
    end_workers: Callable[[], Awaitable[None]] | None = None,
) -> list[ChildSpec]:
    """Scheduler, step predictor, planner, workers and gateway. The predictor is not vital: without
    one the scheduler goes by what requests took so far. Nor is a planner that only proposes.
    `end_workers` ends those that the planner has launched."""
    env = _service_environ(options, endpoints, environ)
    crash_at = environ.get(CRASH_AT, "")

    def python(name: str, service: str, probe: Probe, **settings: object) -> ChildSpec:
        return ChildSpec(
            name=name,
            service=service,
            argv=(sys.executable, "-m", MODULES[service]),
            env={**env, **_variables(**settings)},
            probe=probe,
            address=endpoints.gateway_url if service == "gateway" else "",
            first_env=_first_env(name, crash_at),
            is_vital=service != "predictor",
        )

    on_bus = partial(service_probe, bus)
    scheduler = python("scheduler", "scheduler", on_bus("scheduler"), metrics_port=0)
    predictor = python("predictor", "predictor", on_bus("predictor"), metrics_port=0)
    workers = [
        python(name, "gpu-worker", on_bus("gpu-worker"), worker_name=name, metrics_port=0)
        for name in (f"worker-{i}" for i in range(1, options.n_workers + 1))
    ]
    gateway = python(
        "gateway",
        "gateway",
        http_probe(f"{endpoints.gateway_url}/readyz"),
        host=options.host,
        port=endpoints.gateway_port,
        metrics_port=-1,  # it serves /metrics on its own port
    )
    if options.planner == "none":
        return [scheduler, predictor, *workers, gateway]
    service = "reconfigurator"
    planner = python(service, service, on_bus(service), **_planner_settings(options, environ))
    if options.planner == "advise":
        return [scheduler, predictor, replace(planner, is_vital=False), *workers, gateway]
    return [scheduler, predictor, replace(planner, afterwards=end_workers), gateway]


def _planner_settings(options: StackOptions, environ: Mapping[str, str]) -> dict[str, object]:
    """As far as the environment leaves them open."""
    usual: dict[str, object] = {
        "nodes": f"1x{options.n_workers * options.tp_degree}",
        "initial_mix": f"{options.n_workers}xtp{options.tp_degree}",
        "tp_degrees": ",".join(map(str, _degrees(options.tp_degree))),
        "worker_device": options.worker_device,
        "plans_dir": options.home / "plans",
    }
    ours: dict[str, object] = {
        "planner_mode": options.planner,
        "launcher": "process",
        "instances_dir": options.instances,
        "metrics_port": 0,
    }
    return {name: v for name, v in usual.items() if not environ.get(variable(name))} | ours


def _degrees(tp_degree: int) -> list[int]:
    """To choose from: the planner's own, as far as they and the first workers' divide one
    another."""
    usual = [d for d in DEGREES if tp_degree % d == 0 or d % tp_degree == 0]
    return sorted({*usual, tp_degree})


def _first_degrees(options: StackOptions, environ: Mapping[str, str]) -> list[int | None]:
    """Of the workers to begin with; None: as the environment says. A mix that makes no sense is
    the planner's to refuse."""
    if options.planner != "apply":
        return [None]
    mix = environ.get(variable("initial_mix"), "")
    named = {int(degree) for degree in re.findall(r"tp(\d+)", mix)}
    return [*sorted(named)] if named else [options.tp_degree]


def _first_env(name: str, crash_at: str) -> dict[str, str]:
    """The crash point of a child's first life. In fault tests `crash_at` is `point:count` for every
    child, or for some, as in "worker-1=worker.after_commit:3,scheduler=scheduler.after_admit:1"."""
    for entry in crash_at.split(","):
        child, equals, point = entry.partition("=")
        if child == name or (entry and not equals):
            return {CRASH_AT: point or entry}
    return {}


def _service_environ(
    options: StackOptions, endpoints: Endpoints, environ: Mapping[str, str]
) -> dict[str, str]:
    urls = _variables(nats_url=endpoints.nats_url, redis_url=endpoints.redis_url)
    return {**_without_crash(environ), **urls, **_option_settings(options)}


def _option_settings(options: StackOptions) -> dict[str, str]:
    return _variables(
        model=options.model,
        cache_mode=options.cache_mode,
        threads=options.threads,
        policy=options.policy,
        run_ahead=options.run_ahead,
    )


def _without_crash(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != CRASH_AT}


def _variables(**settings: object) -> dict[str, str]:
    """Environment variables of the settings that are not None."""
    return {variable(name): str(value) for name, value in settings.items() if value is not None}
