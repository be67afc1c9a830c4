"""Threads of an emulated block: exchanges, barriers, shared memory, and what becomes of mistakes with them."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.errors import DeviceError
from tests.device.throwaway import Throwaway


def launch_and_download(throwaway: Throwaway, definition: str, *args, out: np.ndarray, **options) -> np.ndarray:
    """The kernel's last argument is `out`, on the device."""
    array = throwaway.device.upload(out)
    throwaway.launch(definition, *args, array, **options)
    return throwaway.device.download(array)


def test_shuffles(throwaway: Throwaway) -> None:
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
    wave = throwaway.wave
    found = launch_and_download(throwaway, source, out=np.zeros((4, wave, 6), np.int32), block=(4 * wave,))
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


def test_shuffle_of_floats_and_unsigned(throwaway: Throwaway) -> None:
    source = """
    KERNEL(64) probe(float* out) {
        const float sum = shfl_xor(0.5f * LANE(), 1) + (float)shfl((u32)LANE() + 4000000000u, 1);
        out[threadIdx.x] = sum;
    }
    """
    wave = throwaway.wave
    found = launch_and_download(throwaway, source, out=np.zeros(wave, np.float32), block=(wave,))
    lanes = np.arange(wave)
    assert (found == np.float32(0.5) * (lanes ^ 1).astype(np.float32) + np.float32(4000000001)).all()


def test_indices_of_grids_and_blocks_of_three_dimensions(throwaway: Throwaway) -> None:
    source = """
    KERNEL(24) probe(i32* out) {
        const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[block * 24 + thread] = block * 1000 + thread;
    }
    """
    out = np.zeros((30, 24), np.int32)
    found = launch_and_download(throwaway, source, out=out, grid=(2, 3, 5), block=(4, 3, 2))
    assert (found == np.arange(30)[:, None] * 1000 + np.arange(24)).all()


def test_barriers_order_shared_memory(throwaway: Throwaway) -> None:
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
    found = launch_and_download(throwaway, source, out=np.zeros(256, np.int32), block=(256,), shared_bytes=1024)
    expected = np.arange(256)
    for _ in range(10):
        expected = np.roll(np.roll(expected, -1) + 1, -100)
    assert (found == expected).all()


def test_shared_memory_is_poisoned_for_every_block(throwaway: Throwaway) -> None:
    source = """
    KERNEL(32) probe(u32* out) {
        SHARED u32 fixed[32];
        SHARED u16 small;
        DYNAMIC_SHARED(u32, sized);
        const int i = threadIdx.x;
        const u32 seen = fixed[i] & sized[i] & (small | 0xFFFF0000u);
        BARRIER();
        fixed[i] = sized[i] = small = 0;
        out[blockIdx.x * 32 + i] = seen;
    }
    """
    found = launch_and_download(throwaway, source, out=np.zeros((9, 32), np.uint32), grid=(9,), shared_bytes=128)
    assert (found == 0xFFFFFFFF).all()


def test_atomics(throwaway: Throwaway) -> None:
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
    upload, download = throwaway.device.upload, throwaway.device.download
    total, most, tickets = (upload(np.zeros(shape, kind)) for shape, kind in ((1, "f4"), (1, "i4"), ((5, 128), "i4")))
    found = launch_and_download(
        throwaway, source, total, most, tickets, out=np.zeros(1, np.int32), grid=(5,), block=(128,)
    )
    assert found[0] == 640
    assert download(total)[0] == 320
    assert download(most)[0] == 639
    assert (np.sort(download(tickets)) == np.arange(128)).all()


def test_threads_run_in_an_order_drawn_from_the_seed(throwaway: Throwaway) -> None:
    source = "KERNEL(64) probe(i32* next, i32* out) { out[atomic_add(next, 1)] = blockIdx.x * 64 + threadIdx.x; }"

    def order(device: EmulatedDevice) -> list[int]:
        own = Throwaway(throwaway.folder, device)
        counter = device.upload(np.zeros(1, np.int32))
        found = launch_and_download(own, source, counter, out=np.zeros(256, np.int32), grid=(4,), block=(64,))
        return found.tolist()

    devices = [EmulatedDevice(seed=seed) for seed in (1, 1, 2)]
    first, same, other = (order(device) for device in devices)
    again = order(devices[0])
    for device in devices:
        device.close()
    assert first == same
    assert first != other and first != again
    assert sorted(first) == sorted(other) == list(range(256))


