// Quantizes the inputs of the FP8 forward (forward_fp8.cu): 16-bit Q, K and V to e4m3 with a
// float32 scale per block of rows (or per head, or per tensor). Q and K are multiplied by a
// Hadamard matrix if requested (incoherent processing, arXiv:2407.08608, section 3.3); V is also
// transposed. One thread block works on ROWS rows of one head; scale = max |x| / 448.
//
// V^T is (.., d, n). Its rows are padded with zeros to a multiple of 16, and the keys of each
// sixteen are permuted: keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 are stored at 4 t to 4 t + 3. These are
// the four scores of a row that one thread holds (forward_fp8.cu).
using u8 = unsigned char;
using u32 = unsigned int;
using i64 = long long;
#include "elements.cuh"
#include "pack_fp8.cuh"
#include "hadamard.cuh"

constexpr int D = FS_D, ROWS = FS_ROWS, STAGES = 3;
// A piece is eight elements. Four neighbouring threads own a row of Q or K, or two short rows.
constexpr int OWN = D == 64 ? 2 : 1, PIECES = OWN * D / 32, THREADS = ROWS * 4 / OWN;
constexpr bool ROTATE = FS_ROTATE;
constexpr float LARGEST = FS_E5M2 ? 57344.0f : 448.0f;
// Below this, LARGEST / x may be infinite: such elements become zeros, with scale 1.
constexpr float LEAST = LARGEST / 3.0e38f;
// Blocks and their scales in one launch; or in two launches: first the maxima, then the elements.
enum Mode { BLOCKS, LARGEST_ONLY, ELEMENTS_ONLY };
constexpr Mode MODE = static_cast<Mode>(FS_MODE);

struct Input {  // (batch, heads, n, d), strides in elements, the last axis contiguous
    const char* data;
    i64 batch, head, row;
};
struct Args {
    Input q, k, v;
    u8 *q8, *k8, *v8, *vt;   // (.., n, d) each; (.., d, n padded)
    float *q_scale, *k_scale, *v_scale;
    u32 *q_largest, *k_largest, *v_largest;  // bits of max |x|, for two launches
    const float* signs;                      // (d,), signs of the rotation
    int n_q, n_kv, heads, kv_heads, batch, tiles_q, tiles_kv, columns;  // columns: of vt
};
static_assert(sizeof(Args) == FS_ARGS_BYTES, "quantize.py and Args must agree");

__device__ __forceinline__ u32 pack(float a, float b, float c, float d) {
    return pack_fp8<FS_E5M2 != 0>(a, b, c, d);
}

// A tile of Q, K or V: rows from `first` on of head `walk` (batch * heads + head).
enum Which { OF_Q, OF_K, OF_V };
struct Tile {
    const char* from;  // start of the head
    u8* to;
    i64 row;           // bytes between rows of the input
    float* scale;      // of its first rows; null if another tile has the first rows of its block
    u32* largest;
    Which which;
    int walk, first, n, scales;  // scales: how many; with two, each covers ROWS / 2 rows

