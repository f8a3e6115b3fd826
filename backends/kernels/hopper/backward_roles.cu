// The fused backward for head dims of 136 to 192 on Hopper. KV-outer as backward.cu, but each
// warpgroup computes different products. One consumer warpgroup computes the scores, P and dS of a
// whole tile, 64 queries by 96 keys, and dQ; one accumulates dV^T, and one dK^T, each for all keys
// and columns. So each product is as large as a warpgroup's registers allow, which minimises the
// shared-memory traffic of its operands, and no warpgroup waits for another one in the same role. P
// and dS pass through shared memory, transposed. Rows of the scores are queries.
#include "tile_scheduler.cuh"

constexpr int D = FS_D, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K;  // D: both head dims, padded
constexpr int WARPGROUPS = 3, STAGES = 2, CHUNKS = D / 64, THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = 24, SCORES_REGISTERS = 136, SUMS_REGISTERS = 176;
static_assert(PRODUCER_REGISTERS + SCORES_REGISTERS + 2 * SUMS_REGISTERS <= 512, "or all hang");
constexpr bool START = false;  // the scores' accumulators start at 0
// dQ is sent in one piece, in boxes of 32 columns by all queries.
constexpr int DQ_ROWS = BLOCK_Q, DQ_COLUMNS = columns_taken(32), DQ_BOXES = DQ_COLUMNS / 32;
__device__ inline int dq_row(int) { return 0; }
__device__ inline int dq_column(int, int box) { return 32 * box; }
static_assert(D == 192 && BLOCK_Q == 64 && BLOCK_K == 96 && FS_FUSED, "tiles of 64 x 96");

struct OnChip {
    alignas(1024) u16 k[CHUNKS][BLOCK_K * 64];          // lives for one work tile
    alignas(1024) u16 v[CHUNKS][BLOCK_K * 64];          // lives for one work tile
    alignas(1024) u16 q[STAGES][CHUNKS][BLOCK_Q * 64];  // ring; a stage lives for one visit
    alignas(1024) u16 dout[CHUNKS][BLOCK_Q * 64];       // lives for one visit
    alignas(1024) u16 p[BLOCK_K * 64];                  // P^T: a row is a key, 64 queries wide
    alignas(1024) u16 ds[BLOCK_K * 64];                 // dS^T, as P^T
    alignas(1024) float dq[1][D / 32][DQ_ROWS * 32];    // staged for the addition to dQ
    float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q]; // -lse in units of log 2, and -delta
    u64 kv_full, k_empty, v_empty;                      // barriers of k and v
    u64 full[STAGES], empty[STAGES];                    // barriers of q, lse and delta
    u64 dout_full[CHUNKS], dout_empty[CHUNKS];
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_kernels.py and OnChip must agree");

// Named barriers. P_FULL, DS_FULL: P or dS is written. P_FREE, DS_FREE: the warpgroup that
// accumulates dV or dK has read it. DS_WRITTEN: dS is written, for dQ. DQ_FREE, DQ_FULL: dQ is
// sent; is staged.
enum NamedBarrier { P_FULL = 1, P_FREE, DS_FULL, DS_FREE, DS_WRITTEN, DQ_FREE, DQ_FULL };

#define STAGES_DQ
#define ONE_DOUT
#include "kv_outer.cuh"

// Issues and commits S = Q K^T or dP = dO V^T; a row is a query.
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_K / 2], const u16* queries,
                                             const u16* keys) {
    const u64 da = descriptor(queries, 0), db = descriptor(keys, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < columns_taken(16) / 16; ++x)
        wgmma_ss<0, 0>(S, da + along_row(x, BLOCK_Q), db + along_row(x, BLOCK_K), x > 0);
    wgmma_commit();
}

// Issues and commits dQ = dS K.
__device__ __forceinline__ void issue_dq(float (&dQ)[DQ_COLUMNS / 2], const u16* ds, const u16* k) {
    const u64 da = descriptor(ds, 0), db = descriptor(k, BLOCK_K * 128);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_K / 16; ++x)
        wgmma_ss<1, 1>(dQ, da + down_rows(x), db + down_rows(x), x > 0);
    wgmma_commit();
}

// Stores 16 keys of P or dS, rounded and transposed; `at` is the address of this thread's first.
__device__ __forceinline__ void store_keys(u32 at, int x, const float (&S)[BLOCK_K / 2]) {
    u32 rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = pack(S[8 * x + 2 * i], S[8 * x + 2 * i + 1]);
    store_transposed(at + x * 16 * 128, rounded);
}

