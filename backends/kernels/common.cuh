// Code that all portable and Hopper kernels include: the argument struct, the loop over a
// schedule's tables, the order in which blocks take work tiles, the element-wise mask, byte counts
// and time stamps.
//
// Compile-time constants (FS_*) come from flashsim.backends.launch. They have no defaults in this
// file, so a constant that the launcher forgets is a compile error.
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
#include "elements.cuh"

// Defaults for kernels without a mask or score function (backends/launch/functions.py).
#ifndef FS_MASK_MOD
#define FS_MASK_MOD 0
#endif
#ifndef FS_SCORE_MOD
#define FS_SCORE_MOD 0
#endif
#ifndef FS_SCORE_SUMS
#define FS_SCORE_SUMS 0  // 1 if arrays that the score function reads get a gradient
#endif
#ifndef FS_SCORE_LATE
// 1 if a backward computes the score function's slope together with dS
#define FS_SCORE_LATE FS_SCORE_SUMS
#endif
#ifndef FS_READS
#define FS_READS 0  // 1 if a function reads arrays at query or key positions
#endif
#ifndef FS_POLES
#define FS_POLES 0  // 1 if a score function may be infinite or NaN at positions that do not exist
#endif
#ifndef FS_TILE
// stages of the ring of captured elements in shared memory; see Elements in hopper/forward.cu
#define FS_TILE 0
#endif
#ifndef FS_DISTANCES
// stages of the ring of elements that depend on the distance; see Distances in hopper/forward.cu
#define FS_DISTANCES 0
#endif
#ifndef FS_RAMP
// 1 if a score function that is linear in the positions is part of the scores' product; see Ramp in
// hopper/forward.cu and STATISTICS in hopper/kv_outer.cuh
#define FS_RAMP 0
#endif
#ifndef FS_ADDED
// 1 if a kernel makes use of it that the score function only adds to the score; see added_term in
// flex.cuh
#define FS_ADDED 0
#endif
#ifndef FS_BOUNDED
// 1 if scores are bounded, so a forward needs no running maximum; see BoundedSoftmax
#define FS_BOUNDED 0
#endif
#ifndef FLASH_RANGES
// 1 if the mask function keeps a range of keys per query; see kept_keys in flex.cuh
#define FLASH_RANGES 0
#endif
#ifndef FLASH_BOUND
#define FLASH_BOUND 0.0f  // upper bound of |result| of a score function
#endif
#ifndef FS_PACK
// Query heads whose rows share a row tile of the Hopper forward: 1, or a GQA group. Row r of a tile
// is then query r / FS_PACK of the group's head r % FS_PACK.
#define FS_PACK 1
#endif
#ifndef FS_SINKS
#define FS_SINKS 0  // 1 if each head has an attention sink: one more score, without a value
#endif
// 1 if scores start at a term that the score function adds: it depends only on the distance
#define FS_STARTED (FS_DISTANCES && !FS_SCORE_MOD)
#define FS_FLEX (FS_MASK_MOD || FS_SCORE_MOD || FS_RAMP || FS_STARTED)

#define NEG_INF __int_as_float(0xff800000)  // NVRTC has no constexpr infinity
[[maybe_unused]] constexpr float LOG2E = 1.4426950408889634f;

// A (batch, heads, n, d) array in HBM; strides in elements, the last axis contiguous.
struct Tensor {
    char* data;
    i64 batch, head, row;

    __device__ char* at(int b, int h, int r) const {
        return data + (b * batch + h * head + r * row) * FS_BYTES;
    }
};

