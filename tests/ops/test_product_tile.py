"""Tiles of products: those that plans choose for real GPUs are right when emulated, and fit into shared memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.kernel_check import Case, check_case
from pyllm.kernel_product_cases import mul_mat_case
from pyllm.ops.mul_mat import mul_mat, scratch_size
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB, Tile
from pyllm.quants import GPU_TYPES, QuantType
from pyllm.weight import Weight

NVIDIA = [Tile(bm, 64, 64, 128, 2, True) for bm in (32, 64)]
EMULATED_SHARED = 65536  # bytes: what fits on all GPUs
AMD = [Tile(bm, 128, 32, 256, 3, False) for bm in (64, 128)]
SIZES = {QuantType.Q8_0: (35, 67, 288), QuantType.Q6_K: (33, 65, 512), QuantType.F16: (35, 65, 104)}


def plan(tile: Tile, target: Target, x: Any, weight: Weight, scratch: Any, out: Any) -> list[KernelLaunch]:
    (num_tokens, k), n = x.shape, weight.shape[0]
    grid = -(-num_tokens // tile.bm), -(-n // tile.bn)
    args = (x, weight.array, out, np.int64(weight.row_bytes), *map(np.int32, (num_tokens, n, k, n)))
    defines, shared = tile.defines(weight.qtype, x, 0), tile.shared_bytes(weight.qtype)
    return [KernelLaunch("mul_mat", "mul_mat_tile", grid, (tile.threads,), args, defines, shared)]


def case_of(tile: Tile, qtype: QuantType, x_dtype: type) -> Case:
    """A product in this tile, not in that of the plan."""
    case = mul_mat_case(qtype, SIZES[qtype][0], *SIZES[qtype][1:])

    def arguments(rng: np.random.Generator) -> tuple[Any, ...]:
        x, *others = case.arguments(rng)
        return x.astype(x_dtype), *others

    op = Op("mul_mat", case.op.reference, partial(plan, tile))
    return Case(op, case.name, arguments, case.outputs, case.floor, case.unit, case.rounded)


@pytest.mark.parametrize("x_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("qtype", SIZES, ids=lambda qtype: qtype.name)
def test_tiles_of_gpus(device: Device, qtype: QuantType, x_dtype: type) -> None:
    if device.target is None:
        pytest.skip("the CPU has no tiles")
    for tile in NVIDIA if device.target.tiles == "mma" else AMD:
        tile = replace(tile, staged=tile.staged and qtype != QuantType.F16)
        if device.name == "emulated" and tile.shared_bytes(qtype) > EMULATED_SHARED:
            continue
        verdict = check_case(device, case_of(tile, qtype, x_dtype), repeats=1)
        assert verdict.passed, (tile, verdict)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_tiles_fit_into_shared_memory(arch: str) -> None:
    target, limit = Target("cuda", arch, 32, "mma"), SHARED_KIB.get(arch, OTHERS_SHARED_KIB) << 10
    for qtype in GPU_TYPES:
        tiles = [Tile.of(target, tokens, rows, qtype) for tokens in (33, 128, 2048) for rows in (8, 4096, 150_000)]
        tiles += [Tile.of_experts(target, bm, 768, qtype) for bm in (32, 64, 128)]
        assert max(tile.shared_bytes(qtype) for tile in tiles) <= limit


def test_large_products_get_large_tiles() -> None:
    target = Target("cuda", "sm_90", 32, "mma")
    assert Tile.of(target, 2048, 4096, QuantType.Q4_K).bm == 256
    assert Tile.of(target, 128, 14336, QuantType.Q4_K).bm == 128
    assert Tile.of(target, 128, 4096, QuantType.Q4_K).bm == 64  # too few blocks of 128
    assert (
        Tile.of(Target("hip", "gfx1151", 32, "wmma"), 2048, 4096, QuantType.Q8_0).shared_bytes(QuantType.Q8_0) <= 65536
    )


def test_a_nan_in_x_is_one_in_its_row(device: Device) -> None:
    """Saturating must not make a number of it: that would hide what is wrong from the check of the logits."""
    rng = np.random.default_rng(0)
    values, x = rng.standard_normal((8, 64), np.float32), rng.standard_normal((40, 64), np.float32)
    x[3, 5] = np.nan
    out = device.empty((40, 8), np.float32)
    weight = Weight("w", values.shape, QuantType.F32, device.upload(values))
    scratch = device.empty((scratch_size(device.target, len(x), weight),), np.float16)
    mul_mat(device, device.upload(x), weight, out, scratch)
    assert np.isnan(device.download(out)).all(axis=1).tolist() == [row == 3 for row in range(40)]
