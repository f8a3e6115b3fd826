// O = softmax(X) V for a batch of float32 matrices, without softmax(X) in HBM: X (batch, d1, d2), V
// (batch, d2, d3). Online softmax as in FlashAttention-2, float32 multiply-adds.
// Block (i, b) owns BLOCK_1 rows of matrix b and all columns of O. Each of its warps owns some of
// the rows, from the softmax to the store, so that P needs no block-wide barrier.
// Where tensors are held: P of one visit and a slice of V in shared memory; O, m, l in registers.
// flashsim.backends.launch_policy.softmax_matmul sets the constants (FS_*).
using u32 = unsigned int;
using i64 = long long;
#define NEG_INF __int_as_float(0xff800000)  // NVRTC has no constexpr infinity

constexpr int BLOCK_1 = FS_BLOCK_1, BLOCK_2 = FS_BLOCK_2, WIDTH = FS_WIDTH;
constexpr int WARPS = FS_THREADS / 32, ROWS = BLOCK_1 / WARPS;  // rows per warp
constexpr int PART = WIDTH / 32;           // columns of O per lane: lane, lane + 32, ...
constexpr int SLICE = 16;                  // rows of V on chip at a time
constexpr int KEYS = (BLOCK_2 + 31) / 32;  // scores of a row per lane
static_assert(BLOCK_1 % WARPS == 0 && BLOCK_2 % SLICE == 0 && WIDTH % 32 == 0, "see the family");

struct Args {
    const float *x, *v;
    float* o;
    u32* counts;  // bytes of X, V, O that each block moved: (batch, row tiles, 3)
    i64 x_batch, x_row, v_batch, v_row, o_batch, o_row;  // strides, in elements
    int d1, d2, d3;
};
static_assert(sizeof(Args) == FS_ARGS_BYTES, "ARGS and Args must agree");

struct OnChip {              // the launcher asks for exactly sizeof(OnChip) bytes
    float P[BLOCK_1][BLOCK_2];  // one visit; each warp writes and reads its own rows
    float V[SLICE][WIDTH];      // from B1 to the next slice's B0
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "the family and OnChip must agree");

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int w = 16; w; w /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, w));
    return x;
}
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int w = 16; w; w /= 2) x += __shfl_xor_sync(~0u, x, w);
    return x;
}

extern "C" __global__ void __launch_bounds__(FS_THREADS)
softmax_matmul(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this warp owns -------------------------------------------------------------
    const int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * ROWS;
    const int first_row = blockIdx.x * BLOCK_1 + mine, batch = blockIdx.y;
    const float* x = a.x + batch * a.x_batch;
    const float* v = a.v + batch * a.v_batch;
    float o[ROWS][PART] = {}, m[ROWS], l[ROWS] = {};
    u32 x_bytes = 0, v_bytes = 0, o_bytes = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = NEG_INF;

    for (int first = 0; first < a.d2; first += BLOCK_2) {
        const int keys = min(BLOCK_2, a.d2 - first);
        // -- Phase 1: m_new = max(m, rowmax X), P = exp(X - m_new), l and O rescaled --------------
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float s[KEYS], top = m[r], sum = 0.0f;
#pragma unroll
            for (int c = 0; c < KEYS; ++c) {
                const int key = lane + 32 * c;
                s[c] = NEG_INF;
                if (first_row + r < a.d1 && key < keys) {
                    s[c] = x[(first_row + r) * a.x_row + first + key];
                    x_bytes += 4;
                }
                top = fmaxf(top, s[c]);
            }
            top = warp_max(top);
            const float base = top == NEG_INF ? 0.0f : top;  // only -inf so far: avoids inf - inf
            const float alpha = expf(m[r] - base);
#pragma unroll
            for (int c = 0; c < KEYS; ++c) {
                const float p = expf(s[c] - base);
                if (lane + 32 * c < BLOCK_2) t.P[mine + r][lane + 32 * c] = p;
                sum += p;
            }
            l[r] = l[r] * alpha + sum;  // this lane's columns; the row adds at the end
            m[r] = top;
#pragma unroll
            for (int c = 0; c < PART; ++c) o[r][c] *= alpha;
        }
        __syncwarp();  // the warp's rows of P are complete
        // -- Phase 2: O += P V, a slice of V at a time --------------------------------------------
        for (int slice = 0; slice < keys; slice += SLICE) {
            __syncthreads();  // B0: all warps have read the last slice
            for (int e = threadIdx.x; e < SLICE * WIDTH; e += FS_THREADS) {
                const int key = slice + e / WIDTH, column = e % WIDTH;
                const bool exists = key < keys && column < a.d3;
                t.V[e / WIDTH][column] = exists ? v[(first + key) * a.v_row + column] : 0.0f;
                v_bytes += exists ? 4 : 0;
            }
            __syncthreads();  // B1: the slice is complete
#pragma unroll
            for (int k = 0; k < SLICE; k += 4) {
                float4 p[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    p[r] = *reinterpret_cast<const float4*>(&t.P[mine + r][slice + k]);
#pragma unroll
                for (int c = 0; c < PART; ++c) {
                    const int column = lane + 32 * c;
                    const float v0 = t.V[k][column], v1 = t.V[k + 1][column];
                    const float v2 = t.V[k + 2][column], v3 = t.V[k + 3][column];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        o[r][c] += p[r].x * v0;
                        o[r][c] += p[r].y * v1;
                        o[r][c] += p[r].z * v2;
                        o[r][c] += p[r].w * v3;
                    }
                }
            }
        }
        __syncwarp();  // the warp has read its rows of P
    }

    // -- Phase 3: O /= l; store -------------------------------------------------------------------
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = warp_sum(l[r]);
#pragma unroll
        for (int c = 0; c < PART; ++c) {
            const int column = lane + 32 * c;
            if (first_row + r < a.d1 && column < a.d3) {
                a.o[batch * a.o_batch + (first_row + r) * a.o_row + column] = o[r][c] / sum;
                o_bytes += 4;
            }
        }
    }
#if FS_TRACE
    const int tiles = (a.d1 + BLOCK_1 - 1) / BLOCK_1;
    u32* counts = a.counts + (i64(batch) * tiles + blockIdx.x) * 3;
    atomicAdd(counts, x_bytes), atomicAdd(counts + 1, v_bytes), atomicAdd(counts + 2, o_bytes);
#endif
}
