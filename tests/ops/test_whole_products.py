"""Products of few tokens as whole numbers, `mul_mat_thin_s8`: exact where activations are whole numbers already."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.kernel_samples import random_weight
from pyllm.ops import product_whole
from pyllm.ops.mul_mat import mul_mat
from pyllm.ops.op import Target
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB
from pyllm.ops.product_whole import APART_TYPES, WHOLE_TYPES, Whole, static_bytes
from pyllm.quants import FORMATS, QuantType, dequantize
from pyllm.quants.grids import SELECTOR_TYPES, grid_selectors, grid_words
from pyllm.weight import Weight

LARGEST = 32639  # of the whole numbers that a unit of activations becomes
KINDS = ("Q4_1", "NVFP4", "Q5_K", "Q3_K", "IQ2_S", "IQ1_M")  # one for each way to use scales


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(32, "mma")
    yield device
    device.close()


def check(device: EmulatedDevice, qtype: QuantType, num_tokens: int, k: int) -> Whole:
    """Only the sums of units, in float32, are rounded. Returns how the product was cut up."""
    rows = 35
    rng = np.random.default_rng(int(qtype))
    x = rng.integers(-LARGEST, LARGEST + 1, (num_tokens, k)).astype(np.float32)
    x[:, ::32] = LARGEST  # the scale of every unit is then 1
    packed = random_weight(rng, qtype, rows, k).array.view(np.uint8)
    array, held = device.upload_weight(packed, qtype, (rows, k))
    weight = Weight("test", (rows, k), held, array)
    assert device.target is not None
    whole = Whole.of(device.target, num_tokens, weight, 3, 1)
    assert whole is not None
    out = device.empty((num_tokens, rows), np.float32)
    mul_mat(device, device.upload(x), weight, out)
    values = dequantize(packed, qtype).astype(np.float64)
    difference = np.abs(device.download(out) - x.astype(np.float64) @ values.T)
    assert (difference <= 1e-6 * np.abs(x.astype(np.float64)) @ np.abs(values).T).all()
    return whole


@pytest.mark.parametrize("qtype", sorted(WHOLE_TYPES), ids=lambda qtype: qtype.name)
def test_all_block_types(device: EmulatedDevice, qtype: QuantType) -> None:
    check(device, qtype, 3, 768 if FORMATS[qtype].block_size == 256 else 1024)


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "MXFP4", "NVFP4"])
def test_units_of_one_block(device: EmulatedDevice, name: str) -> None:
    """They begin at any multiple of what blocks are aligned to."""
    check(device, QuantType[name], 2, 9 * FORMATS[QuantType[name]].block_size)


@pytest.mark.parametrize("qtype", sorted(APART_TYPES), ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("blocks", [1, 2])
def test_one_token(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, qtype: QuantType, blocks: int) -> None:
    """Each lane adds up its own weights; units of one and of two blocks."""
    monkeypatch.setattr(product_whole, "MANY_UNITS", 0 if blocks == 2 else 1 << 30)
    assert check(device, qtype, 1, 1024).unit_k == 256 * blocks


@pytest.mark.parametrize("name", KINDS)
def test_more_tokens(device: EmulatedDevice, name: str) -> None:
    check(device, QuantType[name], 7, 512)


@pytest.mark.parametrize("qtype", sorted(SELECTOR_TYPES), ids=lambda qtype: qtype.name)
def test_selectors_name_the_codebook(qtype: QuantType) -> None:
    selectors, levels = grid_selectors(qtype)
    elements = grid_words(qtype).view(np.uint8).reshape(-1, 8)
    assert len(selectors) == len(elements)
    for place, element in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
        number = selectors >> 4 * place & 15
        assert (levels >> 8 * number & 255 == elements[:, element]).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_codebooks_fit_beside_the_rest(arch: str) -> None:
    target, limit = Target("cuda", arch, 32, "mma"), SHARED_KIB.get(arch, OTHERS_SHARED_KIB) << 10
    for qtype in WHOLE_TYPES:
        size = 4096 // FORMATS[qtype].block_size * FORMATS[qtype].block_bytes
        weight = Weight("test", (14336, 4096), qtype, np.broadcast_to(np.uint8(0), (14336, size)))
        for num_tokens in (1, 8):
            if whole := Whole.of(target, num_tokens, weight, 896, 1):
                assert whole.shared_bytes(target, num_tokens, 4096) + static_bytes(qtype, whole.tokens) <= limit
