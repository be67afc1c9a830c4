"""group_experts: list the (token, slot) pairs of each expert, cut into tiles for products of many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.route import MAX_EXPERTS

if TYPE_CHECKING:
    from pyllm.device import Device


@dataclass(frozen=True)
class ExpertLists:
    """What `group_experts` writes.

    Attributes:
        array: [size(...)] int32, parts one behind the other: where each expert's pairs start (num_experts + 1); the
            number of tiles (1); numbers token * num_used + slot of pairs, expert by expert, each in ascending order
            (num_pairs); for each tile its expert and where its pairs start (2 * max_tiles).
        bm: pairs of a tile.
    """

    array: Any
    bm: int

    @staticmethod
    def max_tiles(num_pairs: int, num_experts: int, bm: int) -> int:
        """Most tiles that there can be."""
        return min(num_pairs, num_pairs // bm + num_experts)

    @classmethod
    def size(cls, num_pairs: int, num_experts: int, bm: int) -> int:
        """Elements of the array."""
        return num_experts + 2 + num_pairs + 2 * cls.max_tiles(num_pairs, num_experts, bm)


def group_experts_ref(experts: np.ndarray, num_experts: int, lists: ExpertLists) -> None:
    flat = experts.reshape(-1)
    known = np.flatnonzero((flat >= 0) & (flat < num_experts))
    counts = np.bincount(flat[known], minlength=num_experts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    tiles = [(e, first) for e in range(num_experts) for first in range(starts[e], starts[e + 1], lists.bm)]
    array, at = lists.array, num_experts + 1
    array[:at] = starts
    array[at] = len(tiles)
    array[at + 1 : at + 1 + len(known)] = known[np.argsort(flat[known], kind="stable")]
    array[at + 1 + flat.size :][: 2 * len(tiles)] = np.reshape(tiles, -1)


def plan_group_experts(target: Target, experts: Any, num_experts: int, lists: ExpertLists) -> list[KernelLaunch]:
    args = (experts, lists.array, np.int32(experts.size), np.int32(num_experts))
    return [KernelLaunch("group_experts", "group_experts", (num_experts,), (256,), args, {"BM": lists.bm})]


GROUP_EXPERTS = Op("group_experts", group_experts_ref, plan_group_experts)


def group_experts(device: Device, experts: Any, num_experts: int, lists: ExpertLists) -> None:
    """Fill the lists with which `mul_mat_id` multiplies many tokens.

    Args:
        experts: [num_tokens, num_used] int32; pairs with another expert than 0..num_experts-1 are left out.
        num_experts: 512 at most.
        lists: output.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("group_experts", "experts", experts, (None, None), ("int32",))
    size = ExpertLists.size(experts.size, num_experts, lists.bm)
    check_array("group_experts", "lists", lists.array, (size,), ("int32",))
    require(num_experts <= MAX_EXPERTS, "group_experts", f"{num_experts} experts, {MAX_EXPERTS} at most")
    device.launch(GROUP_EXPERTS, experts, num_experts, lists)
