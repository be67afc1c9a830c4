"""Threads of an emulated block: exchanges, barriers, shared memory, and what becomes of mistakes with them."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.errors import DeviceError
from tests.device.throwaway import Throwaway


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
    found = throwaway.result(source, out=np.zeros((9, 32), np.uint32), grid=(9,), shared_bytes=128)
    assert (found == 0xFFFFFFFF).all()


def test_threads_run_in_an_order_drawn_from_the_seed(throwaway: Throwaway) -> None:
    source = "KERNEL(64) probe(i32* next, i32* out) { out[atomic_add(next, 1)] = blockIdx.x * 64 + threadIdx.x; }"

    def order(device: EmulatedDevice) -> list[int]:
        own = Throwaway(throwaway.folder, device)
        counter = device.upload(np.zeros(1, np.int32))
        found = own.result(source, counter, out=np.zeros(256, np.int32), grid=(4,), block=(64,))
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
    assert (throwaway.result(source % "BARRIER();", out=out, block=(64,)) == right).all()
    assert (throwaway.result(source % "", out=out, block=(64,)) != right).any()


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
    found = throwaway.result(source, out=np.zeros(20, np.int32))
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
    after = EmulatedDevice(*(throwaway.wave, throwaway.target.tiles))  # the process goes on
    Throwaway(throwaway.folder, after).launch("KERNEL(32) probe(i32* out) { BARRIER(); }", np.zeros(1, np.int32))
    after.synchronize()
    after.close()
