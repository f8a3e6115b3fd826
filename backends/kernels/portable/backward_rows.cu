// The two row-wise passes around a backward. `flash_delta` runs before it: delta = rowsum(dO * O),
// with FS_DLSE minus the LSE's gradient; it also clears the float32 accumulator of dQ, if there is
// one, or with FS_FIRST only the flags of its pieces (hopper/send_dq.cuh). `flash_convert` runs
// after it. A block owns a row tile of a head. Both start with the last
// head: L2 then has the first heads when the backward begins with them, and still has dQ of the
// last heads when the backward is done. No shared memory; every access to whole rows is 16 bytes
// wide.
#include "common.cuh"

constexpr int THREADS = 32 * FS_WARPS, WIDE = 16 / FS_BYTES;  // elements of 16 bytes
constexpr int CHUNKS = FS_HEAD_DIM_V / WIDE;
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
constexpr int ROWS = THREADS / LANES;
// Loads per thread and tensor that are in flight together. With 8 warps, most row tiles are one
// batch, and wait for memory once instead of once per row of a thread.
constexpr int DEEP = 4;
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

// A head's rows of a tensor; the address is computed once.
struct Rows {
    char* data;
    i64 step;

    __device__ Rows(const Args& a, const Tensor& x, int walk)
        : data(x.at(walk / a.heads, walk % a.heads, 0)), step(x.row * FS_BYTES) {}
    __device__ uint4& piece(int r, int c) const {
        return reinterpret_cast<uint4*>(data + r * step)[c];
    }
};

__device__ inline float dot(uint4 raw_x, uint4 raw_y) {
    const Elements x = widen(raw_x), y = widen(raw_y);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDE; ++i) sum += x.x[i] * y.x[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
flash_delta(const __grid_constant__ Args a) {
    wait_for_what_ran_before();
    let_what_runs_next_start();  // all other inputs of the next kernel are complete too
    const int i = blockIdx.x, walk = gridDim.y - 1 - blockIdx.y, lane = threadIdx.x % LANES;
    const Range rows = row_tile(a, i);
    const Rows out(a, a.o, walk), dout(a, a.dout, walk);
    u32* slots = a.tile_counts + (i64(walk) * a.tiles + i) * 8;
    u32 loaded = 0, stored = 0, cleared = 0;
    [[maybe_unused]] u32 loaded_dlse = 0;
    // A uniform loop: the shuffles below need every lane.
    for (int r0 = rows.start; r0 < rows.stop; r0 += DEEP * ROWS) {
        float sum[DEEP] = {};
        const int first = r0 + threadIdx.x / LANES;
#if FS_DLSE
        // loaded before the products, so that the loads of their rows overlap
        float less[DEEP] = {};
#pragma unroll
        for (int j = 0; j < DEEP; ++j) {
            const int r = first + j * ROWS;
            if (r >= rows.stop || lane != 0) break;
            less[j] = a.dlse[i64(walk) * a.n_q + r], loaded_dlse += 4;
        }
#endif
        for (int c = lane; c < CHUNKS; c += LANES) {
            uint4 x[DEEP] = {}, y[DEEP] = {};
#pragma unroll
            for (int j = 0; j < DEEP; ++j) {
                const int r = first + j * ROWS;
                if (r >= rows.stop) break;
                x[j] = out.piece(r, c), y[j] = dout.piece(r, c);
                loaded += ValueRow::bytes(c);
            }
#pragma unroll
            for (int j = 0; j < DEEP; ++j) sum[j] += dot(x[j], y[j]);
        }
#pragma unroll
        for (int j = 0; j < DEEP; ++j) {
            const int r = first + j * ROWS;
#pragma unroll
            for (int w = LANES / 2; w; w /= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], w);
#if FS_DLSE
            sum[j] -= less[j];  // used by the lane that stores the sum
#endif
            if (r < rows.stop && lane == 0) a.delta[i64(walk) * a.n_q + r] = sum[j], stored += 4;
        }
    }
#if FS_FIRST
    if (threadIdx.x < 2 && rows.start < rows.stop)
        a.turns[(i64(walk) * a.n_q + rows.start) * 2 + threadIdx.x] = 0;
#elif FS_FUSED
    const i64 first = i64(walk) * a.n_q + rows.start;
    float4* acc = reinterpret_cast<float4*>(a.dq_acc + first * FS_HEAD_DIM);
    for (int e = threadIdx.x; e < (rows.stop - rows.start) * (FS_HEAD_DIM / 4); e += THREADS) {
        acc[e] = {0.0f, 0.0f, 0.0f, 0.0f};
        cleared += KeyRow::counted(FS_HEAD_DIM - e % (FS_HEAD_DIM / 4) * 4, 4) * 4;
    }
#endif
    report(slots, loaded), report(slots + 1, loaded);  // O and dO: one chunk of each at a time
#if FS_DLSE
    report(slots + 2, loaded_dlse);
#endif
    report(slots + 2 + FS_DLSE, stored), report(slots + 3 + FS_DLSE, cleared);
}

#if !FS_F32
extern "C" __global__ void __launch_bounds__(THREADS)
flash_convert(const __grid_constant__ Args a) {
    wait_for_what_ran_before();
    const int i = blockIdx.x, walk = gridDim.y - 1 - blockIdx.y;
    const Range rows = row_tile(a, i);
    const Rows dq(a, a.dq, walk);
    u32* slots = a.tile_counts + (i64(walk) * a.tiles + i) * 8;
    u32 stored = 0;
    const float4* acc =
        reinterpret_cast<const float4*>(a.dq_acc + (i64(walk) * a.n_q + rows.start) * FS_HEAD_DIM);
    constexpr int PER_ROW = FS_HEAD_DIM / 8;
    const int pieces = (rows.stop - rows.start) * PER_ROW;
#if FS_FIRST
    const bool empty = a.turns[(i64(walk) * a.n_q + rows.start) * 2] != 2;  // no visit stored here
#else
    constexpr bool empty = false;
#endif
    for (int e0 = threadIdx.x; e0 < pieces; e0 += DEEP * THREADS) {
        float4 x[DEEP], y[DEEP];
#pragma unroll
        for (int j = 0; j < DEEP; ++j) {
            const int e = e0 + j * THREADS;
            if (e < pieces) x[j] = acc[2 * e], y[j] = acc[2 * e + 1];
        }
#pragma unroll
        for (int j = 0; j < DEEP; ++j) {
            const int e = e0 + j * THREADS;
            if (e >= pieces) break;
            const float s = a.scale;
            const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
            const float4 l = empty ? zero : x[j], h = empty ? zero : y[j];
            dq.piece(rows.start + e / PER_ROW, e % PER_ROW) = {
                pack(l.x * s, l.y * s), pack(l.z * s, l.w * s), pack(h.x * s, h.y * s),
                pack(h.z * s, h.w * s)};
            stored += KeyRow::bytes(e % PER_ROW);
        }
    }
    report(slots, 2 * stored), report(slots + 1, stored);
}
#endif
