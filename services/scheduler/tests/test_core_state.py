"""The lifecycle table."""

from __future__ import annotations

import itertools

import pytest

from dilaserve.errors import LifecycleError
from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.state import EVENTS, STATES, TRANSITIONS, next_state


def request() -> Request:
    return Request("r", "m", n_prompt=8, n_output=24, block_length=8, arrival_s=0.0)


@pytest.mark.parametrize(("state", "event"), [*itertools.product(STATES, EVENTS)])
def test_what_the_table_lacks_raises_and_changes_nothing(state: str, event: str) -> None:
    tried = request()
    tried.state = state  # type: ignore[assignment]
    if (state, event) in TRANSITIONS:
        tried.advance(event)  # type: ignore[arg-type]
        assert tried.state == TRANSITIONS[state, event]  # type: ignore[index]
        return
    with pytest.raises(LifecycleError, match=rf"'{event}' is not allowed in state '{state}'"):
        tried.advance(event)  # type: ignore[arg-type]
    assert tried.state == state


def test_every_state_is_reached_and_only_done_ends() -> None:
    assert set(TRANSITIONS.values()) | {"unknown"} == set(STATES)
    assert set(STATES) - {state for state, _ in TRANSITIONS} == {"done"}


def test_every_state_can_end() -> None:
    for state in set(STATES) - {"unknown", "done"}:
        assert next_state(state, "end") == "done" or state == "unknown"


@pytest.mark.parametrize("n_output", [1, 8, 9, 24, 30])
def test_blocks_cover_the_canvas(n_output: int) -> None:
    tried = Request("r", "m", n_prompt=3, n_output=n_output, block_length=8, arrival_s=0.0)
    sizes = [tried.block_size(block) for block in range(tried.n_blocks)]
    assert sum(sizes) == n_output
    assert all(size == 8 for size in sizes[:-1])
    assert tried.n_block_masked == sizes[0]
    assert tried.at_block_start
