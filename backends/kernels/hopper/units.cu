// Microbenchmarks as in portable/units.cu, for Hopper's own units: wgmma, TMA, mbarriers.
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
#include "ptx.cuh"
#include "wgmma.cuh"

// Each warpgroup of the block multiplies 64 x 16 by 16 x N, with four products in flight, `rounds`
// times. FROM: A is read from shared memory (0) or from registers (1). B, and A, are one swizzled
// tile.
template <int N, int FROM>
__device__ __forceinline__ void multiply(int rounds, float keep, float* out, i64* cycles) {
    extern __shared__ __align__(1024) unsigned char tile[];
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
    u32 a[4] = {threadIdx.x, 0, 0, 0};
    const u64 at = descriptor(tile, 0);
    __syncthreads();
    const i64 start = clock64();
    for (int r = 0; r < rounds; ++r) {
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (FROM == 0) wgmma_ss<0, 0>(d, at + along_row(x, 64), at + along_row(x, N), 1);
            else wgmma_rs<0>(d, a, at + along_row(x, N), 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    pin(d);
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        if (d[i] == keep) *out = d[i];
}
#define MULTIPLY(NAME, N, FROM)                                              \
    extern "C" __global__ void __launch_bounds__(384, 1)                     \
    NAME##_##N(int rounds, float keep, float* out, i64* cycles) {            \
        multiply<N, FROM>(rounds, keep, out, cycles);                        \
    }
MULTIPLY(wgmma_shared, 32, 0)
MULTIPLY(wgmma_shared, 64, 0)
MULTIPLY(wgmma_shared, 80, 0)
MULTIPLY(wgmma_shared, 128, 0)
MULTIPLY(wgmma_shared, 176, 0)
MULTIPLY(wgmma_shared, 256, 0)
MULTIPLY(wgmma_registers, 32, 1)
MULTIPLY(wgmma_registers, 64, 1)
MULTIPLY(wgmma_registers, 80, 1)
MULTIPLY(wgmma_registers, 128, 1)
MULTIPLY(wgmma_registers, 176, 1)

// One thread per block keeps `STAGES` copies of 16 KiB in flight, from `n` bytes that all blocks
// read.
constexpr int STAGES = 8, PIECE = 16384;
extern "C" __global__ void bulk_reads(const char* from, i64 n, int pieces) {
    extern __shared__ __align__(1024) char to[];
    __shared__ u64 full[STAGES];
    if (threadIdx.x) return;
    for (int i = 0; i < STAGES; ++i) barrier_init(&full[i], 1);
    barrier_init_fence();
    i64 at = blockIdx.x * i64(PIECE) % n;
    for (int p = 0; p < pieces + STAGES; ++p) {
        const int stage = p % STAGES;
        if (p >= STAGES) wait(&full[stage], (p / STAGES - 1) & 1);
        if (p >= pieces) continue;
        arrive_expect(&full[stage], PIECE);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1], %2, [%3];"
                     :: "r"(shared_address(to + stage * PIECE)), "l"(from + at), "r"(PIECE),
                        "r"(shared_address(&full[stage])) : "memory");
        at += i64(gridDim.x) * PIECE;
        if (at >= n) at -= n;
    }
}

// One thread per block adds float32 pieces of 16 KiB into `n` bytes that all blocks add to.
extern "C" __global__ void bulk_additions(char* to, i64 n, int pieces) {
    extern __shared__ __align__(1024) char from[];
    for (int i = threadIdx.x; i < PIECE / 4; i += blockDim.x)
        reinterpret_cast<float*>(from)[i] = 1.0f;
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x) return;
    i64 at = blockIdx.x * i64(PIECE) % n;
    for (int p = 0; p < pieces; ++p) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     :: "l"(to + at), "r"(shared_address(from)), "r"(PIECE) : "memory");
        reduce_commit();
        at += i64(gridDim.x) * PIECE;
        if (at >= n) at -= n;
    }
    reduce_wait();
}

// Two warps alternate through mbarriers, `rounds` times: two arrivals and two waits per round.
extern "C" __global__ void hand_overs(int rounds, u32 keep, u32* out, i64* cycles) {
    __shared__ u64 turn[2];
    if (threadIdx.x == 0) barrier_init(&turn[0], 1), barrier_init(&turn[1], 1);
    barrier_init_fence();
    __syncthreads();
    const int me = threadIdx.x / 32;
    const i64 start = clock64();
    if (threadIdx.x % 32 == 0)
        for (int r = 0; r < rounds; ++r) {
            if (me == 0) arrive(&turn[0]), wait(&turn[1], r & 1);
            else wait(&turn[0], r & 1), arrive(&turn[1]);
        }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
    if (rounds == int(keep)) *out = keep;
}
