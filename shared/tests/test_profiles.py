"""Latency profiles: smoothing, look-up, extrapolation, files."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.profiles import (
    LatencyCurve,
    LatencyProfile,
    Point,
    ProfileError,
    ProfileSet,
    isotonic,
    load_profiles,
    save_profiles,
)

ZIGZAG = [(10, 1.0), (20, 3.0), (30, 2.0), (40, 4.0)]
VALUES = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=30)


def test_violators_are_pooled() -> None:
    assert isotonic([(n, s, 1) for n, s in ZIGZAG]) == [(10, 1.0), (20, 2.5), (30, 2.5), (40, 4.0)]


def test_pools_weigh_their_measurements() -> None:
    assert isotonic([(1, 4.0, 3), (2, 0.0, 1)]) == [(1, 3.0), (2, 3.0)]


@given(VALUES)
def test_smoothed_values_do_not_fall_and_keep_the_mean(values: list[float]) -> None:
    smoothed = [s for _, s in isotonic([(n, v, 1) for n, v in enumerate(values)])]
    assert all(a <= b for a, b in itertools.pairwise(smoothed))
    assert sum(smoothed) == pytest.approx(sum(values))


@given(VALUES)
def test_rising_values_are_left_as_they_are(values: list[float]) -> None:
    rising = sorted(values)
    assert [s for _, s in isotonic([(n, v, 1) for n, v in enumerate(rising)])] == rising


def test_between_measurements_it_is_linear() -> None:
    curve = LatencyCurve(ZIGZAG)
    assert curve.seconds(15) == 1.75
    assert curve.seconds(25) == 2.5
    assert curve.seconds(35) == 3.25
    assert curve.seconds(40) == 4.0


def test_a_small_pass_costs_what_the_smallest_measured_one_costs() -> None:
    curve = LatencyCurve(ZIGZAG)
    assert [curve.seconds(n) for n in (1, 9, 10)] == [1.0, 1.0, 1.0]
    assert curve.seconds(0) == 0.0


def test_beyond_the_last_measurement_it_goes_on_with_the_slope_of_the_upper_half() -> None:
    curve = LatencyCurve([(10, 1.0), (20, 2.0), (30, 2.0), (40, 4.0)])
    assert curve.is_measured(40)
    assert not curve.is_measured(41)
    assert curve.seconds(50) == pytest.approx(4.0 + 10 * (4.0 - 2.0) / 20)


def test_one_measurement_is_taken_as_proportional_only_beyond_it() -> None:
    curve = LatencyCurve([(1, 0.5)])
    assert curve.seconds(3) == 1.5


def test_measurements_of_one_size_count_as_their_mean() -> None:
    assert LatencyCurve([(20, 5.0), (10, 1.0), (10, 3.0)]).seconds(10) == 2.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.001, 10.0)), min_size=1, max_size=20))
def test_more_tokens_never_take_less_time(points: list[tuple[int, float]]) -> None:
    curve = LatencyCurve(points)
    times = [curve.seconds(n) for n in range(1200)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(times))


@pytest.mark.parametrize(
    "points",
    [[], [(0, 1.0)], [(5, 0.0)], [(5, float("nan"))], [(2**40, 1.0)], [(5, 1e308), (5, 1e308)]],
)
def test_impossible_measurements_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ProfileError):
        LatencyCurve(points)


def test_negative_tokens_are_a_bug() -> None:
    with pytest.raises(ValueError, match="-1"):
        LatencyCurve(ZIGZAG).seconds(-1)


def test_file_holds_degrees_kinds_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        '{"model": "m", "device": "d", "profiles": ['
        '{"tp_degree": 2, "points": [[32, 2.0], [64, 3.0, "cache", 2], [64, 9.0, "recompute"]]},'
        '{"tp_degree": 1, "points": [[32, 4.0]]}]}'
    )
    profiles = load_profiles(path)
    assert profiles.tp_degrees == [1, 2]
    assert profiles.curve(1).seconds(32) == 4.0
    assert profiles.curve(2).seconds(64) == 6.0
    assert profiles.curve(2, "cache").seconds(64) == 3.0
    assert profiles.curve(1, "cache").seconds(32) == 4.0
    with pytest.raises(ProfileError, match="no TP degree 4, only 1, 2"):
        profiles.curve(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed"),
        ('{"x":' + 100_000 * "[", "malformed"),
        ('{"model": "m", "device": "d", "profiles": [{"tp_degree": "x"}]}', r"tp_degree"),
        ('{"model": "m", "device": "d", "profiles": []}', "no profile"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as raised:
        load_profiles(path)
    assert str(path) in str(raised.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere\.json"):
        load_profiles(tmp_path / "nowhere.json")


def test_what_is_saved_is_loaded_with_kinds_rows_and_keys(tmp_path: Path) -> None:
    points = [Point(64, 0.01), Point(512, 0.02, "recompute", 2, 256), Point(64, 0.01, "cache", 2)]
    saved = ProfileSet(
        model="m",
        device="d",
        source='who, and "how"',
        conditions={"dtype": "bfloat16"},
        profiles=[
            LatencyProfile(tp_degree=1, points=points),
            LatencyProfile(tp_degree=2, points=points[:1]),
        ],
    )
    path = tmp_path / "profile.json"
    save_profiles(saved, path)
    assert load_profiles(path) == saved
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    nowhere = tmp_path / "absent" / "profile.json"
    with pytest.raises(ProfileError, match=r"absent/profile\.json cannot be written"):
        save_profiles(ProfileSet(model="m", device="d", profiles=[]), nowhere)
