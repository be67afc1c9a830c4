"""What compiled kernels use, read from made-up machine code and, where a compiler is here, from real."""

from __future__ import annotations

import pytest

from pyllm.device import code_object
from pyllm.device.code_object import KernelResources, read_resources
from pyllm.device.gpu_compilers import cuda_compiler
from pyllm.errors import DeviceError
from pyllm.ops.op import Target
from tests.device.cubin_maker import amd_code, bundle, cubin, message

# Reads elements of an array at places that are not known beforehand: it cannot be kept in registers.
LOCAL = """extern "C" __global__ void local(int* p, int n) {
    __shared__ int shared[300];
    int a[64];
    for (int i = 0; i < 64; i++) a[i] = p[i];
    for (int i = 0; i < n; i++) a[p[i] & 63] += i;
    shared[threadIdx.x] = n;
    __syncthreads();
    for (int i = 0; i < 64; i++) p[i] = a[i] + shared[i];
}
"""


def amd_kernel(name: str, **more: object) -> dict[str, object]:
    sizes = {".group_segment_fixed_size": 70000, ".private_segment_fixed_size": 16, ".vgpr_count": 200}
    return {".name": name, **sizes, ".args": [{".offset": 8}] * 20, **more}


def test_nvidia() -> None:
    assert read_resources(cubin("add", shared=1024, frame=48, registers=70)) == [KernelResources("add", 1024, 48, 70)]


def test_amd_alone_and_in_a_bundle() -> None:
    code = amd_code([amd_kernel("b"), amd_kernel("a", **{".vgpr_count": 8})])
    expected = [KernelResources("a", 70000, 16, 8), KernelResources("b", 70000, 16, 200)]
    assert read_resources(code) == read_resources(bundle(code)) == expected


@pytest.mark.parametrize(
    "code", [b"", b"\x7fELF", b"not a file at all", cubin("add")[:200], bundle(b""), amd_code([{}])]
)
def test_what_cannot_be_read(code: bytes) -> None:
    with pytest.raises(DeviceError, match="the compiled kernel cannot be read"):
        read_resources(code)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, 127, -1, -32, 70000, -70000, 1.5, "", "a" * 31, "a" * 200, b"\x00\xff"),
        list(range(20)),
        {str(key): [key] for key in range(20)},
    ],
)
def test_messages(value: object) -> None:
    assert code_object._Message(message(value)).value() == value


def test_a_message_that_ends_too_early() -> None:
    with pytest.raises(ValueError, match="ends too early"):
        code_object._Message(message("a" * 40)[:-1]).value()


def test_real_machine_code() -> None:
    try:
        compiler = cuda_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    for arch in ("sm_80", "sm_90"):
        compiled = compiler.compile(LOCAL, Target("cuda", arch, 32, "mma"), {})
        assert compiled.code is not None, compiled.errors
        (kernel,) = read_resources(compiled.code)
        assert kernel.name == "local" and kernel.shared_bytes == 1200
        assert kernel.scratch_bytes == 256 and kernel.registers > 8
