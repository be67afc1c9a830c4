"""Exchanges, barriers, shared memory and atomics of the kernel headers."""

from __future__ import annotations

import numpy as np

from tests.device.throwaway import Throwaway


def test_shuffles(anywhere: Throwaway) -> None:
    source = """
    KERNEL(256) probe(i32* out) {
        const int lane = LANE();
        i32* mine = out + (WARP_ID() * WARP_SIZE + lane) * 6;
        mine[0] = shfl(100 + lane, lane + 3);
        mine[1] = shfl_xor(100 + lane, 5);
        mine[2] = shfl_down(100 + lane, 7);
        mine[3] = (i32)(ballot(lane % 3 == 0) >> 31);
        mine[4] = (i32)warp_sum((float)lane);
        mine[5] = (i32)warp_max((float)(lane * 7 % WARP_SIZE));
    }
    """
    wave = anywhere.wave
    found = anywhere.result(source, out=np.zeros((4, wave, 6), np.int32), block=(4 * wave,))
    lanes = np.arange(wave)
    votes = sum(1 << int(lane) for lane in lanes if lane % 3 == 0) >> 31
    expected = np.stack(
        [
            100 + (lanes + 3) % wave,
            100 + (lanes ^ 5),
            np.where(lanes + 7 < wave, 107 + lanes, 100 + lanes),
            np.full(wave, np.array(votes & 0xFFFFFFFF, np.uint32).view(np.int32)),
            np.full(wave, lanes.sum()),
            np.full(wave, wave - 1),
        ],
        axis=-1,
    )
    assert (found == expected).all()


def test_shuffle_of_floats_and_unsigned(anywhere: Throwaway) -> None:
    source = """
    KERNEL(64) probe(float* out) {
        const float sum = shfl_xor(0.5f * LANE(), 1) + (float)shfl((u32)LANE() + 4000000000u, 1);
        out[threadIdx.x] = sum;
    }
    """
    wave = anywhere.wave
    found = anywhere.result(source, out=np.zeros(wave, np.float32), block=(wave,))
    lanes = np.arange(wave)
    assert (found == np.float32(0.5) * (lanes ^ 1).astype(np.float32) + np.float32(4000000001)).all()


def test_indices_of_grids_and_blocks_of_three_dimensions(anywhere: Throwaway) -> None:
    source = """
    KERNEL(24) probe(i32* out) {
        const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[block * 24 + thread] = block * 1000 + thread;
    }
    """
    out = np.zeros((30, 24), np.int32)
    found = anywhere.result(source, out=out, grid=(2, 3, 5), block=(4, 3, 2))
    assert (found == np.arange(30)[:, None] * 1000 + np.arange(24)).all()


def test_barriers_order_shared_memory(anywhere: Throwaway) -> None:
    source = """
    KERNEL(256) probe(i32* out) {
        SHARED i32 fixed[256];
        DYNAMIC_SHARED(i32, sized);
        const int i = threadIdx.x;
        fixed[i] = i;
        BARRIER();
        for (int round = 0; round < 10; round++) {
            sized[i] = fixed[(i + 1) % 256] + 1;
            BARRIER();
            fixed[i] = sized[(i + 100) % 256];
            BARRIER();
        }
        out[i] = fixed[i];
    }
    """
    found = anywhere.result(source, out=np.zeros(256, np.int32), block=(256,), shared_bytes=1024)
    expected = np.arange(256)
    for _ in range(10):
        expected = np.roll(np.roll(expected, -1) + 1, -100)
    assert (found == expected).all()


def test_atomics(anywhere: Throwaway) -> None:
    source = """
    KERNEL(128) probe(float* sum, i32* most, i32* tickets, i32* out) {
        SHARED i32 in_block;
        if (threadIdx.x == 0) in_block = 0;
        BARRIER();
        const int i = blockIdx.x * 128 + threadIdx.x;
        tickets[i] = atomic_add(&in_block, 1);
        atomic_add(sum, 0.5f);
        atomic_max(most, (i * 77) % 640);
        BARRIER();
        if (threadIdx.x == 0) atomic_add(out, in_block);
    }
    """
    upload, download = anywhere.device.upload, anywhere.device.download
    total, most, tickets = (upload(np.zeros(shape, kind)) for shape, kind in ((1, "f4"), (1, "i4"), ((5, 128), "i4")))
    found = anywhere.result(source, total, most, tickets, out=np.zeros(1, np.int32), grid=(5,), block=(128,))
    assert found[0] == 640
    assert download(total)[0] == 320
    assert download(most)[0] == 639
    assert (np.sort(download(tickets)) == np.arange(128)).all()
