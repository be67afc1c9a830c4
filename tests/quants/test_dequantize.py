"""Decoding of block formats: hand-made blocks, random bytes against the gguf package, reference rows, odd shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pyllm.errors import ShapeError, UnsupportedError
from pyllm.gguf_file import GGUFFile
from pyllm.quants import FORMATS, QuantType, dequantize, row_bytes

QUANT_FILES = sorted((Path(__file__).parents[1] / "data" / "refdata" / "quant").glob("*.gguf"))
DECODABLE = [qtype for qtype, block_format in FORMATS.items() if block_format.decode]
STORED_ONLY = [qtype for qtype, block_format in FORMATS.items() if not block_format.decode]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit patterns; any NaN equals any other, their payload depends on the order of operands."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def gguf_dequantize(data: np.ndarray, qtype: QuantType) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(qtype)))


def random_rows(qtype: QuantType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes: every scale occurs, subnormal, infinite and NaN ones too."""
    *rows, elements = shape
    return np.random.default_rng(seed).integers(0, 256, (*rows, row_bytes(qtype, elements)), dtype=np.uint8)


def block(size: int, *fields: tuple[int, bytes | list[int]], fill: int = 0) -> np.ndarray:
    """A block of `size` bytes, all `fill`, with `fields` written at their offsets."""
    packed = np.full(size, fill, np.uint8)
    for offset, values in fields:
        packed[offset : offset + len(values)] = list(values)
    return packed


def f16(value: float) -> bytes:
    return np.float16(value).tobytes()


# The 6-bit scales of Q4_K and Q5_K: scale 0 is 3, minimum 0 is 4; scale 4 is 2 + 16, minimum 4 is 5 + 32; the others 0.
PACKED_SCALES = [(4, [0x43]), (8, [0x84]), (12, [0x52])]

# Type, block, values: {range or index: value} applied in order to zeros.
HAND_MADE = [
    (QuantType.F32, np.frombuffer(np.float32(1.5).tobytes(), np.uint8), {0: 1.5}),
    (
        QuantType.F16,
        block(8, (0, [0x00, 0x3C, 0x00, 0xC0, 0x01, 0x00, 0x00, 0x7C])),
        {0: 1, 1: -2, 2: 2**-24, 3: np.inf},
    ),
    (
        QuantType.BF16,
        block(8, (0, [0x80, 0x3F, 0x40, 0xC0, 0x01, 0, 0x80, 0x7F])),
        {0: 1, 1: -3, 2: 2**-133, 3: np.inf},
    ),
    (QuantType.Q4_0, block(18, (0, f16(0.5)), (2, [0x1F]), fill=0x88), {0: 3.5, 16: -3.5}),
    (QuantType.Q4_1, block(20, (0, f16(2)), (2, f16(-1)), (7, [0xA5])), {range(32): -1, 3: 9, 19: 19}),
    (
        QuantType.Q5_0,
        block(22, (0, f16(1)), (2, [0x01, 0, 0, 0x80]), (21, [0x70])),
        {range(32): -16, 0: 0, 31: 7},
    ),
    (
        QuantType.Q5_1,
        block(24, (0, f16(0.5)), (2, f16(1)), (6, [0x02]), (9, [0x32])),
        {range(32): 1, 1: 2, 17: 10.5},
    ),
    (QuantType.Q8_0, block(34, (0, f16(0.25)), (2, [0x80]), (33, [0x7F])), {0: -32, 31: 31.75}),
    (
        QuantType.Q2_K,
        block(84, (0, [0x42]), (15, [0x13]), (16, [0x03]), (64, [0x80]), (80, f16(1)), (82, f16(0.25))),
        {range(0, 16): -1, 0: 5, range(240, 256): -0.25, 240: 5.75},
    ),
    (
        QuantType.Q3_K,
        block(
            110,
            (0, [0x01]),
            (16, [0x40]),
            (32, [0x02]),
            (80, [0x30]),
            (96, [0x05]),
            (101, [0x30]),
            (104, [0xAA, 0xEA, 0xAA, 0xAA]),
            (108, f16(0.5)),
        ),
        {range(0, 16): -10, 0: 5, range(208, 224): -38, 208: 28.5},
    ),
    (
        QuantType.Q4_K,
        block(144, (0, f16(1)), (2, f16(0.5)), *PACKED_SCALES, (16, [0x07]), (85, [0x09])),
        {range(0, 32): -2, 0: 19, range(128, 160): -18.5, 133: 143.5},
    ),
    (
        QuantType.Q5_K,
        block(176, (0, f16(1)), (2, f16(0.5)), *PACKED_SCALES, (16, [0x10]), (21, [0x01]), (48, [0x07]), (117, [0x09])),
        {range(0, 32): -2, 0: 19, 5: 46, range(128, 160): -18.5, 128: 269.5, 133: 143.5},
    ),
    (
        QuantType.Q6_K,
        block(
            210, (0, [0x0F]), (80, [0x05]), (128, [0x03]), (176, [0x02]), (192, [0x02]), (201, [0xFD]), (208, f16(0.5))
        ),
        {range(0, 16): -32, 0: 31, range(144, 160): 48, 144: -7.5},
    ),
    (QuantType.IQ4_NL, block(18, (0, f16(2)), (2, [0xF0]), fill=0x88), {range(32): 2, 0: -254, 16: 226}),
    (
        QuantType.IQ4_XS,
        block(136, (0, f16(0.5)), (2, [0xAA, 0xAA]), (5, [0x70]), (56, [0xF0])),
        {range(96, 128): -444.5, 112: 395.5},
    ),
]


