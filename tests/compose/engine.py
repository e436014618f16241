"""A real Docker engine by ../shared/docker/engine.sh, and compose projects in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENGINE = ROOT.parent / "shared/docker/engine.sh"
STANDINS = {"nats:2.15-alpine": "nats", "valkey/valkey:9": "valkey"}
MIN_FREE_BYTES = 3 * 1024**3


def why_not() -> str:
    """Why no engine can run here; empty if one can."""
    if not ENGINE.exists():
        return f"{ENGINE} is absent: no way to start a Docker engine here"
    if os.geteuid() != 0:
        return "a Docker engine needs root"
    if shutil.disk_usage("/tmp").free < MIN_FREE_BYTES:
        return "less than 3 GB of disk are free under /tmp"
    return ""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: `docker` is its client, `environ` points it at the engine."""

    docker: str
    environ: Mapping[str, str]
    wheels_url: str

    def run(self, *args: str, environ: Mapping[str, str] | None = None) -> str:
        """Standard output of a docker command; raises with both outputs if it fails."""
        done = subprocess.run(
            [self.docker, *args],
            cwd=ROOT,
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(
                f"docker {' '.join(args)}: {done.stdout[-4000:]}{done.stderr[-8000:]}"
            )
        return done.stdout

    def build_standins(self) -> None:
        """Build NATS and Valkey under the tags that the compose file names."""
        for tag, name in STANDINS.items():
            file = f"tests/compose/standins/{name}.Dockerfile"
            self.run("build", "-q", "--network", "host", "-f", file, "-t", tag, ".")


@dataclass(frozen=True, slots=True)
class Project:
    """One compose project of docker-compose.yml, on free ports."""

    engine: Engine
    name: str
    files: tuple[str, ...] = ("docker-compose.yml", "tests/compose/build.yml")
    environ: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *args: str) -> str:
        """Standard output of `docker compose`."""
        files = [word for file in self.files for word in ("-f", file)]
        return self.engine.run("compose", "-p", self.name, *files, *args, environ=self._environ())

    def containers(self, service: str) -> list[Any]:
        """`docker inspect` of a service's containers, stopped ones too."""
        ids = self.compose("ps", "-aq", service).split()
        found: list[Any] = json.loads(self.engine.run("inspect", *ids)) if ids else []
        return found

    def inside(self, service: str, *command: str) -> str:
        """Standard output of a command in the first container of a service."""
        return self.compose("exec", "-T", service, *command)

    def url(self, service: str, port: int) -> str:
        """Where a published port is reached from here."""
        return f"http://{self.compose('port', service, str(port)).strip()}"

    def _environ(self) -> dict[str, str]:
        return {
            "GATEWAY_PORT": "0",
            "NATS_PORT": "0",
            "DILASERVE_TAG": "test",
            "PIP_FIND_LINKS": self.engine.wheels_url,
            **self.environ,
        }


@contextmanager
def start_engine() -> Iterator[Engine]:
    """Install and start the engine, with the base image and the stand-ins; end what was started."""
    was_up = _shell("$DOCKER info >/dev/null 2>&1 && echo up || true").split() == ["up"]
    lines = _shell("dk_install >&2; dk_up; dk_base; dk_wheels; echo $DOCKER; env").splitlines()
    wheels_url = lines.pop(0) if lines[0].startswith("http") else ""
    environ = dict(line.split("=", 1) for line in lines[1:] if "=" in line)
    engine = Engine(docker=lines[0], environ=environ, wheels_url=wheels_url)
    try:
        engine.build_standins()
        yield engine
    finally:
        _shell('kill "$(cat $DK/wheels.pid)"; rm -f $DK/wheels.pid' if was_up else "dk_down")


def _shell(script: str) -> str:
    """Standard output of `script` after sourcing engine.sh."""
    done = subprocess.run(
        ["bash", "-c", f". {ENGINE}; set -e; {script}"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}: exit status {done.returncode}"
    return done.stdout
