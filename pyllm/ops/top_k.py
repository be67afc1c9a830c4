"""top_k: the largest values of each row, so that sampling does not need the whole row on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device

KEYS = 16  # of a thread of the kernel
PART = 512 * KEYS  # columns from which one of its blocks chooses


def top_k_ref(
    values: np.ndarray, scratch_values: np.ndarray, scratch_ids: np.ndarray, out_values: np.ndarray, out_ids: np.ndarray
) -> None:
    comparable = np.where(np.isnan(values), np.float32(-np.inf), values)
    # A stable sort of the negated values: the lower column first among equals.
    order = np.argsort(-comparable, axis=-1, kind="stable")[:, : out_ids.shape[1]]
    out_ids[...] = order
    out_values[...] = np.take_along_axis(comparable, order, axis=-1)


def scratch_columns(columns: int, k: int) -> int:
    """Columns of each scratch array: what all passes but the last leave behind."""
    total = 0
    while columns > PART:
        columns = -(-columns // PART) * k
        total += columns
    return max(1, total)


def plan_top_k(
    target: Target, values: Any, scratch_values: Any, scratch_ids: Any, out_values: Any, out_ids: Any
) -> list[KernelLaunch]:
    rows, columns = values.shape
    k = out_ids.shape[1]
    launches: list[KernelLaunch] = []
    source, names, start = values, scratch_ids, 0
    flat_values, flat_ids = scratch_values.reshape(-1), scratch_ids.reshape(-1)
    while True:
        parts = -(-columns // PART)
        if parts == 1:
            found_values, found_ids = out_values, out_ids
        else:
            stop = start + rows * parts * k
            found_values, found_ids, start = flat_values[start:stop], flat_ids[start:stop], stop
        args = (source, names, found_values, found_ids, np.int64(columns))
        defines = {"TOP": k, "KEYS": KEYS, "HAS_IDS": int(bool(launches))}
        launches.append(KernelLaunch("top_k", "top_k", (rows, parts), (512,), args, defines))
        if parts == 1:
            return launches
        source, names, columns = found_values, found_ids, parts * k


TOP_K = Op("top_k", top_k_ref, plan_top_k)


def top_k(device: Device, values: Any, scratch_values: Any, scratch_ids: Any, out_values: Any, out_ids: Any) -> None:
    """The k largest values of each row, in descending order, equal ones by column; NaN counts as -infinity.

    Args:
        values: [rows, columns] float32.
        scratch_values, scratch_ids: [rows, scratch_columns(columns, k)] float32 and int32; overwritten.
        out_values: [rows, k] float32.
        out_ids: [rows, k] int32, columns of the values.

    Raises:
        ShapeError: shapes or dtypes do not fit, or k is not in 1..min(columns, 256).
    """
    check_array("top_k", "values", values, (None, None), ("float32",))
    rows, columns = values.shape
    check_array("top_k", "out_ids", out_ids, (rows, None), ("int32",))
    k = out_ids.shape[1]
    require(1 <= k <= min(columns, 256), "top_k", f"k is {k}, there are {columns} columns")
    check_array("top_k", "out_values", out_values, (rows, k), ("float32",))
    for name, array, dtype in (("scratch_values", scratch_values, "float32"), ("scratch_ids", scratch_ids, "int32")):
        check_array("top_k", name, array, (rows, scratch_columns(columns, k)), (dtype,))
    device.launch(TOP_K, values, scratch_values, scratch_ids, out_values, out_ids)