// The argument of every kernel, passed by value. launch.ARGS mirrors it; the sizes are compared
// below.
struct Args {
    Tensor q, k, v, o, dout, dq, dk, dv;
    float *lse, *delta;            // (batch * heads, n_q)
    float* dq_acc;                 // (batch * heads, n_q, FS_HEAD_DIM)
    u32* turns;  // (batch * heads, n_q, 2): which block adds dQ next (hopper/backward.cu)
    union {
        const float* dlse;         // backward: gradient of the LSE, (batch * heads, n_q)
        const float* q_scale;      // FP8 forward (forward_fp8.cu; FP8 has no backward)
    };
    const float *k_scale, *v_scale;  // scales of FP8 inputs
    const int4 *rows, *cols;       // Schedule.rows, Schedule.cols
    const int4* spans;  // Schedule.row_spans or col_spans, by the outer loop of this pass
    const int *ptr, *index, *kind; // Schedule.row_csr or col_csr
    const int* order;              // outer tiles, in the order in which blocks take them
    union {  // see device_tables.py
        const int* ranks;       // rank of each visit among the ordered additions to dQ
        const ushort4* shares;  // visits of each warpgroup of a Hopper forward: (tiles, 4)
    };
    // bytes moved: (query heads, n_visits, 8), or (walks, n_visits, 8) with FS_PACK; and
    // (walks, tiles, 8)
    u32 *visit_counts, *tile_counts;
    u64 *visit_stamps, *tile_stamps;  // the same, with 5 numbers each
    int n_q, n_kv, heads, group, walks, tiles, clump, n_visits, left, right;
    int first, stop;               // range of work tiles of this launch (hopper/backward.cu)
    float scale, softcap;
#if FS_FLEX
    alignas(8) FlashCaptured captured;  // arrays and numbers that the mask and score functions read
#if FS_VARLEN
    const int2* starts;  // of each outer tile's packed sequence: its first query, its first key
#endif
#endif
#if FS_SINKS
    const float* sinks;            // of each query head
#endif
};  // batch * heads always counts query heads; `walks` counts the heads of this pass's outer loop
static_assert(sizeof(Args) == FS_ARGS_BYTES, "launch.ARGS and Args must agree");

// -- Which tiles: read from the schedule, never decided here --------------------------------------
struct Visit {
    int tile;     // inner tile: key tile j in a Q-outer loop, row tile i in a KV-outer loop
    bool masked;  // the mask drops some of the tile's scores
};

struct Walk {
    int4 span;  // lo, full_lo, full_hi, hi
    int first, count;

    __device__ Walk(const Args& a, int outer) {
#if FS_SPANS
        span = a.spans[outer];
        count = span.w - span.x;
        first = FS_TRACE || FS_TIMELINE ? a.ptr[outer] : 0;  // visit numbers follow the CSR order
#else
        first = a.ptr[outer];
        count = a.ptr[outer + 1] - first;
#endif
    }
    __device__ Visit operator()(const Args& a, int v) const {
#if FS_SPANS
        const int t = FS_DESCENDING ? span.w - 1 - v : span.x + v;
        return {t, t < span.y || t >= span.z};
#else
        return {a.index[first + v], a.kind[first + v] != 0};
#endif
    }
};

struct Range {  // the rows of one tile, in packed indices
    int start, stop, offset;
};

__device__ inline Range row_tile(const Args& a, int i) {
#if FS_VARLEN
    const int4 t = a.rows[i];
    return {t.x, t.y, t.z};
#else
    return {i * FS_BLOCK_Q, min((i + 1) * FS_BLOCK_Q, a.n_q * FS_PACK), a.n_kv - a.n_q};
#endif
}
__device__ inline Range col_tile(const Args& a, int j) {
#if FS_VARLEN
    const int4 t = a.cols[j];
    return {t.x, t.y, t.z};
#else
    return {j * FS_BLOCK_K, min((j + 1) * FS_BLOCK_K, a.n_kv), a.n_kv - a.n_q};
#endif
}

// -- Who does what --------------------------------------------------------------------------------
// Blocks start in index order. A group of `clump` heads, whose tensors fit in L2 together, is
// finished before the next group starts. Within a group, the outer tiles with the most visits come
// first.
struct Work {
    int walk, outer;  // walk = batch * heads + head (KV heads in a KV-outer pass)
};
__device__ inline Work take_work(const Args& a) {
    const int block = blockIdx.x, whole = a.clump * a.tiles;
    const int first = block / whole * a.clump, size = min(a.clump, a.walks - first);
    const int rest = block % whole;
    return {first + rest % size, a.order[rest / size]};
}

// The query of a row, and its head in the group.
__device__ inline int query_of(int row) { return FS_PACK == 1 ? row : u32(row) / FS_PACK; }
__device__ inline int member_of(int row) { return FS_PACK == 1 ? 0 : u32(row) % FS_PACK; }

// -- Which scores ---------------------------------------------------------------------------------
// Query q keeps keys lo(q) <= k <= hi(q). Without a window or causal mask, the comparison compiles
// away.
struct Keep {
    int lo, hi;
    __device__ Keep(const Args& a, int query, int offset, int key_stop) {
        hi = FS_RIGHT ? min(query + offset + a.right, key_stop - 1) : key_stop - 1;
        lo = FS_LEFT ? query + offset - a.left : 0;
    }
    __device__ bool operator()(int key) const { return key <= hi && (!FS_LEFT || key >= lo); }
};

