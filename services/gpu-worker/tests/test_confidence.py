from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dilaserve_gpu_worker.engine.confidence import confidence_stats

outputs = st.lists(
    st.lists(st.floats(0, 1), min_size=1, max_size=40).map(np.array), min_size=1, max_size=6
)


@given(batch=outputs)
def test_statistics_are_numpys(batch: list[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> None:
    for values, stats in zip(batch, confidence_stats(batch), strict=True):
        got = [stats.min, stats.q25, stats.median, stats.q75, stats.mean]
        expected = [*np.quantile(values, [0, 0.25, 0.5, 0.75]), values.mean()]
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_no_output_no_statistics() -> None:
    assert confidence_stats([]) == []
