"""No policy goes below a request's quality floor, whatever its SLO, the load and the losses."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dilaserve.messages import Admitted
from dilaserve.store.records import ServiceLevel
from dilaserve_scheduler.policies import POLICIES

from .world import World, call

levels = st.builds(
    ServiceLevel,
    slo_ms=st.sampled_from([None, 1, 500, 5000, 600_000]),
    priority=st.integers(-2, 2),
    min_confidence=st.none() | st.floats(0.0, 1.0) | st.sampled_from([0.5, 0.7, 0.9, 1.0]),
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a world takes minutes
)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.1]),
    asked=st.lists(levels, min_size=1, max_size=12),
    gap_s=st.sampled_from([0.0, 0.1, 1.0]),
    is_struck=st.booleans(),
)
def test_no_step_is_below_the_floor(
    policy: str, seed: int, loss: float, asked: list[ServiceLevel], gap_s: float, is_struck: bool
) -> None:
    world = World(seed=seed, loss=loss, n_workers=2, budget=128, policy=policy)
    world.run_for(1.0)
    for number, level in enumerate(asked):
        world.at(number * gap_s, partial(world.submit, f"r{number}", level=level))
    if is_struck:
        world.at(1.0, partial(world.crash_worker, "w0", 1.0))
        world.at(2.0, partial(world.crash_scheduler, 0.5))
    world.run_for(20.0)
    n_steps = 0
    for number, level in enumerate(asked):
        floor = level.min_confidence or 0.0
        reply = world.replies.get(f"r{number}")
        assert not isinstance(reply, Admitted) or reply.threshold >= floor
        steps = call(world.store.deltas(f"r{number}"))
        assert all(step.threshold >= floor for step in steps), (policy, level)
        n_steps += len(steps)
    assert n_steps > 0
