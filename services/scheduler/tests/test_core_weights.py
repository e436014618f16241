"""A request that has run a step goes on with the same weights, or not at all."""

from __future__ import annotations

from functools import partial
from typing import Literal

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dilaserve.store.records import RequestRecord
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.core.effects import Fail, Load, Log, Reassign
from dilaserve_scheduler.core.events import Loaded, Recovered
from dilaserve_scheduler.policies import POLICIES

from .driver import Driver, command, every, item, only, stored
from .world import World, call

WEIGHTS = {"w0": "aa", "w1": "aa", "w2": "bb"}


def begun(*others: tuple[str, str]) -> Driver:
    """Request r has run a step on a-0001, with weights aa; beside it others (id, weights)."""
    driver = Driver()
    driver.up("a-0001", weights_hash="aa")
    driver.admit()
    driver.result("a-0001", step=1, n_unmasked=1)
    for instance_id, weights_hash in others:
        driver.up(instance_id, weights_hash=weights_hash)
    return driver


def test_it_goes_to_one_with_the_same_weights() -> None:
    driver = begun(("b-0001", "bb"), ("c-0001", "aa"))
    assert only(driver.down("a-0001"), Reassign).owner == "c-0001"


def test_it_waits_where_nobody_has_them_and_holds_up_no_other() -> None:
    driver = begun(("b-0001", "bb"))
    driver.reassigned(only(driver.down("a-0001"), Reassign))
    assert driver.request().state == "parked"
    placed = only(driver.admit("s"), Reassign)
    assert item(driver.reassigned(placed), "b-0001").request_id == "s"
    call = only(driver.up("c-0001", weights_hash="aa"), Reassign)
    assert (call.request_id, call.owner) == ("r", "c-0001")


def test_before_its_first_step_it_may_go_anywhere() -> None:
    driver = Driver()
    driver.up("a-0001", weights_hash="aa")
    driver.admit()
    driver.up("b-0001", weights_hash="bb")
    assert only(driver.down("a-0001"), Reassign).owner == "b-0001"


def test_a_taken_over_request_leaves_an_owner_with_other_weights() -> None:
    driver = Driver(term=2)
    record = stored("r", step=4, n_unmasked=4, n_block_masked=4, weights_hash="aa")
    driver.give(Recovered((record,)))
    effects = driver.up("a-0001", weights_hash="bb")
    assert command(effects, "a-0001").items, "its record will be read when it is fenced"
    driver.up("b-0001", weights_hash="aa")
    fenced = driver.result("a-0001", step=5, n_unmasked=5, outcome="fenced")
    load = only(fenced, Load)
    moved = only(driver.give(Loaded(load.op, (record,), ())), Reassign)
    assert (moved.owner, moved.cause, moved.owner_died) == ("b-0001", "misplaced", False)


def test_it_fails_when_nobody_comes_with_them() -> None:
    driver = Driver(settings=CoreSettings(queue_timeout_s=20.0))
    driver.up("a-0001", weights_hash="aa")
    driver.admit()
    driver.result("a-0001", step=1, n_unmasked=1)
    driver.up("b-0001", weights_hash="bb")
    driver.reassigned(only(driver.down("a-0001"), Reassign))
    failed = only(driver.beats(20.5, "b-0001"), Fail)
    assert failed.cause == "timed_out"
    assert "none that lives has the weights that it was begun with (aa)" in failed.error


def test_a_difference_is_still_told() -> None:
    driver = begun()
    effects = driver.up("b-0001", weights_hash="bb")
    assert any("weights bb" in log.text for log in every(effects, Log))


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a world takes minutes
)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.1]),
    policy=st.sampled_from(sorted(POLICIES)),
    strikes=st.lists(
        st.tuples(
            st.floats(0.5, 6.0),
            st.sampled_from(["crash", "leave", "scheduler"]),
            st.sampled_from(sorted(WEIGHTS)),
        ),
        max_size=8,
    ),
)
def test_no_course_mixes_weights(
    seed: int,
    loss: float,
    policy: str,
    strikes: list[tuple[float, Literal["crash", "leave", "scheduler"], str]],
) -> None:
    world = World(
        seed=seed,
        loss=loss,
        n_workers=3,
        budget=96,
        policy=policy,
        weights=WEIGHTS,
        settings=CoreSettings(queue_timeout_s=30.0),
    )
    ids = [f"r{number}" for number in range(8)]
    for number, request_id in enumerate(ids):
        world.at(0.5 + number * 0.4, partial(world.submit, request_id, n_output=30))
    for delay_s, strike, name in strikes:
        world.at(delay_s, partial(_strike, world, strike, name))
    world.run_for(120.0)
    for request_id in ids:
        used = {WEIGHTS[d.worker[:2]] for d in call(world.store.deltas(request_id))}
        assert len(used) <= 1
        record = world.record(request_id)
        assert record is None or _is_over(record), request_id


def _strike(world: World, strike: str, name: str) -> None:
    if strike == "scheduler":
        if world.core is not None:
            world.crash_scheduler(0.5)
    elif name in world.workers:
        world.crash_worker(name, 1.0) if strike == "crash" else world.leave_worker(name, 1.0)


def _is_over(record: RequestRecord) -> bool:
    return record.state in ("done", "failed", "new")