// The transposed test: which queries keep a key. A key past the tile's end is kept by no query.
struct KeepColumn {
    int lo, hi;
    __device__ KeepColumn(const Args& a, int key, Range cols) {
        lo = FS_RIGHT ? key - cols.offset - a.right : 0;
        hi = FS_LEFT ? key - cols.offset + a.left : 0x7fffffff;
        if (key >= cols.stop) lo = 0x7fffffff, hi = -1;
    }
    __device__ bool operator()(int query) const { return query >= lo && (!FS_LEFT || query <= hi); }
};

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh. For bfloat16 it is the hardware instruction, whose relative error of 2^-11 is an eighth of
// the inputs' rounding error. Other types use exp2: two special-function calls, with an error of a
// few 1e-7.
__device__ inline float fast_tanh(float x) {
#if FS_BF16
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * LOG2E * x));
#endif
}

#if FS_SINKS
// Adds a head's sink to the sum of a row's exponentials. `m` is the row's maximum as a natural
// logarithm. Returns the row's LSE, and sets `l` to the divisor of O.
__device__ inline float with_sink(float sink, float m, float& l) {
    if (l == 0.0f) return sink;  // no key: O is 0
    const float top = fmaxf(m, sink);
    const float mine = exp2_approx((m - top) * LOG2E);
    const float total = l * mine + exp2_approx((sink - top) * LOG2E);
    l = __fdividef(total, mine);
    return top + __logf(total);
}
#endif

// -- Rows in HBM ----------------------------------------------------------------------------------
// A row of WIDTH elements, padded to whole 16-byte pieces. Only the EXIST elements of the problem
// are counted as bytes.
template <int WIDTH_, int EXIST_>
struct Row {
    static constexpr int WIDTH = WIDTH_, EXIST = EXIST_;
    static_assert(WIDTH % 8 == 0 && EXIST <= WIDTH && WIDTH - EXIST < 8, "see launch.row_elements");
    // Whether column `column`, below WIDTH, belongs to the problem.
    __device__ static bool exists(int column) { return WIDTH == EXIST || column < EXIST; }
    // How many of `n` columns belong to the problem; `left` columns of WIDTH remain from the first
    // of them on.
    __device__ static int counted(int left, int n) {
        return max(0, min(n, left - (WIDTH - EXIST)));
    }
    // Bytes of 16-byte piece `piece` that belong to the problem.
    __device__ static u32 bytes(int piece) {
        constexpr int N = 16 / FS_BYTES;
        return WIDTH == EXIST ? 16 : counted(WIDTH - piece * N, N) * FS_BYTES;
    }
};
using KeyRow = Row<FS_HEAD_DIM, FS_COUNTED>;        // of Q, K, dQ, dK
using ValueRow = Row<FS_HEAD_DIM_V, FS_COUNTED_V>;  // of V, O, dO, dV

// -- What was moved -------------------------------------------------------------------------------
// Adds the bytes that each thread moved to a counter: one reduction per warp.
__device__ inline void report(u32* slot, u32 bytes) {
#if FS_TRACE
    bytes = __reduce_add_sync(~0u, bytes);
    if (threadIdx.x % 32 == 0 && bytes) atomicAdd(slot, bytes);
#endif
}
// Adds two counts to neighbouring counters in one reduction, with one lane per counter. The two
// addresses differ on purpose: before an atomic that may hit one address from many lanes, ptxas
// inserts a vote.
__device__ inline void report(u32* slots, u32 first, u32 second) {
#if FS_TRACE
    first = __reduce_add_sync(~0u, first), second = __reduce_add_sync(~0u, second);
    const int lane = threadIdx.x % 32;
    if (lane < 2) atomicAdd(slots + lane, lane ? second : first);
#endif
}

// -- When -----------------------------------------------------------------------------------------
__device__ inline u64 cycles() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}
__device__ inline u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
#if FS_TIMELINE
#define STAMP(base, slot) if (threadIdx.x == 0) (base)[slot] = cycles()
#else
#define STAMP(base, slot) static_cast<void>(base)
#endif
// A block's record: its SM, then (cycles, ns) at its start and end. The pairs relate clock64 to
// globaltimer.
__device__ inline void stamp_block(u64* record, bool end) {
#if FS_TIMELINE
    if (threadIdx.x == 0) {
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        record[0] = sm;
        record[end ? 3 : 1] = cycles();
        record[end ? 4 : 2] = nanoseconds();
    }
#endif
}

// -- Launches that overlap (sm_90) ----------------------------------------------------------------
// Waits until the previous launch is complete and its writes are visible; no such write may be read
// earlier.
__device__ inline void wait_for_what_ran_before() {
#if FS_OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next launch start. It may run up to its own wait.
__device__ inline void let_what_runs_next_start() {
#if FS_OVERLAP
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
