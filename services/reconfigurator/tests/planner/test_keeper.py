"""What is wanted is kept: through plans, deaths, failures, and a crash of the keeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve_reconfigurator.executor import Stage
from dilaserve_reconfigurator.keeper import Keeper
from dilaserve_reconfigurator.snapshot import PlanningError

from .test_executor import Drains, MemoryLauncher, executor

EIGHT, MIXED, FOURS = {1: 8}, {1: 4, 2: 2}, {4: 2}


class KilledError(Exception):
    """Stands in for kill -9."""


def keeper(
    launcher: MemoryLauncher, folder: Path, *, life: str = "a", dies_in: Stage | None = None
) -> Keeper:
    ours = executor(launcher, Drains(), prefix=life)

    deaths: list[Stage] = []

    def at(stage: Stage) -> None:
        if stage == dies_in and not deaths:
            deaths.append(stage)
            raise KilledError

    ours._at = at
    return Keeper(ours, [8], folder, EIGHT)


def nobody() -> MemoryLauncher:
    return MemoryLauncher([8], {1: 0})


def counts(launcher: MemoryLauncher) -> dict[int, int]:
    return {degree: n for degree, n in launcher.counts().items() if n}


async def test_begins_with_the_initial_mix_and_then_leaves_it(tmp_path: Path) -> None:
    launcher = nobody()
    ours = keeper(launcher, tmp_path)
    report = await ours.keep()
    assert report is not None
    assert report.phase == "done"
    assert counts(launcher) == EIGHT
    assert await ours.keep() is None


async def test_instance_that_died_is_replaced(tmp_path: Path) -> None:
    launcher = nobody()
    ours = keeper(launcher, tmp_path)
    await ours.keep()
    await launcher.stop("a-3")
    await ours.keep()
    assert counts(launcher) == EIGHT


async def test_mixes_follow_one_another(tmp_path: Path) -> None:
    launcher = nobody()
    ours = keeper(launcher, tmp_path)
    await ours.keep()
    for mix in (MIXED, FOURS, EIGHT):
        report = await ours.change_to(mix)
        assert report is not None
        assert report.phase == "done"
        assert counts(launcher) == mix


async def test_plan_that_is_given_up_is_undone(tmp_path: Path) -> None:
    launcher = nobody()
    ours = keeper(launcher, tmp_path)
    await ours.keep()
    launcher.failing = {4}
    report = await ours.change_to(FOURS)
    assert report is not None
    assert report.phase == "given_up"
    assert await ours.keep() is None
    assert counts(launcher) == EIGHT


async def test_repair_that_fails_is_tried_again(tmp_path: Path) -> None:
    launcher = nobody()
    ours = keeper(launcher, tmp_path)
    await ours.keep()
    await launcher.stop("a-3")
    launcher.failing = {1}
    report = await ours.keep()
    assert report is not None
    assert report.phase == "given_up"
    launcher.failing = set()
    await ours.keep()
    assert counts(launcher) == EIGHT


@pytest.mark.parametrize(
    "dies_in", ["wanted", "draining", "stopping", "stopped", "launching", "launched", "done"]
)
async def test_killed_in_any_phase_its_next_life_finishes(tmp_path: Path, dies_in: Stage) -> None:
    launcher = nobody()
    await keeper(launcher, tmp_path).keep()
    with pytest.RaisesGroup(KilledError, allow_unwrapped=True, flatten_subgroups=True):
        await keeper(launcher, tmp_path, life="b", dies_in=dies_in).change_to(FOURS)
    again = keeper(launcher, tmp_path, life="c")
    await again.keep()
    assert counts(launcher) == FOURS
    assert await again.keep() is None


@pytest.mark.parametrize(
    "dies_in",
    ["wanted", "draining", "stopping", "stopped", "launching", "launched", "undoing", "given_up"],
)
async def test_killed_in_a_plan_that_cannot_be_finished_it_goes_back(
    tmp_path: Path, dies_in: Stage
) -> None:
    launcher = nobody()
    await keeper(launcher, tmp_path).keep()
    launcher.failing = {4}
    with pytest.RaisesGroup(KilledError, allow_unwrapped=True, flatten_subgroups=True):
        await keeper(launcher, tmp_path, life="b", dies_in=dies_in).change_to(FOURS)
    for name in [name for name, slot in launcher.slots.items() if slot.tp_degree == 4]:
        await launcher.stop(name)  # the one that was being launched has failed meanwhile
    again = keeper(launcher, tmp_path, life="c")
    await again.keep()
    await again.keep()
    assert counts(launcher) == EIGHT


async def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "wanted.json").write_text("{")
    with pytest.raises(PlanningError, match=r"wanted\.json is malformed"):
        keeper(nobody(), tmp_path)


async def test_mix_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanningError, match="3×TP-4 does not fit on nodes of"):
        await keeper(nobody(), tmp_path).change_to({4: 3})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"counts":',
        b"\xff",
        b'{"counts":{"1":-3}}',
        b'{"counts":{"0":3}}',
        b'{"counts":{"-1":3}}',
        b'{"counts":{"1":3},"before":{"0":1}}',
    ],
)
def test_nonsense_is_not_wanted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wanted.json").write_bytes(content)
    with pytest.raises(PlanningError, match=r"wanted\.json is malformed: .*; remove it"):
        keeper(nobody(), tmp_path)


def test_mix_of_another_cluster_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "wanted.json").write_bytes(b'{"counts":{"4":3}}')
    with pytest.raises(PlanningError, match=r"3×TP-4 does not fit .*or remove .*wanted\.json"):
        keeper(nobody(), tmp_path)


def test_initial_mix_without_room_is_refused_at_the_start(tmp_path: Path) -> None:
    ours = executor(nobody(), Drains(), prefix="a")
    with pytest.raises(PlanningError, match=r"9×TP-1 does not fit .*or DILASERVE_INITIAL_MIX"):
        Keeper(ours, [8], tmp_path, {1: 9})


def test_folder_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "wanted.json").mkdir()
    with pytest.raises(PlanningError, match=r"wanted\.json cannot be read"):
        keeper(nobody(), tmp_path)
