"""The mix of TP degrees changes under constant load, with real workers: no request fails, no
committed token changes, every text comes out as in the undisturbed run, and a floor of capacity
holds; or, where there is no room for one, requests wait, and the pause is reported.

`make soak` goes round more often (DILASERVE_SOAK_ROUNDS).
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from .replanning import Load, change, check_texts, live_cluster, print_line

N_ROUNDS = int(os.environ.get("DILASERVE_SOAK_ROUNDS", "3"))
ROUND_S = 600
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + ROUND_S * N_ROUNDS)]

SLOTS, FLOOR = 8, 4
ROUND = ({1: 4, 2: 2}, {1: 0, 2: 0, 4: 2}, {1: 8, 2: 0, 4: 0})


async def test_eight_slots_change_while_half_of_them_serve(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, slots=SLOTS, floor=FLOOR, drain_s=120.0) as live:
        load = Load(live)
        reference = await load.once()
        began = time.monotonic()
        async with load.constant():
            for _ in range(N_ROUNDS):
                for mix in ROUND:
                    report = await change(live, mix)
                    assert report.lowest >= FLOOR
                    assert report.pause_s == 0.0
        assert live.floor.below_s(FLOOR, began) == 0.0
        checked = await check_texts(live, load, reference)
        print_line("load", str(checked))
        assert checked.n_moved, "nobody was disturbed"


async def test_four_slots_have_no_room_for_a_floor_so_requests_wait(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, slots=4, floor=2, drain_s=20.0) as live:
        load = Load(live)
        reference = await load.once()
        async with load.constant():
            await asyncio.sleep(2.0)
            began = time.monotonic()
            there = await change(live, {1: 0, 4: 1})
            back = await change(live, {1: 4, 4: 0})
        assert (there.lowest, back.lowest) == (0, 0)
        paused_s = there.pause_s + back.pause_s
        assert paused_s > 0.0
        assert live.floor.below_s(1, began) <= paused_s, "nobody served for longer than is said"
        checked = await check_texts(live, load, reference)
        print_line("load", f"{checked}, paused {paused_s:.1f} s")
