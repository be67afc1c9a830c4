"""Products emulated with the plans that Hopper gets: mul_mat_wgmma and mul_mat_id_wgmma."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.executor import OVERLAP_TOKENS
from pyllm.kernel_check import Case, check_case
from pyllm.kernel_expert_cases import gated_mul_mat_id_case, mul_mat_id_case
from pyllm.kernel_product_cases import half_weight, linear_case, mul_mat_case
from pyllm.kernel_samples import HALF, normal, random_weight
from pyllm.ops import linear, product_plan, product_wgmma
from pyllm.ops.mul_mat import mul_mat_ref
from pyllm.ops.mul_mat_id import expert_tile_rows
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_plan import Gate, Output
from pyllm.ops.product_wgmma import (
    EXPERT_TOKENS,
    TILES,
    WgmmaTile,
    expert_tile,
    for_type,
    gains_together,
    product_cut,
    uses_wgmma,
    wgmma_launch,
)
from pyllm.quants import FORMATS, GPU_TYPES, QuantType
from pyllm.weight import Weight

HOPPER = Target("cuda", "sm_90", 32, "mma")
TYPES = sorted(GPU_TYPES)


@pytest.fixture(params=["emulated-32"])  # a name of a life: tests/conftest.py thins out rare block types
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(32, "mma")
    device.target = replace(device.target, arch="sm_90")
    yield device
    device.close()


@pytest.fixture(autouse=True)
def many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are enough to see what these do, though plans take them for more: see test_direct_products.py."""
    for module in (product_plan, linear):
        monkeypatch.setattr(module, "takes_direct", lambda *arguments: False)


def sources(device: EmulatedDevice, case: Case) -> list[tuple[str, str]]:
    assert case.op.plan is not None
    launches = case.op.plan(device.target, *case.draw(0))
    return [(launch.source, launch.arch) for launch in launches if isinstance(launch, KernelLaunch)]


def check(device: EmulatedDevice, case: Case, source: str = "mul_mat_wgmma", repeats: int = 1) -> None:
    assert (source, "sm_90a") in sources(device, case)
    verdict = check_case(device, case, repeats=repeats)
    assert verdict.passed, verdict


@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_all_block_types(device: EmulatedDevice, qtype: QuantType) -> None:
    """Rows that end within a step, or within a run of 32 where the blocks allow it."""
    row_elements = {1: 104, 256: 512}.get(FORMATS[qtype].block_size, 288 if FORMATS[qtype].block_size == 32 else 320)
    check(device, mul_mat_case(qtype, 35, 97, row_elements))


def in_tile(case: Case, tile: WgmmaTile, dtype: type = np.float32) -> Case:
    """A product of float16 in this tile, not in that of the plan."""

    def plan(target: Target, x: Any, weight: Any, scratch: Any, out: Any) -> list[KernelLaunch]:
        return [wgmma_launch(target, x, [weight], [out], out.shape[1], int(out.dtype == np.float16), tile)]

    def arguments(rng: np.random.Generator) -> tuple[Any, ...]:
        x, weight, _, out = case.arguments(rng)
        return x.astype(np.float16), weight, None, out.astype(dtype)

    floor = HALF if dtype == np.float16 else case.floor
    return replace(case, op=Op("mul_mat", case.op.reference, plan), arguments=arguments, floor=floor)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows} x {tile.tokens}")
@pytest.mark.parametrize(
    "qtype", [QuantType.F32, QuantType.F16, QuantType.Q4_K, QuantType.Q6_K], ids=lambda qtype: qtype.name
)
def test_tiles_of_plans(device: EmulatedDevice, tile: WgmmaTile, qtype: QuantType) -> None:
    """The last tile of tokens and of rows is a part; more steps than stages; blocks that take turns."""
    case = mul_mat_case(qtype, tile.tokens + 9, 2 * tile.rows - 31, 520 if FORMATS[qtype].block_size == 1 else 512)
    verdict = check_case(device, in_tile(case, for_type(tile, qtype)), repeats=2)
    assert verdict.passed, verdict


