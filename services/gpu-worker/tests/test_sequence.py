"""What a request asks of a pass, against its canvas read anew, position by position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.batch import build_batch
from dilaserve_gpu_worker.engine.sequence import Row, Sequence
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest

FAR = 10**6
MASK_ID, EOS = 60, 7
MODES: list[CacheMode] = ["none", "prefix", "dual"]


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """At any state of a canvas, holes included."""
    n_output = draw(st.integers(1, 30))
    token = st.sampled_from([MASKED, MASKED, 1, 2, EOS])
    spec = DecodingSpec(
        n_output=n_output,
        block_length=draw(st.sampled_from([1, 3, 8, 32])),
        seed=0,
        ignore_eos=draw(st.booleans()),
    )
    prompt = draw(st.lists(st.integers(0, 9), max_size=5))
    canvas = draw(st.lists(token, min_size=n_output, max_size=n_output))
    request = EngineRequest("r", prompt, spec, 0, canvas, Credit(0.9, FAR))
    return Sequence(request, mask_id=MASK_ID, eos_ids={EOS}, is_shifted=draw(st.booleans()))


def masked_of(canvas: list[int]) -> list[int]:
    return [position for position, token in enumerate(canvas) if token == MASKED]


def block_of(canvas: list[int], length: int) -> int:
    return min([*masked_of(canvas), len(canvas) - 1]) // length


def check(sequence: Sequence) -> None:
    """What follows from the canvas alone."""
    canvas, length = sequence.canvas(), sequence.spec.block_length
    masked = masked_of(canvas)
    assert sequence.n_unmasked == len(canvas) - len(masked)
    assert sequence.block == block_of(canvas, length)
    in_block = [position for position in masked if position // length == sequence.block]
    assert sequence.n_block_masked(sequence.block) == len(in_block)
    settled = canvas[: min([*masked, len(canvas)])]
    ends = EOS in settled and not sequence.spec.ignore_eos
    assert sequence.finish_reason == ("stop" if ends else None if masked else "length")


def check_row(row: Row, mode: CacheMode, is_shifted: bool) -> None:
    sequence, canvas = row.sequence, row.sequence.canvas()
    length, n_prompt = sequence.spec.block_length, sequence.n_prompt
    masked = masked_of(canvas)
    start, stop = row.block * length, min((row.block + 1) * length, len(canvas))
    in_block = [position for position in masked if position < stop]
    later = [position for position in masked if position >= stop]
    commits_first = row.kind == "recompute" and is_shifted and mode != "none"
    wanted = {"recompute": in_block, "cache": in_block, "rebuild": []}[row.kind]
    assert row.candidates.tolist() == (masked[:1] if commits_first else wanted)
    looked_at = [] if row.kind == "cache" else later
    assert row.outlook.tolist() == (masked[1:] if commits_first else looked_at)
    tokens = [*range(n_prompt), *(MASK_ID if t == MASKED else t for t in canvas)]
    if row.kind == "rebuild":
        tokens[n_prompt + start : n_prompt + stop] = [MASK_ID] * (stop - start)
    first = n_prompt + start if row.kind == "cache" else 0
    last = n_prompt + stop if row.kind == "cache" and mode == "dual" else len(tokens)
    assert row.start == first
    outputs = slice(max(n_prompt - first, 0), None)
    assert row.tokens[outputs].tolist() == tokens[max(first, n_prompt) : last]
    assert row.is_full == (row.n_tokens == sequence.n_tokens)


@given(sequence=sequences(), mode=st.sampled_from(MODES), data=st.data())
def test_every_state_is_that_of_its_canvas(
    sequence: Sequence, mode: CacheMode, data: st.DataObject
) -> None:
    check(sequence)
    step = 0
    while sequence.finish_reason is None:
        is_first_masked = sequence.canvas()[sequence.block * sequence.spec.block_length] == MASKED
        is_shifted = sequence._is_shifted
        if mode != "none" and is_shifted and is_first_masked:
            assert sequence.next_kind(mode) == "recompute"
        row = sequence.next_row(mode)
        check_row(row, mode, is_shifted)
        sequence.cached_block = row.block
        if row.kind == "rebuild":
            continue
        is_selected = np.array(
            data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
            if (n := len(row.candidates)) > 1
            else [True]
        )
        is_selected[data.draw(st.integers(0, len(is_selected) - 1))] = True
        positions, before = row.candidates[is_selected], sequence.canvas()
        tokens = np.array(data.draw(st.lists(st.sampled_from([1, EOS]), min_size=30, max_size=30)))
        sequence.commit(positions, tokens[: len(positions)], row.candidates[~is_selected])
        for position, token in zip(positions.tolist(), tokens.tolist(), strict=False):
            before[position] = token
        step += 1
        assert sequence.canvas() == before
        assert sequence.step == step
        if sequence.block != row.block:
            assert sequence.n_block_masked(row.block) == 0
        check(sequence)


def predictors(row: Row, positions: list[int], first: int, shift: int) -> list[int]:
    """Of a row whose tokens begin at `first`."""
    before = [row.sequence.n_prompt + position - shift for position in positions]
    return [first + max(each - row.start, 0) for each in before]


@pytest.mark.parametrize("mode", MODES)
@given(
    several=st.lists(st.tuples(sequences(), st.booleans()), min_size=1, max_size=5),
    shift=st.integers(0, 1),
)
def test_a_batch_lays_row_behind_row(
    mode: CacheMode, several: list[tuple[Sequence, bool]], shift: int
) -> None:
    """Slots are those of requests in a pool one behind the other."""
    rows, first_slot = [], 0
    for sequence, is_cached in several:
        sequence.slots = np.arange(first_slot, first_slot + sequence.n_tokens)
        sequence.cached_block = sequence.block if is_cached else None
        rows.append(sequence.next_row(mode))
        first_slot += sequence.n_tokens
    batch = build_batch(rows, shift)
    assert batch.n_tokens == sum(row.n_tokens for row in rows)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    keys: list[int] = []
    wanted: list[int] = []
    looked_at: list[int] = []
    for row in rows:
        at = range(row.start, row.start + row.n_tokens)
        wanted += predictors(row, row.candidates.tolist(), len(tokens), shift)
        looked_at += predictors(row, row.outlook.tolist(), len(tokens), shift)
        tokens += row.tokens.tolist()
        positions += at
        slots += [int(row.slots[position]) for position in at]
        keys += [] if row.is_full else row.slots.tolist()
    assert batch.write_slots.tolist() == slots
    assert batch.key_slots.tolist() == keys
    for array, expected in (
        (batch.tokens_T, tokens),
        (batch.positions_T, positions),
        (batch.logit_rows_M, wanted),
        (batch.outlook_rows_K, looked_at),
    ):
        assert array.tolist() == expected + [0] * (-len(expected) % 32)
    assert sum(run.n_rows for run in batch.runs) == len(rows)
    assert [run.start for run in batch.runs] == sorted({run.start for run in batch.runs})
