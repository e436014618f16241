"""Free ports: below what the kernel gives connections that go out, and each at random."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dilaserve.embedded import free_port, ports
from dilaserve.embedded.ports import FIRST, USUAL_FIRST_EPHEMERAL, ports_below

LOOPBACK = "127.0.0.1"


@pytest.fixture
def in_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Lets the ephemeral range be another one."""

    def set_to(text: str) -> Path:
        path = tmp_path / "ip_local_port_range"
        path.write_text(text)
        monkeypatch.setattr(ports, "EPHEMERAL", path)
        return path

    return set_to


def test_free_ports_are_free_and_differ() -> None:
    found = {free_port() for _ in range(20)}
    assert len(found) > 15
    for port in found:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, port))


def test_no_connection_that_goes_out_can_get_one(in_range: Callable[[str], Path]) -> None:
    in_range("20000\t60999\n")
    assert all(FIRST <= free_port() < 20_000 for _ in range(50))


def test_one_that_is_taken_or_unwanted_is_not_given(in_range: Callable[[str], Path]) -> None:
    in_range("20000\t60999\n")
    with socket.socket() as taken:
        taken.bind((LOOPBACK, free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        unwanted = port + 1
        draws = iter([port - FIRST, unwanted - FIRST, port + 2 - FIRST])
        found = free_port(other_than=[None, unwanted], below=lambda _: next(draws))
    assert found == port + 2


def test_where_nearly_all_ports_are_ephemeral_the_kernel_chooses(
    in_range: Callable[[str], Path],
) -> None:
    in_range("1024\t65535\n")
    assert free_port(below=lambda _: pytest.fail("there is nothing to choose from")) > 0


def test_where_the_system_tells_no_range_the_usual_one_holds(
    tmp_path: Path, in_range: Callable[[str], Path]
) -> None:
    usual = range(FIRST, USUAL_FIRST_EPHEMERAL)
    assert ports_below(tmp_path / "none") == usual
    assert ports_below(in_range("no numbers\n")) == usual


def test_an_address_of_another_machine_is_told_at_once() -> None:
    draws = iter([0])
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1", below=lambda _: next(draws))
