"""Whatever is lost, repeated, reordered or killed, and whatever the policy: every admitted request
ends, and nothing that was decided is decided again (the store would raise, or answer `fenced` for
ever)."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dilaserve.messages import Admitted, Refused
from dilaserve.store.records import MASKED, RequestRecord
from dilaserve_scheduler.core import CoreSettings
from dilaserve_scheduler.policies import POLICIES

from .world import World, call

GIVEN_UP = ("finished", "unknown")
Fault = Literal["worker", "leave", "drain", "undrain", "scheduler", "partition", "store", "cancel"]

faults = st.lists(
    st.tuples(
        st.floats(0.5, 8.0),
        st.sampled_from(get_args(Fault)),
        st.integers(0, 9),
    ),
    max_size=6,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a world takes minutes
    print_blob=True,
)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    n_workers=st.integers(1, 3),
    run_ahead=st.sampled_from([None, 1, 3]),
    policy=st.sampled_from(sorted(POLICIES)),
    planned=faults,
)
def test_every_admitted_request_ends(
    seed: int,
    loss: float,
    n_workers: int,
    run_ahead: int | None,
    policy: str,
    planned: list[tuple[float, Fault, int]],
) -> None:
    world = World(
        seed=seed,
        loss=loss,
        n_workers=n_workers,
        settings=CoreSettings(run_ahead=run_ahead),
        budget=128,
        policy=policy,
    )
    ids = [f"r{number}" for number in range(10)]
    for number, request_id in enumerate(ids):
        n_output = (5, 24, 30)[number % 3]
        world.at(number * 0.6, partial(world.submit, request_id, n_output=n_output))
    for delay_s, fault, number in planned:
        world.at(delay_s, partial(strike, world, fault, number))
    deadline = world.now + 400.0
    while world.now < deadline and not all_over(world, ids):
        world.run_for(5.0)
    check(world, ids, {fault for _, fault, _ in planned})


def strike(world: World, fault: Fault, number: int) -> None:
    name = f"w{number % 3}"
    match fault:
        case "worker":
            if name in world.workers:
                world.crash_worker(name, 0.3 * number)
        case "leave":
            if name in world.workers:
                world.leave_worker(name, 0.3 * number)
        case "drain" | "undrain":
            world.drain_worker(name, 0.6 * number, goes=fault == "drain")
        case "scheduler":
            if world.core is not None:
                world.crash_scheduler(0.2 * number)
        case "partition":
            world.partitioned = True
            world.at(0.5 * number, lambda: setattr(world, "partitioned", False))
        case "store":
            if not world.store.down:
                world.stop_store(0.1 * number, min(0.1 * number, 0.9))
        case "cancel":
            world.cancel(f"r{number}")


def all_over(world: World, ids: list[str]) -> bool:
    if world.core is None or world.store.down or world.core.requests():
        return False
    return all(is_over(world.record(i), world.replies.get(i)) for i in ids)


def is_over(record: RequestRecord | None, reply: Admitted | Refused | None) -> bool:
    if record is None or record.state == "new":  # lost by the store after it was answered
        return isinstance(reply, Admitted) or (reply is not None and reply.code in GIVEN_UP)
    return record.state != "active"


def check(world: World, ids: list[str], struck: set[Fault]) -> None:
    assert world.core is not None
    assert world.core.requests() == []
    world.run_for(10.0)
    assert all(not worker.held and not worker.wanted for worker in world.workers.values())
    for request_id in ids:
        record = world.record(request_id)
        if record is None or record.state == "new":
            assert "store" in struck  # it lost the record, or its admission; it expires
        elif record.state == "done":
            assert MASKED not in record.canvas
            deltas = call(world.store.deltas(request_id))
            assert [d.step for d in deltas] == sorted({d.step for d in deltas})
        elif record.state == "failed":
            assert record.attempts >= 3 or struck & {"cancel", "store"}
        else:
            assert (record.state, "cancel" in struck) == ("cancelled", True)


@pytest.mark.parametrize("run_ahead", [None, 1])
def test_undisturbed_nothing_is_sent_twice(run_ahead: int | None) -> None:
    """Repetition is for losses: a calm run needs an item per block, or per step."""
    world = World(settings=CoreSettings(run_ahead=run_ahead))
    world.run_for(1.0)
    world.submit("r", n_output=24)
    world.run_for(20.0)
    record = world.record("r")
    assert record is not None
    assert record.state == "done"
    assert world.n_sent <= (record.step if run_ahead == 1 else 3)
