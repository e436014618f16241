"""What every bus promises, run over the memory bus and over a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dilaserve.bus import Bus, BusMessage, Endpoint, ServiceCard
from dilaserve.errors import (
    BusTimeoutError,
    NoRespondersError,
    ResponderFailedError,
)
from dilaserve.testing import settled, until

SETTLE_S = 0.1
"""Long enough for a message to arrive that should not."""


CARD = ServiceCard(
    name="scheduler",
    version="0.1.0",
    description="decides",
    metadata={"id": "scheduler-12ab", "pid": "7", "address": ""},
)


async def echo(message: BusMessage) -> bytes:
    return message.subject.encode() + b"|" + message.data


class TestPublish:
    async def test_reaches_every_subscriber_of_every_connection(self, bus: Bus, other: Bus) -> None:
        got: list[tuple[str, BusMessage]] = []
        await bus.subscribe("dlm.v1.a", lambda message: got.append(("first", message)))
        await bus.subscribe("dlm.v1.a", lambda message: got.append(("second", message)))
        await other.subscribe("dlm.v1.a", lambda message: got.append(("other", message)))
        await settled(other)
        await bus.publish("dlm.v1.a", b"x")
        await until(lambda: len(got) == 3)
        assert {name for name, _ in got} == {"first", "second", "other"}
        assert all(m == BusMessage("dlm.v1.a", b"x") for _, m in got)

    async def test_keeps_order_for_each_subscription(self, bus: Bus, other: Bus) -> None:
        got: list[int] = []
        await other.subscribe("dlm.v1.>", lambda message: got.append(int(message.data)))
        await settled(other)
        for i in range(500):
            await bus.publish(f"dlm.v1.s{i % 3}", str(i).encode())
        await until(lambda: len(got) == 500)
        assert got == list(range(500))

    async def test_handler_never_runs_inside_publish(self, bus: Bus) -> None:
        got: list[bytes] = []
        await bus.subscribe("dlm.v1.a", lambda message: got.append(message.data))
        await bus.publish("dlm.v1.a", b"x")
        assert got == []
        await until(lambda: got == [b"x"])

    async def test_carries_headers(self, bus: Bus) -> None:
        got: list[BusMessage] = []
        await bus.subscribe("dlm.v1.a", got.append)
        await bus.publish("dlm.v1.a", b"", headers={"traceparent": "00-ab-cd-01"})
        await until(lambda: len(got) == 1)
        assert got[0].headers == {"traceparent": "00-ab-cd-01"}
        assert got[0].reply == ""

    async def test_keeps_nothing_for_late_subscribers(self, bus: Bus) -> None:
        await bus.publish("dlm.v1.a", b"early")
        await settled(bus)
        got: list[bytes] = []
        await bus.subscribe("dlm.v1.a", lambda message: got.append(message.data))
        await bus.publish("dlm.v1.a", b"late")
        await until(lambda: got == [b"late"])

    async def test_takes_a_megabyte_and_refuses_more(self, bus: Bus) -> None:
        got: list[int] = []
        await bus.subscribe("dlm.v1.a", lambda message: got.append(len(message.data)))
        await bus.publish("dlm.v1.a", bytes(2**20))
        await until(lambda: got == [2**20])
        with pytest.raises(ValueError, match=r"1048577 bytes on dlm\.v1\.a is above the limit"):
            await bus.publish("dlm.v1.a", bytes(2**20 + 1))
        with pytest.raises(ValueError, match="above the limit"):
            await bus.request("dlm.v1.a", bytes(2**20 + 1), timeout_s=1)

    @pytest.mark.parametrize("subject", ["", "a..b", "a b", ".a", "a.*", "a.>", "a\r\nb"])
    async def test_refuses_malformed_subjects(self, bus: Bus, subject: str) -> None:
        with pytest.raises(ValueError, match="is not a subject"):
            await bus.publish(subject, b"")

    async def test_an_error_in_a_handler_is_loud_and_stops_nothing(
        self, bus: Bus, loop_errors: list[BaseException]
    ) -> None:
        got: list[bytes] = []

        def on_message(message: BusMessage) -> None:
            if message.data == b"bad":
                raise KeyError("bad")
            got.append(message.data)

        await bus.subscribe("dlm.v1.a", on_message)
        for data in (b"one", b"bad", b"two"):
            await bus.publish("dlm.v1.a", data)
        await until(lambda: got == [b"one", b"two"])
        assert [repr(error) for error in loop_errors] == ["KeyError('bad')"]


class TestSubscribe:
    @pytest.mark.parametrize(
        ("pattern", "matching", "missing"),
        [
            ("dlm.v1.evt.*.step", ["dlm.v1.evt.w1.step"], ["dlm.v1.evt.step", "dlm.v1.evt.w1.hb"]),
            ("dlm.v1.evt.>", ["dlm.v1.evt.w1.hb", "dlm.v1.evt.x"], ["dlm.v1.evt", "dlm.v2.evt.x"]),
            ("*.v1", ["dlm.v1", "x.v1"], ["v1", "dlm.v1.x"]),
            (">", ["a", "a.b.c"], []),
            ("dlm.v1", ["dlm.v1"], ["dlm.v1.x", "dlm", "DLM.v1"]),
        ],
    )
    async def test_wildcards(
        self, bus: Bus, pattern: str, matching: list[str], missing: list[str]
    ) -> None:
        got: list[str] = []
        await bus.subscribe(pattern, lambda message: got.append(message.subject))
        for subject in [*missing, *matching]:
            await bus.publish(subject, b"")
        await until(lambda: len(got) >= len(matching))
        await settled(bus)
        assert [subject for subject in got if not subject.startswith("_INBOX")] == matching

    @pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a.b*", "a b"])
    async def test_refuses_malformed_patterns(self, bus: Bus, pattern: str) -> None:
        with pytest.raises(ValueError, match="is not a pattern"):
            await bus.subscribe(pattern, print)

    async def test_unsubscribing_ends_it_and_twice_does_no_harm(self, bus: Bus) -> None:
        got: list[bytes] = []
        subscription = await bus.subscribe("dlm.v1.a", lambda message: got.append(message.data))
        await bus.publish("dlm.v1.a", b"x")
        await until(lambda: got == [b"x"])
        await subscription.unsubscribe()
        await subscription.unsubscribe()
        await bus.publish("dlm.v1.a", b"y")
        await settled(bus)
        assert got == [b"x"]


class TestRequest:
    async def test_gets_the_answer_with_its_own_data(self, bus: Bus, other: Bus) -> None:
        await other.serve(CARD, [Endpoint("echo", "dlm.v1.req.echo", echo)])
        await settled(other)
        answers = await asyncio.gather(
            *(bus.request("dlm.v1.req.echo", str(i).encode(), timeout_s=5) for i in range(50))
        )
        assert [a.data for a in answers] == [f"dlm.v1.req.echo|{i}".encode() for i in range(50)]

    async def test_passes_headers_on(self, bus: Bus) -> None:
        async def header(message: BusMessage) -> bytes:
            return message.headers["traceparent"].encode()

        await bus.serve(CARD, [Endpoint("header", "dlm.v1.req.header", header)])
        answer = await bus.request(
            "dlm.v1.req.header", b"", timeout_s=5, headers={"traceparent": "00-1"}
        )
        assert answer.data == b"00-1"

    async def test_nobody_listens(self, bus: Bus) -> None:
        with pytest.raises(NoRespondersError, match=r"nobody listens on dlm\.v1\.req\.none"):
            await bus.request("dlm.v1.req.none", b"", timeout_s=5)

    async def test_nobody_answers_in_time(self, bus: Bus) -> None:
        await bus.subscribe("dlm.v1.req.mute", lambda message: None)
        with pytest.raises(BusTimeoutError, match=r"no answer on dlm\.v1\.req\.mute within 0\.05"):
            await bus.request("dlm.v1.req.mute", b"", timeout_s=0.05)

    async def test_the_responder_fails(self, bus: Bus, loop_errors: list[BaseException]) -> None:
        async def fail(message: BusMessage) -> bytes:
            raise KeyError("lost")

        await bus.serve(CARD, [Endpoint("fail", "dlm.v1.req.fail", fail)])
        with pytest.raises(ResponderFailedError, match=r"KeyError\('lost'\)"):
            await bus.request("dlm.v1.req.fail", b"", timeout_s=5)
        assert [repr(error) for error in loop_errors] == ["KeyError('lost')"]

    async def test_requests_are_answered_side_by_side(self, bus: Bus) -> None:
        both = asyncio.Barrier(2)

        async def meet(message: BusMessage) -> bytes:
            await both.wait()
            return b"met"

        await bus.serve(CARD, [Endpoint("meet", "dlm.v1.req.meet", meet)])
        answers = await asyncio.gather(
            *(bus.request("dlm.v1.req.meet", b"", timeout_s=5) for _ in range(2))
        )
        assert [answer.data for answer in answers] == [b"met", b"met"]

    async def test_one_member_of_a_group_answers(self, bus: Bus, other: Bus) -> None:
        served: list[str] = []

        def member(name: str) -> Callable[[BusMessage], Any]:
            async def answer(message: BusMessage) -> bytes:
                served.append(name)
                return name.encode()

            return answer

        await bus.serve(CARD, [Endpoint("who", "dlm.v1.req.who", member("a"))])
        await other.serve(CARD, [Endpoint("who", "dlm.v1.req.who", member("b"))])
        await settled(other)
        answers = [await bus.request("dlm.v1.req.who", b"", timeout_s=5) for _ in range(60)]
        assert len(served) == 60
        assert {answer.data for answer in answers} == {b"a", b"b"}

    async def test_members_of_two_groups_both_get_it(self, bus: Bus) -> None:
        served: list[str] = []

        async def first(message: BusMessage) -> bytes:
            served.append("first")
            return b""

        async def second(message: BusMessage) -> bytes:
            served.append("second")
            return b""

        await bus.serve(
            CARD,
            [
                Endpoint("first", "dlm.v1.req.x", first, queue="one"),
                Endpoint("second", "dlm.v1.req.x", second, queue="two"),
            ],
        )
        await bus.request("dlm.v1.req.x", b"", timeout_s=5)
        await until(lambda: sorted(served) == ["first", "second"])

    async def test_collects_all_answers(self, bus: Bus, other: Bus) -> None:
        async def answer_from(connection: Bus, text: bytes) -> None:
            def on_message(message: BusMessage) -> None:
                task = asyncio.ensure_future(connection.publish(message.reply, text))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            await connection.subscribe("dlm.v1.all", on_message)
            await settled(connection)

        tasks: set[asyncio.Future[None]] = set()
        await answer_from(bus, b"1")
        await answer_from(other, b"2")
        answers = await bus.request_many("dlm.v1.all", b"", wait_s=0.2)
        assert sorted(answer.data for answer in answers) == [b"1", b"2"]
        assert await bus.request_many("dlm.v1.none", b"", wait_s=SETTLE_S) == []