    __device__ void find(const Args& a, int number) {
        const int of_q = a.batch * a.heads * a.tiles_q, of_k = a.batch * a.kv_heads * a.tiles_kv;
        which = number < of_q ? OF_Q : number < of_q + of_k ? OF_K : OF_V;
        number -= which == OF_Q ? 0 : which == OF_K ? of_q : of_q + of_k;
        const Input& x = which == OF_Q ? a.q : which == OF_K ? a.k : a.v;
        const int tiles = which == OF_Q ? a.tiles_q : a.tiles_kv;
        const int heads = which == OF_Q ? a.heads : a.kv_heads;
        walk = number / tiles, first = number % tiles * ROWS;
        n = which == OF_Q ? a.n_q : a.n_kv;
        row = x.row * 2;
        from = x.data + (walk / heads * x.batch + walk % heads * x.head) * 2;
        to = (which == OF_Q ? a.q8 : which == OF_K ? a.k8 : a.v8) + i64(walk) * n * D;
        // FS_SCALES: 0 one per tensor, 1 per head, 2 per block of rows.
        const int rows = which == OF_Q ? FS_SCALE_Q : FS_SCALE_K;
        const int at = FS_SCALES == 0 ? 0 : FS_SCALES == 1 ? walk
                     : walk * ((n + rows - 1) / rows) + first / rows;
        const bool leads = FS_SCALES == 0 ? number == 0
                         : FS_SCALES == 1 ? first == 0 : first % rows == 0;
        scale = (which == OF_Q ? a.q_scale : which == OF_K ? a.k_scale : a.v_scale) + at;
        if (!leads) scale = nullptr;
        largest = (which == OF_Q ? a.q_largest : which == OF_K ? a.k_largest : a.v_largest) + at;
        scales = MODE == BLOCKS && rows == ROWS / 2 ? 2 : 1;
    }
};
// A ring of tiles; each thread fetches the pieces that it works on. V^T replaces V in place.
struct OnChip {
    uint4 pieces[STAGES][PIECES][THREADS];
    u32 signs[D / 2];  // of two columns, as the sign bits of 16-bit elements
    u32 tops[2][32];   // each warp's maximum
    Tile tiles[4];     // the current tile, two that are being fetched, and one being located
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "quantize.py and OnChip must agree");
// Where a tile of V^T has the four keys at 4 `four` of row `row`, in words. The 16-byte pieces of a
// row are permuted to avoid bank conflicts between rows that are eight apart.
__device__ __forceinline__ int transposed_at(int row, int four) {
    return row * (ROWS / 4) + ((four / 4 ^ (row / 8)) % 8 * 4 | four % 4);
}

__device__ __forceinline__ void fetch(uint4* to, const char* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from),
                    "r"(exists ? 16 : 0) : "memory");
}
__device__ __forceinline__ void fetch_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void fetch_wait() {  // waits for all but the last groups
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
}

// Neighbouring threads fetch neighbouring pieces of whole rows: fetching halves of 128-byte lines
// takes longer (docs/notebooks/hopper.md). The exception is longer rows that are rotated. Each
// thread fetches what it will work on, 64 bytes of eight rows at a time: exchanging pieces between
// threads costs more than it saves.
constexpr bool WHOLE_ROWS = !ROTATE || D == 64;
constexpr int LINES = 256 / D;  // rows of Q and K that a warp fetches from at a time
// Of V, a thread owns eight columns of four keys that are adjacent in V^T, once or twice.
__device__ __forceinline__ int own_eight() { return threadIdx.x % (D / 8); }
// The first row of the tile's Q or K from which this thread fetches, if whole rows are fetched.
__device__ __forceinline__ int line_row() {
    return threadIdx.x / 32 * 8 * OWN + threadIdx.x % 32 / (D / 8);
}
// The tile's rows and columns of Q and K that this thread owns before a rotation: every fourth
// piece of a row or of two. Without a rotation, a thread owns what it fetches.
__device__ __forceinline__ int own_row(int piece) {
    return ROTATE ? (threadIdx.x / 32 * OWN + piece / (D / 32)) * 8 + threadIdx.x % 32 / 4
                  : line_row() + piece * LINES;
}
__device__ __forceinline__ int own_column(int piece) {
    return ROTATE ? (threadIdx.x % 4 + piece % (D / 32) * 4) * 8 : threadIdx.x % (D / 8) * 8;
}
// Where a stage has this thread's pieces. If other threads fetch them, every second piece is
// swapped with one of another row, to avoid bank conflicts between two pieces of a row.
__device__ __forceinline__ u32 own_slot(int piece) {
    return threadIdx.x ^ (ROTATE && WHOLE_ROWS && piece % 2 ? 4 : 0);
}
// The inverse: where piece `piece` of the warp's row `row` is written.
__device__ __forceinline__ int slot(int row, int piece) {
    return row / 8 * (D / 32) * THREADS + piece / 4 * THREADS + threadIdx.x / 32 * 32 +
           ((row % 8 ^ piece / 4 % 2) * 4 | piece % 4);
}
// The rows and columns that this thread owns after a rotation.
__device__ __forceinline__ int turned_row(int piece) {
    return (threadIdx.x / 32 * OWN + piece / (D / 32)) * 8 + threadIdx.x % 4 * 2 +
           piece % (D / 32) / (D / 64);
}
__device__ __forceinline__ int turned_column(int piece) {
    return threadIdx.x % 32 / 4 * 8 + piece % (D / 64) * 64;
}
// Row in a tile of V of the j-th of the four keys at 4 `four` in V^T.
__device__ __forceinline__ int key_at(int four, int j) {
    return four / 4 * 16 + four % 4 * 2 + j % 2 + j / 2 * 8;
}
__device__ __forceinline__ int own_four(int piece) {
    return (threadIdx.x + piece / 4 * THREADS) / (D / 8);
}
__device__ __forceinline__ int own_key(int piece) {
    return key_at(own_four(piece), piece % 4);
}

