"""shift_rows: copy K/V rows to another page, with the keys turned to other positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.kv_types import KVType
from pyllm.ops.check import check_array, require
from pyllm.ops.copy_rows import RowMove, copy_rows_ref
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.rope import RopePairing, rope_ref

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache


@dataclass(frozen=True)
class KeyTurn:
    """By how much the keys of a layer turn: rotations about one pair's angles add up, so a key that was rotated for
    position p and is then turned by n positions is the key of position p + n.

    Attributes:
        cos, sin: [1, n_rot / 2] float32, of n times each pair's frequency; YaRN's magnitude is not in them, since
            stored keys have it.
        pairing: which elements form a pair.
        head_dim: elements per head; those behind n_rot stay as they are.
    """

    cos: Any
    sin: Any
    pairing: RopePairing
    head_dim: int


def shift_rows_ref(cache: LayerCache, kv_type: KVType, turn: KeyTurn, move: RowMove) -> None:
    own = cache.tags[move.source] == np.uint32(move.source_epoch)
    copy_rows_ref(cache, move)
    keys = cache.k[move.target]
    heads = kv_type.decode(keys[own]).reshape(int(own.sum()), -1, turn.head_dim)
    rope_ref(heads, turn.cos, turn.sin, turn.pairing)
    keys[own] = kv_type.encode(heads.reshape(len(heads), heads.shape[1] * heads.shape[2]))


def plan_shift_rows(
    target: Target, cache: LayerCache, kv_type: KVType, turn: KeyTurn, move: RowMove
) -> list[KernelLaunch]:
    require(turn.head_dim % 4 == 0, "shift_rows", f"head size {turn.head_dim} is not a multiple of 4")
    num_heads = kv_type.width(cache.k.shape[1]) // turn.head_dim
    v = cache.v.view(np.uint16)
    sizes = (turn.cos.shape[1], num_heads, cache.k.shape[1], v.shape[1])
    args = (cache.k, v, cache.tags, turn.cos, turn.sin, *move.kernel_args, *map(np.int32, sizes))
    defines = {
        "KV_TYPE": kv_type.code,
        "HEAD_DIM": turn.head_dim,
        "NEOX": int(turn.pairing == RopePairing.NEOX),
    }
    grid = (move.num_rows, 1 + -(-num_heads // (128 // target.warp_size)))
    return [KernelLaunch("shift_rows", "shift_rows", grid, (128,), args, defines)]


SHIFT_ROWS = Op("shift_rows", shift_rows_ref, plan_shift_rows)


def shift_rows(device: Device, cache: LayerCache, kv_type: KVType, turn: KeyTurn, move: RowMove) -> None:
    """Copy rows whose tag is source_epoch, their keys turned, and give them target_epoch; a row with another tag
    becomes absent.

    Args:
        cache: one layer's K, V and tags; changed.
        kv_type: how rows are stored.
        turn: by how much keys turn.

    Numerics: keys are decoded exactly, turned in float32 with each product and sum rounded, and rounded once more to
    the storage type: all devices agree in every bit. Values are copied.

    Raises:
        ShapeError: rows lie outside the cache or overlap, or the turn is of other heads; kernels also need head sizes
            that are multiples of 4.

    Source: Su et al. 2021, arXiv:2104.09864, of whose rotations R(p) R(n) = R(p + n) holds.
    """
    for name, array in (("cos", turn.cos), ("sin", turn.sin)):
        check_array("shift_rows", name, array, (1, None), ("float32",))
    require(tuple(turn.cos.shape) == tuple(turn.sin.shape), "shift_rows", "cos and sin differ in shape")
    half, width = turn.cos.shape[1], kv_type.width(cache.k.shape[1])
    require(2 * half <= turn.head_dim, "shift_rows", f"{2 * half} rotated elements, head_dim {turn.head_dim}")
    require(width % turn.head_dim == 0, "shift_rows", f"rows of {width} elements, head_dim {turn.head_dim}")
    move.check("shift_rows", cache)
    device.launch(SHIFT_ROWS, cache, kv_type, turn, move)
