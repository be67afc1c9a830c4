"""Number formats, vector accesses and matrix tiles of the kernel headers, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.throwaway import Throwaway

ALL_16_BITS = np.arange(65536, dtype=np.uint16)


def interesting_floats() -> np.ndarray:
    """Every f16, what lies halfway to the next one and beside that, extremes, and random bits."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        halves = ALL_16_BITS.view(np.float16).astype(np.float32)
    finite = halves[np.isfinite(halves)].astype(np.float64)
    middles = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        beside = [np.nextafter(middles, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    extremes = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 65519.99, 65520, -65520], np.float32)
    return np.concatenate([halves, middles, *beside, random, extremes])


def test_every_f16_to_f32_and_back(anywhere: Throwaway) -> None:
    source = """
    KERNEL(256) probe(const f16* h, float* wide, u16* back) {
        const int i = blockIdx.x * 256 + threadIdx.x;
        wide[i] = to_f32(h[i]);
        back[i] = f16_to_bits(to_f16(to_f32(f16_from_bits(f16_to_bits(h[i])))));
    }
    """
    halves = ALL_16_BITS.view(np.float16)
    wide = anywhere.device.upload(np.zeros(65536, np.float32))
    back = anywhere.device.upload(np.zeros(65536, np.uint16))
    anywhere.launch(source, anywhere.device.upload(halves), wide, back, grid=(256,), block=(256,))
    with np.errstate(invalid="ignore"):
        expected = halves.astype(np.float32)
    number = ~np.isnan(expected)
    found = anywhere.device.download(wide)
    assert (found.view(np.uint32) == expected.view(np.uint32))[number].all()
    assert np.isnan(found[~number]).all()
    again = anywhere.device.download(back)
    assert (again == ALL_16_BITS)[number].all()
    assert np.isnan(again.view(np.float16)[~number]).all()