@pytest.mark.parametrize(("qtype", "packed", "values"), HAND_MADE, ids=[row[0].name for row in HAND_MADE])
def test_hand_made_block(qtype, packed, values):
    expected = np.zeros(len(packed) // FORMATS[qtype].block_bytes * FORMATS[qtype].block_size, np.float32)
    for where, value in values.items():
        expected[where] = value
    np.testing.assert_array_equal(dequantize(packed, qtype), expected)


@pytest.mark.parametrize("qtype", DECODABLE, ids=lambda qtype: qtype.name)
def test_random_bytes_like_gguf(qtype):
    # 161 rows of 1,024 are more than one chunk, and the last chunk is a short one.
    data = random_rows(qtype, (161, 1024))
    assert_same_bits(dequantize(data, qtype), gguf_dequantize(data, qtype))


@pytest.mark.parametrize("qtype", DECODABLE, ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("shape", [(256,), (1, 256), (3, 512), (2, 3, 256)], ids=str)
def test_shapes(qtype, shape):
    data = random_rows(qtype, shape)
    values = dequantize(data, qtype)
    assert values.shape == shape
    flat = data.reshape(-1, data.shape[-1])
    assert_same_bits(values.reshape(-1, shape[-1]), gguf_dequantize(flat, qtype))


@pytest.mark.parametrize("qtype", DECODABLE, ids=lambda qtype: qtype.name)
def test_empty(qtype):
    num_bytes = row_bytes(qtype, 256)
    assert dequantize(np.empty((0, num_bytes), np.uint8), qtype).shape == (0, 256)
    assert dequantize(np.empty((3, 0), np.uint8), qtype).shape == (3, 0)


@pytest.mark.parametrize("qtype", [QuantType.F16, QuantType.BF16, QuantType.Q4_0, QuantType.Q6_K])
def test_strided_input_and_output(qtype):
    data = random_rows(qtype, (7, 512))
    expected = dequantize(data, qtype)
    half_row = row_bytes(qtype, 256)
    for packed, values in [
        (data[::2], expected[::2]),
        (data[::-1], expected[::-1]),
        (data[:, half_row:], expected[:, 256:]),
        (np.asfortranarray(data), expected),
        (np.broadcast_to(data[0], (3, *data[0].shape)), np.broadcast_to(expected[0], (3, 512))),
    ]:
        assert_same_bits(dequantize(packed, qtype), np.ascontiguousarray(values))
    wide = np.full((7, 1024), 5, np.float32)
    assert dequantize(data, qtype, wide[:, ::2]).base is not None
    assert_same_bits(np.ascontiguousarray(wide[:, ::2]), expected)
    assert (wide[:, 1::2] == 5).all()


@pytest.mark.parametrize("qtype", DECODABLE, ids=lambda qtype: qtype.name)
def test_out_is_filled_completely_and_input_untouched(qtype):
    data = random_rows(qtype, (3, 256))
    data.flags.writeable = False
    before = data.copy()
    out = np.full((3, 256), np.nan, np.float32)
    assert dequantize(data, qtype, out) is out
    assert_same_bits(out, dequantize(data, qtype))
    np.testing.assert_array_equal(data, before)
    assert not np.shares_memory(dequantize(data, qtype), data)


def test_sizes():
    assert row_bytes(QuantType.Q4_K, 512) == 288
    assert row_bytes(QuantType.Q8_0, 0) == 0
    assert len(FORMATS) == len(QuantType)
    assert all(block_format.type == qtype for qtype, block_format in FORMATS.items())


def test_sizes_like_gguf():
    gguf = pytest.importorskip("gguf")
    for qtype, (block_size, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        if qtype == gguf.GGMLQuantizationType.Q8_1:
            continue  # the package says 40 bytes, ggml 36; the type is never in a file
        assert FORMATS[QuantType(int(qtype))].block_size == block_size
        assert FORMATS[QuantType(int(qtype))].block_bytes == block_bytes


@pytest.mark.parametrize("num_elements", [1, 31, 255, -256])
def test_partial_rows_are_refused(num_elements):
    with pytest.raises(ShapeError, match="whole number of Q6_K blocks"):
        row_bytes(QuantType.Q6_K, num_elements)


def test_wrong_arrays_are_refused():
    data = random_rows(QuantType.Q4_0, (2, 64))
    for packed in (data[:, :-1], data.view(np.int8), np.uint8(3)):
        with pytest.raises(ShapeError):
            dequantize(np.asarray(packed), QuantType.Q4_0)
    for out in (np.empty((2, 32), np.float32), np.empty((2, 64), np.float16)):
        with pytest.raises(ShapeError, match="expected float32"):
            dequantize(data, QuantType.Q4_0, out)


@pytest.mark.parametrize("qtype", STORED_ONLY, ids=lambda qtype: qtype.name)
def test_undecodable_types_are_named(qtype):
    with pytest.raises(UnsupportedError, match=f"cannot decode {qtype.name}; it reads F32"):
        dequantize(np.empty((1, row_bytes(qtype, 256)), np.uint8), qtype)


@pytest.mark.parametrize("path", QUANT_FILES, ids=lambda path: path.stem)
def test_reference_rows(path):
    references = np.load(path.with_suffix("").with_name(path.stem + ".ref.npz"))
    names = [key for key in references if key.startswith("deq:")]
    assert names
    with GGUFFile(path) as file:
        for key in names:
            name = key.removeprefix("deq:")
            rows = file.tensor_data(name)
            rows = rows.reshape(-1, rows.shape[-1])[:2]  # experts are stacks of matrices
            assert_same_bits(dequantize(rows, file.tensors[name].qtype), references[key])


def test_import_is_light():
    code = "import sys, pyllm.quants; assert 'gguf' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
