// Code that the Hopper kernels share: the distribution of work tiles, and accumulator fragments.
#include "common.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

// Whether the registers suffice. A kernel starts with as many registers per thread, in multiples of
// eight, as all its threads can have. If the warpgroups request more in total, the last one to
// request waits for ever.
template <int THREADS>
__device__ constexpr bool registers_suffice(int producer, int consumer) {
    return producer + consumer * (THREADS / 128 - 1) <= THREADS / 128 * (65536 / THREADS / 8 * 8);
}

// Returns this warpgroup's role, after the barriers are initialised and registers are moved: 0
// loads tiles, the others compute.
template <int PRODUCER_REGISTERS, int CONSUMER_REGISTERS>
__device__ __forceinline__ int take_role() {
    __syncthreads();  // no thread uses a barrier before it is initialised
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) registers_give<PRODUCER_REGISTERS>();
    else registers_take<CONSUMER_REGISTERS>();
    return role;
}

struct Ring {  // a stage of a ring, and the parity of the current lap
    int stage = 0;
    u32 parity = 0;
    __device__ inline void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

#ifndef FS_IN_STEP
#define FS_IN_STEP 0  // see Step in kv_outer.cuh
#endif
#ifdef FS_WARPGROUPS
#ifndef FS_SHARES
#define FS_SHARES 0  // 1 if each warpgroup has a share of a work tile's visits
#endif
// The visits of one warpgroup, as numbers within a work tile: it computes the visits from `first`
// to before `stop`. Of these, the mask keeps all scores of those from `full_first` to before
// `full_stop`. The mask drops all scores of the other visits.
struct Share {
    int first, full_first, full_stop, stop;
};
#endif
// One work tile of the persistent loop. The producer writes it ahead of time; all warps read it.
struct Item {
    int walk;       // batch * heads + head (KV heads in a KV-outer pass); -1: no work tile is left
    int outer;      // the tile that the block owns
    int base;       // tile j of the inner loop starts at base + j * (its tile size)
    int end;        // end of the inner loop's sequence
    Range own;
#if FS_IN_STEP
    int way;        // step between row tiles: 1, or -1 from the last to the first
#endif
    Walk visits;
#ifdef FS_WARPGROUPS
#if FS_SHARES
    ushort4 shares[FS_WARPGROUPS];

    __device__ Share share(int warpgroup) const {
        const ushort4 s = shares[warpgroup];
        return {s.x, s.y, s.z, s.w};
    }
#else
    __device__ Share share(int) const { return {0, 0, 0, visits.count}; }
#endif
    // Visit v of a warpgroup with this share.
    __device__ Visit visit(const Args& a, const Share& share, int v) const {
        Visit found = visits(a, v);
        if (FS_SHARES) found.masked = v < share.full_first || v >= share.full_stop;
        return found;
    }
#endif
};

// Work tile `w` of the launch. As in common.cuh, a group of `clump` heads, whose tensors fit in L2
// together, is finished before the next group; within a group, the tiles with the most visits come
// first.
__device__ inline Item make_item(const Args& a, int w, bool by_row) {
    const int whole = a.clump * a.tiles;
    const int first = w / whole * a.clump, size = min(a.clump, a.walks - first), rest = w % whole;
    const int outer = a.order[rest / size];
#if FS_IN_STEP
    // The direction alternates per wave, and every head group has the same number of waves.
    // Otherwise a group's partial wave, or the excess over a full wave, would reverse the
    // directions of the next group's tiles.
    const int blocks = gridDim.x, rounds = max(1, (2 * whole + blocks) / (2 * blocks));
    const int round = w / whole * rounds + rest / blocks;
#endif
    Item it{first + rest % size, outer, 0, by_row ? a.n_kv : a.n_q,
            by_row ? row_tile(a, outer) : col_tile(a, outer),
#if FS_IN_STEP
            round % 2 ? 1 : -1,
#endif
            Walk(a, outer)};
#if FS_VARLEN
    it.end = by_row ? a.rows[outer].w : a.cols[outer].w;
    if (it.visits.count) {
        const int j = it.visits(a, 0).tile;
        it.base = by_row ? a.cols[j].x - j * FS_BLOCK_K : a.rows[j].x - j * FS_BLOCK_Q;
    }
#endif
    return it;
}

// Work tiles are taken in order from a counter. A block's first tile is its block number, so the
// counter starts at 0. Every block asks until no tile is left, so a launch increments the counter
// `items` times in all, and the last increment resets it to 0. If no block gets a second tile,
// there is no counter. A cluster of blocks shares one work tile, and gets no second.
#ifndef FS_CLUSTER
#define FS_CLUSTER 1
#endif
__device__ inline int first_work() { return blockIdx.x / FS_CLUSTER; }
__device__ inline int next_work(u32* counter, int items) {
    return counter ? gridDim.x + atomicInc(counter, items - 1) : 1 << 30;
}
// This block's rank in its cluster.
[[maybe_unused]] __device__ inline int cluster_rank() { return blockIdx.x % FS_CLUSTER; }

// The slots through which the producer hands work tiles to the other warps. With two slots the
// producer runs one tile ahead.
struct Items {
    u64 full[2], empty[2];
    Item item[2];

