// FlashAttention-3 backward (arXiv:2407.08608, Algorithm 3) for Hopper: 16-bit inputs, float32
// accumulators, KV-outer. A block owns one key tile of one KV head. Each of two consumer warpgroups
// owns 64 of its keys and keeps their dK and dV in registers. Scores are computed transposed, keys
// by queries, so that P^T and dS^T already are the left operands of dV = P^T dO and dK = dS^T Q.
// Only dQ^T = K^T dS^T needs all keys of the tile, so only for dQ does dS pass through shared
// memory. TMA adds dQ into a float32 accumulator; with FS_ORDERED, in the order of the key tiles.
// One producer thread loads tiles, a second warp loads the rows' log-sum-exp and delta, and two
// more warps send dQ. The schedule's tables say which row tiles are visited. Without FS_FUSED the
// kernel computes no dQ: in the three-pass backward, dq.cu does.
//
// With FS_ONCE each row tile has one visit, which covers all of its keys. So delta is the sum of P
// dP over the block's own keys, and no kernel has to compute it before. And dQ is complete after
// the visit: it is rounded and stored. With FS_DLSE as well, this kernel subtracts the LSE's
// gradient from delta; without FS_ONCE, flash_delta has done so.
#include "tile_scheduler.cuh"

constexpr int D = FS_D, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K;  // D: both head dims, padded
constexpr int WARPGROUPS = BLOCK_K / 64, STAGES = 2, CHUNKS = D / 64;
// The columns of D that the products use: those that exist (a cluster divides them in pieces of
// 32).
constexpr int COLUMNS = columns_taken(FS_CLUSTER > 1 ? 32 : 16);
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
// The scores' accumulators start at -lse / scale, unless a softcap needs the scores themselves.
constexpr bool START = !FS_SCALED;
// dV is issued in slices of SLICE queries, each as soon as its slice of P is complete. There are
// few slices, since wgmma_wait counts at most 7 groups. A score function may read memory; it gets
// one slice, and so waits for memory once.
constexpr int SLICE = BLOCK_Q == 128 ? 32 : FS_SCORE_MOD && !FS_DISTANCES ? 64 : 16;
constexpr int SLICES = BLOCK_Q / SLICE;
// If a visit's exponentials take longer than dP: dP is then waited for in the middle of the
// exponentials.
constexpr bool HALFWAY = BLOCK_Q == 128 && !FS_ONCE && !FS_SCORE_LATE;
// dK of a visit is waited for in the next visit, if registers suffice.
constexpr bool CARRY = D == 128 && BLOCK_Q == 64 && !FS_SOFTCAP && (!FS_SCORE_MOD || FS_DISTANCES);
#if FS_DISTANCES
// The score function adds a term that depends only on the distance between query and key. A stage
// has the terms of all distances in a tile pair (and one more).
constexpr int DISTANCES = BLOCK_Q + BLOCK_K;
static_assert(DISTANCES % 32 == 0 && FS_DISTANCES == STAGES, "");
static_assert(FS_STARTED ? FS_STATISTICS : FS_ADDED, "");
#endif
// The initial values of the next visit's scores are loaded while this visit's last products run:
// for this many rows, the load takes long. At 32 columns under a causal mask or window, the early
// load is slower. (So is an early load of dP's initial values at 32 columns; with more columns it
// needs too many registers.)
constexpr bool EARLY = FS_FUSED && START && BLOCK_Q == 128 && !FS_ONCE &&
                       (COLUMNS > 32 || !FS_RIGHT) && !FS_STATISTICS;
