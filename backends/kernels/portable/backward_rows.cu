// The two row-wise passes around a backward: `flash_delta` before it (delta = rowsum(dO * O), and
// the clearing of the float32 dQ accumulator where dQ is reduced into one) and `flash_convert`
// after it. Block (i, head) owns row tile i; no shared memory, every access 16 bytes wide.
#include "common.cuh"

constexpr int THREADS = 32 * FS_WARPS, WIDE = 16 / FS_BYTES;  // elements of 16 bytes
constexpr int CHUNKS = FS_HEAD_DIM_V / WIDE;
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
static_assert(FS_HEAD_DIM % WIDE == 0 && FS_HEAD_DIM_V % WIDE == 0, "rows are cut into 16 bytes");

struct Elements { float x[WIDE]; };

__device__ inline Elements widen(uint4 raw) {
    const u32 word[4] = {raw.x, raw.y, raw.z, raw.w};
    Elements e;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#if FS_F32
        e.x[w] = __uint_as_float(word[w]);
#else
        const float2 pair = unpack(word[w]);
        e.x[2 * w] = pair.x, e.x[2 * w + 1] = pair.y;
#endif
    }
    return e;
}

__device__ inline char* row_of(const Args& a, const Tensor& x, int walk, int row) {
    return x.at(walk / a.heads, walk % a.heads, row);
}
__device__ inline uint4& piece(char* row, int c) { return reinterpret_cast<uint4*>(row)[c]; }

extern "C" __global__ void __launch_bounds__(THREADS)
flash_delta(const __grid_constant__ Args a) {
    wait_for_what_ran_before();
    let_what_runs_next_start();  // what it reads besides is there, too
    const int i = blockIdx.x, walk = blockIdx.y, lane = threadIdx.x % LANES;
    const Range rows = row_tile(a, i);
    u32* slots = a.tile_counts + (i64(walk) * a.tiles + i) * 8;
    u32 loaded = 0, stored = 0, cleared = 0;
    // Uniform: the shuffles below need every lane.
    for (int r0 = rows.start; r0 < rows.stop; r0 += THREADS / LANES) {
        const int r = r0 + threadIdx.x / LANES;
        float sum = 0.0f;
        if (r < rows.stop)
            for (int c = lane; c < CHUNKS; c += LANES) {
                const Elements o = widen(piece(row_of(a, a.o, walk, r), c));
                const Elements d = widen(piece(row_of(a, a.dout, walk, r), c));
#pragma unroll
                for (int x = 0; x < WIDE; ++x) sum += o.x[x] * d.x[x];
                loaded += ValueRow::bytes(c);
            }
#pragma unroll
        for (int w = LANES / 2; w; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
        if (r < rows.stop && lane == 0) a.delta[i64(walk) * a.n_q + r] = sum, stored += 4;
    }
#if FS_FUSED
    const i64 first = i64(walk) * a.n_q + rows.start;
    float4* acc = reinterpret_cast<float4*>(a.dq_acc + first * FS_HEAD_DIM);
    for (int e = threadIdx.x; e < (rows.stop - rows.start) * (FS_HEAD_DIM / 4); e += THREADS) {
        acc[e] = {0.0f, 0.0f, 0.0f, 0.0f};
        cleared += KeyRow::counted(FS_HEAD_DIM - e % (FS_HEAD_DIM / 4) * 4, 4) * 4;
    }
#endif
    report(slots, loaded), report(slots + 1, loaded);  // O and dO: one chunk of each at a time
    report(slots + 2, stored), report(slots + 3, cleared);
}

#if !FS_F32
extern "C" __global__ void __launch_bounds__(THREADS)
flash_convert(const __grid_constant__ Args a) {
    wait_for_what_ran_before();
    const int i = blockIdx.x, walk = blockIdx.y;
    const Range rows = row_tile(a, i);
    u32* slots = a.tile_counts + (i64(walk) * a.tiles + i) * 8;
    u32 stored = 0;
    const float4* acc =
        reinterpret_cast<const float4*>(a.dq_acc + (i64(walk) * a.n_q + rows.start) * FS_HEAD_DIM);
    constexpr int PER_ROW = FS_HEAD_DIM / 8;
    for (int e = threadIdx.x; e < (rows.stop - rows.start) * PER_ROW; e += THREADS) {
        const float4 x = acc[2 * e], y = acc[2 * e + 1];
        const float s = a.scale;
        const uint4 out = {pack(x.x * s, x.y * s), pack(x.z * s, x.w * s), pack(y.x * s, y.y * s),
                           pack(y.z * s, y.w * s)};
        piece(row_of(a, a.dq, walk, rows.start + e / PER_ROW), e % PER_ROW) = out;
        stored += KeyRow::bytes(e % PER_ROW);
    }
    report(slots, 2 * stored), report(slots + 1, stored);
}
#endif
