"""The twin's store answers as the memory store does, whatever it is asked."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.lifecycle import is_terminal
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import MASKED, Commit, DecodingSpec, NewRequest, ServiceLevel
from dilaserve_bench.twin.recorded import NOT_RECORDED
from dilaserve_bench.twin.store import EndedRecord, TwinStore
from dilaserve_gpu_worker.engine.types import StepOutput

T = TypeVar("T")
N_OUTPUT = 6
IDS = st.sampled_from(["a", "b"])
OWNERS = st.sampled_from(["", "w0", "w1"])
TERMS = st.integers(0, 2)
"""How many leases ago the term was taken."""

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), IDS),
        st.tuples(st.just("lease"), st.integers(0, 6)),
        st.tuples(st.just("admit"), IDS, TERMS, OWNERS),
        st.tuples(
            st.just("reassign"), IDS, TERMS, OWNERS, st.integers(0, 4), st.integers(0, 6),
            st.booleans(),
        ),
        st.tuples(st.just("fail"), IDS, TERMS),
        st.tuples(
            st.just("commit"), IDS, st.integers(1, 4), st.integers(1, 4),
            st.sets(st.integers(0, N_OUTPUT - 1), max_size=3), st.booleans(),
        ),
    ),
    max_size=40,
)  # fmt: skip


def call(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the memory store waited")


class Pair:
    """Both stores, asked the same."""

    def __init__(self) -> None:
        self.memory = MemoryStore(clock=lambda: 0.0)
        self.ended: list[EndedRecord] = []
        self.twin = TwinStore(self.ended.append)
        self.terms = [1]
        assert self.lease(0) == (1, 1)

    def lease(self, min_term: int) -> tuple[int | None, int]:
        ours = self.twin.take_lease(min_term)
        self.terms.append(ours)
        return call(self.memory.take_lease("s", ttl_s=1e9, min_term=min_term)), ours

    def ask(self, kind: str, *arguments: Any) -> tuple[Any, Any]:
        asked: tuple[Any, Any] = getattr(self, kind)(*arguments)
        return asked

    def new(self, request_id: str) -> tuple[bool, bool]:
        request = NewRequest(
            request_id=request_id,
            model_id="m",
            prompt=[1],
            spec=DecodingSpec(n_output=N_OUTPUT, block_length=4, seed=0),
            level=ServiceLevel(),
            gateway_id="g",
            arrival_s=0.0,
        )
        return call(self.memory.new(request, expire_s=1e9)), self.twin.new(request)

    def admit(self, request_id: str, age: int, owner: str) -> tuple[Any, Any]:
        term = self.terms[-1 - min(age, len(self.terms) - 1)]
        theirs = call(self.memory.admit(request_id, term=term, owner=owner))
        return theirs, self.twin.admit(request_id, term=term, owner=owner)

    def reassign(
        self, request_id: str, age: int, owner: str, expected: int, least: int, died: bool
    ) -> tuple[Any, Any]:
        values: dict[str, Any] = {
            "term": self.terms[-1 - min(age, len(self.terms) - 1)],
            "owner": owner,
            "expected_epoch": expected,
            "min_epoch": least,
            "owner_died": died,
        }
        theirs = call(self.memory.reassign(request_id, **values))
        return theirs, self.twin.reassign(request_id, **values)

    def fail(self, request_id: str, age: int) -> tuple[Any, Any]:
        term = self.terms[-1 - min(age, len(self.terms) - 1)]
        theirs = call(self.memory.fail(request_id, term=term, error="e"))
        return theirs, self.twin.fail(request_id, term=term, error="e")

    def commit(
        self, request_id: str, epoch: int, step: int, positions: set[int], last: bool
    ) -> tuple[Any, Any]:
        where = sorted(positions)
        output = StepOutput(
            request_id, step, 0, "cache", 0.9, where, [7] * len(where), [0.5] * len(where),
            NOT_RECORDED, 0, 0, "length" if last else None,
        )  # fmt: skip
        commit = Commit(
            request_id=request_id,
            epoch=epoch,
            step=step,
            block=0,
            kind="cache",
            threshold=0.9,
            worker="w",
            latency_ms=1.0,
            positions=output.positions,
            tokens=output.tokens,
            confidences=output.confidences,
            stats=NOT_RECORDED,
            finish_reason=output.finish_reason,
        )
        (theirs,) = call(self.memory.commit([commit]))
        return theirs, self.twin.commit(epoch, output)


@given(CALLS)
@settings(max_examples=300, deadline=None)
def test_same_calls_same_answers_same_records(calls: list[tuple[Any, ...]]) -> None:
    pair = Pair()
    for kind, *arguments in calls:
        theirs, ours = pair.ask(kind, *arguments)
        assert ours == theirs, (kind, arguments)
        assert sorted(pair.twin.active()) == call(pair.memory.active())
    ended = {record.request_id: record for record in pair.ended}
    assert len(ended) == len(pair.ended), "every end is told once"
    for theirs, ours in zip(
        call(pair.memory.load(["a", "b"])), pair.twin.load(["a", "b"]), strict=True
    ):
        if theirs is not None and is_terminal(theirs.state):
            record = ended.pop(theirs.request.request_id)
            assert (record.state, record.canvas) == (theirs.state, theirs.canvas)
            theirs = msgspec.structs.replace(theirs, canvas=[])
        if theirs is not None:
            theirs = msgspec.structs.replace(theirs, stats=None, ended_s=None)
        assert ours == theirs
    assert not ended


def test_a_canvas_starts_masked() -> None:
    pair = Pair()
    pair.new("a")
    (record,) = pair.twin.load(["a"])
    assert record is not None
    assert record.canvas == [MASKED] * N_OUTPUT