// Sets to -inf the scores that the mask drops, if the visit is masked.
__device__ __forceinline__ void mask_scores(float (&S)[BLOCK_K / 2], const Args& a, const Item& it,
                                            bool masked, int query
#if FS_FLEX
                                            , const Head& at
#endif
                                            ) {
    if (!masked) return;
    const int key = it.own.start + fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Keep keep(a, query + 8 * r, it.own.offset, it.own.stop);
        const int first = keep.lo - key, last = keep.hi - key;
#pragma unroll
        for (int e = 0; e < BLOCK_K / 2; ++e) {
            const int c = e / 4 * 8 + e % 2;
            if (e / 2 % 2 == r && (c > last || (FS_LEFT && c < first))) S[e] = NEG_INF;
#if FS_MASK_MOD
            if (e / 2 % 2 == r && !kept(a, at, existing(query + 8 * r, it.end),
                                        existing(key + c, it.own.stop)))
                S[e] = NEG_INF;
#endif
        }
    }
}

#if FS_SCORE_MOD
// P of raw scores; see `probability`.
template <bool KEPT>
__device__ __forceinline__ void make_probabilities(float (&P)[BLOCK_K / 2], float (&S)[BLOCK_K / 2],
                                                   const Args& a, const Item& it, const Head& at,
                                                   int query, const float (&minus_lse)[2]) {
    const int first = it.own.start + fragment_column();
    const Keep keep[2] = {{a, query, it.own.offset, it.own.stop},
                          {a, query + 8, it.own.offset, it.own.stop}};
    const FlashAt q[2] = {KEPT ? FlashAt(query) : existing(query, it.end),
                          KEPT ? FlashAt(query + 8) : existing(query + 8, it.end)};
#pragma unroll
    for (int e = 0; e < BLOCK_K / 2; ++e) {
        const int r = e / 2 % 2, step = e / 4 * 8 + e % 2;
        const FlashAt k = KEPT ? FlashAt(first, step) : existing(first, step, it.own.stop);
        const bool exists =
            !FS_POLES || (query + 8 * r < it.end && first + step < it.own.stop);
        const bool inside = KEPT || (exists && keep[r](first + step) && kept(a, at, q[r], k));
        P[e] = probability<KEPT>(a, at, S[e], LOG2E, minus_lse[r], q[r], k, inside);
    }
}
#endif