// dQ of a visit is computed in the next visit, so that no warpgroup waits for the other's dS.
[[maybe_unused]] constexpr bool DEFERRED = FS_DEFERRED;
// dQ^T, D x BLOCK_Q, is divided between the warpgroups in pieces of 64 columns of dQ by DQ_ROWS
// queries: at D = 128 each warpgroup takes half of the columns, at D = 64 half of the queries. dQ
// leaves in boxes of 128 bytes per row: 32 float32 columns, or 64 rounded ones.
constexpr bool SPLIT_COLUMNS = D == 128;
// Up to 32 columns, dQ is computed instead of dQ^T: dQ^T would need 64 rows, the minimum of a
// product.
[[maybe_unused]] constexpr bool UPRIGHT = COLUMNS <= 32;
constexpr int DQ_ROWS = SPLIT_COLUMNS ? BLOCK_Q : BLOCK_Q / 2;
[[maybe_unused]] constexpr int DQ_BOXES = FS_ONCE ? 1 : 2;
[[maybe_unused]] constexpr int DQ_FLOATS = UPRIGHT ? 16 : DQ_ROWS / 2;
__device__ inline int dq_row(int g) { return SPLIT_COLUMNS ? 0 : DQ_ROWS * g; }
__device__ inline int dq_column(int g, int box) { return (SPLIT_COLUMNS ? 64 * g : 0) + 32 * box; }
static_assert(!UPRIGHT || DQ_ROWS == 64, "the rows of a product");
static_assert((D == 64 || D == 128) && COLUMNS <= D, "");
static_assert(BLOCK_Q % 16 == 0 && WARPGROUPS == 2 && DQ_ROWS % 8 == 0, "");
// dS^T in shared memory: a row is a key, with DS_WIDE queries per chunk (ptx.cuh).
constexpr int DS_WIDE = BLOCK_Q % 64 ? 16 : 64;
[[maybe_unused]] constexpr u64 DS_SWIZZLE = DS_WIDE == 16 ? SWIZZLE_32 : SWIZZLE_128;

// In a cluster, each block leaves dK and dV for the others in the memory of k, v, q and dout. This
// is the distance in bytes between two of a thread's floats.
[[maybe_unused]] constexpr int ROW_OF_THREADS = 128 * WARPGROUPS * 4;
static_assert(FS_CLUSTER == 1 || !(FS_ORDERED || FS_TIMELINE), "items have one block there");
static_assert(!FS_ONCE || (FS_FUSED && !FS_ORDERED && !FS_SOFTCAP && BLOCK_Q % 32 == 0), "");
static_assert(!FS_ONCE || !FS_SCORE_MOD, "delta is no sum of what it has");
static_assert(FS_ONCE || !FS_DLSE, "delta has it already");
static_assert(!FS_STATISTICS || (FS_BF16 && START && !FS_ONCE), "");
static_assert(!FS_ONCE || !FS_DEFERRED, "no visit follows in which dQ would be computed");
static_assert(D * ROW_OF_THREADS <= 2 * (2 * BLOCK_K + 2 * STAGES * BLOCK_Q) * D, "room for both");

