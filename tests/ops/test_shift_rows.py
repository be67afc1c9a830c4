"""shift_rows against complex rotations in float64: keys of lower positions, values as they were, tags of the page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ShapeError
from pyllm.kv_cache import LayerCache
from pyllm.kv_types import KV_TYPES, KVType
from pyllm.models.rope_scaling import RopeFrequencies, RopeScaling, rope_frequencies
from pyllm.ops.copy_rows import RowMove
from pyllm.ops.flash_attention import NUM_COUNTERS
from pyllm.ops.rope import RopePairing
from pyllm.ops.shift_rows import KeyTurn, shift_rows
from tests.ops.lives import check_against_float64, on_device
from tests.ops.test_rope import rotated

PAGE, SOURCE, TARGET, ROWS = 8, 8, 24, 7
# Beside the largest element of a block, where there are blocks: half a step of the codes, and the scale's rounding.
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11, "q4_0": 1 / 8 + 2.0**-11}
LLAMA_3 = np.array([1, 1, 1, 2, 4, 6, 8, 8], np.float32)
FREQUENCIES = {
    "plain": rope_frequencies(16, 10000.0, RopeScaling("none", 1.0, 2048, 1.0), None),
    "factors": rope_frequencies(16, 500000.0, RopeScaling("none", 1.0, 8192, 1.0), LLAMA_3),
    "linear": rope_frequencies(16, 10000.0, RopeScaling("linear", 8.0, 2048, 1.0), None),
    "yarn": rope_frequencies(16, 10000.0, RopeScaling("yarn", 4.0, 2048, 1.0), None),
}


def layer_cache(device: Device, kv_type: KVType, k: np.ndarray, v: np.ndarray) -> LayerCache:
    """Rows of a page at SOURCE under the tag 5; everything else is NaN under the tag 9."""
    stored = [kv_type.encode(np.full((4 * PAGE, x.shape[1]), np.nan, np.float32)) for x in (k, v)]
    tags = np.full(4 * PAGE, 9, np.uint32)
    for rows, x in zip(stored, (k, v), strict=True):
        rows[SOURCE : SOURCE + len(x)] = kv_type.encode(x)
    tags[SOURCE : SOURCE + len(k)] = 5
    arrays = (on_device(device, array) for array in (*stored, tags))
    return LayerCache(*arrays, PAGE, 0, on_device(device, np.zeros(NUM_COUNTERS, np.int32)))


def key_turn(device: Device, frequencies: RopeFrequencies, by: int, pairing: RopePairing, head_dim: int) -> KeyTurn:
    cos, sin = (on_device(device, table) for table in frequencies.turn(by))
    return KeyTurn(cos, sin, pairing, head_dim)


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize(("head_dim", "n_rot"), [(32, 32), (64, 24), (96, 96), (160, 64)])
@pytest.mark.parametrize("name", KV_TYPES)
def test_rows_are_moved_and_their_keys_turned(
    device: Device, name: str, head_dim: int, n_rot: int, pairing: RopePairing
) -> None:
    rng, kv_type, heads = np.random.default_rng(0), KV_TYPES[name], 3
    k, v = (rng.standard_normal((ROWS, heads * head_dim), np.float32) for _ in range(2))
    cache = layer_cache(device, kv_type, k, v)
    frequencies = rope_frequencies(n_rot, 10000.0, RopeScaling("none", 1.0, 2048, 1.0), None)
    before = [device.download(array) for array in (cache.k, cache.v, cache.tags)]
    turn = key_turn(device, frequencies, -1000, pairing, head_dim)
    shift_rows(device, cache, kv_type, turn, RowMove(SOURCE, TARGET, ROWS, 5, 77))
    after = [device.download(array) for array in (cache.k, cache.v, cache.tags)]
    stored = kv_type.decode(before[0][SOURCE : SOURCE + ROWS]).reshape(ROWS, heads, head_dim)
    angle = np.full((ROWS, 1), -1000.0) * frequencies.inv_freq.astype(np.float64)
    exact = rotated(stored, angle, pairing)
    found = kv_type.decode(after[0][TARGET : TARGET + ROWS]).reshape(exact.shape)
    if name == "f32":
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        check_against_float64(found, exact, plainly_rotated(stored, cos, sin, pairing))
        assert (found[..., n_rot:] == stored[..., n_rot:]).all()
    else:
        unit = np.abs(exact)
        if kv_type.block > 1:
            blocks = unit.reshape(-1, kv_type.block)
            unit = np.broadcast_to(blocks.max(axis=1, keepdims=True), blocks.shape).reshape(exact.shape)
        assert (np.abs(found - exact) <= ROUNDING[name] * unit + 1e-6).all()
    assert after[1][TARGET : TARGET + ROWS].tobytes() == before[1][SOURCE : SOURCE + ROWS].tobytes()
    assert (after[2][TARGET : TARGET + ROWS] == 77).all()
    for old, new in zip(before, after, strict=True):  # and nothing else has changed
        assert new[:TARGET].tobytes() == old[:TARGET].tobytes()
        assert new[TARGET + ROWS :].tobytes() == old[TARGET + ROWS :].tobytes()


def plainly_rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: RopePairing) -> np.ndarray:
    """In float32, pair by pair."""
    out, half = x.copy(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairing == RopePairing.NORM else (i, i + half)
        c, s = cos[:, i, None], sin[:, i, None]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return out


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("kind", FREQUENCIES)
def test_a_turned_key_is_the_key_of_its_new_position(device: Device, kind: str, pairing: RopePairing) -> None:
    """With the magnitude that it had: positions 70 to 76 become 6 to 12."""
    frequencies = FREQUENCIES[kind]
    raw = np.random.default_rng(1).standard_normal((ROWS, 2, 32), np.float32)
    positions = 70 + np.arange(ROWS, dtype=np.float64)[:, None]

    def keys(at: np.ndarray) -> np.ndarray:
        heads = rotated(raw, at * frequencies.inv_freq, pairing)
        heads[..., :16] *= frequencies.magnitude
        return heads.reshape(ROWS, -1)

    k = keys(positions).astype(np.float32)
    cache = layer_cache(device, KV_TYPES["f32"], k, k)
    turn = key_turn(device, frequencies, -64, pairing, 32)
    shift_rows(device, cache, KV_TYPES["f32"], turn, RowMove(SOURCE, TARGET, ROWS, 5, 77))
    assert np.abs(device.download(cache.k)[TARGET : TARGET + ROWS] - keys(positions - 64)).max() < 2e-6
    assert (frequencies.magnitude != 1) == (kind == "yarn")


@pytest.mark.parametrize("name", KV_TYPES)
def test_a_row_that_is_not_the_sequences_own_becomes_absent(device: Device, name: str) -> None:
    kv_type = KV_TYPES[name]
    k = np.random.default_rng(2).standard_normal((ROWS, 64), np.float32)
    cache = layer_cache(device, kv_type, k, k)
    tags = device.download(cache.tags)
    tags[SOURCE + 2] = 6
    cache = replace(cache, tags=on_device(device, tags))
    before = [device.download(array) for array in (cache.k, cache.v)]
    turn = key_turn(device, FREQUENCIES["plain"], -8, RopePairing.NEOX, 32)
    shift_rows(device, cache, kv_type, turn, RowMove(SOURCE, TARGET, 5, 5, 77))
    assert device.download(cache.tags)[TARGET : TARGET + 6].tolist() == [77, 77, 0, 77, 77, 9]
    for rows, old in zip((cache.k, cache.v), before, strict=True):
        assert device.download(rows)[TARGET + 2].tobytes() == old[TARGET + 2].tobytes()


def test_wrong_arguments_are_named(device: Device) -> None:
    k = np.zeros((ROWS, 64), np.float32)
    cache, f32 = layer_cache(device, KV_TYPES["f32"], k, k), KV_TYPES["f32"]
    turn = key_turn(device, FREQUENCIES["plain"], -8, RopePairing.NEOX, 32)
    for wrong, rows, message in (
        (turn, (8, 12, 8), "overlap"),
        (turn, (8, 28, 8), "outside"),
        (replace(turn, head_dim=8), (8, 24, 8), "16 rotated elements"),
        (replace(turn, head_dim=48), (8, 24, 8), "rows of 64 elements"),
        (replace(turn, sin=on_device(device, np.zeros((1, 4), np.float32))), (8, 24, 8), "differ in shape"),
        (replace(turn, cos=on_device(device, np.zeros(8, np.float32))), (8, 24, 8), "cos"),
    ):
        with pytest.raises(ShapeError, match=message):
            shift_rows(device, cache, f32, wrong, RowMove(*rows, 5, 77))
