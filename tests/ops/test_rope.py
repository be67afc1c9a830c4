"""rope against complex rotations in float64, and the scalings of its frequencies."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ShapeError
from pyllm.models.rope_scaling import RopeScaling, rope_frequencies
from pyllm.ops.rope import RopePairing, rope, rope_table
from tests.ops.lives import SIZES, on_device

PLAIN = RopeScaling("none", 1.0, 2048, 1.0)


def rotated(x: np.ndarray, angle: np.ndarray, pairing: RopePairing) -> np.ndarray:
    """Each pair as a complex number, turned by its angle."""
    half = angle.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if pairing == RopePairing.NORM
        else (slice(0, half), slice(half, 2 * half))
    )
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, None, :]
    out = x.astype(np.float64)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize(("head_dim", "n_rot"), [(2, 2), (64, 64), (64, 32), (80, 80), (96, 24), (256, 64)])
def test_rope(device: Device, head_dim: int, n_rot: int, pairing: RopePairing) -> None:
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 2, 77, 1000, 4095], np.int32)
    x = rng.standard_normal((6, 3, head_dim), np.float32)
    frequencies = rope_frequencies(n_rot, 10000.0, PLAIN, None)
    cos, sin = (device.empty((6, n_rot // 2), np.float32) for _ in range(2))
    rope_table(device, on_device(device, positions), on_device(device, frequencies.inv_freq), 1.0, cos, sin)
    out = on_device(device, x)
    rope(device, out, cos, sin, pairing)
    angle = positions[:, None].astype(np.float64) * frequencies.inv_freq
    # A float32 angle of 4,095 radians is off by up to 2.5e-4; the rotation cannot be better than its angle.
    assert np.abs(device.download(out) - rotated(x, angle, pairing)).max() < 2e-3
    assert np.abs(device.download(out)[:4] - rotated(x, angle, pairing)[:4]).max() < 2e-5


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("tokens", SIZES)
def test_rope_sizes(device: Device, tokens: int, pairing: RopePairing) -> None:
    x = np.random.default_rng(1).standard_normal((tokens, 2, 64), np.float32)
    positions = np.arange(tokens, dtype=np.int32)
    inv_freq = rope_frequencies(48, 10000.0, PLAIN, None).inv_freq
    cos, sin = (device.empty((tokens, 24), np.float32) for _ in range(2))
    rope_table(device, on_device(device, positions), on_device(device, inv_freq), 1.0, cos, sin)
    out = on_device(device, x)
    rope(device, out, cos, sin, pairing)
    angle = positions[:, None].astype(np.float64) * inv_freq
    assert np.abs(device.download(out) - rotated(x, angle, pairing)).max() < 1e-4
    assert (device.download(out)[:, :, 48:] == x[:, :, 48:]).all()


def test_magnitude_scales_both_tables(device: Device) -> None:
    positions, inv_freq = np.array([3], np.int32), np.array([1.0, 0.5], np.float32)
    cos, sin = (device.empty((1, 2), np.float32) for _ in range(2))
    rope_table(device, on_device(device, positions), on_device(device, inv_freq), 1.5, cos, sin)
    assert np.allclose(device.download(cos), 1.5 * np.cos([[3.0, 1.5]]))
    assert np.allclose(device.download(sin), 1.5 * np.sin([[3.0, 1.5]]))


def test_frequencies() -> None:
    plain = rope_frequencies(8, 10000.0, PLAIN, None).inv_freq
    assert np.allclose(plain, [1, 0.1, 0.01, 0.001])
    factors = np.array([1, 2, 4, 8], np.float32)
    assert np.allclose(rope_frequencies(8, 10000.0, PLAIN, factors).inv_freq, plain / factors)
    assert np.allclose(rope_frequencies(8, 10000.0, RopeScaling("linear", 4.0, 64, 1.0), None).inv_freq, plain / 4)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    scaling = RopeScaling("yarn", 4.0, 4096, 1.0)
    plain = rope_frequencies(128, 10000.0, PLAIN, None).inv_freq
    yarn = rope_frequencies(128, 10000.0, scaling, None)
    turns = 4096 * plain / (2 * np.pi)  # within the original context
    assert np.allclose(yarn.inv_freq[turns > 40], plain[turns > 40])
    assert np.allclose(yarn.inv_freq[turns < 0.8], plain[turns < 0.8] / 4)
    assert (np.diff(yarn.inv_freq) < 0).all()
    assert yarn.magnitude == pytest.approx(1 + 0.1 * np.log(4.0))


def test_too_many_rotated_elements_are_refused(device: Device) -> None:
    x, table = device.empty((1, 1, 4), np.float32), device.empty((1, 3), np.float32)
    with pytest.raises(ShapeError, match="6 rotated elements, head_dim 4"):
        rope(device, x, table, table, RopePairing.NEOX)
