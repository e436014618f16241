from __future__ import annotations

import pytest

from dilaserve_gpu_worker.engine.kv_pool import PageAllocator, n_pages_for, slots_of


def test_pages_are_taken_once_and_come_back() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.take(3), allocator.take(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.n_free == 0
    allocator.give_back(first)
    assert allocator.n_free == 3
    assert sorted(allocator.take(3)) == sorted(first)


def test_taking_more_than_is_free_changes_nothing() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match="3 KV pages wanted, 2 free"):
        allocator.take(3)
    assert allocator.n_free == 2


def test_pages_follow_each_other_where_they_can() -> None:
    allocator = PageAllocator(8)
    taken = [allocator.take(2) for _ in range(4)]
    assert taken == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for pages in (taken[1], taken[2], [7], [0]):
        allocator.give_back(pages)
    assert allocator.take(3) == [2, 3, 4]
    assert allocator.take(2) == [0, 5]
    assert allocator.take(0) == []
    assert allocator.n_free == 1


def test_giving_back_twice_is_an_error() -> None:
    allocator = PageAllocator(2)
    pages = allocator.take(1)
    allocator.give_back(pages)
    with pytest.raises(ValueError, match="given back twice"):
        allocator.give_back(pages)


def test_pages_and_slots() -> None:
    assert [n_pages_for(n) for n in (1, 32, 33, 64, 65)] == [1, 1, 2, 2, 3]
    assert slots_of([4, 1], 40).tolist() == [*range(128, 160), *range(32, 40)]