    __device__ inline void init(int readers) {  // `readers`: number of warps that read
        for (int i = 0; i < 2; ++i) barrier_init(&full[i], 1), barrier_init(&empty[i], readers);
    }
    // One thread: writes work tile w into the next slot.
    __device__ inline Item& write(Ring& slot, const Args& a, int w, int items, bool by_row) {
        Item& it = prepare(slot, a, w, items, by_row);
        release(slot);
        return it;
    }
    // As `write`, but readers have to wait for `release`.
    __device__ inline Item& prepare(const Ring& slot, const Args& a, int w, int items,
                                    bool by_row) {
        // every warp has read the slot's previous work tile
        wait(&empty[slot.stage], slot.parity ^ 1);
        Item& it = item[slot.stage];
        if (w < items) it = make_item(a, w, by_row);
        else it.walk = -1;
        return it;
    }
    __device__ inline void release(Ring& slot) {
        arrive(&full[slot.stage]);  // releases the work tile to its readers
        slot.next(2);
    }
    // A whole warp: returns a copy of the next work tile.
    __device__ inline Item read(Ring& slot) {
        const Item it = look(slot);
        let_go(slot);
        return it;
    }
    // Returns the next work tile in place. It stays valid until the warp releases it: the producer
    // has the other slot.
    __device__ inline const Item& look(const Ring& slot) {
        wait(&full[slot.stage], slot.parity);
        return item[slot.stage];
    }
    __device__ inline void let_go(Ring& slot) {
        __syncwarp();  // the whole warp has finished reading the work tile
        if (threadIdx.x % 32 == 0) arrive(&empty[slot.stage]);
        slot.next(2);
    }
};

// Where rows `row` to `stop` of a tensor lie in its tensor map. TMA clips a box only where the map
// ends. So a map of packed sequences has one view of the tensor per possible end of a tile,
// numbered by its last axis. In view `stop`, the row before `stop` is the last one, ROUND - 1
// (tensor_maps.py). Thus nothing of the next sequence is moved.
struct Place {
    int row, batch;
};
__device__ inline Place place(int row, int stop, int batch) {
    return FS_VARLEN ? Place{ROUND - stop + row, stop} : Place{row, batch};
}

// Starts TMA copies of a tile, 64 columns per box, and credits `bar` with its bytes.
template <int CHUNKS, int ELEMENTS>
__device__ inline void copy_tile(u16 (&to)[CHUNKS][ELEMENTS], const TensorMap* map, u64* bar,
                                 Place from, int head) {
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c)
        copy_box(to[c], map, bar, 64 * c, from.row, head, from.batch);
}

// A raw score for an exponent that cannot apply the scale (FS_SCALED): scaled; or capped, in units
// of the cap, which the exponent applies.
__device__ inline float scaled(const Args& a, float score) {
    return FS_SOFTCAP ? fast_tanh(score * (a.scale / a.softcap)) : score * a.scale;
}
// The factor from a score to an exponent in base 2.
__device__ inline float exponent_factor(const Args& a) {
    if (FS_SCALED && (FS_SCORE_MOD || !FS_SOFTCAP)) return LOG2E;
    return (FS_SOFTCAP ? a.softcap : a.scale) * LOG2E;
}

// The columns that a backward's products use: whole `step`s of the wider head_dim. Whole 64-column
// chunks, which TMA pads with zeros, would be more.
__device__ inline constexpr int columns_taken(int step) {
    return ((FS_HEAD_DIM > FS_HEAD_DIM_V ? FS_HEAD_DIM : FS_HEAD_DIM_V) + step - 1) / step * step;
}

