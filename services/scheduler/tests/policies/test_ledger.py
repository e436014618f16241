"""Requests as columns."""

from __future__ import annotations

import numpy as np
import pytest

from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.policies.ledger import Course, Ledger

from .builders import advance, make_request


def enter(ledger: Ledger, request: Request, steps: tuple[float, float] = (8.0, 16.0)) -> Course:
    return ledger.add(
        request,
        steps=steps,
        upper=[2 * each for each in steps],
        deadline=9.0,
        n_cache=8,
        floor=0,
    )


def test_predictions_shrink_with_the_tokens_left() -> None:
    ledger, request = Ledger(2), make_request()
    course = enter(ledger, request)
    slots = np.array([course.slot])
    assert ledger.steps(slots).tolist() == [[8.0], [16.0]]
    assert [course.steps(k, upper=True) for k in range(2)] == [16.0, 32.0]
    advance(request, 4)
    ledger.progressed([course])
    assert ledger.steps(slots).tolist() == [[6.0], [12.0]]
    ledger.predict(course, [3.0, 6.0], [4.0, 8.0], tokens_left=12)
    assert ledger.steps(slots).tolist() == [[3.0], [6.0]]
    ledger.predict(course, [3.0, 6.0], [4.0, 8.0], tokens_left=24)  # of long ago
    assert ledger.steps(slots).tolist() == [[1.5], [3.0]]


def test_there_is_at_least_a_step_a_block() -> None:
    ledger = Ledger(2)
    slots = np.array([enter(ledger, make_request(), (0.5, 1.0)).slot])
    assert ledger.steps(slots).tolist() == [[2.0], [2.0]]


def test_it_grows_and_uses_slots_again() -> None:
    ledger = Ledger(2)
    requests = [make_request(f"r{n}") for n in range(200)]
    for n, request in enumerate(requests):
        enter(ledger, request, (n, 2.0 * n))
    slots = np.array([course.slot for course in ledger.courses_of(requests)])
    ledger.refresh()
    assert ledger.p50[0, slots].tolist() == list(range(200))
    assert len(set(slots.tolist())) == len(ledger) == 200
    size = len(ledger.by_slot)
    for request in requests[:100]:
        ledger.remove(request)
    ledger.remove(requests[0])
    assert requests[0] not in ledger
    assert sorted(ledger.active()) == sorted(slots[100:])
    for n in range(100):
        enter(ledger, make_request(f"s{n}"))
    assert len(ledger.by_slot) == size
    ledger.refresh()
    assert ledger.p50[0, slots[100:]].tolist() == list(range(100, 200))


def test_places_are_spread_evenly() -> None:
    ledger = Ledger(2)
    courses = [enter(ledger, make_request(f"r{n}")) for n in range(100)]
    for share in (0.1, 0.5, 0.9):
        assert np.mean([course.spread < share for course in courses]) == pytest.approx(
            share, abs=0.02
        )


def test_one_by_one_they_are_as_in_columns() -> None:
    ledger = Ledger(2)
    requests = [make_request(f"r{n}", n_output=16 + 8 * n) for n in range(80)]
    for n, request in enumerate(requests):
        enter(ledger, request, (4.0 + n, 8.0 + n))
        advance(request, n % 16)
    courses = ledger.courses_of(requests)
    ledger.progressed(courses)
    slots = np.array([course.slot for course in courses])
    apart = [[course.steps(k) for course in courses] for k in range(2)]
    assert np.array(apart) == pytest.approx(ledger.steps(slots))
    assert [course.deadline for course in courses] == [9.0] * 80
    assert [course.extra for course in courses] == [r.n_tokens - 8 for r in requests]


def test_who_has_left_is_not_in_the_columns_of_who_comes_next() -> None:
    ledger, old, new = Ledger(2), make_request("old"), make_request("new")
    course = enter(ledger, old)
    advance(old, 4)
    ledger.progressed([course])
    ledger.predict(course, [3.0, 6.0], [4.0, 8.0], tokens_left=12)
    ledger.remove(old)
    slots = np.array([enter(ledger, new).slot])
    assert slots.tolist() == [course.slot]
    assert ledger.steps(slots).tolist() == [[8.0], [16.0]]


def test_the_latest_of_several_notes_stays() -> None:
    ledger, request = Ledger(2), make_request()
    course = enter(ledger, request)
    for n_tokens in (4, 2, 2):
        advance(request, n_tokens)
        ledger.progressed([course])
        ledger.predict(course, [1.0, 9.0 - n_tokens], [9.0, 9.0], tokens_left=course.left)
    assert ledger.steps(np.array([course.slot])).tolist() == [[1.0], [7.0]]
    assert ledger.left[course.slot] == 8.0


def test_priorities_are_counted() -> None:
    ledger = Ledger(2)
    requests = [make_request(f"r{n}", priority=n % 2) for n in range(5)]
    for request in requests:
        enter(ledger, request)
    assert ledger.n_by_priority == {0: 3, 1: 2}
    for request in requests[1::2]:
        ledger.remove(request)
    assert dict(ledger.n_by_priority) == {0: 3}
