"""Idle GPUs strengthen what carries the load."""

from __future__ import annotations

from itertools import product

import pytest

from dilaserve_reconfigurator.spare import fill, fits, only


@pytest.mark.parametrize(
    ("nodes", "loads", "expected"),
    [
        ([4, 4], {1: 0.0, 2: 0.0, 4: 0.3}, {1: 0, 2: 0, 4: 2}),
        ([4, 4], {1: 0.5, 2: 0.0, 4: 0.5}, {1: 4, 2: 0, 4: 1}),
        ([4], {1: 2.2, 4: 0.0}, {1: 4, 4: 0}),
        ([6], {2: 0.0, 4: 0.3}, {2: 1, 4: 1}),
        ([4], {1: 1.0000001, 2: 0.0}, {1: 4, 2: 0}),
        ([3], {2: 0.2}, {2: 1}),
    ],
)
def test_spare_gpus_go_where_the_work_is(
    nodes: list[int], loads: dict[int, float], expected: dict[int, int]
) -> None:
    assert fill(nodes, loads) == expected


def test_room_is_exact() -> None:
    """Against packing node after node, each in every way."""
    for nodes in ([4], [3, 2], [4, 1, 1], [2, 2, 2]):
        packed = {
            tuple(map(sum, zip(*layout, strict=True)))
            for layout in product(*(ways(n_gpus) for n_gpus in nodes))
        }
        for ones, twos, fours in product(range(8), range(5), range(3)):
            assert fits(nodes, {1: ones, 2: twos, 4: fours}) == ((ones, twos, fours) in packed)


def ways(n_gpus: int) -> list[tuple[int, int, int]]:
    return [
        (ones, twos, fours)
        for ones, twos, fours in product(range(n_gpus + 1), repeat=3)
        if ones + 2 * twos + 4 * fours <= n_gpus
    ]


def test_one_degree_alone() -> None:
    assert only([4, 3], [1, 2, 4], 1) == {1: 7, 2: 0, 4: 0}
    assert only([4, 3], [1, 2, 4], 2) == {1: 0, 2: 3, 4: 0}