struct OnChip {
    alignas(1024) u16 k[CHUNKS][BLOCK_K * 64];             // lives for one work tile
    alignas(1024) u16 v[CHUNKS][BLOCK_K * 64];             // lives for one work tile
    alignas(1024) u16 q[STAGES][CHUNKS][BLOCK_Q * 64];     // ring; a stage lives for one visit
    alignas(1024) u16 dout[STAGES][CHUNKS][BLOCK_Q * 64];  // ring; a stage lives for one visit
#if FS_FUSED
    alignas(1024) u16 ds[STAGES][BLOCK_Q / DS_WIDE][BLOCK_K * DS_WIDE];  // dS^T
#if FS_ONCE
    alignas(1024) u16 dq[WARPGROUPS][DQ_BOXES][DQ_ROWS * 64];    // staged for the store to dQ
    float sums[STAGES][4 * WARPGROUPS][BLOCK_Q], delta[4 * WARPGROUPS][BLOCK_Q];  // per warp
#if FS_DLSE
    float dlse[STAGES][BLOCK_Q];
#endif
#else
    alignas(1024) float dq[WARPGROUPS][DQ_BOXES][DQ_ROWS * 32];  // staged for the addition to dQ
#endif
#endif
#if FS_STATISTICS
    alignas(1024) u16 statistics[STAGES][BLOCK_Q * 16];    // see STATISTICS in kv_outer.cuh
#else
    float lse[STAGES][BLOCK_Q];                            // -lse, in the scores' unit
#if !FS_ONCE
    float delta[STAGES][BLOCK_Q];                          // -delta
#endif
#endif
#if FS_DISTANCES
    float distances[STAGES][DISTANCES];                    // terms that a score function adds
#endif
    u64 kv_full, k_empty, v_empty;                         // barriers of k and v
    u64 ds_full[STAGES], ds_free[STAGES];                  // barriers of ds, if dQ is deferred
    u64 full[STAGES], empty[STAGES];                       // barriers of q, dout and statistics
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_kernels.py and OnChip must agree");

// Named barriers (0 is __syncthreads). DS_READY: dS is written. DQ_FREE, DQ_FULL: a warpgroup's
// piece of dQ is sent; is staged. TILES_READ: no product of a work tile that a cluster shares reads
// a tile any more. SUMS_READY: sums are written.
enum NamedBarrier { DS_READY = 1, DQ_FREE = 2, DQ_FULL = 4, TILES_READ = 6, SUMS_READY = 7 };

#if FS_FUSED
#define STAGES_DQ
#endif
#include "kv_outer.cuh"

// Issues and commits S^T (+)= K Q^T or dP^T += V dO^T: `mine` is 64 rows of a K or V tile.
template <bool ADD>
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_Q / 2], const u16* mine,
                                             const u16* visited) {
    const u64 da = descriptor(mine, 0), db = descriptor(visited, 0);
#pragma unroll
    for (int x = 0; x < COLUMNS / 16; ++x)
        wgmma_ss<0, 0>(S, da + along_row(x, BLOCK_K), db + along_row(x, BLOCK_Q), ADD || x > 0);
    wgmma_commit();
}

#if FS_STATISTICS
// Issues the product that sets each score to its query's first (-lse / scale) or second (-delta)
// statistic: the left operand's rows select the statistic's three parts. With FS_RAMP, the rows
// also have the number of their key, which multiplies the function's step.
__device__ __forceinline__ void start_scores(float (&S)[BLOCK_Q / 2], const u16* statistics,
                                             int which) {
    constexpr u32 ONE = 0x3F80;  // 1 in bfloat16
    const int pair = threadIdx.x % 4 - 2 * which;  // of columns
    const u32 part = pair == 0 ? ONE | ONE << 16 : pair == 1 ? ONE : 0;
    u32 rows[4] = {part, part, 0, 0};
#if FS_RAMP
    if (which == 0) {
        const float key = (threadIdx.x / 128 - 1) * 64 + fragment_row();
        rows[2] = pair > 1 ? 0 : pack(key, pair ? 0.0f : key);
        rows[3] = pair > 1 ? 0 : pack(key + 8, pair ? 0.0f : key + 8);
    }
#endif
    wgmma_rs<0>(S, rows, descriptor(statistics, 0, SWIZZLE_32), FS_STARTED && which == 0);
}
#endif

#if FS_DISTANCES
// The number of the distance between this thread's first key and first query, among a tile pair's.
__device__ __forceinline__ int first_distance(int g) {
    return fragment_column() - 64 * g - fragment_row() + BLOCK_K - 1;
}

// Sets this thread's scores to the terms that the score function adds.
__device__ __forceinline__ void start_at_terms(float (&S)[BLOCK_Q / 2], const float* terms, int g) {
    const float* mine = terms + first_distance(g);
#pragma unroll
    for (int e = 0; e < BLOCK_Q / 2; ++e) S[e] = mine[e / 4 * 8 + e % 2 - e / 2 % 2 * 8];
}
#endif

