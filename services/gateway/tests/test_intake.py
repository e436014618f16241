"""Bodies that cannot be right are refused with field, value and remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dilaserve_gateway.errors import ApiError
from dilaserve_gateway.intake import ignored_fields, parse_body, parse_level_headers
from dilaserve_gateway.schema import ChatBody, CompletionBody, GenerationBody

COMPLETION = {"model": "tiny", "prompt": "hello"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def refused(data: bytes, kind: type[GenerationBody]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(data, kind)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    return caught.value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"hello", "not JSON"),
        (b'{"model": "tiny", ', "not JSON"),
        (b'\xff{"model": "tiny"}', "not JSON"),
        (b'{"model": "\xff"}', "not JSON"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b"[" * 100_000, "not JSON: recursion limit"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON: recursion limit"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "not JSON: number out of range"),
        (b"null", "The body is None; send a JSON object"),
        (b"[1]", "The body is a list of 1; send a JSON object"),
        (b'"text"', "The body is 'text'; send a JSON object"),
    ],
)
def test_bodies_that_are_no_objects(data: bytes, message: str) -> None:
    assert message in refused(data, CompletionBody).message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": 7}, "model", "`model` (7) is not valid: it should be a valid string; give the"),
        ({"prompt": None}, "prompt", "`prompt` (None) is not valid; give a string, a list"),
        ({"prompt": [1, "a"]}, "prompt", "give a string, a list of strings, token ids"),
        ({"prompt": [True]}, "prompt", "give a string"),
        ({"prompt": [1.5]}, "prompt", "give a string"),
        ({"temperature": 2.1}, "temperature", "(2.1) is not valid: it should be less than"),
        ({"temperature": "1"}, "temperature", "give a number from 0 (greedy) to 2"),
        ({"top_p": 0}, "top_p", "give a number above 0 and at most 1"),
        ({"max_tokens": 0}, "max_tokens", "(0) is not valid: it should be greater"),
        ({"max_tokens": -5}, "max_tokens", "give the length of the output in tokens"),
        ({"max_tokens": 1.5}, "max_tokens", "should be a valid integer"),
        ({"max_tokens": True}, "max_tokens", "(True) is not valid"),
        ({"n": 0}, "n", "give how many choices to generate, from 1"),
        ({"n": 129}, "n", "(129) is not valid"),
        ({"seed": 2**63}, "seed", "give an integer of 64 bits"),
        ({"seed": 10**400}, "seed", "(an integer of 1329 bits) is not valid"),
        ({"stop": ""}, "stop", "give a string of 1 to 1000 characters, or a list of up to 4"),
        ({"stop": ["a"] * 5}, "stop", "(a list of 5) is not valid"),
        ({"stop": ["a", ""]}, "stop", "give a string of 1 to 1000 characters"),
        ({"stream": "yes"}, "stream", "give true or false"),
        ({"stream_options": True}, "stream_options", "give an object like"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"slo_ms": 0}, "slo_ms", "give the latency objective in whole milliseconds"),
        ({"priority": 5000}, "priority", "give an integer from -1000 to 1000"),
        ({"min_confidence": 1.5}, "min_confidence", "give the lowest confidence threshold"),
        ({"service_tier": "gold"}, "service_tier", "give auto, default, flex"),
        ({"logprobs": 6}, "logprobs", "(6) is not valid"),
        ({"user": ["x"]}, "user", "give a string"),
    ],
)
def test_fields_of_a_completion(fields: dict[str, Any], param: str, message: str) -> None:
    error = refused(json.dumps(COMPLETION | fields).encode(), CompletionBody)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_are_finite(value: str) -> None:
    body = b'{"model": "tiny", "prompt": "x", "temperature": %s}' % value.encode()
    assert refused(body, CompletionBody).param == "temperature"


@pytest.mark.parametrize("name", ["model", "messages"])
def test_fields_that_are_missing(name: str) -> None:
    body = {key: value for key, value in CHAT.items() if key != name}
    error = refused(json.dumps(body).encode(), ChatBody)
    assert (error.param, f"`{name}` is missing; give " in error.message) == (name, True)


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([], "messages", "give a list of at least one message"),
        ("hello", "messages", "should be a valid array"),
        (["hello"], "messages[0]", "should be an object"),
        ([{"role": "user"}], "messages[0].content", "is missing; give a string, or a list"),
        ([{"content": "x"}], "messages[0].role", "give system, developer, user or assistant"),
        ([CHAT["messages"][0], {"role": "tool", "content": "x"}], "messages[1].role", "'tool'"),  # type: ignore[index]
        ([{"role": "user", "content": None}], "messages[0].content", "give a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content", "text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "text"),
    ],
)
def test_messages(messages: Any, param: str, message: str) -> None:
    error = refused(json.dumps(CHAT | {"messages": messages}).encode(), ChatBody)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("frequency_penalty", False),
        ("modalities", ["audio"]),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 2),
    ],
)
def test_fields_that_would_change_the_answer(name: str, value: Any) -> None:
    error = refused(json.dumps(CHAT | {name: value}).encode(), ChatBody)
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert "is not supported; " in error.message


def test_fields_that_change_nothing() -> None:
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "echo": False,
        "logprobs": None,
        "stop": None,
    }
    body = parse_body(json.dumps(CHAT | harmless).encode(), ChatBody)
    assert ignored_fields(body) == ()


def test_unknown_fields_are_named_where_they_fit_a_header() -> None:
    unknown = {"max_token": 5, "store": True, "é": 1, "a b": 1, "x" * 65: 1, "": 1, "\r\n": 1}
    body = parse_body(json.dumps(COMPLETION | unknown).encode(), CompletionBody)
    assert ignored_fields(body) == ("max_token", "store")
    many = {f"f{i}": 1 for i in range(100)}
    body = parse_body(json.dumps(COMPLETION | many).encode(), CompletionBody)
    assert len(ignored_fields(body)) == 10


def test_headers_give_the_level() -> None:
    level = parse_level_headers({"x-slo-ms": "1500", "x-priority": "-2", "x-min-confidence": "0.7"})
    assert (level.slo_ms, level.priority, level.min_confidence) == (1500, -2, 0.7)
    assert parse_level_headers({"accept": "*/*"}).slo_ms is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-slo-ms", "soon"),
        ("x-priority", "1.5"),
        ("x-min-confidence", "nan"),
        ("x-service-tier", "gold"),
    ],
)
def test_headers_that_are_not_valid(name: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"`{name}` \\('{value}'|nan\\) is not valid") as caught:
        parse_level_headers({name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
