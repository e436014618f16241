"""The contract of launchers on containers of a real Docker engine, and what only those promise."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dilaserve_reconfigurator.launchers import Launched, Launcher, LaunchError
from dilaserve_reconfigurator.launchers.docker import DockerLauncher, cpu_spec, gpu_spec
from dilaserve_reconfigurator.launchers.docker_host import ContainerSpec, DockerHost
from dilaserve_reconfigurator.stage2 import Slot
from dilaserve_reconfigurator.testing import ONE, SLEEP, TWO, LauncherContract, Make

from . import engine as docker

pytestmark = [
    pytest.mark.compose,
    pytest.mark.skipif(bool(docker.why_not()), reason=docker.why_not() or "an engine can run"),
]

IMAGE = "python:3.11-slim-bookworm"


class Engine:
    """Launchers on the engine, each test with a cluster of its own."""

    def __init__(self, engine: docker.Engine) -> None:
        self.cluster = f"test-{secrets.token_hex(3)}"
        self._engine = engine
        self._hosts: list[DockerHost] = []

    def launcher(self, *hosts: str, spec_of: Any = gpu_spec, **spec: Any) -> DockerLauncher:
        """On the one engine under as many names as there are hosts."""
        url = self._engine.environ["DOCKER_HOST"]
        nodes = [DockerHost(name, url) for name in hosts or ("one",)]
        self._hosts += nodes
        return DockerLauncher(
            nodes,
            self.cluster,
            ContainerSpec(**{"image": IMAGE, "command": ["python", "-c", SLEEP], **spec}),
            spec_of=spec_of,
            grace_s=0.5,
        )

    def containers(self) -> list[Any]:
        """`docker inspect` of the cluster's containers."""
        label = f"label=dilaserve.cluster={self.cluster}"
        ids = self._engine.run("ps", "-aq", "--filter", label).split()
        found: list[Any] = json.loads(self._engine.run("inspect", *ids)) if ids else []
        return found

    def end(self) -> None:
        for container in self.containers():
            self._engine.run("rm", "-f", container["Id"])
        for host in self._hosts:
            host.close()


@pytest.fixture
async def ours(engine: docker.Engine) -> AsyncIterator[Engine]:
    ours = Engine(engine)
    yield ours
    ours.end()


@pytest.fixture
def make(ours: Engine) -> Make:
    def build(script: str) -> Launcher:
        return ours.launcher(command=["python", "-c", script])

    return build


class TestDocker(LauncherContract):
    """Containers of a real engine."""


async def test_nothing_is_left_of_what_was_stopped_or_has_ended(ours: Engine) -> None:
    launcher = ours.launcher(command=["python", "-c", "pass"])
    await launcher.launch("a", ONE)
    await launcher.wait("a")
    assert len(ours.containers()) == 1
    assert await launcher.running() == []
    assert ours.containers() == []


async def test_container_gets_the_gpus_of_its_slot(ours: Engine) -> None:
    await ours.launcher().launch("a", TWO)
    (container,) = ours.containers()
    (request,) = container["HostConfig"]["DeviceRequests"]
    assert request["DeviceIDs"] == ["2", "3"]
    assert request["Capabilities"] == [["gpu"]]
    says = "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])"
    await ours.launcher(command=["python", "-c", says]).launch("b", Slot(0, (0, 1)))
    assert await ours.launcher().wait("b") == "exit code 0; 0,1"


async def test_container_gets_the_cores_of_its_slot(ours: Engine) -> None:
    says = "import os; print(os.sched_getaffinity(0), os.environ['DILASERVE_DEVICE'])"
    launcher = ours.launcher(spec_of=cpu_spec, command=["python", "-c", says])
    await launcher.launch("a", Slot(0, (1,)))
    assert await launcher.wait("a") == "exit code 0; {1} cpu"


async def test_container_is_hardened_and_has_what_it_was_given(ours: Engine) -> None:
    await ours.launcher(
        volumes=["/usr/share:/model:ro"], environ={"A": "b"}, labels={"c": "d"}
    ).launch("a", ONE)
    (container,) = ours.containers()
    host = container["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Init"] is True
    assert host["Binds"] == ["/usr/share:/model:ro"]
    assert {"A=b", "DILASERVE_WORKER_NAME=a"} <= set(container["Config"]["Env"])
    assert container["Config"]["Labels"] == {
        "c": "d",
        "dilaserve.cluster": ours.cluster,
        "dilaserve.host": "one",
        "dilaserve.name": "a",
        "dilaserve.slot": "0",
    }


async def test_hosts_are_the_nodes_in_their_order(ours: Engine) -> None:
    """Here both are one engine: a host's containers are those that have its name."""
    launcher = ours.launcher("east", "west")
    await launcher.launch("a", Slot(0, (0,)))
    await launcher.launch("b", Slot(1, (0,)))
    both = [Launched("a", Slot(0, (0,))), Launched("b", Slot(1, (0,)))]
    assert await ours.launcher("east", "west").running() == both
    assert await ours.launcher("west").running() == [Launched("b", Slot(0, (0,)))]
    await launcher.stop("a")
    assert await launcher.running() == both[1:]


async def test_clusters_on_one_engine_do_not_see_each_other(
    engine: docker.Engine, ours: Engine
) -> None:
    await ours.launcher().launch("a", ONE)
    assert await Engine(engine).launcher().running() == []


async def test_image_that_is_not_there_is_named(ours: Engine) -> None:
    with pytest.raises(LaunchError, match=r"host one: No such image: no/such:image; build or pull"):
        await ours.launcher(image="no/such:image").launch("a", ONE)


async def test_container_that_cannot_start_is_not_left_behind(ours: Engine) -> None:
    with pytest.raises(LaunchError, match="Requested CPUs are not available"):
        await ours.launcher(spec_of=cpu_spec).launch("a", Slot(0, (999,)))
    assert ours.containers() == []


async def test_command_that_is_not_there_is_named(ours: Engine) -> None:
    launcher = ours.launcher(command=["/no/such/command"])
    await launcher.launch("a", ONE)
    assert "/no/such/command" in await launcher.wait("a")


async def test_container_that_was_created_only_is_removed(ours: Engine) -> None:
    """As a planner leaves it that is killed between the two."""
    labels = {"dilaserve.cluster": ours.cluster, "dilaserve.host": "one", "dilaserve.name": "a"}
    words = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
    ours._engine.run("create", *words, "--label", "dilaserve.slot=0", IMAGE)
    assert await ours.launcher().running() == []
    assert ours.containers() == []
