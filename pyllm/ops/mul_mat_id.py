"""mul_mat_id: each token times the matrices of the experts chosen for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.group_experts import ExpertLists
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_tile import Tile
from pyllm.ops.product_wgmma import expert_tile, uses_wgmma
from pyllm.ops.product_whole import WholeExperts
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device

VEC_PAIRS = 64  # up to here every (token, slot) pair reads its expert's rows for itself
EMULATED_VEC_PAIRS = 16
ROWS = 2  # of a weight that a warp multiplies at a time
INVARIANT_PAIRS = 32  # of a tile, always, for a batch-invariant target; 64 where tiles are no smaller
WHOLE_PAIRS = 1024  # up to here, and so many for each expert, experts' matrices are multiplied as whole numbers
WHOLE_PAIRS_OF_EXPERT = 8


def mul_mat_id_ref(
    x: np.ndarray, experts: np.ndarray, weight: Weight, lists: ExpertLists | None, out: np.ndarray
) -> None:
    num_used = experts.shape[1]
    for expert in np.unique(experts):
        token, slot = np.nonzero(experts == expert)
        rows = x[token, slot if x.shape[1] == num_used else 0]
        packed = weight.array[expert]
        matrix = packed if weight.qtype == QuantType.F32 else dequantize(packed, weight.qtype)
        out[token, slot] = rows @ matrix.T


def without_lists(target: Target | None, num_pairs: int, weight: Weight) -> bool:
    """Whether products with a stack of matrices take no lists of each expert's pairs."""
    if target is None:
        return True
    if target.batch_invariant:
        return False
    if num_pairs <= (EMULATED_VEC_PAIRS if target.vendor == "host" else VEC_PAIRS):
        return True
    few = min(WHOLE_PAIRS, WHOLE_PAIRS_OF_EXPERT * weight.shape[0])
    return target.vendor == "cuda" and num_pairs <= few and takes_whole(target, weight)


def takes_whole(target: Target, weight: Weight) -> bool:
    """Whether few pairs are multiplied with a stack of matrices as whole numbers."""
    return WholeExperts.of(target, WHOLE_PAIRS, WHOLE_PAIRS, weight, gate=True) is not None


def expert_tile_rows(target: Target | None, num_pairs: int, *weights: Weight) -> int:
    """Pairs of a tile (`ExpertLists.bm`) for a number of (token, slot) pairs; 0 where `mul_mat_id` needs no lists.

    Args:
        weights: stacks of matrices of the same experts.
    """
    if target is None or all(without_lists(target, num_pairs, weight) for weight in weights):
        return 0
    if target.batch_invariant:
        return INVARIANT_PAIRS if target.vendor == "cuda" else 64
    if target.vendor != "cuda":
        return 64
    each = num_pairs // weights[0].shape[0]
    if target.arch == "sm_90":
        return 64 if each <= 40 else 128 if each < 96 else 160 if each <= 128 else 192
    return 32 if each <= 20 else 64 if each <= 96 else 128  # measured: BENCHMARKS.md


