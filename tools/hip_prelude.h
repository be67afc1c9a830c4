// hip_prelude: what hiprtc declares for rawkernels/common/platform_hip.cuh, for clang's `-x hip` without ROCm.
//
// It checks that sources compile, no more: the code is never linked or run.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, (threads))))

#define PRELUDE static __device__ inline __attribute__((always_inline))

struct prelude_index {
    unsigned x, y, z;
};
extern const __device__ __attribute__((weak)) prelude_index threadIdx, blockIdx, blockDim, gridDim;

PRELUDE void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
PRELUDE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }

PRELUDE int prelude_lane() { return (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
PRELUDE int __shfl(int value, int lane, int) { return __builtin_amdgcn_ds_bpermute(lane << 2, value); }
PRELUDE int __shfl_xor(int value, int mask, int) {
    return __builtin_amdgcn_ds_bpermute((prelude_lane() ^ mask) << 2, value);
}
PRELUDE int __shfl_down(int value, int delta, int) {
    return __builtin_amdgcn_ds_bpermute((prelude_lane() + delta) << 2, value);
}
#if WARP_SIZE == 64
PRELUDE unsigned long long __ballot(int pred) { return __builtin_amdgcn_ballot_w64(pred); }
#else
PRELUDE unsigned long long __ballot(int pred) { return __builtin_amdgcn_ballot_w32(pred); }
#endif

PRELUDE int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
PRELUDE float atomicAdd(float* address, float value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
PRELUDE int atomicMax(int* address, int value) { return __atomic_fetch_max(address, value, __ATOMIC_RELAXED); }

extern "C" {
__device__ float expf(float);
__device__ float exp2f(float);
__device__ float logf(float);
__device__ float log2f(float);
__device__ float tanhf(float);
__device__ float cosf(float);
__device__ float sinf(float);
__device__ float powf(float, float);
__device__ float erff(float);
}
PRELUDE float rsqrtf(float x) { return __builtin_amdgcn_rsqf(x); }
PRELUDE float fabsf(float x) { return __builtin_fabsf(x); }
PRELUDE float sqrtf(float x) { return __builtin_sqrtf(x); }
PRELUDE float floorf(float x) { return __builtin_floorf(x); }
PRELUDE float rintf(float x) { return __builtin_rintf(x); }
PRELUDE float fminf(float x, float y) { return __builtin_fminf(x, y); }
PRELUDE float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
PRELUDE float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

template <typename T>
PRELUDE T min(T x, T y) {
    return y < x ? y : x;
}
template <typename T>
PRELUDE T max(T x, T y) {
    return x < y ? y : x;
}
