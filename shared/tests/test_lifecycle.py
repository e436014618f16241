"""The lifecycle table: every row, and everything that it lacks."""

from __future__ import annotations

from itertools import product

import pytest

from dilaserve.errors import LifecycleError
from dilaserve.lifecycle import EVENTS, STATES, TERMINAL, TRANSITIONS, advance, is_terminal


@pytest.mark.parametrize(("pair", "after"), list(TRANSITIONS.items()))
def test_every_row_of_the_table_is_taken(pair: tuple, after: str) -> None:
    assert advance(*pair) == after


@pytest.mark.parametrize("pair", [p for p in product(STATES, EVENTS) if p not in TRANSITIONS])
def test_whatever_the_table_lacks_raises(pair: tuple) -> None:
    state, event = pair
    with pytest.raises(LifecycleError, match=f"{event!r} is not allowed in state {state!r}"):
        advance(state, event)


def test_the_ends_are_final_and_every_other_state_can_end() -> None:
    assert {"done", "cancelled", "failed"} == TERMINAL
    assert all(is_terminal(state) == (state in TERMINAL) for state in STATES)
    for state in set(STATES) - TERMINAL:
        assert advance(state, "cancel") in TERMINAL
        assert advance(state, "fail") in TERMINAL


def test_every_state_is_reachable_from_new() -> None:
    reached = {"new"}
    for _ in STATES:
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(STATES)


def test_only_an_admitted_request_is_worked_on() -> None:
    worked_on = {state for state, event in TRANSITIONS if event in ("commit", "reassign", "finish")}
    assert worked_on == {"active"}
