"""One Docker engine by its endpoint: containers by label, with errors of ours.

The SDK blocks, so each call is made in a thread. Knows no instance and no slot.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import docker
from docker.errors import APIError, DockerException
from docker.tls import TLSConfig
from docker.types import DeviceRequest

from dilaserve.errors import DiLaServeError, UnavailableError

__all__ = ["Container", "ContainerSpec", "DockerHost", "HostError", "RefusedError"]

CALL_TIMEOUT_S = 30.0
NOT_FOUND, CONFLICT = 404, 409
SCRATCH = "size=256m"
SHARED_MEMORY = "1g"
"""Ranks of one instance exchange tensors there (NCCL); an engine's default is 64 MB."""


class HostError(UnavailableError):
    """A Docker engine that does not answer; what was asked of it may or may not have been done."""


class RefusedError(DiLaServeError):
    """A Docker engine that says no, and why. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Container:
    """A container as a listing shows it. `state` is Docker's: created, running, exited, …"""

    container_id: str
    state: str
    labels: Mapping[str, str]

    @property
    def is_running(self) -> bool:
        """Whether it holds what it was given."""
        return self.state in ("running", "paused", "restarting")

    @property
    def has_ended(self) -> bool:
        """Whether it ran and does so no more."""
        return self.state in ("exited", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """What to run. An empty `command` is the image's own, an empty `network` the engine's."""

    image: str
    command: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[str] = ()
    """As in /models/llada:/model:ro."""
    network: str = ""
    alias: str = ""
    """A name in a network of its own kind, which containers may share."""
    gpus: Sequence[int] = ()
    cores: Sequence[int] = ()


class DockerHost:
    """`certs` is a folder with ca.pem, cert.pem and key.pem, for an endpoint that wants TLS. The
    first call connects, so an engine may be down when the planner starts."""

    def __init__(self, name: str, url: str, *, certs: Path | None = None) -> None:
        self.name = name
        self._url = url
        self._certs = certs
        self._api: Any = None
        self._connecting = threading.Lock()

    def close(self) -> None:
        """Let go of the connections."""
        if self._api is not None:
            self._api.close()

    async def containers(self, labels: Mapping[str, str]) -> list[Container]:
        """All that have these labels, whatever their state. Raises HostError."""
        wanted = [f"{key}={value}" for key, value in labels.items()]
        found = await self._call(lambda api: api.containers(all=True, filters={"label": wanted}))
        return [Container(each["Id"], each["State"], each["Labels"]) for each in found]

    async def run(self, name: str, spec: ContainerSpec) -> None:
        """Create and start it. Raises RefusedError, with nothing left behind, and HostError."""
        created = await self._call(lambda api: _create(api, name, spec))
        try:
            await self._call(lambda api: api.start(created["Id"]))
        except RefusedError:
            await self.remove(created["Id"])
            raise

    async def signal(self, container_id: str, signal: Literal["SIGTERM", "SIGKILL"]) -> None:
        """Send it to the container's first process, unless that has ended."""
        await self._end(lambda api: api.kill(container_id, signal))

    async def remove(self, container_id: str) -> None:
        """Whatever its state, unless it is gone."""
        await self._end(lambda api: api.remove_container(container_id, force=True, v=True))

    async def last_words(self, container_id: str, n_lines: int) -> tuple[str, list[str]]:
        """How it ended, and the end of its log; little of one that is being removed."""
        try:
            inspected = await self._call(lambda api: api.inspect_container(container_id))
            log = await self._call(lambda api: api.logs(container_id, tail=n_lines))
        except RefusedError as error:
            if error.status in (NOT_FOUND, CONFLICT):
                return "it has ended", []
            raise
        how = f"exit code {inspected['State']['ExitCode']}"
        if inspected["State"]["OOMKilled"]:
            how += ", killed for want of memory"
        return how, log.decode(errors="replace").strip().splitlines()

    async def _end(self, work: Callable[[Any], object]) -> None:
        try:
            await self._call(work)
        except RefusedError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # gone, or about to be
                raise

    async def _call(self, work: Callable[[Any], Any]) -> Any:
        """What `work` returns, given the SDK's client."""
        try:
            return await asyncio.to_thread(lambda: work(self._connected()))
        except APIError as error:
            why = error.explanation or str(error)
            raise RefusedError(f"Docker host {self.name}: {why}", error.status_code) from error
        except (DockerException, OSError) as error:  # those of requests are OSErrors
            raise HostError(
                f"Docker host {self.name} ({self._url}) does not answer: {error}; "
                "see that its engine runs, that DILASERVE_DOCKER_HOSTS has its endpoint, and that "
                "this user may use it"
            ) from error

    def _connected(self) -> Any:
        with self._connecting:
            if self._api is None:
                self._api = docker.APIClient(
                    base_url=self._url, timeout=CALL_TIMEOUT_S, tls=_tls(self._certs)
                )
            return self._api


def _tls(certs: Path | None) -> TLSConfig | bool:
    if certs is None:
        return False
    return TLSConfig(
        client_cert=(str(certs / "cert.pem"), str(certs / "key.pem")),
        ca_cert=str(certs / "ca.pem"),
        verify=True,
    )


def _create(api: Any, name: str, spec: ContainerSpec) -> Any:
    """As hardened as the containers of docker-compose.yml."""
    gpus = [DeviceRequest(device_ids=list(map(str, spec.gpus)), capabilities=[["gpu"]])]
    host_config = api.create_host_config(
        binds=list(spec.volumes),
        network_mode=spec.network or None,
        device_requests=gpus if spec.gpus else None,
        cpuset_cpus=",".join(map(str, spec.cores)) or None,
        init=True,
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        tmpfs={"/tmp": SCRATCH},
        shm_size=SHARED_MEMORY,
    )
    return api.create_container(
        spec.image,
        list(spec.command) or None,
        name=name,
        environment=dict(spec.environ),
        labels=dict(spec.labels),
        host_config=host_config,
        networking_config=_aliases(api, spec),
    )


def _aliases(api: Any, spec: ContainerSpec) -> Any:
    """Only networks that somebody made know names."""
    if not spec.alias or spec.network in ("", "bridge", "host", "none"):
        return None
    endpoint = api.create_endpoint_config(aliases=[spec.alias])
    return api.create_networking_config({spec.network: endpoint})