def test_f32_to_f16_and_bf16(anywhere: Throwaway) -> None:
    source = """
    KERNEL(256) probe(const float* x, f16* half, u16* brain, i32 n) {
        const int i = blockIdx.x * 256 + threadIdx.x;
        if (i >= n) return;
        half[i] = to_f16(x[i]);
        brain[i] = f32_to_bf16(f32_from_bits(f32_bits(x[i])));
    }
    """
    x = interesting_floats()
    half = anywhere.device.upload(np.zeros(len(x), np.float16))
    brain = anywhere.device.upload(np.zeros(len(x), np.uint16))
    grid = (-(-len(x) // 256),)
    anywhere.launch(source, anywhere.device.upload(x), half, brain, np.int32(len(x)), grid=grid, block=(256,))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    number = ~np.isnan(x)
    found = anywhere.device.download(half)
    assert (found.view(np.uint16) == expected.view(np.uint16))[number].all()
    assert np.isnan(found[~number]).all()

    bits = anywhere.device.download(brain)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    assert (bits[~number] == 0x7FC0).all()
    finite = np.isfinite(x) & (np.abs(x) < 3.3e38)
    above, below = ((bits[finite].astype(np.int64) + step).astype(np.uint32) << 16 for step in (1, -1))
    error = np.abs(wide[finite].astype(np.float64) - x[finite])
    for other in (above, below):  # no neighbour is nearer, and of two as near the even one was taken
        neighbour = other.view(np.float32).astype(np.float64)
        distance = np.abs(neighbour - x[finite])
        usable = np.isfinite(neighbour) & (np.signbit(neighbour) == np.signbit(x[finite]))
        assert (error <= distance)[usable].all()
        assert (bits[finite] % 2 == 0)[usable & (error == distance)].all()
    assert (wide[np.isinf(x)] == x[np.isinf(x)]).all()


def test_every_bf16_to_f32(anywhere: Throwaway) -> None:
    source = "KERNEL(256) probe(const u16* b, u32* out) { LINE }".replace(
        "LINE", "const int i = blockIdx.x * 256 + threadIdx.x; out[i] = f32_bits(bf16_to_f32(b[i]));"
    )
    out = anywhere.device.upload(np.zeros(65536, np.uint32))
    anywhere.launch(source, anywhere.device.upload(ALL_16_BITS), out, grid=(256,), block=(256,))
    assert (anywhere.device.download(out) == ALL_16_BITS.astype(np.uint32) << 16).all()


def test_mathematics_and_constants(anywhere: Throwaway) -> None:
    functions = {
        "fast_exp(x)": np.exp,
        "fast_exp2(x)": np.exp2,
        "expf(x)": np.exp,
        "tanhf(x)": np.tanh,
        "cosf(x)": np.cos,
        "sinf(x)": np.sin,
        "rsqrt_f(fabsf(x) + 1.0f)": lambda x: 1 / np.sqrt(np.abs(x) + 1),
        "fmaf(x, x, 0.25f)": lambda x: x * x + 0.25,
        "min(x, 0.5f) + max(x, 0.5f)": lambda x: x + 0.5,
        "x < 0 ? INFINITY_F : 1.0f": lambda x: np.where(x < 0, np.inf, 1),
        "x < 0 ? NAN_F : 1.0f": lambda x: np.where(x < 0, np.nan, 1),
        "fast_exp(-INFINITY_F) + x": lambda x: x,
    }
    lines = "".join(f"out[{row} * 64 + i] = {text};" for row, text in enumerate(functions))
    source = (
        f"KERNEL(64) probe(const float* in, float* out) {{ const int i = threadIdx.x; const float x = in[i]; {lines} }}"
    )
    x = np.linspace(-10, 10, 64, dtype=np.float32)
    out = anywhere.device.upload(np.zeros((len(functions), 64), np.float32))
    anywhere.launch(source, anywhere.device.upload(x), out, block=(64,))
    found = anywhere.device.download(out)
    for row, (text, function) in zip(found, functions.items(), strict=True):
        np.testing.assert_allclose(row, function(x.astype(np.float64)), rtol=2e-6, atol=1e-6, err_msg=text)


def test_dot4_is_signed(anywhere: Throwaway) -> None:
    source = "KERNEL(128) probe(const i32* a, const i32* b, i32* out) { const int i = threadIdx.x; LINE }".replace(
        "LINE", "out[i] = dot4(a[i], b[i], 1000);"
    )
    a, b = np.random.default_rng(0).integers(-128, 128, (2, 128, 4)).astype(np.int8)
    a[0] = b[0] = -128
    out = anywhere.device.upload(np.zeros(128, np.int32))
    words = [anywhere.device.upload(array.reshape(-1).view(np.int32)) for array in (a, b)]
    anywhere.launch(source, *words, out, block=(128,))
    assert (anywhere.device.download(out) == 1000 + (a.astype(int) * b).sum(axis=1)).all()


def test_16_byte_accesses(anywhere: Throwaway) -> None:
    source = """
    KERNEL(32) probe(const float* in, u32* out) {
        const f32x4 floats = load16<f32x4>(in + 4 * threadIdx.x);
        const u32x4 words = load16(in + 4 * threadIdx.x);
        u32x4 both = {f32_bits(floats.w), words.z, words.y, f32_bits(floats.x)};
        store16(out + 4 * threadIdx.x, both);
    }
    """
    x = np.random.default_rng(0).standard_normal((32, 4), np.float32)
    out = anywhere.device.upload(np.zeros((32, 4), np.uint32))
    anywhere.launch(source, anywhere.device.upload(x), out)
    assert (anywhere.device.download(out) == x.view(np.uint32)[:, ::-1]).all()


@pytest.mark.parametrize("stride", [16, 24, 72])
def test_tiles(anywhere: Throwaway, stride: int) -> None:
    source = """
    KERNEL(2 * WARP_SIZE) probe(const f16* a, const f16* b, float* out) {
        SHARED f16 rows[2][16 * STRIDE];
        SHARED f16 columns[2][16 * STRIDE];
        const int warp = WARP_ID();
        FragC c;
        tile_zero(c);
        for (int step = 0; step < 3; step++) {
            for (int i = LANE(); i < 256; i += WARP_SIZE) {
                const int source = warp * 16 * 48 + i / 16 * 48 + 16 * step + i % 16;
                rows[warp][i / 16 * STRIDE + i % 16] = a[source];
                columns[warp][i / 16 * STRIDE + i % 16] = b[source];
            }
            WARP_BARRIER();
            FragA fa;
            FragB fb;
            tile_load_a(fa, rows[warp], STRIDE);
            tile_load_b(fb, columns[warp], STRIDE);
            tile_mma(c, fa, fb);
            WARP_BARRIER();
        }
        for (int i = 0; i < TILE_C_ELEMENTS; i++) out[warp * 256 + tile_c_row(i) * 16 + tile_c_col(i)] = c.x[i];
    }
    """
    a, b = np.random.default_rng(stride).standard_normal((2, 2, 16, 48)).astype(np.float16)
    out = anywhere.device.upload(np.full((2, 16, 16), np.nan, np.float32))
    inputs = [anywhere.device.upload(array) for array in (a, b)]
    anywhere.launch(source, *inputs, out, block=(2 * anywhere.wave,), defines={"STRIDE": stride})
    exact = a.astype(np.float64) @ b.astype(np.float64).swapaxes(1, 2)
    np.testing.assert_allclose(anywhere.device.download(out), exact, rtol=0, atol=2e-5)


def test_a_product_over_the_columns_of_a_product(anywhere: Throwaway) -> None:
    """C = A B as the A of another product, whose B is stored by rows; sums and maxima along C's rows."""
    source = """
    KERNEL(WARP_SIZE) probe(const f16* a, const f16* b, const f16* v, float* out, float* of_rows, float* halves) {
        SHARED f16 tiles[3][16 * 24];
        for (int i = LANE(); i < 256; i += WARP_SIZE) {
            tiles[0][i / 16 * 24 + i % 16] = a[i];
            tiles[1][i / 16 * 24 + i % 16] = b[i];
            tiles[2][i / 16 * 24 + i % 16] = v[i];
        }
        WARP_BARRIER();
        FragA fa, weights;
        FragB fb, fv;
        FragC c, sum;
        tile_load_a(fa, tiles[0], 24);
        tile_load_b(fb, tiles[1], 24);
        tile_load_b_rows(fv, tiles[2], 24);
        tile_zero(c);
        tile_zero(sum);
        tile_mma(c, fa, fb);
        tile_c_to_a(weights, c);
        tile_mma(sum, weights, fv);
        float total[TILE_ROWS], most[TILE_ROWS];
        for (int slot = 0; slot < TILE_ROWS; slot++) total[slot] = 0, most[slot] = -INFINITY_F;
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            out[tile_c_row(i) * 16 + tile_c_col(i)] = sum.x[i];
            total[tile_c_slot(i)] += c.x[i];
            most[tile_c_slot(i)] = fmaxf(most[tile_c_slot(i)], c.x[i]);
        }
        for (int slot = 0; slot < TILE_ROWS; slot++) {
            of_rows[tile_row_of(slot)] = tile_row_sum(total[slot]);
            of_rows[16 + tile_row_of(slot)] = tile_row_max(most[slot]);
        }
        tile_add_halves(c);
        for (int i = 0; i < TILE_C_ELEMENTS; i++) halves[tile_c_row(i) * 16 + tile_c_col(i)] = c.x[i];
    }
    """
    a, b, v = np.random.default_rng(1).standard_normal((3, 16, 16)).astype(np.float16)
    outputs = [anywhere.device.upload(np.full(shape, np.nan, np.float32)) for shape in ((16, 16), (2, 16), (16, 16))]
    anywhere.launch(source, *map(anywhere.device.upload, (a, b, v)), *outputs, block=(anywhere.wave,))
    out, (sums, maxima), halves = map(anywhere.device.download, outputs)
    c = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(out, c.astype(np.float16).astype(np.float64) @ v.astype(np.float64), rtol=0, atol=5e-3)
    np.testing.assert_allclose(sums, c.sum(axis=1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(maxima, c.max(axis=1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(halves, np.tile(c[:8] + c[8:], (2, 1)), rtol=0, atol=2e-5)
