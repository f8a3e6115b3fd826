// FP8 inputs of the Hopper forward (forward_fp8.cu): 16-bit Q, K and V to e4m3 with a float32 scale
// for each block of rows (or head, or tensor), Q and K rotated by a Hadamard matrix if asked
// (incoherent processing, arXiv:2407.08608, section 3.3), V also transposed. One block of threads
// works on ROWS rows of one head; scale = max |x| / 448.
//
// V^T is (.., d, n), its rows filled up with zeros to whole sixteens, and the keys of each sixteen
// permuted: at 4 t, .. 4 t + 3 lie keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9, which are what one thread
// has of a row of scores (forward_fp8.cu).
using u8 = unsigned char;
using u32 = unsigned int;
using i64 = long long;

constexpr int D = FS_D, ROWS = FS_ROWS, PARTS = D / 32, THREADS = ROWS * PARTS;
constexpr bool ROTATE = FS_ROTATE;
constexpr float LARGEST = FS_E5M2 ? 57344.0f : 448.0f;
// Up to here LARGEST / x may not be finite: elements so small are zeros, their scale 1.
constexpr float LEAST = LARGEST / 3.0e38f;
// Blocks and their scales in one go; or in two launches: largest values, then elements.
enum Mode { BLOCKS, LARGEST_ONLY, ELEMENTS_ONLY };
constexpr Mode MODE = static_cast<Mode>(FS_MODE);
constexpr int PITCH = ROWS / 4 + 1;  // words of a row of V^T in shared memory; odd

struct Input {  // (batch, heads, n, d), strides in elements, the last axis contiguous
    const char* data;
    i64 batch, head, row;
};
struct Args {
    Input q, k, v;
    u8 *q8, *k8, *v8, *vt;   // (.., n, d) each, v8 may be absent; (.., d, n padded)
    float *q_scale, *k_scale, *v_scale;
    u32 *q_largest, *k_largest, *v_largest;  // bits of max |x|; where there are two launches
    const float* signs;                      // (d,), of the rotation
    int n_q, n_kv, heads, kv_heads, batch, tiles_q, tiles_kv, columns;  // columns: of vt
};
static_assert(sizeof(Args) == FS_ARGS_BYTES, "families/quantize.py and Args must agree");

__device__ __forceinline__ float2 unpack(u32 x) {
#if FS_BF16
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
#else
    float2 r;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
#endif
}
#if FS_E5M2
#define CVT "cvt.rn.satfinite.e5m2x2.f32"
#else
#define CVT "cvt.rn.satfinite.e4m3x2.f32"
#endif
__device__ __forceinline__ u32 pack(float a, float b, float c, float d) {
    u32 r;
    asm("{\n.reg .b16 lo, hi;\n" CVT " lo, %2, %1;\n" CVT " hi, %4, %3;\nmov.b32 %0, {lo, hi};\n}"
        : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}
// Every thread has 32 elements, in four 16-byte pieces, which it fetches itself, a tile ahead.
struct OnChip {
    uint4 pieces[2][4][THREADS];
    u32 signs[D / 2];        // of two columns, as the sign bits of 16-bit elements
    u32 tops[2][32];         // a warp's largest element
    u32 transposed[D * PITCH];
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "families/quantize.py and OnChip must agree");

__device__ __forceinline__ void fetch(uint4* to, const char* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from),
                    "r"(exists ? 16 : 0) : "memory");
}
__device__ __forceinline__ void fetch_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void fetch_wait() {  // for all but the last group
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// A tile of Q, K or V: rows `first` on of walk `walk` (batch * heads + head).
enum Which { OF_Q, OF_K, OF_V };
struct Tile {
    Which which;
    int walk, first, tile, n;
    const Input& from;
    __device__ Tile(const Args& a, int number)
        : which(number < a.batch * a.heads * a.tiles_q ? OF_Q
                : number < a.batch * (a.heads * a.tiles_q + a.kv_heads * a.tiles_kv) ? OF_K : OF_V),
          from(which == OF_Q ? a.q : which == OF_K ? a.k : a.v) {
        if (which != OF_Q) number -= a.batch * a.heads * a.tiles_q;
        if (which == OF_V) number -= a.batch * a.kv_heads * a.tiles_kv;
        const int tiles = which == OF_Q ? a.tiles_q : a.tiles_kv;
        const int heads = which == OF_Q ? a.heads : a.kv_heads;
        walk = number / tiles, tile = number % tiles, first = tile * ROWS;
        n = which == OF_Q ? a.n_q : a.n_kv;
        base = walk / heads * from.batch + walk % heads * from.head;
    }
    i64 base;  // of the head, in elements
    // Of Q and K four pieces of a row; of V a piece of four keys that lie together in V^T.
    __device__ void fetch_into(uint4 (&to)[4][THREADS]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + (which == OF_V ? key_of(i) : int(threadIdx.x) / PARTS);
            const int piece =
                which == OF_V ? threadIdx.x % (D / 8) : PARTS * i + threadIdx.x % PARTS;
            const bool exists = row < n;
            fetch(&to[i][threadIdx.x],
                  from.data + (exists ? base + row * from.row + piece * 8 : 0) * 2, exists);
        }
    }
    // Row in the tile of the i-th of the four keys at places 4 t to 4 t + 3 of a sixteen.
    static __device__ int key_of(int i) {
        const int four = threadIdx.x / (D / 8);
        return four / 4 * 16 + four % 4 * 2 + i % 2 + i / 2 * 8;
    }
};