// Loads the statistic (lse or delta) of each of this thread's scores.
__device__ __forceinline__ void load_rows(float (&S)[BLOCK_Q / 2], const float* statistic) {
#pragma unroll
    for (int j = 0; j < BLOCK_Q / 8; ++j) {
        const float2 pair = query_pair(statistic, j);
        S[4 * j] = S[4 * j + 2] = pair.x, S[4 * j + 1] = S[4 * j + 3] = pair.y;
    }
}

// Issues and commits dV += P^T dO or dK += dS^T Q over `rows` queries starting at `first`; the left
// operand is in registers.
__device__ __forceinline__ void issue_grad(float (&acc)[COLUMNS / 2],
                                           const u32 (&P)[BLOCK_Q / 16][4], const u16* visited,
                                           int first, int rows) {
    const u64 db = descriptor(visited, BLOCK_Q * 128);
    wgmma_fence();
#pragma unroll
    for (int x = first / 16; x < (first + rows) / 16; ++x)
        wgmma_rs<1>(acc, P[x], db + down_rows(x), 1);
    wgmma_commit();
}

#include "dq_of_keys.cuh"

#if FS_FUSED
// The queries of dS^T from which warpgroup g computes its piece of dQ. They may begin inside a
// chunk.
__device__ __forceinline__ const u16* piece_of_ds(
    const u16 (&ds)[BLOCK_Q / DS_WIDE][BLOCK_K * DS_WIDE], int g) {
    const int first = SPLIT_COLUMNS ? 0 : g * DQ_ROWS;
    return &ds[first / DS_WIDE][first % DS_WIDE];
}
#endif

#if FS_SCORE_MOD
// P of the slice of queries that starts at `first`, rounded; see `probability`.
__device__ __forceinline__ void make_slice(u32 (&P)[BLOCK_Q / 16][4], float (&S)[BLOCK_Q / 2],
                                           const Args& a, const Item& it, const Head& at,
                                           bool masked, bool exact, float factor, const float* lse,
                                           int first, int key, int query) {
    float p[SLICE / 2], scores[SLICE / 2];
#pragma unroll
    for (int e = 0; e < SLICE / 2; ++e) scores[e] = S[first / 2 + e];
    probabilities(p, scores, a, it, at, masked, exact, factor, lse + first, key, query + first);
#pragma unroll
    for (int e = 0; e < SLICE / 2; ++e) S[first / 2 + e] = scores[e];
#pragma unroll
    for (int e = 0; e < SLICE / 2; e += 2)
        P[(first / 2 + e) / 8][(first / 2 + e) / 2 % 4] = pack(p[e], p[e + 1]);
}
#endif