def several_in_tile(qtype: QuantType, rows: Sequence[int], tile: WgmmaTile, output: Output) -> Case:
    """Matrices of odd sizes in one launch, in this tile; between their products, columns that nobody may write."""
    tokens, k, gap = tile.tokens + 9, 256, 3
    firsts = [gap, *(gap + np.cumsum(rows) + gap * np.arange(1, len(rows) + 1))]
    columns = int(firsts[-1])

    def reference(x: np.ndarray, weights: Sequence[Weight], out: np.ndarray) -> None:
        for weight, first in zip(weights, firsts, strict=False):
            part = out[:, first : first + weight.shape[0]]
            products = np.empty(part.shape, x.dtype)
            mul_mat_ref(x, weight, None, products)
            part[...] = products + (part if output is Output.ADD else 0)

    def plan(target: Target, x: Any, weights: Sequence[Weight], out: Any) -> list[KernelLaunch]:
        outs = [out.reshape(-1)[first:] for first in firsts[: len(weights)]]
        return [wgmma_launch(target, x, weights, outs, columns, int(output), tile)]

    def arguments(rng: np.random.Generator) -> tuple[Any, ...]:
        weights = tuple(random_weight(rng, qtype, number, k) for number in rows)
        out = normal(rng, tokens, columns).astype(np.float16 if output is Output.F16 else np.float32)
        return normal(rng, tokens, k).astype(np.float16), weights, out

    def rounded(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, weights, out = arguments
        return x.astype(np.float32), tuple(half_weight(weight) for weight in weights), out

    op = Op("mul_mat_wgmma", reference, plan)
    return Case(op, f"{qtype.name}, {rows}", arguments, (2,), floor=HALF, rounded=rounded)


@pytest.mark.parametrize(
    ("tile", "output"),
    list(zip(TILES, itertools.cycle((Output.ADD, Output.F16, Output.F32)), strict=False)),
    ids=lambda value: f"{value.rows} x {value.tokens}" if isinstance(value, WgmmaTile) else value.name,
)
def test_several_matrices_in_tiles_of_plans(device: EmulatedDevice, tile: WgmmaTile, output: Output) -> None:
    """Each matrix ends within a tile; one begins with the first tile behind it, in columns of its own."""
    for qtype, rows in ((QuantType.Q4_K, (tile.rows + 1, 33, 17)), (QuantType.F16, (7, tile.rows + 6))):
        case = several_in_tile(qtype, rows, for_type(tile, qtype), output)
        verdict = check_case(device, case, repeats=1)
        assert verdict.passed, verdict


@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 200])
def test_only_the_tokens_that_there_are_cost_time(device: EmulatedDevice, tokens: int) -> None:
    case = mul_mat_case(QuantType.Q8_0, tokens, 70, 96)
    verdict = check_case(device, in_tile(case, TILES[0], np.float16), repeats=1)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "case",
    [
        linear_case((QuantType.Q4_K,) * 3, (130, 33, 17), 35, 1280, norm=True, bias=True),
        linear_case((QuantType.Q6_K,), (97,), 70, 768, dtype=np.float16, accumulate=True),
        linear_case((QuantType.Q8_0,) * 2, (97, 35), 35, 768, dtype=np.float16, accumulate=True),
        linear_case((QuantType.F16,) * 2, (70, 3), 40, 1024, dtype=np.float16),
        linear_case((QuantType.Q8_0,) * 2, (40, 40), 35, 512, gate=Gate.SILU, dtype=np.float16),
    ],
    ids=str,
)
def test_shares_of_k(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Blocks share k as for large matrices, and add up in one order; not where products go to arrays of their own."""
    monkeypatch.setattr(product_wgmma, "SUM_TIME", -1e6)
    product_wgmma._cut.cache_clear()
    try:
        launched = [source for source, _ in sources(device, case)]
        assert ("sum_parts" in launched) == ("silu" not in case.name), launched
        check(device, case, repeats=2)
    finally:
        product_wgmma._cut.cache_clear()


def test_launches_that_start_early_have_tiles_for_it() -> None:
    assert product_wgmma.EARLY_TOKENS == OVERLAP_TOKENS


def test_how_k_is_shared() -> None:
    for num_tokens, rows, k, shares in (
        (128, (4096,), 12288, 4),
        (48, (4096,), 4096, 4),
        (512, (4096,), 4096, 1),
        (2048, (14336,), 4096, 1),
        (48, (4096,), 4000, 1),
    ):
        assert product_cut(HOPPER, num_tokens, rows, k, 8).shares == shares, (num_tokens, rows, k)


def test_rows_that_are_not_aligned_to_pairs(device: EmulatedDevice) -> None:
    """Neighbours in one output: an odd column to begin with, an odd distance from row to row."""
    check(device, linear_case((QuantType.Q4_K, QuantType.Q8_0), (33, 130), 35, 256, bias=True))


LINEAR_CASES = (
    linear_case((QuantType.Q6_K, QuantType.Q8_0), (40, 40), 35, 256, norm=True, gate=Gate.SILU),
    linear_case((QuantType.Q4_K,), (97,), 200, 256, dtype=np.float16, accumulate=True),
    linear_case((QuantType.F16,), (98,), 70, 72, accumulate=True),
    linear_case((QuantType.Q4_K, QuantType.F32), (40, 24), 35, 256),
    linear_case((QuantType.Q4_K,) * 3, (130, 33, 17), 35, 256, norm=True, bias=True),
    linear_case((QuantType.F16,) * 4, (10, 70, 2, 66), 70, 72, dtype=np.float16),
    linear_case((QuantType.Q8_0,) * 2, (140, 140), 35, 96, norm=True, gate=Gate.SILU),
    linear_case((QuantType.Q6_K,) * 3, (129, 1, 31), 70, 256, dtype=np.float16, accumulate=True),
)


def test_neighbours_of_a_type_share_a_launch(device: EmulatedDevice) -> None:
    q4, q8 = QuantType.Q4_K, QuantType.Q8_0
    for types, launches in (((q4, q4, q4), 1), ((q4, q8, q8), 2), ((q8, q8, q8, q8), 2)):
        case = linear_case(types, (40,) * len(types), 35, 256, dtype=np.float16)
        assert sources(device, case) == [("mul_mat_wgmma", "sm_90a")] * launches
    gated = linear_case((q4, q4), (40, 40), 35, 256, dtype=np.float16, gate=Gate.SILU)
    assert [source for source, _ in sources(device, gated)] == ["mul_mat_wgmma", "gate_mul"]


def test_matrices_that_fill_a_gpu_alone_stay_apart() -> None:
    for num_tokens, rows, together in (
        (128, (4096, 1024, 1024), True),
        (512, (4096, 1024, 1024), True),
        (128, (12288, 12288), False),
        (512, (12288, 12288), True),
        (2048, (1024, 1024), True),
    ):
        assert gains_together(HOPPER, num_tokens, rows, 4096) == together, (num_tokens, rows)


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_linear(device: EmulatedDevice, case: Case) -> None:
    check(device, case)


EXPERT_CASES = (
    mul_mat_id_case(QuantType.Q4_K, 33, 7, 3, 97, 512, 64, dtype=np.float16),
    mul_mat_id_case(QuantType.Q8_0, 9, 30, 3, 130, 96, 32, shared_input=False, dtype=np.float16),
    mul_mat_id_case(QuantType.F16, 65, 5, 2, 97, 104, 128, dtype=np.float16),
    mul_mat_id_case(QuantType.Q6_K, 170, 3, 2, 140, 256, 128, dtype=np.float16),
    mul_mat_id_case(QuantType.IQ2_XS, 170, 3, 2, 140, 256, 192, dtype=np.float16),
    mul_mat_id_case(QuantType.F32, 70, 3, 2, 65, 96, 160, dtype=np.float16),
    mul_mat_id_case(QuantType.Q4_K, 50, 5, 3, 300, 768, 64, dtype=np.float16),
    mul_mat_id_case(QuantType.Q6_K, 50, 5, 3, 300, 256, 64, dtype=np.float16),
)


@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
def test_experts(device: EmulatedDevice, case: Case) -> None:
    """Experts that nobody chose, tiles that end early, more blocks than tiles."""
    check(device, case, "mul_mat_id_wgmma")


GATED_EXPERT_CASES = (
    gated_mul_mat_id_case(QuantType.Q4_K, QuantType.Q4_K, 90, 128, np.float16, rows=76),
    gated_mul_mat_id_case(QuantType.Q8_0, QuantType.Q8_0, 70, 64, np.float16),
    gated_mul_mat_id_case(QuantType.F16, QuantType.F16, 40, 32, np.float16, rows=130),
)


@pytest.mark.parametrize("case", GATED_EXPERT_CASES, ids=str)
def test_gated_experts_are_one_launch(device: EmulatedDevice, case: Case) -> None:
    """Rows that end within a tile, an odd number of them, more tiles than one."""
    assert sources(device, case) == [("mul_mat_id_wgmma", "sm_90a")]
    check(device, case, "mul_mat_id_wgmma")


def test_gated_experts_of_two_types_are_three_launches(device: EmulatedDevice) -> None:
    case = gated_mul_mat_id_case(QuantType.Q4_K, QuantType.Q6_K, 70, 64, np.float16)
    assert sources(device, case) == [("mul_mat_id_wgmma", "sm_90a")] * 2 + [("gate_mul", "")]
    check(device, case, "mul_mat_id_wgmma")


@pytest.mark.parametrize("bm", [160, 192])
def test_experts_of_float32_activations_take_the_other_kernel(device: EmulatedDevice, bm: int) -> None:
    case = mul_mat_id_case(QuantType.Q8_0, 70, 3, 2, 65, 96, bm)
    assert sources(device, case) == [("mul_mat_id", "")]
    verdict = check_case(device, case, repeats=1)
    assert verdict.passed, verdict


def test_only_hopper_gets_these() -> None:
    for arch, wanted in (("sm_90", True), ("sm_89", False), ("sm_100", False), ("gfx942", False)):
        assert uses_wgmma(replace(HOPPER, arch=arch), QuantType.Q4_K) == wanted
    assert not uses_wgmma(None, QuantType.Q4_K)


@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_tiles_fit_into_shared_memory(qtype: QuantType) -> None:
    tiles = [
        for_type(product_cut(HOPPER, tokens, rows, 4096, 8).tile, qtype)
        for tokens in (33, 65, 129, 257, 2048)
        for rows in ((8,), (4096,), (150_000,), (4096, 1024, 1024))
    ]
    tiles += [expert_tile(bm, qtype) for bm in EXPERT_TOKENS]
    assert all(tile.fits(qtype) and tile.x_stages >= 2 for tile in tiles)


def test_tiles_that_were_the_fastest_on_an_h200() -> None:
    """Of those in BENCHMARKS.md."""
    for num_tokens, num_rows, fastest in (
        (2048, 14336, (128, 256)),
        (512, 14336, (128, 256)),
        (128, 14336, (128, 128)),
        (2048, 4096, (128, 256)),
        (512, 4096, (128, 128)),
        (256, 4096, (64, 128)),
        (65, 4096, (64, 64)),
    ):
        tile = product_cut(HOPPER, num_tokens, [num_rows], 4096).tile
        assert (tile.rows, tile.tokens) == fastest, (num_tokens, num_rows)


def test_tiles_of_experts_that_were_the_fastest_on_an_h200() -> None:
    """The same of 128 experts, of which a token uses eight."""
    weight = Weight("experts", (128, 768, 2048), QuantType.Q4_K, None)
    for num_tokens, fastest in (
        (256, (256, 64)),
        (512, (256, 64)),
        (1024, (128, 128)),
        (2048, (128, 160)),
        (8192, (128, 192)),
    ):
        tile = expert_tile(expert_tile_rows(HOPPER, 8 * num_tokens, weight), weight.qtype)
        assert (tile.rows, tile.tokens) == fastest, num_tokens
