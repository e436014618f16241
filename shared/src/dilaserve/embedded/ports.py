"""Ports for listeners that start a little later, in this process or another one.

The kernel gives connections that go out a port of its ephemeral range, a port that was chosen there
may be gone before its listener opens: so these lie below it. Knows no server.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from dilaserve.embedded.commands import LOOPBACK

__all__ = ["free_port", "ports_below"]

FIRST = 10_000
"""Above the ports that programs are known by."""
FEWEST = 4_000
"""In fewer, two processes would often choose the same one."""
USUAL_FIRST_EPHEMERAL = 32_768
"""Linux's own; that of others is higher."""
N_TRIED = 100
TAKEN = (errno.EADDRINUSE, errno.EACCES)
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(
    host: str = LOOPBACK,
    *,
    other_than: Collection[int | None] = (),
    below: Callable[[int], int] = secrets.randbelow,
) -> int:
    """A port of this address that was free a moment ago, at random: whoever chooses one in the same
    moment hardly ever gets the same. `below`: a random number from 0 up to that. Raises OSError
    for an address that is none of this machine."""
    ports = ports_below(EPHEMERAL)
    for _ in range(N_TRIED if ports else 0):
        port = ports[below(len(ports))]
        if port not in other_than and _can_bind(host, port):
            return port
    return _of_the_kernel(host)


def ports_below(path: Path) -> range:
    """Those below the ephemeral range that the file tells; none where hardly any are."""
    try:
        found = re.match(r"\s*([0-9]{1,5})\s", path.read_text())
    except OSError:
        found = None
    end = int(found[1]) if found else USUAL_FIRST_EPHEMERAL
    return range(FIRST, end) if end - FIRST >= FEWEST else range(0)


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            return False
        return True


def _of_the_kernel(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port