__device__ __forceinline__ void fetch_tile(uint4 (&to)[PIECES][THREADS], const Tile& t) {
    if (WHOLE_ROWS) {
        const bool of_v = t.which == OF_V;
        const int row = of_v ? own_key(0) : line_row(), left = t.n - t.first - row;
        const int lane = threadIdx.x % 32;
        const char* const from = t.from + (t.first + row) * t.row + own_eight() * 16;
        uint4* const stage = &to[0][0];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int below = of_v ? key_at(0, i % 4) + i / 4 * (THREADS / (D / 8) * 4) : i * LINES;
            const int at = ROTATE && !of_v ? slot(i * LINES + lane / (D / 8), own_eight())
                                           : i * THREADS + own_slot(i);
            // else writes zeros and reads nothing
            fetch(stage + at, from + below * t.row, below < left);
        }
        return;
    }
    const char* const from = t.from;
    const i64 step = t.row;
    const int left = t.n - t.first;
    uint4* const mine = &to[0][threadIdx.x];
    if (t.which == OF_V) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const bool exists = own_key(i) < left;
            fetch(mine + i * THREADS,
                  from + (exists ? t.first + own_key(i) : 0) * step + own_eight() * 16, exists);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PIECES; i += D / 32) {
            const bool exists = own_row(i) < left;
            const char* row = from + (exists ? t.first + own_row(i) : 0) * step + own_column(i) * 2;
#pragma unroll
            for (int j = 0; j < D / 32; ++j) fetch(mine + (i + j) * THREADS, row + 64 * j, exists);
        }
    }
}

// Of each of two 16-bit numbers, the one of larger magnitude.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {  // a is not negative
    u32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b & 0x7fff7fffu));
    return r;
}

// Computes the scale of tile `t`. `mine` is the maximum of this thread (if the maximum was found
// before: of all threads). Writes the tile's scales, if this tile is the one to do so, and returns
// the factor of its elements. `norm` is a factor that the elements still lack.
__device__ __forceinline__ float settle(const Tile& t, float mine, u32 (&tops)[32], float norm) {
    const int warps = THREADS / 32 / t.scales;  // with two scales, each covers half of the warps
    const int warp = threadIdx.x / 32, half = warp >= warps, lane = threadIdx.x % 32;
    if (MODE != ELEMENTS_ONLY) {
        const u32 mine_of_warp = __reduce_max_sync(~0u, __float_as_uint(mine));
        if (lane == 0) tops[warp] = mine_of_warp;
    }
    // B0: every warp's maximum is written; all threads are done with the last tile
    __syncthreads();
    float top;
    if (MODE != ELEMENTS_ONLY) {
        const u32 all = __reduce_max_sync(~0u, lane < warps ? tops[half * warps + lane] : 0u);
        if (MODE == LARGEST_ONLY && threadIdx.x == 0) atomicMax(t.largest, all);
        top = __uint_as_float(all);
    } else {
        top = mine;
    }
    if (MODE != LARGEST_ONLY && t.scale && warp == half * warps && lane == 0 &&
        t.first + half * (ROWS / 2) < t.n)
        t.scale[half] = top > LEAST ? top * norm / LARGEST : 1.0f;
    return top > LEAST ? LARGEST / top : 1.0f;
}

