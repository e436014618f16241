"""Batch sizes and speeds that suit a workload."""

from __future__ import annotations

import pytest

from dilaserve.profiles import LatencyCurve
from dilaserve_reconfigurator.snapshot import MAX_SIZES, batch_sizes, degree_speeds, worthwhile

from .builders import PACES, request_class
from .test_planner import PROFILES


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 5), (64, 8192), (100, 101)])
def test_sizes_are_few_ascend_and_reach_both_ends(smallest: int, largest: int) -> None:
    sizes = batch_sizes(smallest, largest)
    assert len(sizes) <= MAX_SIZES
    assert sizes[0] == smallest
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))


def test_larger_batches_that_save_nothing_are_left_out() -> None:
    """Up to 128 tokens a pass takes 0.1 s, from there on it grows with them."""
    curve = LatencyCurve([(64, 0.1), (128, 0.1), (256, 0.2), (512, 0.4)])
    assert worthwhile((64, 128, 256, 512), curve) == (64, 128)


def test_speeds_suit_the_classes() -> None:
    """Full lengths of 128 and 512 tokens, as frequent; an instance holds 1,024, so 3 of them."""
    classes = [request_class(64, 64, rate=1.0), request_class(448, 64, rate=1.0)]
    one, two = degree_speeds(PROFILES, classes, degrees=(2, 1), paces=PACES, max_batch_tokens=1024)
    assert (one.tp_degree, two.tp_degree) == (1, 2)
    assert one.recompute_sizes[0] == 128
    assert one.recompute_sizes[-1] <= 1024
    assert one.cache_sizes == (32, 64, 96)
    # 64 tokens take 16 steps at the slower threshold, 2 of them recompute, half of each class
    assert one.others == ((pytest.approx(1 / 16), 128), (pytest.approx(1 / 16), 512))