// x diag(signs) H, a butterfly for each bit of the column; not yet divided by sqrt(d).
__device__ __forceinline__ void rotate(float (&x)[4][8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2)
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (!(c & bit)) {
                    const float a = x[i][c], b = x[i][c | bit];
                    x[i][c] = a + b, x[i][c | bit] = a - b;
                }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(i & bit)) {
                    const float a = x[i][c], b = x[i | bit][c];
                    x[i][c] = a + b, x[i | bit][c] = a - b;
                }
    }
#pragma unroll
    for (int bit = 1; bit < PARTS; bit *= 2) {
        const float sign = threadIdx.x & bit ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 8; ++c)
                x[i][c] = x[i][c] * sign + __shfl_xor_sync(~0u, x[i][c], bit);
    }
}

// The scale of tile `t`, whose largest element in this thread is `mine`, is written by who has its
// block's first rows; returns what elements are multiplied by. FS_SCALES: 0 one for the tensor, 1
// for a head, 2 for a block. `norm` is a factor still missing in the elements.
__device__ __forceinline__ float settle(const Args& a, const Tile& t, float mine, u32 (&tops)[32],
                                        float norm) {
    float* scales = t.which == OF_Q ? a.q_scale : t.which == OF_K ? a.k_scale : a.v_scale;
    u32* largest = t.which == OF_Q ? a.q_largest : t.which == OF_K ? a.k_largest : a.v_largest;
    // Where a tile has two blocks of 64 rows, each has half of the threads.
    const int rows = t.which == OF_Q ? FS_SCALE_Q : FS_SCALE_K;
    const int warps = THREADS / 32 / (MODE == BLOCKS && rows == ROWS / 2 ? 2 : 1);
    const int warp = threadIdx.x / 32, half = warp / warps, lane = threadIdx.x % 32;
    const int row = t.first + half * (ROWS / 2);
    const int at = FS_SCALES == 0 ? 0 : FS_SCALES == 1 ? t.walk
                 : t.walk * ((t.n + rows - 1) / rows) + row / rows;
    float top;
    if (MODE != ELEMENTS_ONLY) {
        const u32 mine_of_warp = __reduce_max_sync(~0u, __float_as_uint(mine));
        if (lane == 0) tops[warp] = mine_of_warp;
    }
    __syncthreads();  // B0: every warp's maximum is there; V^T's last tile has been read
    if (MODE != ELEMENTS_ONLY) {
        const u32 all = __reduce_max_sync(~0u, lane < warps ? tops[half * warps + lane] : 0u);
        if (MODE == LARGEST_ONLY && threadIdx.x == 0) atomicMax(largest + at, all);
        top = __uint_as_float(all);
    } else {
        top = __uint_as_float(largest[at]);
    }
    const bool first = FS_SCALES == 0 ? t.walk == 0 && t.tile == 0
                     : FS_SCALES == 1 ? t.tile == 0 : row % rows == 0 && row < t.n;
    if (MODE != LARGEST_ONLY && warp % warps == 0 && lane == 0 && first)
        scales[at] = top > LEAST ? top * norm / LARGEST : 1.0f;
    return top > LEAST ? LARGEST / top : 1.0f;
}

// V^T's tile, from shared memory: 16 bytes of a row a thread.
__device__ __forceinline__ void store_transposed(const u32* tile, u8* vt, int walk, int first,
                                                 int columns) {
    u8* head = vt + i64(walk) * D * columns;
#pragma unroll
    for (int i = threadIdx.x; i < D * (ROWS / 16); i += THREADS) {
        const int row = i / (ROWS / 16), piece = i % (ROWS / 16), column = first + piece * 16;
        const u32* at = tile + row * PITCH + piece * 4;
        if (column < columns)
            *reinterpret_cast<uint4*>(head + i64(row) * columns + column) =
                make_uint4(at[0], at[1], at[2], at[3]);
    }
}

__device__ __forceinline__ void store_rows(const Args& a, const Tile& t, const float (&x)[4][8],
                                           float inverse) {
    const int row = t.first + threadIdx.x / PARTS;
    if (row >= t.n) return;
    u8* to = (t.which == OF_Q ? a.q8 : a.k8) + (i64(t.walk) * t.n + row) * D;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float(&y)[8] = x[i];
        *reinterpret_cast<uint2*>(to + (PARTS * i + threadIdx.x % PARTS) * 8) = make_uint2(
            pack(y[0] * inverse, y[1] * inverse, y[2] * inverse, y[3] * inverse),
            pack(y[4] * inverse, y[5] * inverse, y[6] * inverse, y[7] * inverse));
    }
}