// Stores V^T's tile from shared memory: 16 bytes of a row per thread.
__device__ __forceinline__ void store_transposed(const u32* tile, u8* vt, int walk, int first,
                                                 int columns) {
    const int piece = threadIdx.x % (ROWS / 16), column = first + piece * 16;
    u8* const head = vt + i64(walk) * D * columns;
    if (column >= columns) return;
#pragma unroll
    for (int row = threadIdx.x / (ROWS / 16); row < D; row += THREADS / (ROWS / 16)) {
        *reinterpret_cast<uint4*>(head + i64(row) * columns + column) =
            *reinterpret_cast<const uint4*>(tile + transposed_at(row, 4 * piece));
    }
}

template <bool TURNED>
__device__ __forceinline__ void store_rows(const Tile& t, const float (&x)[PIECES][8],
                                           float inverse) {
    u8* const to = t.to;
    const int first = t.first, n = t.n;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const float(&y)[8] = x[p];
        const int row = first + (TURNED ? turned_row(p) : own_row(p));
        if (row < n)
            *reinterpret_cast<uint2*>(to + i64(row) * D +
                                      (TURNED ? turned_column(p) : own_column(p))) =
                make_uint2(pack(y[0] * inverse, y[1] * inverse, y[2] * inverse, y[3] * inverse),
                           pack(y[4] * inverse, y[5] * inverse, y[6] * inverse, y[7] * inverse));
    }
}

// Transposes 4 x 4 bytes.
__device__ __forceinline__ void transpose_bytes(u32 (&w)[4]) {
    const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[0], w[1], 0x7362);
    const u32 c = __byte_perm(w[2], w[3], 0x5140), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, c, 0x5410), w[1] = __byte_perm(a, c, 0x7632);
    w[2] = __byte_perm(b, d, 0x5410), w[3] = __byte_perm(b, d, 0x7632);
}