def test_a_missing_barrier_shows(throwaway: Throwaway) -> None:
    source = """
    KERNEL(64) probe(i32* out) {
        SHARED i32 reversed[64];
        reversed[63 - threadIdx.x] = threadIdx.x;
        %s
        out[threadIdx.x] = reversed[threadIdx.x];
    }
    """
    right = 63 - np.arange(64)
    out = np.zeros(64, np.int32)
    assert (launch_and_download(throwaway, source % "BARRIER();", out=out, block=(64,)) == right).all()
    assert (launch_and_download(throwaway, source % "", out=out, block=(64,)) != right).any()


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ("if (threadIdx.x < 10) return; BARRIER();", "54 wait at a barrier, 0 at a warp exchange, 10 have ended"),
        (
            "if (threadIdx.x < 10) shfl(1, 0); else BARRIER();",
            "54 wait at a barrier, 10 at a warp exchange, 0 have ended",
        ),
    ],
    ids=["ended", "at an exchange"],
)
def test_a_divergent_barrier_is_reported(throwaway: Throwaway, body: str, counts: str) -> None:
    source = "KERNEL(64) probe(i32* out) { if (blockIdx.x == 1) { BODY } out[0] = 1; }".replace("BODY", body)
    throwaway.launch(source, np.zeros(1, np.int32), grid=(2,), block=(64,))
    with pytest.raises(
        DeviceError, match=r"kernel probe, block \(1, 0, 0\): divergent barrier: of 64 threads " + counts
    ):
        throwaway.device.synchronize()


def test_different_exchanges_in_one_warp_are_reported(throwaway: Throwaway) -> None:
    source = "KERNEL(32) probe(i32* out) { out[0] = LANE() % 2 ? shfl(1, 0) : (i32)ballot(true); }"
    throwaway.launch(source, np.zeros(1, np.int32))
    with pytest.raises(DeviceError, match=r"kernel probe, thread .*: divergent warp exchange"):
        throwaway.device.synchronize()


def test_an_exchange_among_the_lanes_that_are_left(throwaway: Throwaway) -> None:
    source = "KERNEL(32) probe(i32* out) { if (LANE() >= 20) return; out[LANE()] = shfl(LANE(), LANE() + 4); }"
    found = launch_and_download(throwaway, source, out=np.zeros(20, np.int32))
    assert (found == np.where(np.arange(20) < 16, np.arange(20) + 4, -1)).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[0] = (i32)load16((u8*)out + 4).x;", "16-byte access to an address that is no multiple of 16"),
        ("*(volatile i32*)(u64)(64 + out[0]) = 1;", "an access to 0x40, where there is no memory"),
        ("out[0] = (out[1] + 7) / out[0];", "integer division by zero"),
        ("DYNAMIC_SHARED(i32, sized); sized[8] = 0;", "behind the 32 bytes of dynamic shared memory"),
        (
            "volatile u8 large[200000]; for (int i = 0; i < 200000; i += 512) large[i] = 1; deeper(out, 1);",
            "its stack is full",
        ),
    ],
    ids=["misaligned", "null", "division", "dynamic shared", "stack"],
)
def test_what_would_end_the_process_is_reported(throwaway: Throwaway, body: str, message: str) -> None:
    source = """
    __attribute__((noinline)) int deeper(volatile i32* out, int depth) {
        volatile u8 large[4000];
        large[depth & 1023] = 1;
        return deeper(out, depth + 1) + large[out[0]];
    }
    KERNEL(32) probe(i32* out) { BODY }
    """
    throwaway.launch(source.replace("BODY", body), throwaway.device.upload(np.zeros(16, np.int32)), shared_bytes=32)
    with pytest.raises(DeviceError, match=r"kernel probe, thread \(\d+, 0, 0\) of block \(0, 0, 0\): .*" + message):
        throwaway.device.synchronize()
    after = EmulatedDevice(*(throwaway.wave, throwaway.device.target.tiles))  # the process goes on
    Throwaway(throwaway.folder, after).launch("KERNEL(32) probe(i32* out) { BARRIER(); }", np.zeros(1, np.int32))
    after.synchronize()
    after.close()
