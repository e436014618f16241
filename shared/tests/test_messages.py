"""Every message survives the wire; unknown ones are refused, unknown fields skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve import messages
from dilaserve.messages import (
    GatewayToScheduler,
    SchedulerReply,
    StepCommand,
    StepItem,
    TokenDelta,
    ToWorker,
    WorkerEvent,
)

UNIONS: list[tuple[Any, Callable[[bytes], Any]]] = [
    (GatewayToScheduler, messages.decode_request),
    (SchedulerReply, messages.decode_reply),
    (ToWorker, messages.decode_to_worker),
    (WorkerEvent, messages.decode_worker_event),
    (TokenDelta, messages.decode_to_gateway),
    (messages.ToPredictor, messages.decode_to_predictor),
    (messages.FromPredictor, messages.decode_from_predictor),
]
KINDS = [(kind, decode) for union, decode in UNIONS for kind in get_args(union) or (union,)]


def anything(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Messages of a kind with JSON's numbers in them."""
    finite = st.floats(allow_nan=False, allow_infinity=False)
    words = st.from_regex(r"[A-Za-z0-9_-]{1,9}", fullmatch=True)
    leaves = {
        float: finite,
        messages.Count: st.integers(0, 2**40),
        messages.Number: st.integers(-(2**40), 2**40),
        messages.TokenId: st.integers(0, 2**31 - 1),
        messages.RequestId: st.text(min_size=1, max_size=512),
        messages.Word: words,
    }
    hints = msgspec.structs.fields(kind)
    return st.builds(kind, **{f.name: _of(f.type, leaves) for f in hints})


def _of(hint: Any, leaves: dict[Any, Any]) -> st.SearchStrategy[Any]:
    if hint in leaves:
        return leaves[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return anything(hint)
    inner = get_args(hint)
    if getattr(hint, "__origin__", None) is list:
        return st.lists(_of(inner[0], leaves), max_size=3)
    if inner and not all(isinstance(arg, str) for arg in inner):
        return st.one_of(*(_of(arg, leaves) for arg in inner))
    return st.from_type(hint)


@pytest.mark.parametrize(
    ("kind", "decode"), KINDS, ids=[kind.__struct_config__.tag for kind, _ in KINDS]
)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_each_survives_the_wire(kind: Any, decode: Callable[[bytes], Any], data: Any) -> None:
    message = data.draw(anything(kind))
    assert decode(messages.encode(message)) == message


def test_tags_are_one_of_a_kind() -> None:
    tags = [kind.__struct_config__.tag for kind, _ in KINDS]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("decode", [decode for _, decode in UNIONS])
def test_unknown_tag_and_broken_json_raise(decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(b'{"type":"of the future","request_id":"r"}')
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"type":')


@pytest.mark.parametrize("decode", [decode for _, decode in UNIONS])
@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_deep_nesting_is_malformed(decode: Callable[[bytes], Any], bracket: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"x":' + bracket * 100_000)


@pytest.mark.parametrize("text", ["-1", "1" + "0" * 13, "1" + "0" * 30, "1e3"])
def test_absurd_counts_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.term"):
        messages.decode_to_worker(b'{"type":"step_command","seq":1,"term":' + text.encode() + b"}")


@pytest.mark.parametrize("name", ["", "a b", "a.b", "*", ">", "é", "a\n", "a" * 300])
def test_an_instance_that_no_subject_can_name_is_refused(name: str) -> None:
    down = messages.encode(messages.InstanceDown(instance_id=name))
    with pytest.raises(msgspec.ValidationError, match=r"\$\.instance_id"):
        messages.decode_worker_event(down)


@pytest.mark.parametrize("token", [-1, 2**31])
def test_tokens_that_no_tokenizer_takes_are_refused(token: int) -> None:
    delta = token_delta(tokens=[token])
    with pytest.raises(msgspec.ValidationError, match=r"\$\.tokens"):
        messages.decode_to_gateway(messages.encode(delta))


def test_messages_of_another_direction_are_refused() -> None:
    command = messages.encode(StepCommand(term=1, seq=1))
    assert messages.decode_to_worker(command) == StepCommand(term=1, seq=1)
    with pytest.raises(msgspec.ValidationError):
        messages.decode_worker_event(command)


def test_unknown_fields_are_skipped() -> None:
    text = b'{"type":"step_command","term":3,"seq":9,"colour":"red","items":[{"request_id":"r",'
    text += b'"epoch":2,"threshold":0.9,"until_block":1,"shade":4}]}'
    item = StepItem(request_id="r", epoch=2, threshold=0.9, until_block=1)
    assert messages.decode_to_worker(text) == StepCommand(term=3, seq=9, items=[item])


def test_the_error_names_the_field() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.items\[0\]\.epoch"):
        messages.decode_to_worker(
            b'{"type":"step_command","term":3,"seq":9,"items":[{"request_id":"r","epoch":"x"}]}'
        )


def test_a_message_is_readable() -> None:
    assert messages.encode(token_delta(tokens=[258])) == (
        b'{"type":"token_delta","request_id":"r1","epoch":1,"step":4,"positions":[3],'
        b'"tokens":[258],"confidences":[0.97],"kind":"cache","threshold":0.9,"worker":"w-01"}'
    )


def token_delta(tokens: list[int]) -> TokenDelta:
    """One token at position 3."""
    return TokenDelta(
        request_id="r1",
        epoch=1,
        step=4,
        positions=[3],
        tokens=tokens,
        confidences=[0.97],
        kind="cache",
        threshold=0.9,
        worker="w-01",
    )
