"""The line of those who wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.waiting import WaitingLine


def make(name: str, arrival_s: float = 0.0, model: str = "m") -> Request:
    return Request(name, model, n_prompt=1, n_output=8, block_length=8, arrival_s=arrival_s)


def line() -> WaitingLine:
    return WaitingLine(lambda request: (request.arrival_s,))


def names(tried: WaitingLine, model: str = "m") -> list[str]:
    return [request.request_id for request in tried.in_order(model)]


def test_first_come_first_served_per_model() -> None:
    tried = line()
    for name, arrival_s, model in (("b", 2, "m"), ("a", 1, "m"), ("x", 0, "other")):
        tried.join(make(name, arrival_s, model))
    assert names(tried) == ["a", "b"]
    assert names(tried, "other") == ["x"]
    assert tried.n_by_model == {"m": 2, "other": 1}
    assert not tried.is_empty("m")
    assert tried.is_empty("none")


def test_those_passed_over_keep_their_places() -> None:
    tried = line()
    requests = [make(name, n) for n, name in enumerate("abc")]
    for request in requests:
        tried.join(request)
    for request in tried.in_order("m"):
        if request.request_id == "b":
            tried.leave(request)
            break
    assert names(tried) == ["a", "c"]


def test_waiting_twice_is_a_mistake() -> None:
    tried, request = line(), make("a")
    tried.join(request)
    with pytest.raises(ValueError, match="waits already"):
        tried.join(request)
    assert tried.leave(request)
    assert not tried.leave(request)
    tried.join(request)
    assert names(tried) == ["a"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5)), max_size=40))
def test_it_behaves_as_a_sorted_list(moves: list[tuple[bool, int, int]]) -> None:
    tried = line()
    waiting: dict[str, Request] = {}
    for joins, name, arrival_s in moves:
        key = str(name)
        if joins and key not in waiting:
            waiting[key] = make(key, arrival_s)
            tried.join(waiting[key])
        elif not joins and key in waiting:
            tried.leave(waiting.pop(key))
        expected = sorted(request.arrival_s for request in waiting.values())
        assert [request.arrival_s for request in tried.in_order("m")] == expected
        assert len(tried) == len(waiting)
