"""A running stack: servers, then services, awaited until the first real step has run."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from dilaserve import checks
from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import free_port
from dilaserve.errors import DiLaServeError
from dilaserve.store.redis import connect_redis
from dilaserve.supervisor import ports
from dilaserve.supervisor.child import Child
from dilaserve.supervisor.guard import start_guard
from dilaserve.supervisor.plan import (
    LOOPBACK,
    Endpoints,
    StackOptions,
    plan_checks,
    plan_servers,
    plan_services,
)
from dilaserve.supervisor.restarts import RestartPolicy
from dilaserve.supervisor.state import (
    ChildState,
    StackPhase,
    StackState,
    locked,
    remove_state,
    write_state,
)
from dilaserve.supervisor.supervisor import Supervisor

__all__ = ["Stack", "running_stack"]

DEFAULT_PORT = 8000
SERVERS_TIMEOUT_S = 20.0
SERVICES_TIMEOUT_S = 600.0  # a large model takes minutes to load


class Stack:
    """What `running_stack` yields: addresses, and the children by name."""

    def __init__(
        self, options: StackOptions, endpoints: Endpoints, *, log: Callable[[str, str], None]
    ) -> None:
        self.endpoints = endpoints
        self.phase: StackPhase = "starting"
        self._options = options
        self._data = options.home / "valkey"
        self._supervisor = Supervisor(policy=RestartPolicy(), log=log, changed=self.save)

    def __getitem__(self, name: str) -> Child:
        """The child of this name: nats, valkey, scheduler, predictor, gateway, worker-1 …"""
        return self._supervisor[name]

    @property
    def state(self) -> StackState:
        """What the state file says."""
        return StackState(
            phase=self.phase,
            supervisor_pid=os.getpid(),
            gateway_url=self.endpoints.gateway_url,
            nats_url=self.endpoints.nats_url,
            redis_url=self.endpoints.redis_url,
            model=str(self._options.model),
            children=[_child_state(child) for child in self._supervisor.children],
        )

    def save(self) -> None:
        """Write the state file."""
        write_state(self._options.home, self.state)

    def enter(self, phase: StackPhase) -> None:
        """Change the phase, and say so in the state file."""
        self.phase = phase
        self.save()

    async def start_servers(self, environ: Mapping[str, str]) -> None:
        """Start NATS and Valkey, and wait until they answer; an external Redis, too.
        Raises StoreUnavailableError and SettingsError for that one."""
        shutil.rmtree(self._data, ignore_errors=True)  # left behind by a killed supervisor
        self._data.mkdir()
        servers = self._supervisor.start(
            plan_servers(self.endpoints, data=self._data, environ=environ)
        )
        await self._supervisor.wait_ready(servers, timeout_s=SERVERS_TIMEOUT_S)
        if self.endpoints.redis_port is None:  # else every service finds out, again and again
            await (await connect_redis(self.endpoints.redis_url)).close()

    async def start_services(
        self,
        environ: Mapping[str, str],
        cleanup: AsyncExitStack,
        end_workers: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Start all services at once, and wait until all that are vital are ready."""
        bus = await connect_nats(self.endpoints.nats_url, name="supervisor")
        cleanup.push_async_callback(bus.close)
        specs = plan_services(
            self._options, self.endpoints, bus=bus, environ=environ, end_workers=end_workers
        )
        started = self._supervisor.start(specs)
        await self._supervisor.wait_ready(
            [child for child in started if child.spec.is_vital], timeout_s=SERVICES_TIMEOUT_S
        )

    async def wait(self) -> None:
        """Until there is nothing left to keep running. Raises DiLaServeError then."""
        await self._supervisor.wait()
        raise DiLaServeError("every process of the stack was given up; the log above says why")

    async def stop(self) -> None:
        """End all children."""
        self.enter("stopping")
        await self._supervisor.stop()
        shutil.rmtree(self._data, ignore_errors=True)  # a stack remembers nothing of the last one
        remove_state(self._options.home)


@asynccontextmanager
async def running_stack(
    options: StackOptions, *, environ: Mapping[str, str], log: Callable[[str, str], None]
) -> AsyncIterator[Stack]:
    """A stack in `options.home`, ready to serve; ended with the context. `log` takes (name of the
    child, line). Raises DiLaServeError when it does not come up, or another one runs there."""
    with (
        locked(options.home),
        ports.held_port(options.host, options.port, first=DEFAULT_PORT) as port,
    ):
        await _refuse_wrong(options, environ)
        stack = Stack(options, choose_endpoints(options, port), log=log)
        async with AsyncExitStack() as cleanup:
            end_workers = await _guard(options, cleanup)
            cleanup.push_async_callback(stack.stop)
            await stack.start_servers(environ)
            await stack.start_services(environ, cleanup, end_workers)
            stack.enter("ready")
            yield stack


async def _refuse_wrong(options: StackOptions, environ: Mapping[str, str]) -> None:
    """Raises DiLaServeError for settings and folders with which no worker or gateway starts:
    nothing has been started yet, and the supervisor would try again and again."""
    for answer in await asyncio.to_thread(checks.ask, plan_checks(options, environ)):
        if isinstance(answer, DiLaServeError):
            raise answer


async def _guard(
    options: StackOptions, cleanup: AsyncExitStack
) -> Callable[[], Awaitable[None]] | None:
    """What ends the workers that the planner launches; none are left of an earlier stack."""
    if options.planner != "apply":
        return None
    guard = await start_guard(options.instances)
    cleanup.push_async_callback(guard.close)
    return guard.close


def choose_endpoints(options: StackOptions, gateway_port: int) -> Endpoints:
    """Where everything is to listen: free ports for the servers that are embedded."""
    nats_port = None if options.nats_url else free_port(other_than=[gateway_port])
    redis_port = None if options.redis_url else free_port(other_than=[gateway_port, nats_port])
    return Endpoints(
        gateway_url=f"http://{options.host}:{gateway_port}",
        gateway_port=gateway_port,
        nats_url=options.nats_url or f"nats://{LOOPBACK}:{nats_port}",
        nats_port=nats_port,
        redis_url=options.redis_url or f"redis://{LOOPBACK}:{redis_port}/0",
        redis_port=redis_port,
    )


def _child_state(child: Child) -> ChildState:
    return ChildState(
        name=child.spec.name,
        service=child.spec.service,
        phase=child.phase,
        pid=child.pid,
        n_restarts=child.n_restarts,
        address=child.spec.address,
    )
