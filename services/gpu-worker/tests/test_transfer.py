from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from dilaserve_gpu_worker.transfer import Array, StaticArrays, fetch, fetch_packed, put

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5),
    np.arange(7, dtype=np.int32),
    np.empty(0, np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([0.5, -1.5]),
]


def test_arrays_arrive_as_they_are() -> None:
    for tensors in (put(ARRAYS, CPU), StaticArrays(ARRAYS, CPU).tensors):
        for array, tensor in zip(ARRAYS, tensors, strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype
            assert tensor.shape == array.shape
            assert tensor.is_contiguous()


def test_arrays_go_to_another_device_in_one_piece() -> None:
    tensors = put(ARRAYS, torch.device("meta"))  # which has no values
    assert len({tensor.untyped_storage().nbytes() for tensor in tensors}) == 1
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert (tensor.shape, tensor.device.type) == (array.shape, "meta")
        assert tensor.itemsize == array.itemsize


@pytest.mark.parametrize("fetched", [fetch, fetch_packed])
def test_what_is_fetched_is_what_was_there(
    fetched: Callable[[Sequence[torch.Tensor]], list[Array]],
) -> None:
    arrays = [np.array([0.1, 0.7], np.float32), np.array([2**53]), *ARRAYS]
    for array, got in zip(arrays, fetched(put(arrays, CPU)), strict=True):
        assert np.array_equal(got, array)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)


def test_static_arrays_keep_their_place() -> None:
    static = StaticArrays(ARRAYS, CPU)
    places = [tensor.data_ptr() for tensor in static.tensors]
    static.fill([array + 1 for array in ARRAYS])
    assert [tensor.data_ptr() for tensor in static.tensors] == places
    for array, tensor in zip(ARRAYS, static.tensors, strict=True):
        assert np.array_equal(tensor.numpy(), array + 1)
    assert all(place % 16 == 0 for place in places)


@pytest.mark.parametrize("wrong", [np.arange(4), np.arange(5, dtype=np.int32)])
def test_static_arrays_take_nothing_of_another_shape(wrong: np.ndarray) -> None:
    static = StaticArrays(ARRAYS, CPU)
    with pytest.raises(ValueError, match="in the place of"):
        static.fill([wrong, *ARRAYS[1:]])