def plan_mul_mat_id(
    target: Target, x: Any, experts: Any, weight: Weight, lists: ExpertLists | None, out: Any
) -> list[KernelLaunch]:
    num_experts, n, k = weight.shape
    require(k % 8 == 0, "mul_mat_id", f"rows of {weight.name} are not a multiple of 8 long")
    num_used, num_pairs, x_slots = experts.shape[1], experts.size, x.shape[1]
    output, row_bytes = int(out.dtype == np.float16), np.int64(weight.row_bytes)
    if without_lists(target, num_pairs, weight):
        return [few_pairs_launch(target, x, experts, weight, weight, out)]
    assert lists is not None
    sizes = (num_pairs, n, k, num_experts, num_used, x_slots)
    if uses_wgmma(target, weight.qtype) and x.dtype == np.float16:
        return [wgmma_experts_launch(target, x, experts, weight, weight, lists, out)]
    args = (x, lists.array, weight.array, out, row_bytes, *map(np.int32, sizes))
    most_tiles = ExpertLists.max_tiles(num_pairs, num_experts, lists.bm)
    tile = Tile.of_experts(target, lists.bm, n, weight.qtype)
    grid = (-(-n // tile.bn), most_tiles)
    defines, shared = tile.defines(weight.qtype, x, output), tile.shared_bytes(weight.qtype)
    return [KernelLaunch("mul_mat_id", "mul_mat_id_tile", grid, (tile.threads,), args, defines, shared)]


def wgmma_experts_launch(
    target: Target, x: Any, experts: Any, weight: Weight, up: Weight, lists: ExpertLists, out: Any, gate: int = 0
) -> KernelLaunch:
    """`mul_mat_id_wgmma`; with `gate`, silu of the product times the same with `up`."""
    num_experts, n, k = weight.shape
    tile = expert_tile(lists.bm, weight.qtype)
    parts = -(-n // (tile.rows // 2 if gate else tile.rows))
    most_tiles = ExpertLists.max_tiles(experts.size, num_experts, lists.bm)
    blocks = min(most_tiles * parts, target.multiprocessors * tile.blocks)
    sizes = (experts.size, n, k, num_experts, experts.shape[1], x.shape[1])
    args = (x, lists.array, weight.array, up.array, out, np.int64(weight.row_bytes), *map(np.int32, sizes))
    defines = tile.defines(weight.qtype, int(out.dtype == np.float16)) | {"GATE": gate}
    name, shared = "mul_mat_id_wgmma", tile.shared_bytes(weight.qtype)
    return KernelLaunch(name, name, (blocks,), (tile.threads,), args, defines, shared, "sm_90a")


def few_pairs_launch(
    target: Target, x: Any, experts: Any, weight: Weight, up: Weight, out: Any, gate: int = 0
) -> KernelLaunch:
    """Without lists; with `gate`, silu of the product times the same with `up`."""
    num_experts, n, k = weight.shape
    num_tokens, num_used = experts.shape
    sizes = (n, k, num_experts, num_used, x.shape[1])
    args: tuple[Any, ...] = (x, experts, weight.array, up.array, out, np.int64(weight.row_bytes), *map(np.int32, sizes))
    types = {"X_F16": int(x.dtype == np.float16), "OUTPUT": int(out.dtype == np.float16)}
    if whole := WholeExperts.of(target, num_tokens, experts.size, weight, bool(gate)):
        args += tuple(map(np.int32, (experts.size, whole.capacity, whole.chunk)))
        multiprocessors = 3 if target.vendor == "host" else target.multiprocessors
        blocks = min(multiprocessors, experts.size * -(-n // 16))
        name, defines, shared = "mul_mat_id_s8", types | whole.defines(), whole.shared_bytes(target, k)
        return KernelLaunch(name, name, (blocks,), (whole.threads,), args, defines, shared)
    defines = types | {"QTYPE": int(weight.qtype), "ROWS": ROWS, "GATE": gate}
    grid = (-(-n // (ROWS * 128 // target.warp_size)), experts.size)
    return KernelLaunch("mul_mat_id", "mul_mat_id_vec", grid, (128,), args, defines)


MUL_MAT_ID = Op("mul_mat_id", mul_mat_id_ref, plan_mul_mat_id)


def mul_mat_id(
    device: Device, x: Any, experts: Any, weight: Weight, out: Any, lists: ExpertLists | None = None
) -> None:
    """out[t, j] = x[t, j] @ weight[experts[t, j]].T

    Experts that no token chose are neither read nor decoded.

    Args:
        x: [num_tokens, num_used, in_features] float32 or float16; or [num_tokens, 1, in_features]: the same for all
            experts of a token.
        experts: [num_tokens, num_used] int32, each in 0..num_experts-1. For another number kernels read nothing, and
            what they write is not defined.
        weight: [num_experts, out_features, in_features], any block type.
        out: [num_tokens, num_used, out_features] float32 or float16 (saturating); must not overlap x.
        lists: what `group_experts` made of `experts`, with tiles of `expert_tile_rows(...)` for this weight and others
            of the same experts; None where that is 0.

    Numerics: sums in float32. Kernels round the decoded weights to float16; those for many tokens round x too. Few
        tokens on NVIDIA: x is rounded to the 65,278th part of the largest of each 256 (`mul_mat_id_s8`), and a pair's
        result is the same in every bit whatever other pairs there are, as long as they are few; of some formats as
        long as they are fewer than 32, or not.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_mul_mat_id(device, x, experts, weight, out, lists)
    device.launch(MUL_MAT_ID, x, experts, weight, lists, out)


def check_mul_mat_id(device: Device, x: Any, experts: Any, weight: Weight, out: Any, lists: ExpertLists | None) -> None:
    """Raise ShapeError unless the arguments of `mul_mat_id` fit."""
    require(len(weight.shape) == 3, "mul_mat_id", f"weight {weight.name} is not a stack of matrices")
    num_experts, out_features, in_features = weight.shape
    floats = ("float32", "float16")
    check_array("mul_mat_id", "experts", experts, (None, None), ("int32",))
    num_tokens, num_used = experts.shape
    check_array("mul_mat_id", f"x (for {weight.name})", x, (num_tokens, None, in_features), floats)
    require(
        x.shape[1] in (1, num_used), "mul_mat_id", f"x has {x.shape[1]} rows per token, {num_used} experts are used"
    )
    check_array("mul_mat_id", f"out (for {weight.name})", out, (num_tokens, num_used, out_features), floats)
    bm = expert_tile_rows(device.target, experts.size, weight)
    fits = lists.bm == bm or not bm if lists else not bm
    require(fits, "mul_mat_id", f"{weight.name} needs lists of tiles of {bm}")
    if lists is not None:
        size = ExpertLists.size(experts.size, num_experts, lists.bm)
        check_array("mul_mat_id", "lists", lists.array, (size,), ("int32",))
