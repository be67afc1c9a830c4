"""top_k against a stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ShapeError
from pyllm.ops.top_k import FEW_BLOCKS, FEW_KEYS, THREADS, scratch_columns, top_k
from tests.ops.lives import SIZES, on_device

PART = FEW_KEYS * THREADS  # of which a block chooses, while rows are few


def largest(device: Device, values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = values.shape
    scratch = (rows, scratch_columns(rows, columns, k))
    out_values, out_ids = device.empty((rows, k), np.float32), device.empty((rows, k), np.int32)
    scratches = device.empty(scratch, np.float32), device.empty(scratch, np.int32)
    top_k(device, on_device(device, values), *scratches, out_values, out_ids)
    return device.download(out_values), device.download(out_ids)


@pytest.mark.parametrize("k", [1, 3, 64])
@pytest.mark.parametrize("columns", [*SIZES, 512, PART, PART + 1, 41_037])
def test_top_k(device: Device, columns: int, k: int) -> None:
    k = min(k, columns)
    values = np.random.default_rng(columns).standard_normal((2, columns), np.float32)
    found, ids = largest(device, values, k)
    order = np.argsort(-values.astype(np.float64), axis=-1, kind="stable")[:, :k]
    assert (ids == order).all()
    assert (found == np.take_along_axis(values, order, axis=-1)).all()


def test_equal_values_come_by_column(device: Device) -> None:
    values = np.zeros((1, 3 * PART), np.float32)
    values[0, [5, PART + 1, 2 * PART]] = 1
    _, ids = largest(device, values, 6)
    assert ids[0].tolist() == [5, PART + 1, 2 * PART, 0, 1, 2]


def check(device: Device, values: np.ndarray, k: int) -> None:
    """With NaN as -infinity."""
    comparable = np.where(np.isnan(values), np.float32(-np.inf), values)
    order = np.argsort(-comparable, axis=-1, kind="stable")[:, :k]
    found, ids = largest(device, values, k)
    assert (ids == order).all()
    assert (found == np.take_along_axis(comparable, order, axis=-1)).all()


def test_many_rows(device: Device) -> None:
    """So many blocks that each has larger parts."""
    rng = np.random.default_rng(5)
    for rows, columns, k in ((FEW_BLOCKS + 1, 300, 5), (FEW_BLOCKS // 3 + 1, 2 * PART + 4099, 9)):
        check(device, np.round(rng.standard_normal((rows, columns), np.float32) * 100), k)


@pytest.mark.parametrize("columns", [3 * PART + 77, 3 * PART + 76])
def test_few_values_that_count(device: Device, columns: int) -> None:
    """More than a block lists are equal, or as good as absent: in one part, in all, or but for a few values."""
    values = np.random.default_rng(columns).standard_normal((5, columns), np.float32)
    values[0, 30:] = -np.inf
    values[1, :PART] = np.nan
    values[2, ::7] = np.nan
    values[2, -PART:] = 3
    values[3] = np.nan
    values[4] = np.where(np.arange(columns) % 2, 0.0, -0.0)
    check(device, values, 64)


def test_values_that_are_not_finite(device: Device) -> None:
    values = np.full((3, 100), -np.inf, np.float32)
    values[0, 7], values[0, 3], values[0, 50] = np.nan, np.inf, -3
    values[1] = np.nan
    found, ids = largest(device, values, 4)
    assert (found[0] == [np.inf, -3, -np.inf, -np.inf]).all()
    assert ids[0, :2].tolist() == [3, 50]
    assert np.isneginf(found[1:]).all()


def test_wrong_arguments_are_named(device: Device) -> None:
    with pytest.raises(ShapeError, match="k is 5, there are 4 columns"):
        largest(device, np.zeros((1, 4), np.float32), 5)