// -- accumulator fragments ------------------------------------------------------------------------
// In a 64-row accumulator, a thread holds rows r = 16 (warp % 4) + lane / 4 and r + 8. Of each 8
// columns it holds the pair at 2 (lane % 4): element e is row e / 2 % 2, column 8 (e / 4) + e % 2 +
// pair.
__device__ inline int fragment_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
__device__ inline int fragment_column() { return threadIdx.x % 4 * 2; }

// An accumulator has the layout of a 16-bit left operand, with two neighbours per register.
template <int N>
__device__ __forceinline__ void round_operand(u32 (&p)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int e = 0; e < N / 2; ++e) p[e / 4][e % 4] = pack(s[2 * e], s[2 * e + 1]);
}

// Transposes within a quad. Before, thread t holds column pair t of four 8-column groups; after, it
// holds all four pairs of group t, which are 16 consecutive bytes of a row.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 give0 = odd ? x[0] : x[1], give1 = odd ? x[2] : x[3];
    give0 = __shfl_xor_sync(~0u, give0, 1), give1 = __shfl_xor_sync(~0u, give1, 1);
    if (odd) x[0] = give0, x[2] = give1; else x[1] = give0, x[3] = give1;
    give0 = high ? x[0] : x[2], give1 = high ? x[1] : x[3];
    give0 = __shfl_xor_sync(~0u, give0, 2), give1 = __shfl_xor_sync(~0u, give1, 2);
    if (high) x[0] = give0, x[1] = give1; else x[2] = give0, x[3] = give1;
}

// Rounds fragment row r (0 or 1) of an accumulator times `factor`. Stores it from column `first`
// on, as far as columns exist, at row `row` of one head of `to`, whose rows are R (see Row). All
// four threads of the quad must call it; `exists` says whether to store. Returns the bytes that
// this thread stored.
template <class R, int N>
__device__ __forceinline__ u32 store_row(const Tensor& to, int batch, int head, int row,
                                         const float (&acc)[N], int r, float factor, bool exists,
                                         int first = 0) {
    char* at = to.data + (batch * to.batch + head * to.head + row * to.row) * 2;
    u32 bytes = 0;
#pragma unroll
    for (int c = 0; c < (N + 15) / 16; ++c) {  // 32 columns per step
        u32 x[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int e = 16 * c + 4 * p + 2 * r;
            x[p] = e < N ? pack(acc[e < N ? e : 0] * factor, acc[e < N ? e + 1 : 0] * factor) : 0;
        }
        transpose_quad(x);
        const int column = first + 32 * c + threadIdx.x % 4 * 8;
        if (exists && column < R::WIDTH) {
            *reinterpret_cast<uint4*>(at + column * 2) = make_uint4(x[0], x[1], x[2], x[3]);
            bytes += R::bytes(column / 8);
        }
    }
    return bytes;
}

// Adds one thread's share of a count; `report` in common.cuh is for whole warps.
__device__ inline void report_one(u32* slot, u32 bytes) {
#if FS_TRACE
    atomicAdd(slot, bytes);
#endif
}

// -- time stamps: the producer and the first thread of each consumer warpgroup write their own ----
// This role's record of visit `number`, counted over all heads. Each warpgroup is a role; the
// producer's is 0. reports/timeline.py defines the slots.
__device__ inline u64* visit_stamps(const Args& a, i64 number) {
    return a.visit_stamps + (number * (blockDim.x / 128) + threadIdx.x / 128) * 5;
}
__device__ inline void stamp(u64* stamps, int slot) {
#if FS_TIMELINE
    if (threadIdx.x % 128 == 0) stamps[slot] = cycles();
#endif
}
// As stamp_block in common.cuh, for this role's share of a work tile.
__device__ inline void stamp_item(const Args& a, int walk, int outer, bool end) {
#if FS_TIMELINE
    if (threadIdx.x % 128 == 0) {
        const i64 item = i64(walk) * a.tiles + outer;
        u64* record = a.tile_stamps + (item * (blockDim.x / 128) + threadIdx.x / 128) * 5;
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        record[0] = sm;
        record[end ? 3 : 1] = cycles();
        record[end ? 4 : 2] = nanoseconds();
    }
#endif
}
