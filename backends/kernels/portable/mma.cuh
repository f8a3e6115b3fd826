// Tensor-core tiles for sm_80 and later: swizzled shared memory, cp.async, mma.sync. Code that
// depends on the element type (16 bits, or float32 rounded to tf32) is in mma_half.cuh and
// mma_tf32.cuh.
#if FS_TF32
using element_t = float;
#else
using element_t = unsigned short;  // float16 or bfloat16, as FS_BF16 says
#endif
constexpr int WIDE = 16 / sizeof(element_t);  // elements per 16-byte chunk

__device__ inline u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// A ROWS x COLS tile in shared memory. A row is divided into 16-byte chunks, and chunk c of row r
// is stored at c ^ f(r), where f spreads 8 consecutive rows over all 32 banks. So ldmatrix, which
// reads one chunk from each of 8 rows at a time, has no bank conflict, and no byte is spent on
// padding. tf32 fragments are read without ldmatrix: two neighbouring chunks from each of rows 0 to
// 3, 4 to 7, or every other row. For tf32, f permutes bits of the row so that these reads have no
// conflict either.
template <int ROWS_, int COLS_>
struct alignas(128) Tile {
    static constexpr int ROWS = ROWS_, COLS = COLS_, CHUNKS = COLS / WIDE;
    static constexpr int PITCH = COLS * sizeof(element_t);
    static constexpr int SPREAD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    static constexpr int SHIFT = SPREAD == 8 ? 0 : SPREAD == 4 ? 1 : 2;
    static_assert(COLS % 16 == 0, "ldmatrix takes two chunks at a time");
    element_t data[ROWS * COLS];

    __device__ static int swizzle(int row) {
#if FS_TF32
        if (SPREAD == 8) return (row & 2) | (row >> 2 & 1) | ((row ^ row >> 2) & 1) << 2;
#endif
        return row >> SHIFT & (SPREAD - 1);
    }
    __device__ static int offset(int row, int chunk) {  // bytes
        return row * PITCH + ((chunk ^ swizzle(row)) << 4);
    }
};

__device__ inline void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// pads to 16 bytes with zeros
__device__ inline void cp_async_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void cp_async_4(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Starts copying `rows` rows of an R (see Row) into a tile; the rest of the tile becomes zeros.
// Returns the bytes that this thread reads from HBM. A whole tile, which nearly all are, needs no
// comparison. If a thread's rows are a multiple of 8 apart, both its addresses advance by
// constants.
template <class R, int THREADS, class T>
__device__ inline u32 load_async(const T& tile, const char* from, i64 stride, int rows) {
    constexpr int TOTAL = T::ROWS * T::CHUNKS, STEP = THREADS / T::CHUNKS, SIZE = sizeof(element_t);
    constexpr bool EVEN = TOTAL % THREADS == 0 && THREADS % T::CHUNKS == 0 && STEP % 8 == 0;
    const u32 to = shared_address(tile.data);
    if (EVEN && R::WIDTH == T::COLS && rows == T::ROWS) {
        const int r = threadIdx.x / T::CHUNKS, c = threadIdx.x % T::CHUNKS;
        const u32 at = to + T::offset(r, c);
        const char* source = from + (r * int(stride) + c * WIDE) * SIZE;
#pragma unroll
        for (int e = 0; e < TOTAL / THREADS; ++e)
            cp_async_16(at + e * STEP * T::PITCH, source + e * (STEP * int(stride) * SIZE));
        return TOTAL / THREADS * R::bytes(c);
    }
    u32 bytes = 0;
#pragma unroll 1
    for (int at = threadIdx.x; at < TOTAL; at += THREADS) {
        const int r = at / T::CHUNKS, c = at % T::CHUNKS;
        const bool inside = r < rows && (R::WIDTH == T::COLS || c * WIDE < R::WIDTH);
        cp_async_16(to + T::offset(r, c), from + (inside ? (r * int(stride) + c * WIDE) * SIZE : 0),
                    inside ? 16 : 0);
        bytes += inside ? R::bytes(c) : 0;
    }
    return bytes;
}

// Starts copying one float per row (LSE, delta); rows past the end become 0.
template <int ROWS, int THREADS>
__device__ inline u32 load_vector_async(float* to, const float* from, int rows) {
    u32 bytes = 0;
#pragma unroll
    for (int e = 0; e < ROWS; e += THREADS) {
        const int r = e + threadIdx.x;
        if (r < ROWS) {
            const bool inside = r < rows;
            cp_async_4(shared_address(to + r), from + (inside ? r : 0), inside ? 4 : 0);
            bytes += inside ? 4 : 0;
        }
    }
    return bytes;
}

// Stores a staged tile to HBM in 16-byte pieces; returns this thread's bytes.
template <class R, int THREADS, class T>
__device__ inline u32 store_tile(const T& tile, char* to, i64 stride, int rows) {
    constexpr int TOTAL = T::ROWS * T::CHUNKS;
    u32 bytes = 0;
#pragma unroll
    for (int e = 0; e < TOTAL; e += THREADS) {
        const int at = e + threadIdx.x, r = at / T::CHUNKS, c = at % T::CHUNKS;
        if (TOTAL % THREADS != 0 && at >= TOTAL) break;
        if (r < rows && (R::WIDTH == T::COLS || c * WIDE < R::WIDTH)) {
            const char* from = reinterpret_cast<const char*>(tile.data) + T::offset(r, c);
            *reinterpret_cast<uint4*>(to + (r * int(stride) + c * WIDE) * int(sizeof(element_t))) =
                *reinterpret_cast<const uint4*>(from);
            bytes += R::bytes(c);
        }
    }
    return bytes;
}

// -- Fragments ------------------------------------------------------------------------------------
// All products are computed in 16 x 16 x 16 pieces. A lane's part of an accumulator, float[4], is
// the same for either element type: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next, of 8.
// Four readers read the operands from tiles. They are named after how the tile is stored: A is
// [m][k], its transpose [k][m]; B is [k][n], its transpose [n][k].
#if FS_TF32
#include "mma_tf32.cuh"
#else
#include "mma_half.cuh"
#endif

// A barrier of the `threads` threads of a group of warps: hardware barrier 1 + group of 16.
__device__ inline void sync_group(int group, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(threads) : "memory");
}

