from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dilaserve_gpu_worker.engine.confidence import confidence_stats


@given(output=st.lists(st.floats(0, 1), min_size=1, max_size=300).map(np.array))
def test_statistics_are_numpys(output: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    before = output.copy()
    stats = confidence_stats(output)
    assert (output == before).all()
    got = [stats.min, stats.q25, stats.median, stats.q75, stats.mean]
    expected = [*np.quantile(output, [0, 0.25, 0.5, 0.75]), output.mean()]
    np.testing.assert_allclose(got, expected, atol=1e-12)
