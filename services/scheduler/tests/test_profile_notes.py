"""What is said of a latency profile, and that it is said once."""

from __future__ import annotations

import pytest

from dilaserve.messages import StepKind
from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_scheduler.profile_notes import ProfileNotes, summary

from .driver import MODEL, info

BOTH: tuple[StepKind, ...] = ("recompute", "cache")


def profiles(kinds_by_degree: dict[int, tuple[StepKind, ...]], model: str = MODEL) -> ProfileSet:
    return ProfileSet(
        model=model,
        device="H100",
        profiles=[
            LatencyProfile(
                tp_degree=degree,
                points=[Point(32, 0.01), *(Point(64, 0.02, kind) for kind in kinds)],
            )
            for degree, kinds in kinds_by_degree.items()
        ],
    )


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({1: BOTH, 2: BOTH}, "step kinds told apart"),
        ({1: (), 2: ("cache",)}, "step kinds not told apart"),
        ({1: BOTH, 2: ()}, "step kinds told apart for some of them only"),
    ],
)
def test_summary(kinds: dict[int, tuple[StepKind, ...]], words: str) -> None:
    assert summary(profiles(kinds), "p.json") == (
        f"latency profile p.json: m on H100, TP degrees 1, 2, {words}"
    )


def test_the_measured_model_and_degree_need_no_words() -> None:
    notes = ProfileNotes(profiles({1: ()}))
    assert list(notes.heard(info("a-0001"))) == []
    assert list(ProfileNotes(None).heard(info("a-0001", model_id="other"))) == []


def test_another_model_is_told_once() -> None:
    notes = ProfileNotes(profiles({1: ()}, model="LLaDA"))
    (text,) = notes.heard(info("a-0001"))
    assert "a-0001 serves 'm', and the latency profile is of 'LLaDA'" in text
    assert "`dilaserve profile`" in text
    assert "unset DILASERVE_PROFILE" in text
    assert list(notes.heard(info("a-0001"))) == list(notes.heard(info("b-0001"))) == []
    assert len(list(notes.heard(info("b-0002", model_id="third")))) == 1


def test_a_degree_that_was_not_measured_is_told_once() -> None:
    notes = ProfileNotes(profiles({1: (), 2: ()}))
    (text,) = notes.heard(info("a-0001", tp_degree=4))
    assert "TP degree 4" in text
    assert "`dilaserve profile --tp 4`" in text
    assert list(notes.heard(info("b-0001", tp_degree=4))) == []