__device__ void consume(OnChip& s, const Args& a, int g) {
    const float to_log2 = exponent_factor(a);
    const int lane = threadIdx.x % 32;
    const bool speaks = lane == 0;  // one arrival per warp
    const int kv_heads = a.heads / a.group;
#if FS_FUSED
    // Where this thread's row of dS^T starts (for store_matrices), swizzled.
    const int ds_row = 64 * g + threadIdx.x / 32 % 4 * 16 + lane % 16;
    const int ds_turn = DS_WIDE == 16 ? ds_row / 4 % 2 : ds_row % 8;
    const u32 ds_at =
        shared_address(s.ds[0][0]) + ds_row * DS_WIDE * 2 + (lane / 16 ^ ds_turn) * 16;
#if !FS_ONCE
    // Where this thread stages dQ^T (rows are queries), if its columns exist.
    const int dq_row = lane % 4 * 2, dq_piece = threadIdx.x / 32 % 2 * 4 + lane / 16;
    const bool dq_sent = dq_column(g, threadIdx.x / 64 % 2) < FS_HEAD_DIM;
    const u32 dq_at = shared_address(&s.dq[g][threadIdx.x / 64 % 2][dq_row * 32]) +
                      (dq_piece ^ dq_row) * 16 + lane / 4 % 4 * 4;
#endif
#endif
    Ring ring, slot;
    u32 kv_parity = 0;
    while (true) {
        const Item& it = s.items.look(slot);  // not a copy: too few registers
        if (it.walk < 0) break;
        const Walk visits = it.visits;
        const int key = it.own.start + 64 * g + fragment_row();
        stamp_item(a, it.walk, it.outer, false);
        float dK[COLUMNS / 2], dV[COLUMNS / 2];
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; ++e) dK[e] = dV[e] = 0.0f;
        wait(&s.kv_full, kv_parity);
        kv_parity ^= 1;
        Step step;
        const int steps = step.begin(a, it, visits.count);
        float S[BLOCK_Q / 2];
#if FS_SCORE_LATE
        FlashSums sums;  // sums of one query head
#endif
#if !FS_STATISTICS
        if (EARLY) {
            if (steps > 0) wait(&s.full[ring.stage], ring.parity);
            load_rows(S, s.lse[ring.stage]);
        }
#endif
#pragma unroll 1
        for (int left = steps; left; --left) {
            const Visit visit = visits(a, step.v);
            const int stage = ring.stage;
            const int walk = it.walk * a.group + step.member;  // index of the query head
            u64* stamps = visit_stamps(a, i64(walk) * a.n_visits + it.visits.first + step.v);
            float dP[BLOCK_Q / 2];
            u32 P[BLOCK_Q / 16][4], dS[BLOCK_Q / 16][4];
            // -- S^T = K Q^T - lse / scale and dP^T = V dO^T - delta ------------------------------
            // The accumulators start at the statistics, which then need no registers of their own.
            // Both are loaded before either product starts: otherwise ptxas makes the second load
            // wait for the first product.
            stamp(stamps, 0);
            if (!EARLY) wait(&s.full[stage], ring.parity);
            stamp(stamps, 1);
#if !FS_STATISTICS
            if (START && !EARLY) load_rows(S, s.lse[stage]);
#if !FS_ONCE
            load_rows(dP, s.delta[stage]);
#endif
#else
#pragma unroll  // not needed, but otherwise ptxas serialises the products at 64 columns
            for (int e = 0; e < (COLUMNS > 48) * BLOCK_Q / 2; ++e) S[e] = dP[e] = 0.0f;
#endif
#if FS_STARTED
            start_at_terms(S, s.distances[stage], g);
#endif
            if (CARRY) wgmma_wait<0>(), pin(dK);  // ptxas would wait here anyway
            else if (FS_ONCE) pin(S);
            else if (!FS_STATISTICS || COLUMNS > 48)
                pin(S), pin(dP);  // loads all of dP here, none of it after S
            wgmma_fence();
#if FS_STATISTICS
            start_scores(S, s.statistics[stage], 0);
#endif
            issue_scores<START>(S, &s.k[0][64 * g * 64], s.q[stage][0]);
            wgmma_fence();
#if FS_STATISTICS
            start_scores(dP, s.statistics[stage], 1);
#endif
            issue_scores<!FS_ONCE>(dP, &s.v[0][64 * g * 64], s.dout[stage][0]);
            if (CARRY && speaks && left < steps) arrive(&s.empty[stage ^ 1]);
#if FS_SCORE_MOD
            const Head at = head_of(a, it, step);
            const int query = it.base + visit.tile * BLOCK_Q + fragment_column();
            const bool exact = is_exact(it, it.base + visit.tile * BLOCK_Q);
#if FS_DISTANCES
            const float* of_rows = s.distances[stage] + first_distance(g);
#elif FS_ADDED
            const float* of_rows = nullptr;
#else
            const float* of_rows = s.lse[stage];
#endif
#endif
            wgmma_wait<1>();
            pin(S);
            stamp(stamps, 2);
            // -- P^T = exp2(c S^T), under dP; dV += P^T dO, slice by slice ------------------------
#if FS_FLEX
#if !FS_SCORE_MOD
            const Head at = head_of(a, it, step);
            const int query = it.base + visit.tile * BLOCK_Q + fragment_column();
            const bool exact = is_exact(it, it.base + visit.tile * BLOCK_Q);
            drop_scores(S, a, it, at, visit.masked, exact, key, query);
#endif
#else
            shape_scores(S, a, it, visit.masked, key,
                         it.base + visit.tile * BLOCK_Q + fragment_column());
#endif
            // Otherwise ptxas moves the multiplications of all slices before the first exponential,
            // which is slow if there are many slices. ptxas does not know that no exponential is
            // negative. So each slice's factor, which never changes, gets a false dependency on an
            // exponential of the previous slice.
            u32 unit = __float_as_uint(to_log2), early = 0;
#pragma unroll
            for (int first = 0; first < BLOCK_Q; first += SLICE) {
                if (HALFWAY) unit |= early & 0x80000000u;
                const float factor = __uint_as_float(unit);
#if FS_SCORE_MOD
                make_slice(P, S, a, it, at, visit.masked, exact, factor, of_rows, first, key,
                           query);
                early = __float_as_uint(S[first / 2]);
#else
#pragma unroll
                for (int e = first / 2; e < (first + SLICE) / 2; e += 2) {
#if FS_SCALED
                    const float2 lse = query_pair(s.lse[stage], e / 4);
#else
                    const float2 lse = {0.0f, 0.0f};
#endif
                    const float p0 = exp2_approx(S[e] * factor + lse.x);
                    const float p1 = exp2_approx(S[e + 1] * factor + lse.y);
                    P[e / 8][e / 2 % 4] = pack(p0, p1);
                    if (e == first / 2) early = __float_as_uint(p0);
#if FS_SOFTCAP  // S is tanh, or -inf; from here on it is P times the softcap's slope, 1 - tanh^2
                    const float t0 = fmaxf(S[e], -1.0f);
                    const float t1 = fmaxf(S[e + 1], -1.0f);
                    S[e] = p0 * (1.0f - t0 * t0), S[e + 1] = p1 * (1.0f - t1 * t1);
#else
                    S[e] = p0, S[e + 1] = p1;
#endif
                }
#endif
                issue_grad(dV, P, s.dout[stage][0], first, SLICE);
                if (!HALFWAY) continue;
                if (first + SLICE == BLOCK_Q / 2) wgmma_wait<SLICES / 2>(), pin(dP);  // complete
                if (first < BLOCK_Q / 2) continue;
#pragma unroll
                for (int e = 0; e < SLICE / 2; ++e) {  // dS of the slices of the first half
                    const int at = (first - BLOCK_Q / 2) / 2 + e;
                    dP[at] *= S[at];
                }
            }
            // -- dS^T = P^T dP^T, under dV --------------------------------------------------------
            if (!HALFWAY) wgmma_wait<SLICES>(), pin(dP);  // dP is complete
            if (speaks && left == 1) arrive(&s.v_empty);  // the next work tile's V may be loaded
            stamp(stamps, 3);
#pragma unroll
            for (int e = HALFWAY ? BLOCK_Q / 4 : 0; e < BLOCK_Q / 2; ++e) {
#if FS_SCORE_LATE
                const int c = e / 4 * 8 + e % 2, r = e / 2 % 2;
                const float2 p = unpack(P[e / 8][e / 2 % 4]);
                dP[e] = function_gradient(a, at, sums, S[e], (e % 2 ? p.y : p.x) * dP[e],
                                          existing(query, c, it.end),
                                          existing(key + 8 * r, it.own.stop));
#else
                dP[e] *= S[e];
#endif
            }
#if FS_ONCE
            const int warp = threadIdx.x / 32 - 4;
            sum_keys(s.sums[stage][warp], dP);
            // All warps' sums are written. The sums of two visits ago, which this buffer held, were
            // read before any warp reached the last visit's barrier.
            named_sync(SUMS_READY, 128 * WARPGROUPS);
#if FS_DLSE
            subtract_delta(dP, S, s.sums[stage], s.delta[warp], s.dlse[stage]);
#else
            subtract_delta(dP, S, s.sums[stage], s.delta[warp]);
#endif
#endif
            round_operand(dS, dP);
#if FS_FUSED
            // Both warpgroups' dQ products of two visits ago have read this stage's dS.
            if (DEFERRED) wait(&s.ds_free[stage], ring.parity ^ 1);
#pragma unroll
            for (int x = 0; x < BLOCK_Q / 16; ++x) {
                const u32 at = ds_at + stage * sizeof(s.ds[0]);
                if (DS_WIDE == 16) store_matrices(at + x * BLOCK_K * 32, dS[x]);
                else store_matrices((at ^ x % 4 * 32) + x / 4 * BLOCK_K * 128, dS[x]);
            }
            fence_async_shared();
            // -- dQ^T = K^T dS^T, dK += dS^T Q ----------------------------------------------------
            // With deferral, this is the last visit's dQ. In a work tile's first visit the product
            // is computed from whatever the buffer holds, and its result is not used: behind a
            // branch, ptxas would serialize asynchronous products.
            const int of = DEFERRED ? stage ^ 1 : stage;
            const bool due = !DEFERRED || left < steps;
            if (DEFERRED) {
                __syncwarp();
                if (speaks) arrive(&s.ds_full[stage]);
                if (due) wait(&s.ds_full[of], stage ? ring.parity : ring.parity ^ 1);
            } else {
                // All of dS is written. The other stage's dS is free from here on: both warpgroups
                // waited for the last visit's products before this barrier.
                named_sync(DS_READY, 128 * WARPGROUPS);
            }
            float dQ[DQ_FLOATS];
            issue_dq(dQ, s.k[SPLIT_COLUMNS ? g : 0], piece_of_ds(s.ds[of], g));
            issue_grad(dK, dS, s.q[stage][0], 0, BLOCK_Q);
            wgmma_wait<1>();  // dV and dQ are complete
            pin(dQ);
            // the next work tile's K may be loaded
            if (!DEFERRED && speaks && left == 1) arrive(&s.k_empty);
            // -- dQ is sent while dK runs: staged here, sent by another warp ----------------------
            if (due) {
                if (DEFERRED && speaks) arrive(&s.ds_free[of]);
#if FS_ONCE
                hand_over_dq(s, dQ, g, a.scale);
#else
                hand_over_dq(s, dQ, g, dq_at, dq_sent);
#endif
            }
#else
            issue_grad(dK, dS, s.q[stage][0], 0, BLOCK_Q);
            wgmma_wait<1>();  // dV is complete
            if (speaks && left == 1) arrive(&s.k_empty);
#endif
#if !FS_STATISTICS
            if (EARLY) {  // if no visit follows, the values are loaded from this stage and not used
                Ring next = ring;
                next.next(STAGES);
                if (left > 1) wait(&s.full[next.stage], next.parity);
                load_rows(S, s.lse[next.stage]);
            }
#endif
            if (!CARRY) {
                wgmma_wait<0>();
                pin(dK);
                if (speaks) arrive(&s.empty[stage]);
            }
#if FS_SCORE_SUMS
            if (left == 1 || FS_IN_STEP || step.v == visits.count - 1) add_sums(a, at, sums);
#endif
            ring.next(STAGES);
            step.next(a, it, visits.count);
            stamp(stamps, 4);
        }
#if FS_FUSED && !FS_ONCE
        float dQ[DQ_FLOATS];
        const int last = ring.stage ^ 1;
        if (DEFERRED) {  // the last visit's dQ
            if (steps > 0) wait(&s.ds_full[last], ring.stage ? ring.parity : ring.parity ^ 1);
            issue_dq(dQ, s.k[SPLIT_COLUMNS ? g : 0], piece_of_ds(s.ds[last], g));
        }
#endif
        wgmma_wait<0>();
        pin(dK), pin(dV);
        if (CARRY && speaks && steps > 0) arrive(&s.empty[ring.stage ^ 1]);
#if FS_FUSED && !FS_ONCE
        if (DEFERRED) {
            pin(dQ);
            if (steps > 0) {
                if (speaks) arrive(&s.ds_free[last]), arrive(&s.k_empty);
                hand_over_dq(s, dQ, g, dq_at, dq_sent);
            }
        }
#endif
        if (speaks && steps == 0) arrive(&s.v_empty), arrive(&s.k_empty);
        // -- dK and dV, straight from registers ---------------------------------------------------
        const int kv_head = it.walk % kv_heads, batch = it.walk / kv_heads;
        u32 dk_bytes = 0, dv_bytes = 0;
#if FS_CLUSTER > 1
        // Each block writes its sums where the tiles were. Then each block reads some of the
        // columns of all blocks, and adds them in the order of the blocks.
        constexpr int PIECES = COLUMNS / 32;  // of dK; dV has as many
        const u32 mine = shared_address(s.k) + (threadIdx.x - 128) * 4;
        named_sync(TILES_READ, 128 * WARPGROUPS);  // no product reads a tile any more
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; ++e) {
            store_float(mine + e * ROW_OF_THREADS, dK[e]);
            store_float(mine + (COLUMNS / 2 + e) * ROW_OF_THREADS, dV[e]);
        }
        cluster_sync();
