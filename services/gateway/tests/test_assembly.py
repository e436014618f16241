"""Whatever happens to deltas on their way, the canvas comes out as it was committed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.messages import TokenDelta
from dilaserve.store.records import LOST_CONFIDENCE, MASKED, Delta
from dilaserve_gateway.assembly import AppliedStep, Assembly


def wire(step: int, positions: list[int], tokens: list[int]) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        epoch=1,
        step=step,
        positions=positions,
        tokens=tokens,
        confidences=[0.5] * len(tokens),
        kind="cache",
        threshold=0.9,
        worker="w",
    )


def stored(delta: TokenDelta) -> Delta:
    return Delta(
        step=delta.step,
        epoch=1,
        block=0,
        kind="cache",
        threshold=0.9,
        worker="w",
        latency_ms=1.0,
        positions=delta.positions,
        tokens=delta.tokens,
        confidences=delta.confidences,
        finish_reason=delta.finish_reason,
    )


@st.composite
def courses(draw: st.DrawFn) -> list[TokenDelta]:
    """A canvas of 12 unmasked in some order and number of steps."""
    order = draw(st.permutations(range(12)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=12, max_size=12))
    steps, start = [], 0
    for number, size in enumerate(sizes, start=1):
        positions = sorted(order[start : start + size])
        if positions:
            steps.append(wire(number, positions, [100 + p for p in positions]))
        start += size
    return steps


@settings(deadline=None)
@given(course=courses(), data=st.data())
def test_lost_repeated_and_reordered_deltas(course: list[TokenDelta], data: st.DataObject) -> None:
    """Receives in any order with losses and repeats; a gap reads what the store then holds."""
    arrivals = data.draw(st.lists(st.sampled_from(course), max_size=30))
    assembly, seen = Assembly(12), [MASKED] * 12
    written: list[int] = []
    for delta in arrivals:
        answer = assembly.offer(delta)
        if isinstance(answer, AppliedStep):
            written += answer.positions
        elif answer == "gap":
            so_far = [stored(d) for d in course if d.step <= delta.step]
            for applied in assembly.catch_up(so_far):
                written += applied.positions
        assert assembly.step >= delta.step
        assert all(b in (MASKED, a) for a, b in zip(assembly.tokens, seen, strict=True))
        seen = list(assembly.tokens)
    for applied in assembly.catch_up([stored(d) for d in course]):
        written += applied.positions
    assert assembly.tokens == [100 + p for p in range(12)]
    assert sorted(written) == list(range(12))
    assert assembly.n_prefix == 12


def test_steps_are_numbered_from_one() -> None:
    assembly = Assembly(4)
    assert assembly.offer(wire(2, [0], [7])) == "gap"
    assert assembly.offer(wire(1, [1], [8])) == AppliedStep(1, [1], [8], [0.5])
    assert assembly.offer(wire(1, [0], [9])) == "duplicate"
    assert assembly.tokens == [MASKED, 8, MASKED, MASKED]


def test_a_malformed_delta_is_read_from_the_store_instead() -> None:
    assembly = Assembly(4)
    assert assembly.offer(wire(1, [4], [7])) == "gap"
    assert assembly.offer(wire(1, [0, 1], [7])) == "gap"
    assert assembly.offer(wire(1, [-1], [7])) == "gap"
    assert assembly.tokens == [MASKED] * 4


def test_a_known_position_never_changes() -> None:
    assembly = Assembly(3)
    assembly.offer(wire(1, [0, 1], [7, 8]))
    applied = assembly.offer(wire(2, [1, 2], [9, 9]))
    assert applied == AppliedStep(2, [2], [9], [0.5])
    assert assembly.tokens == [7, 8, 9]


def test_the_record_fills_what_the_stream_lost() -> None:
    assembly = Assembly(3)
    assembly.offer(wire(1, [2], [7]))
    applied = assembly.settle([5, MASKED, 6], "stop")
    assert applied == AppliedStep(1, [0], [5], [LOST_CONFIDENCE])
    assert (assembly.tokens, assembly.n_prefix) == ([5, MASKED, 7], 1)
    assert assembly.finish_reason == "stop"
