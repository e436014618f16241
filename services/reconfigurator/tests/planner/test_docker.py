"""The Docker launcher when hosts do not answer; the rest is in tests/compose, on a real engine."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest

from dilaserve_reconfigurator.launchers import Launched, LaunchError
from dilaserve_reconfigurator.launchers import docker as docker_launcher
from dilaserve_reconfigurator.launchers.docker import DockerLauncher, gpu_spec
from dilaserve_reconfigurator.launchers.docker_host import (
    Container,
    ContainerSpec,
    DockerHost,
    HostError,
)
from dilaserve_reconfigurator.stage2 import Slot

EAST, WEST = Slot(0, (0, 1)), Slot(1, (0, 1))


class MemoryHost:
    """Containers by name. `is_silent`: nothing is done; `loses_answers`: it is, unheard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.specs: dict[str, ContainerSpec] = {}
        self.states: dict[str, str] = {}
        self.is_silent = False
        self.loses_answers = False

    async def containers(self, labels: Mapping[str, str]) -> list[Container]:
        self._answer()
        return [
            Container(name, self.states[name], spec.labels)
            for name, spec in self.specs.items()
            if labels.items() <= spec.labels.items()
        ]

    async def run(self, name: str, spec: ContainerSpec) -> None:
        self._answer(does=lambda: self._start(name, spec))

    async def signal(self, container_id: str, signal: Literal["SIGTERM", "SIGKILL"]) -> None:
        self._answer(does=lambda: self.states.update({container_id: "exited"}))

    async def remove(self, container_id: str) -> None:
        self._answer(does=lambda: self.specs.pop(container_id))

    async def last_words(self, container_id: str, n_lines: int) -> tuple[str, list[str]]:
        self._answer()
        return "exit code 1", ["Traceback", "out of memory"]

    def _start(self, name: str, spec: ContainerSpec) -> None:
        self.specs[name], self.states[name] = spec, "running"

    def _answer(self, does: Callable[[], object] = lambda: None) -> None:
        if not self.is_silent:
            does()
        if self.is_silent or self.loses_answers:
            raise HostError(f"Docker host {self.name} does not answer")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "WATCH_EVERY_S", "ASK_AGAIN_S"):
        monkeypatch.setattr(docker_launcher, name, 0.001)


@pytest.fixture
def hosts() -> tuple[MemoryHost, MemoryHost]:
    return MemoryHost("east"), MemoryHost("west")


def launcher(hosts: tuple[MemoryHost, MemoryHost]) -> DockerLauncher:
    return DockerLauncher(hosts, "ours", ContainerSpec(image="worker"), spec_of=gpu_spec)


async def both(hosts: tuple[MemoryHost, MemoryHost]) -> DockerLauncher:
    ours = launcher(hosts)
    await ours.launch("a", EAST)
    await ours.launch("b", WEST)
    return ours


async def test_what_a_silent_host_said_last_counts(
    hosts: tuple[MemoryHost, MemoryHost], caplog: pytest.LogCaptureFixture
) -> None:
    ours = await both(hosts)
    east, west = hosts
    west.is_silent = True
    del east.specs["ours-a"]
    assert await ours.running() == [Launched("b", WEST)]
    assert await ours.running() == [Launched("b", WEST)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"
    west.is_silent = False
    del west.specs["ours-b"]
    assert await ours.running() == []


async def test_host_that_has_never_answered_is_not_taken_for_empty(
    hosts: tuple[MemoryHost, MemoryHost],
) -> None:
    await both(hosts)
    hosts[1].is_silent = True
    again = launcher(hosts)
    with pytest.raises(HostError, match="west does not answer"):
        await again.running()
    with pytest.raises(LaunchError, match="'c' cannot be launched: Docker host west does not"):
        await again.launch("c", Slot(0, (2,)))


async def test_launch_whose_answer_was_lost_does_not_stay(
    hosts: tuple[MemoryHost, MemoryHost],
) -> None:
    ours = launcher(hosts)
    await ours.running()
    west = hosts[1]
    west.loses_answers = True
    with pytest.raises(LaunchError, match="'b' cannot be launched: Docker host west does not"):
        await ours.launch("b", WEST)
    assert list(west.specs) == ["ours-b"]
    west.loses_answers = False
    await ours.launch("c", WEST)
    assert await ours.running() == [Launched("c", WEST)]
    assert list(west.specs) == ["ours-c"]


async def test_stop_and_wait_outlast_a_silence(hosts: tuple[MemoryHost, MemoryHost]) -> None:
    ours = await both(hosts)
    west = hosts[1]
    west.is_silent = True
    waiting, stopping = asyncio.create_task(ours.wait("b")), asyncio.create_task(ours.stop("b"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not stopping.done()
    west.is_silent = False
    async with asyncio.timeout(5):
        await stopping
        assert await waiting
    assert await ours.running() == [Launched("a", EAST)]


async def test_log_of_one_that_ended_by_itself_is_told_before_it_goes(
    hosts: tuple[MemoryHost, MemoryHost], caplog: pytest.LogCaptureFixture
) -> None:
    ours = await both(hosts)
    hosts[0].states["ours-a"] = "exited"
    assert await ours.running() == [Launched("b", WEST)]
    assert "a on east ended by itself: exit code 1" in caplog.text
    assert "a: out of memory" in caplog.text
    assert list(hosts[0].specs) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_endpoint_where_nobody_listens_is_named(tmp_path: Path) -> None:
    host = DockerHost("east", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(HostError, match=rf"host east \(unix://{tmp_path}/docker.sock\) does not"):
        await host.containers({})
    host = DockerHost("west", "tcp://127.0.0.1:1")
    with pytest.raises(HostError, match=r"host west .* does not answer"):
        await host.containers({})
    # The SDK leaves sockets open that could not connect, and the threads that made the calls may
    # still hold the errors, and so the sockets: they must go before the warning counts again.
    await asyncio.get_running_loop().shutdown_default_executor()
    gc.collect()
