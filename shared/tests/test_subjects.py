"""NATS subjects and the wildcards that hear them."""

from __future__ import annotations

import inspect
import re

import pytest

from dilaserve import subjects
from dilaserve.bus.subject import check_subject, matches

MAKERS = [make for _, make in inspect.getmembers(subjects, inspect.isfunction) if make.__module__]
INSTANCE = "worker-a-12ab"


def made() -> list[str]:
    return [make(INSTANCE) for make in MAKERS]


def test_all_are_well_formed_and_different() -> None:
    fixed = [
        subjects.REQUEST_SUBMIT,
        subjects.REQUEST_CANCEL,
        subjects.STATUS,
        subjects.PREDICT_STEPS,
    ]
    every = made() + fixed
    for subject in every:
        check_subject(subject)
        assert subject.startswith(subjects.PREFIX + ".")
    assert len(set(every)) == len(every)


def test_wildcards_hear_what_they_should() -> None:
    events = [s for s in made() if re.search(r"\.evt\.", s)]
    assert len(events) == 4
    everything = subjects.ALL_WORKER_EVENTS.split(".")
    assert all(matches(everything, event.split(".")) for event in events)
    results = subjects.ALL_STEP_RESULTS.split(".")
    heard = [event for event in events if matches(results, event.split("."))]
    assert heard == [subjects.event_step(INSTANCE)]
    assert not matches(everything, subjects.command_step(INSTANCE).split("."))


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("*", "a", True),
        ("*", "a.b", False),
        (">", "a", True),
        (">", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.b", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.*.>", "a.b", False),
        ("a.*.>", "a.b.c.d", True),
    ],
)
def test_matching(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern.split("."), subject.split(".")) is expected
