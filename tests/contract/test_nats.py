"""What only a real NATS server shows: starting before it, several URLs, a hang, being refused."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

import pytest
from nats.aio.msg import Msg

from dilaserve.bus.nats import connect_nats
from dilaserve.embedded import EmbeddedServer, free_port, start_nats
from dilaserve.errors import BusUnavailableError, SettingsError
from dilaserve.testing import settled, until

MakeServer = Callable[..., EmbeddedServer]


async def test_waits_for_the_server_to_come_up(make_server: MakeServer) -> None:
    server = make_server("nats")
    connecting = asyncio.create_task(connect_nats(server.url, name="early"))
    await asyncio.sleep(0.3)
    assert not connecting.done()
    await server.start()
    bus = await connecting
    await settled(bus)
    await bus.close()


async def test_gives_up_when_no_server_comes_up() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusUnavailableError, match=r"Refused.*set DILASERVE_NATS_URL"):
        await connect_nats(url, name="lonely", start_timeout_s=0.3)


async def test_takes_several_urls(nats_url: str) -> None:
    bus = await connect_nats(f"nats://127.0.0.1:{free_port()}, {nats_url}", name="two")
    await settled(bus)
    await bus.close()


@pytest.mark.parametrize("url", ["nats://", "nats://host:port", ""])
async def test_names_the_setting_when_a_url_is_wrong(url: str) -> None:
    with pytest.raises(SettingsError, match="DILASERVE_NATS_URL="):
        await connect_nats(url, name="typo")


async def test_a_refused_login_is_told(make_server: MakeServer) -> None:
    server = make_server("nats", "--user", "u", "--pass", "p")
    await server.start()
    with pytest.raises(BusUnavailableError, match="Authorization Violation"):
        await connect_nats(server.url, name="anonymous", start_timeout_s=0.5)
    bus = await connect_nats(server.url.replace("//", "//u:p@"), name="known")
    await settled(bus)
    await bus.close()


async def test_what_a_server_said_outlives_its_reset() -> None:
    n_met = 0

    async def refuse_then_reset(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal n_met
        n_met += 1
        if n_met == 1:
            writer.write(b'INFO {"max_payload": 1048576}\r\n')
            await reader.readuntil(b"PING\r\n")
            writer.write(b"-ERR 'Authorization Violation'\r\n")
        else:
            linger = struct.pack("ii", 1, 0)  # close() resets
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with await asyncio.start_server(refuse_then_reset, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BusUnavailableError, match="Authorization Violation"):
            await connect_nats(url, name="anonymous", start_timeout_s=0.5)
    assert n_met > 1


async def test_a_connection_closed_for_good_is_told(nats_url: str) -> None:
    closed: list[str] = []
    bus = await connect_nats(nats_url, name="rude", on_closed=lambda: closed.append("closed"))
    bus._client._transport.write(b"NONSENSE\r\n")  # the server answers -ERR and hangs up
    await until(lambda: closed == ["closed"])
    with pytest.raises(BusUnavailableError):
        await bus.publish("dlm.v1.a", b"")
    with pytest.raises(BusUnavailableError):
        await bus.subscribe("dlm.v1.a", print)
    await bus.close()


async def test_closing_on_purpose_is_not_told(nats_url: str) -> None:
    closed: list[str] = []
    bus = await connect_nats(nats_url, name="polite", on_closed=lambda: closed.append("closed"))
    await bus.close()
    await asyncio.sleep(0.05)
    assert closed == []


async def test_disconnects_are_counted_and_an_outage_is_not_the_end() -> None:
    closed: list[str] = []
    async with start_nats() as server:
        bus = await connect_nats(server.url, name="x", on_closed=lambda: closed.append("closed"))
        for end in (server.stop, server.kill):
            await end()
            await until(lambda: not bus.connected)
            await server.start()
            await until(lambda: bus.connected)
            await settled(bus)
        assert bus.counts.n_disconnects == 2
        assert closed == []
        await bus.close()


async def test_slow_consumers_are_counted(nats_url: str) -> None:
    bus = await connect_nats(nats_url, name="slow")
    stuck = asyncio.Event()

    async def on_message(message: Msg) -> None:
        await stuck.wait()

    await bus._client.subscribe("dlm.v1.flood", cb=on_message, pending_msgs_limit=1)
    for _ in range(10):
        await bus.publish("dlm.v1.flood", b"")
    await until(lambda: bus.counts.n_slow_consumers >= 8)
    stuck.set()
    await bus.close()


async def test_closing_does_not_wait_for_a_hung_server() -> None:
    async with start_nats() as server:
        bus = await connect_nats(server.url, name="leaving")
        await bus.subscribe("dlm.v1.>", print)
        server.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(5):
            await bus.close()
        server.send_signal(signal.SIGCONT)


@pytest.mark.slow
async def test_a_hung_server_is_noticed_within_seconds() -> None:
    async with start_nats() as server:
        bus = await connect_nats(server.url, name="patient")
        server.send_signal(signal.SIGSTOP)
        await until(lambda: not bus.connected, timeout_s=20)
        with pytest.raises(BusUnavailableError):
            await bus.publish("dlm.v1.a", b"")
        server.send_signal(signal.SIGCONT)
        await until(lambda: bus.connected)
        await settled(bus)
        await bus.close()
