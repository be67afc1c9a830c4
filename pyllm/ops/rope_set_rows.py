"""rope_set_rows: what stands between the projection of queries, keys and values and attention, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews
from pyllm.kv_types import KVType
from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.rms_norm import rms_norm_ref
from pyllm.ops.rope import RopePairing, rope_ref
from pyllm.ops.set_rows import set_rows_ref

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of single heads, before they are rotated.

    Attributes:
        q, k: [head_dim] float32.
        eps: dimensionless, inside the square root.
    """

    q: Any
    k: Any
    eps: float


def rope_set_rows_ref(
    qkv: np.ndarray,
    norms: HeadNorms | None,
    cos: np.ndarray,
    sin: np.ndarray,
    pairing: RopePairing,
    inputs: InputViews,
    cache: LayerCache,
    kv_type: KVType,
    record: np.ndarray,
    out: np.ndarray,
) -> None:
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads = kv_type.width(cache.k.shape[1]) // head_dim
    rotated = (num_heads + num_kv_heads) * head_dim
    heads = qkv[:, :rotated].reshape(num_tokens, -1, head_dim).copy()
    q, k = heads[:, :num_heads], heads[:, num_heads:]
    if norms is not None:
        rms_norm_ref(q, norms.q, norms.eps, q, False)
        rms_norm_ref(k, norms.k, norms.eps, k, False)
    rope_ref(q, cos, sin, pairing)
    rope_ref(k, cos, sin, pairing)
    set_rows_ref(k.reshape(num_tokens, -1), qkv[:, rotated:], inputs, cache, kv_type, record)
    out[...] = q


def plan_rope_set_rows(
    target: Target,
    qkv: Any,
    norms: HeadNorms | None,
    cos: Any,
    sin: Any,
    pairing: RopePairing,
    inputs: InputViews,
    cache: LayerCache,
    kv_type: KVType,
    record: Any,
    out: Any,
) -> list[KernelLaunch]:
    num_tokens, num_heads, head_dim = out.shape
    require(cache.k.shape == cache.v.shape, "rope_set_rows", "key and value length differ")
    require(head_dim % 4 == 0, "rope_set_rows", f"head size {head_dim} is not a multiple of 4")
    all_heads = qkv.shape[1] // head_dim
    tables = (inputs.row_ids, inputs.positions, inputs.token_seq, inputs.seq_ids, inputs.page_table, inputs.page_epochs)
    sizes = (
        *(cos.shape[1], num_heads, (all_heads - num_heads) // 2, cache.k.shape[1]),
        *(inputs.page_table.shape[1], cache.page_size, cache.layer),
    )
    weights = (qkv, qkv) if norms is None else (norms.q, norms.k)
    args = (
        *(qkv, *weights, cos, sin, out, cache.k, cache.v, cache.tags, *tables, record),
        np.float32(0 if norms is None else norms.eps),
        *map(np.int32, sizes),
    )
    defines = {
        "KV_TYPE": kv_type.code,
        "HEAD_DIM": head_dim,
        "Q_F16": int(out.dtype == np.float16),
        "NEOX": int(pairing == RopePairing.NEOX),
        "HEAD_NORM": int(norms is not None),
    }
    grid = (num_tokens, -(-all_heads // (128 // target.warp_size)))
    return [KernelLaunch("rope_set_rows", "rope_set_rows", grid, (128,), args, defines)]


ROPE_SET_ROWS = Op("rope_set_rows", rope_set_rows_ref, plan_rope_set_rows)


def rope_set_rows(
    device: Device,
    qkv: Any,
    norms: HeadNorms | None,
    cos: Any,
    sin: Any,
    pairing: RopePairing,
    inputs: InputViews,
    cache: LayerCache,
    kv_type: KVType,
    record: Any,
    out: Any,
) -> None:
    """Normalise and rotate the heads of q and k; q goes to out, k and v to their rows in the cache, as `set_rows` does.

    Args:
        qkv: [num_tokens, q, k and v side by side] float32: (num_heads + num_kv_heads) * key_length columns, then
            num_kv_heads * value_length.
        norms: norms of the heads of q and k, or None.
        cos, sin: [num_tokens, n_rot / 2] float32, from `rope_table`.
        pairing: which elements form a pair.
        inputs: the device's input block.
        cache: one layer's K, V and tags; written.
        kv_type: how rows are stored.
        record: fault record; appended to.
        out: [num_tokens, num_heads, key_length] float32 or float16.

    Numerics: float32; one rounding to the type of out, and of the cache.

    Raises:
        ShapeError: shapes or dtypes do not fit; kernels also need keys and values of one length.

    Source: of the parts, see rms_norm, rope and set_rows.
    """
    check_array("rope_set_rows", "out", out, (None, None, None), ("float32", "float16"))
    num_tokens, num_heads, head_dim = out.shape
    check_array("rope_set_rows", "qkv", qkv, (num_tokens, None), ("float32",))
    widths = num_heads * head_dim, *(kv_type.width(rows.shape[1]) for rows in (cache.k, cache.v))
    require(qkv.shape[1] == sum(widths), "rope_set_rows", f"qkv has {qkv.shape[1]} columns, q, k and v {widths}")
    for name, array in (("cos", cos), ("sin", sin)):
        check_array("rope_set_rows", name, array, (num_tokens, None), ("float32",))
    require(2 * cos.shape[1] <= head_dim, "rope_set_rows", f"{2 * cos.shape[1]} rotated elements, head_dim {head_dim}")
    check_array("rope_set_rows", "record", record, faults.record_shape(), ("int32",))
    device.launch(ROPE_SET_ROWS, qkv, norms, cos, sin, pairing, inputs, cache, kv_type, record, out)