// The warpgroup that computes P, dS and dQ.
__device__ void make_scores(OnChip& s, const Args& a) {
    [[maybe_unused]] const float to_log2 = exponent_factor(a);
    const bool speaks = threadIdx.x % 32 == 0;  // one arrival per warp
    // Where this thread stores P and dS (for store_transposed), swizzled.
    const int lane = threadIdx.x % 32, key = lane / 16 * 8 + lane % 8;
    const int place = key * 64 + ((threadIdx.x / 32 % 4 * 2 + lane / 8 % 2) ^ key % 8) * 8;
    const u32 p_at = shared_address(&s.p[place]), ds_at = shared_address(&s.ds[place]);
    Ring ring, slot;
    u32 kv_parity = 0, dout_parity = 0;
    while (true) {
        const Item& it = s.items.look(slot);  // not a copy: too few registers
        if (it.walk < 0) break;
        Step step;
        const int steps = step.begin(a, it, it.visits.count);
        stamp_item(a, it.walk, it.outer, false);
#if FS_SCORE_SUMS
        FlashSums sums;  // sums of one query head
#endif
        wait(&s.kv_full, kv_parity);
        kv_parity ^= 1;
#pragma unroll 1
        for (int left = steps; left; --left) {
            const Visit visit = it.visits(a, step.v);
            const int row = fragment_row(), query = it.base + visit.tile * BLOCK_Q + row;
            // index of the query head
            [[maybe_unused]] const int walk = it.walk * a.group + step.member;
            u64* stamps = visit_stamps(a, i64(walk) * a.n_visits + it.visits.first + step.v);
#if FS_FLEX
            const Head at = head_of(a, it, step);
            [[maybe_unused]] const bool ends = FS_IN_STEP || step.v == it.visits.count - 1;
#endif
            step.next(a, it, it.visits.count);
            float S[BLOCK_K / 2], dP[BLOCK_K / 2];
            // -- S = Q K^T and dP = dO V^T --------------------------------------------------------
            stamp(stamps, 0);
            wait(&s.full[ring.stage], ring.parity);
            issue_scores(S, s.q[ring.stage][0], s.k[0]);
            for (int c = 0; c < CHUNKS; ++c) wait(&s.dout_full[c], dout_parity);
            stamp(stamps, 1);
            dout_parity ^= 1;
            issue_scores(dP, s.dout[0], s.v[0]);
            const float lse[2] = {s.lse[ring.stage][row], s.lse[ring.stage][row + 8]};
            wgmma_wait<1>();  // S is complete
            pin(S);
            stamp(stamps, 2);
            // -- P = exp2(c S - lse), under dP ----------------------------------------------------
#if FS_SCORE_MOD
            float P[BLOCK_K / 2];
            if (visit.masked || !is_exact(it, it.base + visit.tile * BLOCK_Q))
                make_probabilities<false>(P, S, a, it, at, query, lse);
            else
                make_probabilities<true>(P, S, a, it, at, query, lse);
            named_sync(P_FREE, 256);  // the last visit's P has been read
#pragma unroll
            for (int x = 0; x < BLOCK_K / 16; ++x) store_keys(p_at, x, P);
#else
#if FS_SCALED
#pragma unroll
            for (float& x : S) x = scaled(a, x);
#endif
#if FS_FLEX
            mask_scores(S, a, it, visit.masked, query, at);
#else
            mask_scores(S, a, it, visit.masked, query);
#endif
            named_sync(P_FREE, 256);  // the last visit's P has been read
#pragma unroll
            for (int x = 0; x < BLOCK_K / 16; ++x) {
                [[maybe_unused]] float slope[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int e = 8 * x + i;
#if FS_SOFTCAP  // the slope is 1 - tanh^2; S is tanh, or -inf
                    const float t = fmaxf(S[e], -1.0f);
                    slope[i] = 1.0f - t * t;
#endif
                    S[e] = exp2_approx(S[e] * to_log2 + lse[i / 2 % 2]);
                }
                store_keys(p_at, x, S);
#if FS_SOFTCAP  // from here on S is P times the slope
#pragma unroll
                for (int i = 0; i < 8; ++i) S[8 * x + i] *= slope[i];
#endif
            }
#endif
            fence_async_shared();
            named_arrive(P_FULL, 256);
            // -- dS = P (dP - delta) --------------------------------------------------------------
            const float delta[2] = {s.delta[ring.stage][row], s.delta[ring.stage][row + 8]};
            wgmma_wait<0>();  // dP is complete
            pin(dP);
            for (int c = 0; c < CHUNKS; ++c)
                if (speaks) arrive(&s.dout_empty[c]);
            if (speaks && left == 1) arrive(&s.v_empty);  // the next work tile's V may be loaded
            stamp(stamps, 3);
            // dK's warpgroup has read the last visit's dS; dQ was awaited
            named_sync(DS_FREE, 256);
#pragma unroll
            for (int x = 0; x < BLOCK_K / 16; ++x) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int e = 8 * x + i;
#if FS_SCORE_SUMS
                    const int k = it.own.start + fragment_column() + e / 4 * 8 + e % 2;
                    dP[e] = function_gradient(a, at, sums, S[e], P[e] * (dP[e] + delta[i / 2 % 2]),
                                              existing(query + i / 2 % 2 * 8, it.end),
                                              existing(k, it.own.stop));
#else
                    dP[e] = S[e] * (dP[e] + delta[i / 2 % 2]);
#endif
                }
                store_keys(ds_at, x, dP);
            }
            fence_async_shared();
            named_sync(DS_WRITTEN, 128);
            named_arrive(DS_FULL, 256);
            // -- dQ = dS K ------------------------------------------------------------------------
            float dQ[DQ_COLUMNS / 2];
            issue_dq(dQ, s.ds, s.k[0]);
            wgmma_wait<0>();
            pin(dQ);
            named_sync(DQ_FREE, 160);  // the last visit's dQ is sent
            stage_columns(&s.dq[0][0], dQ);
            fence_async_shared();
            named_arrive(DQ_FULL, 160);
#if FS_SCORE_SUMS
            if (ends || left == 1) add_sums(a, at, sums);
#endif
            ring.next(STAGES);
            stamp(stamps, 4);
        }
        if (speaks) {  // the next work tile's V and K may be loaded
            if (steps == 0) arrive(&s.v_empty);
            arrive(&s.k_empty);
        }
        stamp_item(a, it.walk, it.outer, true);
        s.items.let_go(slot);
    }
    named_sync(P_FREE, 256), named_sync(DS_FREE, 256);  // as many waits as arrivals
    // the block must not exit before the copies have read its shared memory
    named_sync(DQ_FREE, 160);
}

// Stores a work tile's dV or dK, transposed, rounded, times `factor`. Returns the bytes that this
// thread stored.
template <class R>
__device__ __forceinline__ u32 store_sum(const Tensor& to, const Item& it, int kv_heads,
                                         const float (&sum)[CHUNKS][BLOCK_K / 2], float factor) {
    const int lane = threadIdx.x % 32;
    char* head = to.data + (it.walk / kv_heads * to.batch + it.walk % kv_heads * to.head) * 2;
    u32 bytes = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int column = 64 * c + threadIdx.x / 32 % 4 * 16 + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < BLOCK_K / 16; ++j) {  // 16 keys
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = transposed(pack(sum[c][8 * j + 2 * i] * factor,
                                       sum[c][8 * j + 2 * i + 1] * factor));
            transpose_quad(x);
            const int row = it.own.start + 16 * j + lane / 2 % 2 * 8 + lane / 4;
            if (row < it.own.stop && column < R::WIDTH) {
                *reinterpret_cast<uint4*>(head + (row * to.row + column) * 2) =
                    make_uint4(x[0], x[1], x[2], x[3]);
                bytes += R::bytes(column / 8);
            }
        }
    }
    return bytes;
}

