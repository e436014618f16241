"""Training batches keep the layout's distances and mask as decoding does."""

import numpy as np
import pytest

from dilaserve_bench.tiny.batches import (
    STAGES,
    batch_shape,
    mask_canvases,
    stage_at,
    training_batch,
)
from dilaserve_bench.tiny.layout import DATA_WIDTH, MASK, PAD, PROMPT_LENGTH, vocabulary
from dilaserve_bench.tiny.tasks import training_rng


@pytest.mark.parametrize(("canvas", "width"), [(32, 32), (32, 96), (64, 64), (64, 96), (96, 96)])
def test_data_and_canvas_keep_their_distance_without_the_padding(canvas: int, width: int) -> None:
    batch = training_batch(training_rng(0, 1, 0), STAGES[-1], canvas, width, 2048, 3.0)
    positions = batch.positions.tolist()
    assert batch.ids.shape[1] == len(positions) == width + 4 + canvas
    assert positions[-canvas:] == list(range(PROMPT_LENGTH, PROMPT_LENGTH + canvas))
    assert positions[3] + DATA_WIDTH + 1 == positions[batch.canvas_start]
    if width < DATA_WIDTH:
        full = batch.ids[:, 3 : 3 + width] != vocabulary()[PAD]
        assert bool(full[:, 0].all())


def test_masks_are_in_the_canvas_only_and_carry_the_loss() -> None:
    batch = training_batch(training_rng(0, 2, 0), STAGES[-1], 64, 96, 4096, 3.0)
    mask = vocabulary()[MASK]
    assert not bool((batch.ids[:, : batch.canvas_start] == mask).any())
    canvas = batch.ids[:, batch.canvas_start :]
    kept = canvas != mask
    assert bool((canvas[kept] == batch.targets[kept]).all())
    assert bool((batch.weights[kept] == 0).all())
    assert float((batch.weights.sum(1) > 0).float().mean()) > 0.8


def test_odd_rows_are_states_of_blockwise_decoding() -> None:
    masked, weights = mask_canvases(np.random.default_rng(0), 400, 96, 3.0)
    for row in (row for row in range(1, 400, 2) if weights[row].any()):
        block = int(np.flatnonzero(weights[row]).min()) // 32
        assert not masked[row, : 32 * block].any()
        assert masked[row, 32 * (block + 1) :].all()
        assert not weights[row, 32 * (block + 1) :].any()


def test_weights_are_llada_s_up_to_the_limit() -> None:
    masked, weights = mask_canvases(np.random.default_rng(1), 1000, 32, 3.0)
    uniform = weights[::2]
    assert uniform.max() == pytest.approx(3.0 / 32)
    assert uniform[uniform > 0].min() >= 1 / 32
    assert masked[::2].mean() == pytest.approx(0.5, abs=0.03)


def test_batches_are_a_function_of_the_seed_and_stages_follow_one_another() -> None:
    batches = [
        training_batch(training_rng(5, 7, 1), stage_at(7), *batch_shape(7, 5), 2048, 3.0)
        for _ in range(2)
    ]
    assert bool((batches[0].ids == batches[1].ids).all())
    steps = (0, 1499, 1500, 4999, 5000, 6249, 6250, 8000)
    assert [STAGES.index(stage_at(step)) for step in steps] == [0, 0, 1, 1, 2, 2, 3, 4]