__device__ __forceinline__ void store_values(u32* tile, const Args& a, const Tile& t,
                                             const float (&x)[PIECES][8], float inverse) {
    u8* const to = t.to;
    const int first = t.first, n = t.n, c = own_eight();
#pragma unroll
    for (int e = 0; e < PIECES; e += 4) {  // four keys of eight columns
        u32 w[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            tile[transposed_at(8 * c + i, own_four(e))] = w[i / 4][i % 4] =
                pack(x[e][i] * inverse, x[e + 1][i] * inverse, x[e + 2][i] * inverse,
                     x[e + 3][i] * inverse);
        transpose_bytes(w[0]), transpose_bytes(w[1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = first + own_key(e + j);
            if (key < n)
                *reinterpret_cast<uint2*>(to + i64(key) * D + c * 8) =
                    make_uint2(w[0][j], w[1][j]);
        }
    }
    __syncthreads();  // B1: the tile is complete
    store_transposed(tile, a.vt, t.walk, t.first, a.columns);
}

extern __shared__ __align__(16) char shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 256 / D)
quantize(const __grid_constant__ Args a) {
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    const int tiles = a.batch * (a.heads * a.tiles_q + 2 * a.kv_heads * a.tiles_kv);
    if (threadIdx.x < STAGES && blockIdx.x + threadIdx.x * gridDim.x < tiles)
        s.tiles[threadIdx.x].find(a, blockIdx.x + threadIdx.x * gridDim.x);
    u32 h[4] = {};
    if (ROTATE) {
        hadamard_operand(h);
        for (int i = threadIdx.x; i < D / 2; i += THREADS)
            s.signs[i] = (a.signs[2 * i] < 0 ? 0x8000u : 0) |
                         (a.signs[2 * i + 1] < 0 ? 0x80000000u : 0);
    }
    __syncthreads();  // B2: the signs are written, and the first tiles are located
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) {
        if (blockIdx.x + k * gridDim.x < tiles) fetch_tile(s.pieces[k], s.tiles[k]);
        fetch_commit();
    }
    int stage = 0, ahead = STAGES - 1;
    for (int k = 0, number = blockIdx.x; number < tiles; ++k, number += gridDim.x) {
        const Tile& t = s.tiles[k % 4];
        // read while the copies are awaited
        const u32 found = MODE == ELEMENTS_ONLY ? *t.largest : 0;
        fetch_wait();
        const bool of_v = t.which == OF_V, turned = ROTATE && !of_v;
        if (ROTATE && WHOLE_ROWS) __syncwarp();  // likewise for what the other lanes fetched
        u32 raw[PIECES][4];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const uint4 piece = s.pieces[stage][i][own_slot(i)];
            raw[i][0] = piece.x, raw[i][1] = piece.y, raw[i][2] = piece.z, raw[i][3] = piece.w;
        }
        float x[PIECES][8], mine = 0.0f;
        if (turned) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const uint4 sign = *reinterpret_cast<const uint4*>(&s.signs[own_column(i) / 2]);
                raw[i][0] ^= sign.x, raw[i][1] ^= sign.y, raw[i][2] ^= sign.z, raw[i][3] ^= sign.w;
            }
            rotate<D, OWN>(x, raw, h);
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
#pragma unroll
                for (int c = 0; c < 8; ++c) mine = fmaxf(mine, fabsf(x[i][c]));
        } else {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    most = larger(most, raw[i][w]);
                    const float2 two = unpack(raw[i][w]);
                    x[i][2 * w] = two.x, x[i][2 * w + 1] = two.y;
                }
            mine = fmaxf(unpack(most).x, unpack(most).y);
        }
        if (MODE == ELEMENTS_ONLY) mine = __uint_as_float(found);
        constexpr float NORM = D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : 0.0625f;
        const float inverse = settle(t, mine, s.tops[k % 2], turned ? NORM : 1.0f);
        // Both overwrite what the last tile held, with which all threads are done.
        if (threadIdx.x == 0 && number + STAGES * gridDim.x < tiles)
            s.tiles[(k + STAGES) % 4].find(a, number + STAGES * gridDim.x);
        if (number + (STAGES - 1) * gridDim.x < tiles)
            fetch_tile(s.pieces[ahead], s.tiles[(k + STAGES - 1) % 4]);
        fetch_commit();
        if (MODE != LARGEST_ONLY) {
            if (of_v) store_values(reinterpret_cast<u32*>(s.pieces[stage]), a, t, x, inverse);
            else if (turned) store_rows<true>(t, x, inverse);
            else store_rows<false>(t, x, inverse);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        ahead = ahead == STAGES - 1 ? 0 : ahead + 1;
    }
}

// Transposes and permutes a V that is FP8 already. A thread works on four keys of 16 columns.
extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const __grid_constant__ Args a) {
    constexpr int UNITS = ROWS / 4 * (D / 16);
    u32* tile = reinterpret_cast<u32*>(shared);
    const int walk = blockIdx.x / a.tiles_kv, first = blockIdx.x % a.tiles_kv * ROWS;
    const char* head = a.v.data + walk / a.kv_heads * a.v.batch + walk % a.kv_heads * a.v.head;
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
        const int c = unit % (D / 16), four = unit / (D / 16);
        u32 x[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = first + key_at(four, j);
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (key < a.n_kv)
                raw = __ldcs(reinterpret_cast<const uint4*>(head + key * a.v.row + c * 16));
            x[j][0] = raw.x, x[j][1] = raw.y, x[j][2] = raw.z, x[j][3] = raw.w;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // byte i of each key's sixteen
            const u32 pick = i % 4 | (i % 4 + 4) << 4;
            const u32 lo = __byte_perm(x[0][i / 4], x[1][i / 4], pick);
            const u32 hi = __byte_perm(x[2][i / 4], x[3][i / 4], pick);
            tile[transposed_at(16 * c + i, four)] = __byte_perm(lo, hi, 0x5410);
        }
    }
    __syncthreads();  // B3: the tile is complete
    store_transposed(tile, a.vt, walk, first, a.columns);
}