__device__ inline float quad_max(float x) {  // the four lanes of a quad share a row
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Stages a 16-row block of accumulators in shared memory as elements, times a factor for its upper
// and its lower half.
template <int N, class T>
__device__ inline void stage(T& tile, int row, int col, const float (&c)[N][4], float top,
                             float bottom) {
    const int r = row + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        put_pair(tile, r, col / 8 + n, c[n][0] * top, c[n][1] * top);
        put_pair(tile, r + 8, col / 8 + n, c[n][2] * bottom, c[n][3] * bottom);
    }
}

// Adds a row's part of two neighbouring 8-column fragments to HBM. (x, y) are this lane's elements
// of the left fragment, (z, w) of the right one. `row` points to the first column of the left
// fragment, from which `columns` remain in the row. From sm_90 on, two lanes exchange elements, so
// that each adds four neighbours in one instruction. Every lane of the warp must call it; `inside`
// says whether its row exists. Returns the bytes added.
__device__ inline u32 reduce_pair(float* row, float x, float y, float z, float w, bool inside,
                                  int columns) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    const bool right = lane % 2;  // which fragment this lane adds
    const float give_x = right ? x : z, give_y = right ? y : w;
    const float got_x = __shfl_xor_sync(~0u, give_x, 1), got_y = __shfl_xor_sync(~0u, give_y, 1);
    if (!inside || right * 8 >= columns) return 0;
    const int first = right * 8 + lane % 4 / 2 * 4;
    const float a = right ? got_x : x, b = right ? got_y : y;
    const float c = right ? z : got_x, d = right ? w : got_y;
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(row + first), "f"(a), "f"(b),
                 "f"(c), "f"(d) : "memory");
    return KeyRow::counted(columns - first, 4) * 4;
#else
    const int first = lane % 4 * 2;
    if (inside && columns > 0) atomicAdd(row + first, x), atomicAdd(row + first + 1, y);
    if (inside && columns > 8) atomicAdd(row + first + 8, z), atomicAdd(row + first + 9, w);
    const int left = columns - first;
    return inside ? (KeyRow::counted(left, 2) + KeyRow::counted(left - 8, 2)) * 4 : 0;
#endif
}
