"""Settings → the launcher that they ask for, and the workers' environment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dilaserve.errors import SettingsError
from dilaserve.settings import PREFIX, variable
from dilaserve_reconfigurator.launchers import Launcher
from dilaserve_reconfigurator.launchers.docker import DockerLauncher, cpu_spec, gpu_spec
from dilaserve_reconfigurator.launchers.docker_host import ContainerSpec, DockerHost
from dilaserve_reconfigurator.launchers.process import ProcessLauncher, cpu_environ, cuda_environ
from dilaserve_reconfigurator.settings import ReconfiguratorSettings

__all__ = ["build_launcher"]

LOCAL_ENGINE = "unix:///var/run/docker.sock"
ALIAS = "gpu-worker"
"""Under which Prometheus looks for workers in a Docker network."""
METRICS_PORT = variable("metrics_port")
WORKERS_TOO = (
    "nats_url",
    "redis_url",
    "log_level",
    "metrics_host",
    "otlp_endpoint",
    "start_timeout_s",
    "model_name",
    "cache_mode",
    "block_length",
    "max_batch_tokens",
)
"""Settings of ours that workers have as well."""


def build_launcher(
    settings: ReconfiguratorSettings, nodes: Sequence[int], environ: Mapping[str, str]
) -> Launcher:
    """Raises SettingsError for settings that do not go together."""
    if settings.launcher == "docker":
        return _docker(settings, nodes, environ)
    return _process(settings, nodes, environ)


def _process(
    settings: ReconfiguratorSettings, nodes: Sequence[int], environ: Mapping[str, str]
) -> ProcessLauncher:
    """Workers get our whole environment, but for what is only ours."""
    if len(nodes) > 1:
        raise SettingsError(
            f"DILASERVE_NODES={settings.nodes!r}: processes are launched on this machine only; "
            "give one node, or DILASERVE_LAUNCHER=docker"
        )
    ours = _ours()
    kept = {name: value for name, value in environ.items() if name not in ours}
    return ProcessLauncher(
        Path(settings.instances_dir),
        [sys.executable, "-m", "dilaserve_gpu_worker"],
        environ={**kept, METRICS_PORT: "0", **_more(settings)},
        environ_of=cpu_environ if settings.worker_device == "cpu" else cuda_environ,
    )


def _docker(
    settings: ReconfiguratorSettings, nodes: Sequence[int], environ: Mapping[str, str]
) -> DockerLauncher:
    """Workers get our DILASERVE_ variables, but for what is only ours: the rest is the image's."""
    ours = _ours()
    kept = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in ours
    }
    if settings.docker_network == "host":
        kept[METRICS_PORT] = "0"  # all workers of a host share its ports
    spec = ContainerSpec(
        image=settings.docker_image,
        environ={**kept, **_more(settings)},
        labels=_pairs(settings, "docker_labels"),
        volumes=_volumes(settings),
        network=settings.docker_network,
        alias=ALIAS,
    )
    spec_of = cpu_spec if settings.worker_device == "cpu" else gpu_spec
    hosts = _hosts(settings, len(nodes))
    return DockerLauncher(hosts, settings.docker_cluster, spec, spec_of=spec_of)


def _hosts(settings: ReconfiguratorSettings, n_nodes: int) -> list[DockerHost]:
    endpoints = _pairs(settings, "docker_hosts") or {"local": LOCAL_ENGINE}
    if len(endpoints) != n_nodes:
        raise SettingsError(
            f"DILASERVE_DOCKER_HOSTS={settings.docker_hosts!r} are {len(endpoints)} hosts, "
            f"DILASERVE_NODES={settings.nodes!r} are {n_nodes} nodes; give a host for each node"
        )
    certs = Path(settings.docker_certs) if settings.docker_certs else None
    return [
        DockerHost(name, url, certs=certs if url.startswith("tcp:") else None)
        for name, url in endpoints.items()
    ]


def _volumes(settings: ReconfiguratorSettings) -> list[str]:
    volumes = _parts(settings.docker_volumes)
    for volume in volumes:
        if volume.startswith((".", "~")) or ":" not in volume:
            raise SettingsError(
                f"DILASERVE_DOCKER_VOLUMES={settings.docker_volumes!r}: {volume!r} is not written "
                "like /models/llada:/model:ro, with a whole path of the workers' host"
            )
    return volumes


def _pairs(settings: ReconfiguratorSettings, name: str) -> dict[str, str]:
    """`a=b,c=d`, in order."""
    text: str = getattr(settings, name)
    pairs: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        if not (key and equals and value) or key in pairs:
            raise SettingsError(
                f"{variable(name)}={text!r}: {part!r} is not written like name=value, each name "
                "once"
            )
        pairs[key] = value
    return pairs


def _more(settings: ReconfiguratorSettings) -> dict[str, str]:
    """Words as in a shell, since values may have commas."""
    try:
        pairs = [word.partition("=") for word in shlex.split(settings.worker_environ)]
    except ValueError as error:
        raise SettingsError(f"DILASERVE_WORKER_ENVIRON cannot be read: {error}") from error
    if not all(key and equals for key, equals, _ in pairs):
        raise SettingsError(
            f"DILASERVE_WORKER_ENVIRON={settings.worker_environ!r} is not written like "
            "OMP_NUM_THREADS=2 NCCL_DEBUG=INFO"
        )
    return {key: value for key, _, value in pairs}


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ours() -> set[str]:
    """Variables that workers must not see: a metrics port is one process's, and so on."""
    names = {field.name for field in msgspec.structs.fields(ReconfiguratorSettings)}
    return {variable(name) for name in names - set(WORKERS_TOO)}
