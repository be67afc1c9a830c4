"""Plans of products at the sizes of real models, for GPUs that need not be there: launches that those take, and scratch
that is enough."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pyllm.device.emulation.kernel import MAX_GRID
from pyllm.errors import ShapeError
from pyllm.ops import product_plan
from pyllm.ops.linear import linear_scratch, plan_linear
from pyllm.ops.op import GemmLaunch, KernelLaunch, Target
from pyllm.ops.product_plan import Gate, Norm
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB
from pyllm.ops.product_wgmma import WgmmaTile
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight
from tests.ops.test_dense_ops import WEIGHT_TYPES

TARGETS = (
    Target("cuda", "sm_90", 32, "mma"),
    Target("cuda", "sm_89", 32, "mma", 46),
    Target("hip", "gfx1151", 32, "wmma", 40),
    Target("hip", "gfx942", 64, "mfma", 304),
)
VOCABULARIES = (((49152,), 576), ((262144,), 640), ((151936,), 896), ((151936,), 1024), ((128256,), 4096))
LAYERS = (((2048, 512, 512), 1024), ((4096, 1024, 1024), 4096), ((1000, 8), 2048), ((3072, 3072), 1024))
COUNTS = (1, 9, 17, 33, 64, 128, 300, 512, 2048)


def weight(qtype: QuantType, rows: int, k: int) -> Weight:
    block = FORMATS[qtype]
    dtype, columns = (
        (np.float32, k) if qtype == QuantType.F32 else (np.uint8, k // block.block_size * block.block_bytes)
    )
    return Weight("test", (rows, k), qtype, np.broadcast_to(np.zeros(1, dtype), (rows, columns)))


def check(target: Target, rows: tuple[int, ...], k: int, count: int, qtype: QuantType) -> None:
    """Of the launches for so many tokens and matrices of so many rows."""
    weights = [weight(qtype, number, k) for number in rows]
    x, out = np.empty((count, k), np.float32), np.empty((count, sum(rows)), np.float32)
    scratch = np.empty(linear_scratch(target, count, weights, x.dtype), np.float16)
    written = []
    for launch in plan_linear(target, x, weights, None, None, Gate.NONE, False, scratch, out):
        if isinstance(launch, GemmLaunch):
            written.append((launch.first_column, launch.b.shape[0]))
            continue
        assert isinstance(launch, KernelLaunch)
        assert all(0 < extent <= most for extent, most in zip(launch.grid, MAX_GRID, strict=False)), launch
        if launch.entry == "sum_parts":
            parts, *_, shares, tokens, columns, _ = launch.args
            assert parts.size == shares * tokens * columns
    if written and len(rows) == 1:  # in pieces, all of it
        ends = [*itertools.accumulate(size for _, size in written)]
        assert [first for first, _ in written] == [0, *ends[:-1]] and ends[-1] == rows[0]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("qtype", ["F32", "F16", "Q8_0", "Q4_0"])
def test_vocabularies_and_layers_of_real_models(target: Target, qtype: str) -> None:
    for (rows, k), count in itertools.product((*VOCABULARIES, *LAYERS), COUNTS):
        check(target, rows, k, count, QuantType[qtype])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=lambda qtype: qtype.name)
def test_products_fit_into_the_shared_memory_of_a_block(target: Target, qtype: QuantType) -> None:
    """With the norm in front of them, too, which brings all of x into it."""
    kib = SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB) if target.vendor == "cuda" else 64
    for k, count, more in itertools.product((4096, 7168, 8192, 12288), (1, 2, 3, 9, 17, 64), ((), (1024, 1024), (64,))):
        weights = [weight(qtype, rows, k) for rows in (64 if more == (64,) else k, *more)]
        columns = sum(one.shape[0] for one in weights)
        for gate in (Gate.NONE, Gate.SILU) if more == (64,) else (Gate.NONE,):
            x, out = np.empty((count, k), np.float32), np.empty((count, 64 if gate else columns), np.float16)
            size = linear_scratch(target, count, weights, x.dtype, norm=True, gate=bool(gate))
            norm = Norm(np.empty(k, np.float32), 1e-5)
            for launch in plan_linear(target, x, weights, norm, None, gate, False, np.empty(size, np.float16), out):
                assert isinstance(launch, GemmLaunch) or launch.shared_bytes <= kib << 10, (k, count, more, launch)


MIXED = tuple(QuantType[name] for name in ("Q4_K", "Q6_K", "IQ2_XXS", "Q8_0", "F16", "F32"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("rows", [97, 12288])
def test_scratch_is_enough_for_mixed_types(target: Target, rows: int) -> None:
    """Some of them may be taken by other kernels than all together; plans refuse a part that is too short."""
    for qtypes, count in itertools.product(itertools.product(MIXED, MIXED), (9, 17, 20, 33, 65, 129, 300, 513)):
        weights = [weight(qtype, rows, 4096) for qtype in qtypes]
        for gate, dtype, norm in (
            (Gate.SILU, np.float32, True),
            (Gate.GELU, np.float16, False),
            (Gate.NONE, np.float32, True),
        ):
            x, out = np.empty((count, 4096), dtype), np.empty((count, rows if gate else 2 * rows), np.float32)
            size = linear_scratch(target, count, weights, x.dtype, norm, bool(gate))
            given = Norm(np.empty(4096, np.float32), 1e-5) if norm else None
            assert plan_linear(target, x, weights, given, None, gate, False, np.empty(size, np.float16), out)


@pytest.mark.parametrize("count", [20, 40, 300])
def test_less_scratch_is_an_error(count: int) -> None:
    weights = [weight(QuantType.Q4_K, 2048, 8192)]
    x, out = np.empty((count, 8192), np.float32), np.empty((count, 2048), np.float32)
    size = linear_scratch(TARGETS[0], count, weights, x.dtype)
    with pytest.raises(ShapeError, match="elements are needed"):
        plan_linear(TARGETS[0], x, weights, None, None, Gate.NONE, False, np.empty(size - 1, np.float16), out)


@pytest.mark.parametrize("count", [300, 700])
def test_layers_of_one_shape_are_weighed_up_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """All layers of a model ask for the same plan, in every ubatch: costs are not worked out again."""
    weights = [weight(qtype, 2048, 4096) for qtype in (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)]
    x, out = np.empty((count, 4096), np.float32), np.empty((count, 3 * 2048), np.float32)

    def plan() -> list[str]:
        scratch = np.empty(linear_scratch(TARGETS[0], count, weights, x.dtype), np.float16)
        launches = plan_linear(TARGETS[0], x, weights, None, None, Gate.NONE, False, scratch, out)
        return [launch.source for launch in launches if isinstance(launch, KernelLaunch)]

    def unasked(*_: object) -> int:
        pytest.fail("costs are worked out again")

    first = plan()
    monkeypatch.setattr(WgmmaTile, "cost", unasked)
    monkeypatch.setattr(product_plan, "arrange_time", unasked)
    assert plan() == first
