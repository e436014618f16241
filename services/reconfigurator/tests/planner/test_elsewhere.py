"""Another place for a launch that fails."""

from __future__ import annotations

from dilaserve_reconfigurator.elsewhere import other_slot
from dilaserve_reconfigurator.stage2 import Slot


def test_free_gpus_that_nobody_is_to_have_come_first() -> None:
    later = [Slot(0, (2, 3))]
    assert other_slot(Slot(0, (0, 1)), [8], [Slot(0, (6,))], later) == Slot(0, (4, 5))


def test_the_same_node_comes_first() -> None:
    failed = Slot(1, (0, 1))
    assert other_slot(failed, [4, 4], [], []) == Slot(1, (2, 3))
    assert other_slot(failed, [4, 4], [Slot(1, (3,))], []) == Slot(0, (0, 1))


def test_a_later_launch_of_the_same_degree_changes_places() -> None:
    later = [Slot(0, (2, 3)), Slot(0, (1,))]
    assert other_slot(Slot(0, (0,)), [4], [], later) == Slot(0, (1,))


def test_a_later_launch_of_another_degree_keeps_its_place() -> None:
    assert other_slot(Slot(0, (0, 1)), [6], [Slot(0, (4,))], [Slot(0, (2,))]) is None


def test_gpus_have_to_lie_as_an_instance_of_the_degree_takes_them() -> None:
    assert other_slot(Slot(0, (0, 1)), [5], [Slot(0, (2,))], []) is None


def test_what_is_taken_or_failed_before_is_no_place() -> None:
    failed_before = [Slot(0, (1,)), Slot(0, (2,))]
    assert other_slot(Slot(0, (0,)), [4], failed_before, []) == Slot(0, (3,))
    assert other_slot(Slot(0, (0,)), [3], failed_before, []) is None
