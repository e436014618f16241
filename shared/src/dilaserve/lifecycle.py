"""The lifecycle of a request as a table: state × event → state. Whatever is absent is an error.

The store, the scheduler's core and the diagram in docs/ are all derived from it.
"""

from __future__ import annotations

from typing import Literal, get_args

from dilaserve.errors import LifecycleError

State = Literal["new", "active", "done", "cancelled", "failed"]
Event = Literal["admit", "reassign", "commit", "finish", "cancel", "fail"]

STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("new", "admit"): "active",
    ("new", "cancel"): "cancelled",
    ("new", "fail"): "failed",
    ("active", "reassign"): "active",
    ("active", "commit"): "active",
    ("active", "finish"): "done",
    ("active", "cancel"): "cancelled",
    ("active", "fail"): "failed",
}

TERMINAL: frozenset[State] = frozenset(STATES) - {state for state, _ in TRANSITIONS}


def advance(state: State, event: Event) -> State:
    """The state after `event`. Raises LifecycleError for a pair that the table lacks."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LifecycleError(
            f"event {event!r} is not allowed in state {state!r}; read the record again"
        ) from None


def is_terminal(state: State) -> bool:
    """Whether no event leads out of `state`."""
    return state in TERMINAL
