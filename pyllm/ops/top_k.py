"""top_k: the largest values of each row, so that sampling does not need the whole row on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device

THREADS = 512  # of a block of the kernel
FEW_KEYS, MANY_KEYS = 16, 40  # of a thread that reads the values: where rows are few, and where they are many
FEW_BLOCKS = 264  # as many as run at the same time on a large card
LIST_KEYS = 16  # of a thread, at most, where blocks choose from what others have listed


@dataclass(frozen=True)
class _Pass:
    """One launch.

    Attributes:
        columns: of each row of what it chooses from.
        keys: of a thread.
        parts: blocks of a row.
    """

    columns: int
    keys: int
    parts: int


def top_k_ref(
    values: np.ndarray, scratch_values: np.ndarray, scratch_ids: np.ndarray, out_values: np.ndarray, out_ids: np.ndarray
) -> None:
    comparable = np.where(np.isnan(values), np.float32(-np.inf), values)
    # A stable sort of the negated values: the lower column first among equals.
    order = np.argsort(-comparable, axis=-1, kind="stable")[:, : out_ids.shape[1]]
    out_ids[...] = order
    out_values[...] = np.take_along_axis(comparable, order, axis=-1)


def _places(k: int) -> int:
    """Elements that a block may list: k, and as many more as usually reach its bound."""
    return k + 32 if k <= 64 else 2 * k


def _passes(rows: int, columns: int, k: int) -> list[_Pass]:
    passes: list[_Pass] = []
    keys = FEW_KEYS if rows * -(-columns // (THREADS * FEW_KEYS)) <= FEW_BLOCKS else MANY_KEYS
    while not passes or passes[-1].parts > 1:
        parts = -(-columns // (THREADS * keys))
        passes.append(_Pass(columns, keys, parts))
        columns = parts * _places(k)
        keys = min(LIST_KEYS, -(-columns // THREADS))
        keys += keys % 2
    return passes


def scratch_columns(rows: int, columns: int, k: int) -> int:
    """Columns of each scratch array: what all passes but the last leave behind."""
    return max(1, sum(each.parts * _places(k) for each in _passes(rows, columns, k)[:-1]))


def plan_top_k(
    target: Target, values: Any, scratch_values: Any, scratch_ids: Any, out_values: Any, out_ids: Any
) -> list[KernelLaunch]:
    rows, columns = values.shape
    k = out_ids.shape[1]
    launches: list[KernelLaunch] = []
    source, names, start = values, scratch_ids, 0
    flat_values, flat_ids = scratch_values.reshape(-1), scratch_ids.reshape(-1)
    for each in _passes(rows, columns, k):
        final = each.parts == 1
        stop = start + rows * each.parts * _places(k)
        found = (out_values, out_ids) if final else (flat_values[start:stop], flat_ids[start:stop])
        args = (source, names, *found, np.int64(each.columns))
        defines = {"TOP": k, "KEYS": each.keys, "PLACES": _places(k), "IS_LIST": int(start > 0), "FINAL": int(final)}
        launches.append(KernelLaunch("top_k", "top_k", (rows, each.parts), (THREADS,), args, defines))
        (source, names), start = found, stop
    return launches


TOP_K = Op("top_k", top_k_ref, plan_top_k)


def top_k(device: Device, values: Any, scratch_values: Any, scratch_ids: Any, out_values: Any, out_ids: Any) -> None:
    """The k largest values of each row, in descending order, equal ones by column; NaN counts as -infinity.

    Args:
        values: [rows, columns] float32.
        scratch_values, scratch_ids: [rows, scratch_columns(rows, columns, k)] float32 and int32; overwritten.
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
        check_array("top_k", name, array, (rows, scratch_columns(rows, columns, k)), (dtype,))
    device.launch(TOP_K, values, scratch_values, scratch_ids, out_values, out_ids)
