"""route: choose the experts of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device

MAX_EXPERTS = 512
SMALLEST_SUM = 6.103515625e-5  # the smallest normal float16: what other engines clamp the sum of weights to


def route_ref(logits: np.ndarray, experts: np.ndarray, weights: np.ndarray) -> None:
    num_used = experts.shape[1]
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probability = shifted / shifted.sum(axis=-1, keepdims=True)
    # A stable sort of the negated values: the lower index first among equals.
    experts[...] = np.argsort(-probability, axis=-1, kind="stable")[:, :num_used]
    chosen = np.take_along_axis(probability, experts, axis=-1)
    weights[...] = chosen / np.maximum(chosen.sum(axis=-1, keepdims=True), np.float32(SMALLEST_SUM))


def plan_route(target: Target, logits: Any, experts: Any, weights: Any) -> list[KernelLaunch]:
    (num_tokens, num_experts), num_used = logits.shape, experts.shape[1]
    grid = (-(-num_tokens // (128 // target.warp_size)),)
    args = (logits, experts, weights, *map(np.int32, (num_tokens, num_experts, num_used)))
    own = next(own for own in (1, 4, 16) if own * target.warp_size >= num_experts)
    return [KernelLaunch("route", "route", grid, (128,), args, {"OWN": own})]


ROUTE = Op("route", route_ref, plan_route)


def route(device: Device, logits: Any, experts: Any, weights: Any) -> None:
    """Softmax over all experts, the likeliest of them, their probabilities scaled to sum to 1.

    Args:
        logits: [num_tokens, num_experts] float32; 512 experts at most.
        experts: [num_tokens, num_used] int32, output: the likeliest first, the lower index first among equals.
        weights: [num_tokens, num_used] float32, output.

    Raises:
        ShapeError: shapes or dtypes do not fit, or more experts are used than there are, or more than 512 are there.

    Source: Shazeer et al. 2017, arXiv:1701.06538, with the softmax before the choice.
    """
    check_array("route", "logits", logits, (None, None), ("float32",))
    check_array("route", "experts", experts, (logits.shape[0], None), ("int32",))
    check_array("route", "weights", weights, experts.shape, ("float32",))
    require(0 < experts.shape[1] <= logits.shape[1], "route", f"{experts.shape[1]} of {logits.shape[1]} experts")
    require(logits.shape[1] <= MAX_EXPERTS, "route", f"{logits.shape[1]} experts, {MAX_EXPERTS} at most")
    device.launch(ROUTE, logits, experts, weights)
