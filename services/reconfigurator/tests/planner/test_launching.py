"""What the settings make of a launcher, and what the workers are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dilaserve.errors import SettingsError
from dilaserve.settings import load
from dilaserve_reconfigurator.holding import HoldingPlanner
from dilaserve_reconfigurator.launchers.docker import DockerLauncher
from dilaserve_reconfigurator.launchers.docker_host import ContainerSpec
from dilaserve_reconfigurator.launchers.process import ProcessLauncher
from dilaserve_reconfigurator.launching import build_launcher
from dilaserve_reconfigurator.monitor import Missing
from dilaserve_reconfigurator.planner import Cluster
from dilaserve_reconfigurator.settings import ReconfiguratorSettings, degrees_of
from dilaserve_reconfigurator.stage2 import Placed, Slot

DOCKER = {"DILASERVE_LAUNCHER": "docker"}


def build(environ: Mapping[str, str], nodes: Sequence[int]) -> DockerLauncher | ProcessLauncher:
    environ = {"DILASERVE_NODES": "x", "DILASERVE_PLANNER_MODE": "apply", **environ}
    launcher = build_launcher(load(ReconfiguratorSettings, environ), nodes, environ)
    assert isinstance(launcher, DockerLauncher | ProcessLauncher)
    return launcher


def spec_of(environ: Mapping[str, str], slot: Slot) -> ContainerSpec:
    launcher = build({**DOCKER, **environ}, [8])
    assert isinstance(launcher, DockerLauncher)
    return launcher._spec_of(launcher._spec, slot)


def environ_of(environ: Mapping[str, str], folder: Path) -> Mapping[str, str]:
    launcher = build({"DILASERVE_INSTANCES_DIR": str(folder), **environ}, [8])
    assert isinstance(launcher, ProcessLauncher)
    return launcher._environ


def test_processes_get_the_environment_but_for_what_is_the_planners(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "DILASERVE_MODEL": "/m",
        "DILASERVE_NATS_URL": "nats://n:1",
        "DILASERVE_METRICS_PORT": "9464",
        "DILASERVE_CRASH_AT": "reconfigurator.draining:1",
        "DILASERVE_PROFILE": "p.json",
        "DILASERVE_WORKER_ENVIRON": "A='b c' D=e,f",
    }
    assert environ_of(environ, tmp_path) == {
        "PATH": "/bin",
        "DILASERVE_MODEL": "/m",
        "DILASERVE_NATS_URL": "nats://n:1",
        "DILASERVE_METRICS_PORT": "0",
        "A": "b c",
        "D": "e,f",
    }


def test_containers_get_our_variables_and_leave_the_rest_to_the_image() -> None:
    environ = {
        "PATH": "/bin",
        "DILASERVE_MODEL": "/model",
        "DILASERVE_METRICS_PORT": "9464",
        "DILASERVE_DOCKER_IMAGE": "worker:1",
        "DILASERVE_DOCKER_NETWORK": "net",
        "DILASERVE_DOCKER_VOLUMES": "/m:/model:ro, cache:/cache",
        "DILASERVE_DOCKER_LABELS": "a=b,c=d=e",
    }
    spec = spec_of(environ, Slot(0, (2, 3)))
    assert spec == ContainerSpec(
        image="worker:1",
        environ={"DILASERVE_MODEL": "/model", "DILASERVE_TP_DEGREE": "2"},
        labels={"a": "b", "c": "d=e"},
        volumes=["/m:/model:ro", "cache:/cache"],
        network="net",
        alias="gpu-worker",
        gpus=(2, 3),
    )


def test_containers_on_cpu_get_cores() -> None:
    spec = spec_of({"DILASERVE_WORKER_DEVICE": "cpu"}, Slot(0, (2, 3)))
    assert (spec.gpus, spec.cores) == ((), (2, 3))
    assert spec.environ["DILASERVE_DEVICE"] == "cpu"


def test_containers_in_the_hosts_network_take_free_metrics_ports() -> None:
    environ = {"DILASERVE_DOCKER_NETWORK": "host"}
    assert spec_of(environ, Slot(0, (0,))).environ["DILASERVE_METRICS_PORT"] == "0"


def test_hosts_are_the_nodes() -> None:
    hosts = {"DILASERVE_DOCKER_HOSTS": "b=tcp://b:2375,a=unix:///run/a.sock"}
    launcher = build({**DOCKER, **hosts}, [8, 4])
    assert isinstance(launcher, DockerLauncher)
    assert [node._host.name for node in launcher._nodes] == ["b", "a"]


@pytest.mark.parametrize(
    ("environ", "nodes", "words"),
    [
        ({}, [8, 8], "on this machine only; give one node, or DILASERVE_LAUNCHER=docker"),
        (DOCKER, [8, 8], "are 1 hosts, .* are 2 nodes; give a host for each node"),
        ({**DOCKER, "DILASERVE_DOCKER_HOSTS": "a"}, [8], "'a' is not written like name=value"),
        ({**DOCKER, "DILASERVE_DOCKER_HOSTS": "a=x,a=y"}, [8, 8], "'a=y' is not .* each name once"),
        ({**DOCKER, "DILASERVE_DOCKER_VOLUMES": "./m:/model"}, [8], "'./m:/model' is not written"),
        ({**DOCKER, "DILASERVE_DOCKER_VOLUMES": "/m"}, [8], "'/m' is not written like"),
        ({"DILASERVE_WORKER_ENVIRON": "A"}, [8], "'A' is not written like OMP_NUM_THREADS=2"),
        ({"DILASERVE_WORKER_ENVIRON": "A='"}, [8], "cannot be read: No closing quotation"),
    ],
)
def test_settings_that_do_not_go_together(
    environ: Mapping[str, str], nodes: Sequence[int], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=words):
        build({"DILASERVE_INSTANCES_DIR": str(tmp_path), **environ}, nodes)


def test_plans_need_a_profile_and_steps_or_workers_to_keep() -> None:
    def options(**environ: str) -> object:
        return load(ReconfiguratorSettings, {"DILASERVE_NODES": "1x8", **environ}).options()

    assert options(DILASERVE_PLANNER_MODE="apply") is None
    with pytest.raises(SettingsError, match="plans need both; with DILASERVE_PLANNER_MODE=apply"):
        options()
    with pytest.raises(SettingsError, match="DILASERVE_PROFILE='p\\.json'"):
        options(DILASERVE_PLANNER_MODE="apply", DILASERVE_PROFILE="p.json")


def test_without_a_profile_the_mix_is_kept() -> None:
    cluster = Cluster((2,), (Placed("a", Slot(0, (0,))),))
    record = HoldingPlanner(lambda: "plan-1").plan(5.0, Missing("no"), cluster)
    assert (record.verdict, record.target.counts) == ("hold", {1: 1})
    assert "no profile of the served model, so the mix is kept" in record.reasons[0]


def test_floor_above_all_gpus_is_refused() -> None:
    settings = load(
        ReconfiguratorSettings, {"DILASERVE_NODES": "1x4", "DILASERVE_CAPACITY_FLOOR": "5"}
    )
    settings.check_floor(5)
    with pytest.raises(SettingsError, match=r"DILASERVE_CAPACITY_FLOOR=5: .*'1x4' are 4 GPUs"):
        settings.check_floor(4)


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,3,4", "1,-2", "²", "1" * 5000])
def test_degrees_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"use for example 1,2,4|write them for example 1,2,4"):
        degrees_of(text)
