"""Seconds of a pass by what it is made of."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.pass_curves import PassCurves
from dilaserve.profiles import LatencyProfile, Point

KINDS = [
    *(Point(n, 0.010 + 1e-4 * n, "cache", n // 32, 256) for n in (32, 128, 512)),
    *(Point(n, 0.020 + 2e-4 * n, "cache", n // 32, 1024) for n in (32, 128, 512)),
    *(Point(n, 0.030 + 3e-4 * n, "recompute", n // 256, 256) for n in (256, 512)),
    *(Point(n, 0.040 + 4e-4 * n, "recompute", n // 1024, 1024) for n in (1024, 2048)),
]


def curves(points: list[Point]) -> PassCurves:
    return PassCurves(LatencyProfile(tp_degree=1, points=points))


@settings(deadline=None)
@given(
    st.integers(0, 5000), st.one_of(st.none(), st.integers(0, 5000)), st.sampled_from([None, 300.0])
)
def test_without_kinds_only_the_tokens_count(
    n_tokens: int, n_full: int | None, n_keys: float | None
) -> None:
    for points in ([Point(32, 0.01), Point(900, 0.1)], KINDS[:6]):  # no kind; one of the two
        of = curves(points)
        assert not of.tells_kinds
        assert of.seconds(n_tokens, n_full, n_keys) == of.mixed.seconds(n_tokens)


def test_a_pass_of_one_kind_and_of_measured_keys_is_as_measured() -> None:
    of = curves(KINDS)
    for point in KINDS:
        n_full = point.n_tokens if point.kind == "recompute" else 0
        assert of.seconds(point.n_tokens, n_full, point.n_keys) == pytest.approx(point.seconds)


def test_between_two_numbers_of_keys_it_is_linear_and_beyond_them_as_at_the_end() -> None:
    of = curves(KINDS)
    assert of.seconds(128, 0, 640) == pytest.approx((0.0228 + 0.0456) / 2)
    assert of.seconds(128, 0, 8) == of.seconds(128, 0, 256)
    assert of.seconds(128, 0, 9000) == of.seconds(128, 0, 1024)


def test_a_mixed_pass_lies_between_the_kinds_by_its_share_of_tokens() -> None:
    of = curves(KINDS)
    cache, full = of.seconds(512, 0, 256), of.seconds(512, 512, 256)
    assert of.seconds(512, 256, 256) == pytest.approx((cache + full) / 2)
    assert of.seconds(512, 600, 256) == full  # rounded above all tokens


def test_without_keys_all_points_of_a_kind_count() -> None:
    points = [Point(p.n_tokens, p.seconds, p.kind) for p in KINDS]
    assert curves(points).seconds(32, 0, 256) == curves(KINDS).seconds(32, 0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([32, 64, 256, 512]),
            st.floats(0.001, 1.0),
            st.sampled_from(["cache", "recompute"]),
            st.sampled_from([128, 512]),
        ),
        min_size=4,
    ),
    st.floats(1, 2000),
    st.floats(0, 1),
)
def test_noisy_points_never_make_a_larger_pass_cheaper(
    measured: list[tuple[int, float, str, int]], n_keys: float, share: float
) -> None:
    of = curves([Point(n, s, kind, None, keys) for n, s, kind, keys in measured])  # type: ignore[arg-type]
    sizes = [16, 32, 48, 64, 200, 256, 300, 512, 900]
    for n_full in (lambda n: 0, lambda n: n):
        seconds = [of.seconds(n, n_full(n), n_keys) for n in sizes]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(seconds))