__device__ __forceinline__ void store_values(OnChip& s, const Args& a, const Tile& t,
                                             const float (&x)[4][8], float inverse) {
    const int c = threadIdx.x % (D / 8), four = threadIdx.x / (D / 8);
    u32 w[8];  // four keys of a column
#pragma unroll
    for (int i = 0; i < 8; ++i)
        s.transposed[(8 * c + i) * PITCH + four] = w[i] =
            pack(x[0][i] * inverse, x[1][i] * inverse, x[2][i] * inverse, x[3][i] * inverse);
    if (a.v8) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = t.first + Tile::key_of(j);
            const u32 pick = j | (j + 4) << 4;
            const u32 words[4] = {__byte_perm(w[0], w[1], pick), __byte_perm(w[2], w[3], pick),
                                  __byte_perm(w[4], w[5], pick), __byte_perm(w[6], w[7], pick)};
            if (key < t.n)
                *reinterpret_cast<uint2*>(a.v8 + (i64(t.walk) * t.n + key) * D + c * 8) =
                    make_uint2(__byte_perm(words[0], words[1], 0x5410),
                               __byte_perm(words[2], words[3], 0x5410));
        }
    }
    __syncthreads();  // B1: the tile is whole
    store_transposed(s.transposed, a.vt, t.walk, t.first, a.columns);
}

extern __shared__ __align__(16) char shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
quantize(const __grid_constant__ Args a) {
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    const int tiles = a.batch * (a.heads * a.tiles_q + 2 * a.kv_heads * a.tiles_kv);
    if (ROTATE)
        for (int i = threadIdx.x; i < D / 2; i += THREADS)
            s.signs[i] = (a.signs[2 * i] < 0 ? 0x8000u : 0) |
                         (a.signs[2 * i + 1] < 0 ? 0x80000000u : 0);
    __syncthreads();  // B2: the signs are there
    Tile(a, blockIdx.x).fetch_into(s.pieces[0]);
    fetch_commit();
    int stage = 0;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const int next = number + gridDim.x;
        if (next < tiles) Tile(a, next).fetch_into(s.pieces[stage ^ 1]);
        fetch_commit();
        fetch_wait();
        const Tile t(a, number);
        const bool turned = ROTATE && t.which != OF_V;
        float x[4][8], mine = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4 raw = s.pieces[stage][i][threadIdx.x];
            if (turned) {
                const uint4 sign = *reinterpret_cast<const uint4*>(
                    &s.signs[(PARTS * i + threadIdx.x % PARTS) * 4]);
                raw.x ^= sign.x, raw.y ^= sign.y, raw.z ^= sign.z, raw.w ^= sign.w;
            }
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float2 two = unpack(words[w]);
                x[i][2 * w] = two.x, x[i][2 * w + 1] = two.y;
            }
        }
        if (turned) rotate(x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 8; ++c) mine = fmaxf(mine, fabsf(x[i][c]));
        constexpr float NORM = D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : 0.0625f;
        const float inverse = settle(a, t, mine, s.tops[stage], turned ? NORM : 1.0f);
        if (MODE != LARGEST_ONLY) {
            if (t.which == OF_V) store_values(s, a, t, x, inverse);
            else store_rows(a, t, x, inverse);
        }
        stage ^= 1;
    }
}

// V that is FP8 already: transposed and permuted, nothing else. A thread has four keys of 16
// columns.
extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const __grid_constant__ Args a) {
    constexpr int UNITS = ROWS / 4 * (D / 16);
    u32* tile = reinterpret_cast<u32*>(shared);  // [D][PITCH]
    const int walk = blockIdx.x / a.tiles_kv, first = blockIdx.x % a.tiles_kv * ROWS;
    const char* head = a.v.data + walk / a.kv_heads * a.v.batch + walk % a.kv_heads * a.v.head;
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
        const int c = unit % (D / 16), four = unit / (D / 16);
        u32 x[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = first + four / 4 * 16 + four % 4 * 2 + j % 2 + j / 2 * 8;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (key < a.n_kv) {
                raw = __ldcs(reinterpret_cast<const uint4*>(head + key * a.v.row + c * 16));
            }
            x[j][0] = raw.x, x[j][1] = raw.y, x[j][2] = raw.z, x[j][3] = raw.w;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // byte i of each key's sixteen
            const u32 pick = i % 4 | (i % 4 + 4) << 4;
            const u32 lo = __byte_perm(x[0][i / 4], x[1][i / 4], pick);
            const u32 hi = __byte_perm(x[2][i / 4], x[3][i / 4], pick);
            tile[(16 * c + i) * PITCH + four] = __byte_perm(lo, hi, 0x5410);
        }
    }
    __syncthreads();  // B3: the tile is whole
    store_transposed(tile, a.vt, walk, first, a.columns);
}
