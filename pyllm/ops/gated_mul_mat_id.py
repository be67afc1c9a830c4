"""gated_mul_mat_id: the first half of an expert, silu(x @ gate.T) * (x @ up.T), for the experts of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.group_experts import ExpertLists
from pyllm.ops.mul_mat_id import (
    check_mul_mat_id,
    few_pairs_launch,
    mul_mat_id_ref,
    plan_mul_mat_id,
    wgmma_experts_launch,
    without_lists,
)
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_wgmma import uses_wgmma
from pyllm.ops.silu_mul import plan_silu_mul, silu_mul_ref
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device


def gated_mul_mat_id_ref(
    x: np.ndarray,
    experts: np.ndarray,
    gate: Weight,
    up: Weight,
    lists: ExpertLists | None,
    scratch: np.ndarray | None,
    out: np.ndarray,
) -> None:
    gates, ups = (np.empty(out.shape, np.promote_types(x.dtype, np.float32)) for _ in range(2))
    mul_mat_id_ref(x, experts, gate, lists, gates)
    mul_mat_id_ref(x, experts, up, lists, ups)
    silu_mul_ref(gates, ups, gates)
    out[...] = gates


def gate_needs_scratch(target: Target | None, num_pairs: int, gate: Weight, up: Weight, x_dtype: Any) -> bool:
    """Whether products of `up` are kept in scratch: where one kernel cannot do both."""
    if target is None:
        return False
    at_once = without_lists(target, num_pairs, gate) or (uses_wgmma(target, gate.qtype) and x_dtype == np.float16)
    return gate.qtype != up.qtype or not at_once


def plan_gated_mul_mat_id(
    target: Target, x: Any, experts: Any, gate: Weight, up: Weight, lists: ExpertLists | None, scratch: Any, out: Any
) -> list[KernelLaunch]:
    if not gate_needs_scratch(target, experts.size, gate, up, x.dtype):
        if without_lists(target, experts.size, gate):
            return [few_pairs_launch(target, x, experts, gate, up, out, gate=1)]
        assert lists is not None
        return [wgmma_experts_launch(target, x, experts, gate, up, lists, out, gate=1)]
    flat = (experts.size, out.shape[2])
    gates, ups = out.reshape(flat), scratch.reshape(flat)
    return [
        *plan_mul_mat_id(target, x, experts, gate, lists, out),
        *plan_mul_mat_id(target, x, experts, up, lists, scratch),
        *plan_silu_mul(target, gates, ups, gates),
    ]


GATED_MUL_MAT_ID = Op("gated_mul_mat_id", gated_mul_mat_id_ref, plan_gated_mul_mat_id)


def gated_mul_mat_id(
    device: Device,
    x: Any,
    experts: Any,
    gate: Weight,
    up: Weight,
    out: Any,
    lists: ExpertLists | None = None,
    scratch: Any = None,
) -> None:
    """out[t, j] = silu(x[t, j] @ gate[experts[t, j]].T) * (x[t, j] @ up[experts[t, j]].T)

    Args:
        x, experts, out, lists: as in `mul_mat_id`.
        gate, up: [num_experts, out_features, in_features], any block types.
        scratch: like out where `gate_needs_scratch(...)`, else None; overwritten.

    Numerics: as mul_mat_id; with scratch the products are rounded to the type of out before they are multiplied.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_mul_mat_id(device, x, experts, gate, out, lists)
    require(gate.shape == up.shape, "gated_mul_mat_id", f"{gate.name} and {up.name} have different shapes")
    needed = gate_needs_scratch(device.target, experts.size, gate, up, x.dtype)
    require(needed == (scratch is not None), "gated_mul_mat_id", "scratch is missing or not needed")
    if scratch is not None:
        check_array("gated_mul_mat_id", "scratch", scratch, out.shape, (out.dtype.name,))
    device.launch(GATED_MUL_MAT_ID, x, experts, gate, up, lists, scratch, out)
