"""Commands on the wire: the very bytes that redis-py would send."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio.connection import Connection

from dilaserve.store.wire import pack

FIELD = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
)
COMMANDS = st.lists(st.lists(FIELD, max_size=6).map(lambda fields: ["FCALL", *fields]), max_size=4)


@settings(deadline=None)
@given(COMMANDS)
def test_as_the_client_packs_them(commands: list[list[bytes | str | int | float]]) -> None:
    assert pack(commands) == b"".join(Connection().pack_commands(commands))


def test_equal_numbers_of_two_types_are_written_each_in_its_way() -> None:
    assert pack([["FCALL", 1, 1.0]]) == b"*3\r\n$5\r\nFCALL\r\n$1\r\n1\r\n$3\r\n1.0\r\n"
    assert pack([["FCALL", 1.0, 1]]) == b"*3\r\n$5\r\nFCALL\r\n$3\r\n1.0\r\n$1\r\n1\r\n"