#pragma unroll 1
        for (int piece = cluster_rank(); piece < 2 * PIECES; piece += FS_CLUSTER) {
            float sum[16];
#pragma unroll
            for (int e = 0; e < 16; ++e) sum[e] = 0.0f;
#pragma unroll 1
            for (int block = 0; block < FS_CLUSTER; ++block)
#pragma unroll
                for (int e = 0; e < 16; ++e)
                    sum[e] += load_from(mine + (16 * piece + e) * ROW_OF_THREADS, block);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = key + 8 * r, column = piece % PIECES * 32;
                const bool exists = row < it.own.stop;
                if (piece < PIECES)
                    dk_bytes += store_row<KeyRow>(a.dk, batch, kv_head, row, sum, r, a.scale,
                                                  exists, column);
                else
                    dv_bytes += store_row<ValueRow>(a.dv, batch, kv_head, row, sum, r, 1.0f,
                                                    exists, column);
            }
        }
        cluster_sync();  // the other blocks have read this block's sums
#else
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = key + 8 * r;
            const bool exists = row < it.own.stop;
            dk_bytes += store_row<KeyRow>(a.dk, batch, kv_head, row, dK, r, a.scale, exists);
            dv_bytes += store_row<ValueRow>(a.dv, batch, kv_head, row, dV, r, 1.0f, exists);
        }
#endif
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        report(counts + 2, dk_bytes), report(counts + 3, dv_bytes);
        stamp_item(a, it.walk, it.outer, true);
        s.items.let_go(slot);
    }
#if FS_FUSED
    // the block must not exit before the copies have read its shared memory
    named_sync(DQ_FREE + g, 160);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if FS_CLUSTER > 1
__cluster_dims__(FS_CLUSTER, 1, 1)
#endif
hopper_backward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                const __grid_constant__ TensorMap map_dq, const __grid_constant__ Args a,
                u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    begin_barriers(s, 2 * FS_FUSED);
#if FS_CLUSTER > 1
    cluster_sync();  // no block copies to another block whose barriers do not exist yet
#endif
    const int role = take_role<PRODUCER_REGISTERS, CONSUMER_REGISTERS>();
    if (role == 0) {
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 1) produce_statistics(s, a);
#if FS_FUSED
        else if (warp >= 2) send_dq(s, a, &map_dq, warp - 2);
#endif
        else if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, &map_dout, counter);
    } else {
        consume(s, a, role - 1);
    }
}
