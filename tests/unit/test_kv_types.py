"""Row types of the KV cache: sizes, and quantised rows against blocks of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pyllm.kv_types import KV_TYPES, KVType

QUANTISED = [kv_type for kv_type in KV_TYPES.values() if kv_type.block > 1]


@pytest.mark.parametrize("kv_type", KV_TYPES.values(), ids=KV_TYPES)
@pytest.mark.parametrize("width", [32, 64, 96, 192, 1024, 1056, 5120])
def test_sizes(kv_type: KVType, width: int) -> None:
    stored = kv_type.encode(np.zeros((3, width), np.float32))
    assert stored.shape == (3, kv_type.row_size(width))
    assert stored.dtype == kv_type.storage
    assert kv_type.width(kv_type.row_size(width)) == width
    assert kv_type.row_bytes(width) == stored.nbytes // 3
    assert kv_type.row_bytes(width) % 16 == 0
    assert kv_type.decode(stored).shape == (3, width)


@pytest.mark.parametrize("kv_type", QUANTISED, ids=lambda kv_type: kv_type.name)
def test_values_are_those_of_a_ggufs_blocks(kv_type: KVType) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((257, 96), np.float32) * np.exp(rng.uniform(-8, 8, (257, 1))).astype(np.float32)
    x[0] = 0
    x[1] = np.round(x[1] * 4)  # ties, of rounding and of the largest element
    qtype = gguf.GGMLQuantizationType[kv_type.name.upper()]
    expected = gguf.dequantize(gguf.quantize(x, qtype), qtype)
    assert (kv_type.decode(kv_type.encode(x)) == expected).all()


@pytest.mark.parametrize("kv_type", QUANTISED, ids=lambda kv_type: kv_type.name)
def test_codes_come_first_and_scales_behind_them(kv_type: KVType) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :32] = np.linspace(-127, 127, 32) if kv_type.name == "q8_0" else np.arange(32) % 16 - 8
    row = kv_type.encode(x)[0]
    code_bytes = 64 if kv_type.name == "q8_0" else 32
    scales = row[code_bytes : code_bytes + 4].view(np.float16)
    assert scales.tolist() == [1, 0]
    assert not row[code_bytes + 4 :].any()
    if kv_type.name == "q8_0":
        assert row[:32].view(np.int8)[[0, 31]].tolist() == [-127, 127]
        assert not row[32:64].any()
    else:
        assert row[:16].tolist() == [17 * nibble for nibble in range(16)]  # elements i and 16 + i are alike here
        assert (row[16:32] == 0x88).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_type", QUANTISED, ids=lambda kv_type: kv_type.name)
def test_a_block_with_a_value_that_is_not_finite_is_nan(kv_type: KVType, bad: float) -> None:
    x = np.full((1, 64), 127, np.float32)
    x[0, 40] = bad
    values = kv_type.decode(kv_type.encode(x))
    assert np.isnan(values[0, 32:]).all()
    assert (values[0, :32] == 127).all()
