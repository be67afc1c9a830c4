"""set_rows: scatter new K and V rows into the paged cache, each with its page's epoch as tag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews
from pyllm.kv_types import KVType
from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache


def set_rows_ref(
    k: np.ndarray, v: np.ndarray, inputs: InputViews, cache: LayerCache, kv_type: KVType, record: np.ndarray
) -> None:
    num_tokens = k.shape[0]
    rows, positions, seq = inputs.row_ids[:num_tokens], inputs.positions[:num_tokens], inputs.token_seq[:num_tokens]
    page_index, row_in_page = np.divmod(positions, cache.page_size)
    pages = inputs.page_table[seq, page_index].astype(np.int64)
    wanted = rows >= 0
    right = rows == pages * cache.page_size + row_in_page
    _report_wrong_rows(np.flatnonzero(wanted & ~right), inputs, cache, record)
    write = np.flatnonzero(wanted & right)
    cache.k[rows[write]] = kv_type.encode(k[write].astype(np.float32, copy=False))
    cache.v[rows[write]] = kv_type.encode(v[write].astype(np.float32, copy=False))
    cache.tags[rows[write]] = inputs.page_epochs[seq, page_index][write]


def _report_wrong_rows(tokens: np.ndarray, inputs: InputViews, cache: LayerCache, record: np.ndarray) -> None:
    if not tokens.size:
        return
    found, positions = inputs.row_ids[tokens], inputs.positions[tokens]
    seq = inputs.token_seq[tokens]
    pages = inputs.page_table[seq, positions // cache.page_size]
    expected = pages.astype(np.int64) * cache.page_size + positions % cache.page_size
    entries = np.empty((len(tokens), faults.WIDTH), np.int32)
    entries[:, 0] = faults.FaultKind.ROW_ID
    entries[:, 1] = inputs.seq_ids[seq]
    entries[:, 2] = cache.layer
    entries[:, 3] = pages
    entries[:, 4] = positions % cache.page_size
    entries[:, 5] = positions
    entries[:, 6] = expected & 0x7FFFFFFF
    entries[:, 7] = found & 0x7FFFFFFF
    faults.report(record, entries)


def plan_set_rows(
    target: Target, k: Any, v: Any, inputs: InputViews, cache: LayerCache, kv_type: KVType, record: Any
) -> list[KernelLaunch]:
    require(k.shape[1] % 4 == 0 and v.shape[1] % 4 == 0, "set_rows", "rows are not multiples of 4 elements")
    tables = (inputs.row_ids, inputs.positions, inputs.token_seq, inputs.seq_ids, inputs.page_table, inputs.page_epochs)
    row_sizes = (cache.k.shape[1], cache.v.shape[1])
    sizes = (k.shape[1], v.shape[1], *row_sizes, inputs.page_table.shape[1], cache.page_size, cache.layer)
    args = (k, v, cache.k, cache.v, cache.tags, *tables, record, *map(np.int32, sizes))
    defines = {"KV_TYPE": kv_type.code, "INPUT_F16": int(k.dtype.name == "float16")}
    return [KernelLaunch("set_rows", "set_rows", (k.shape[0],), (256,), args, defines)]


SET_ROWS = Op("set_rows", set_rows_ref, plan_set_rows)


def set_rows(
    device: Device, k: Any, v: Any, inputs: InputViews, cache: LayerCache, kv_type: KVType, record: Any
) -> None:
    """Write K and V of a ubatch's tokens to the rows named in the input block, and the tags beside them.

    Token t goes to physical row row_ids[t]; -1 writes nothing. The row must be the one that page table and position
    give, page_table[s, p / page_size] * page_size + p % page_size; if it is not, a ROW_ID fault is recorded and nothing
    is written for that token. The tag of a written row is the epoch of its page.

    Args:
        k: [num_tokens, num_kv_heads * key_length] float32 or float16, after rotary embedding.
        v: [num_tokens, num_kv_heads * value_length], as k.
        inputs: the device's input block.
        cache: one layer's K, V and tags; written.
        kv_type: how rows are stored.
        record: fault record; appended to.

    Numerics: one rounding to the storage type, to nearest even; quantised types as `pyllm.kv_types` says.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    for name, array, rows in (("k", k, cache.k), ("v", v, cache.v)):
        check_array("set_rows", name, array, (k.shape[0], kv_type.width(rows.shape[1])), (k.dtype.name,))
    require(k.dtype.name in ("float32", "float16"), "set_rows", f"k is {k.dtype.name}, expected float32 or float16")
    check_array("set_rows", "record", record, faults.record_shape(), ("int32",))
    device.launch(SET_ROWS, k, v, inputs, cache, kv_type, record)