// A warpgroup that accumulates dV^T = dO^T P (VALUES) or dK^T = Q^T dS: 64 columns per product.
template <bool VALUES>
__device__ void add_up(OnChip& s, const Args& a) {
    constexpr int FULL = VALUES ? P_FULL : DS_FULL, FREE = VALUES ? P_FREE : DS_FREE;
    const bool speaks = threadIdx.x % 32 == 0;  // for its warp
    const u64 scores = descriptor(VALUES ? s.p : s.ds, 0);
    Ring ring, slot;
    named_arrive(FREE, 256);  // P or dS is free at first
    while (true) {
        const Item& it = s.items.look(slot);  // not a copy: too few registers
        if (it.walk < 0) return;
        stamp_item(a, it.walk, it.outer, false);
        float sum[CHUNKS][BLOCK_K / 2];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (float& x : sum[c]) x = 0.0f;
        Step step;
#pragma unroll 1
        for (int left = step.begin(a, it, it.visits.count); left; --left) {
            const int walk = it.walk * a.group + step.member;
            u64* stamps = visit_stamps(a, i64(walk) * a.n_visits + it.visits.first + step.v);
            step.next(a, it, it.visits.count);
            stamp(stamps, 0);
            if (!VALUES) wait(&s.full[ring.stage], ring.parity);
            else for (int c = 0; c < CHUNKS; ++c) wait(&s.dout_full[c], ring.parity);
            named_sync(FULL, 256);
            // this warpgroup computes no scores
            stamp(stamps, 1), stamp(stamps, 2), stamp(stamps, 3);
            const u64 tile = descriptor(VALUES ? s.dout[0] : s.q[ring.stage][0], 0);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int x = 0; x < BLOCK_Q / 16; ++x)
                    wgmma_ss<1, 0>(sum[c], tile + (c * BLOCK_Q * 128 / 16 + down_rows(x)),
                                   scores + along_row(x, BLOCK_K), 1);
                wgmma_commit();
            }
            if (VALUES) {  // a chunk of dO has been read
                wgmma_wait<2>();
                if (speaks) arrive(&s.dout_empty[0]);
                wgmma_wait<1>();
                if (speaks) arrive(&s.dout_empty[1]);
            }
            wgmma_wait<0>();
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) pin(sum[c]);
            if (speaks) arrive(VALUES ? &s.dout_empty[2] : &s.empty[ring.stage]);
            named_arrive(FREE, 256);
            stamp(stamps, 4);
            ring.next(VALUES ? 1 : STAGES);
        }
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        const int kv_heads = a.heads / a.group;
        if (VALUES) report(counts + 3, store_sum<ValueRow>(a.dv, it, kv_heads, sum, 1.0f));
        else report(counts + 2, store_sum<KeyRow>(a.dk, it, kv_heads, sum, a.scale));
        stamp_item(a, it.walk, it.outer, true);
        s.items.let_go(slot);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_backward_roles(const __grid_constant__ TensorMap map_q,
                      const __grid_constant__ TensorMap map_k,
                      const __grid_constant__ TensorMap map_v,
                      const __grid_constant__ TensorMap map_dout,
                      const __grid_constant__ TensorMap map_dq, const __grid_constant__ Args a,
                      u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    if (threadIdx.x == 0) {
        barrier_init(&s.kv_full, 1), barrier_init(&s.k_empty, 4), barrier_init(&s.v_empty, 4);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1 + 32);  // the copies, and the lanes with the statistics
            barrier_init(&s.empty[i], 4);  // dK's warps: they wait for dS, and so for all else
        }
        for (int c = 0; c < CHUNKS; ++c)
            // the warps of dP and of dV
            barrier_init(&s.dout_full[c], 1), barrier_init(&s.dout_empty[c], 8);
        s.items.init(4 * WARPGROUPS + 2);  // plus the warps of the statistics and of dQ
        barrier_init_fence();
    }
    __syncthreads();  // no thread uses a barrier before it is initialised
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_give<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 1) produce_statistics(s, a);
        else if (warp == 2) send_dq(s, a, &map_dq, 0);
        else if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, &map_dout, counter);
    } else if (role == 1) {
        registers_take<SCORES_REGISTERS>();
        make_scores(s, a);
    } else {
        registers_take<SUMS_REGISTERS>();
        if (role == 2) add_up<true>(s, a);
        else add_up<false>(s, a);
    }
}
