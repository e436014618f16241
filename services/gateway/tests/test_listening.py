"""Where the gateway listens."""

from __future__ import annotations

import socket

import pytest

from dilaserve.errors import SettingsError
from dilaserve_gateway.listening import listen, url_of


def test_a_free_port() -> None:
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        assert url_of(listener) == f"http://{host}:{port}"
        with socket.create_connection((host, port), timeout=5):
            pass


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SettingsError, match=f"DILASERVE_PORT={port} cannot be listened on"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99999), ("no host", 0), ("", -1)])
def test_addresses_that_are_none(host: str, port: int) -> None:
    with pytest.raises(SettingsError, match="use for example 127"):
        listen(host, port)
