// FlashAttention-3 backward (arXiv:2407.08608, Algorithm 3) for Hopper: 16-bit inputs, float32
// accumulators, KV-outer. A block owns one tile of keys of one key head; each of two consumer
// warpgroups owns 64 of its keys and keeps their dK and dV in registers. Scores are computed
// transposed, keys by queries, so that P^T and dS^T are already the left operands of dV = P^T dO
// and dK = dS^T Q. Only for dQ^T = K^T dS^T, which needs all keys of the tile, does dS pass through
// shared memory; dQ is added into a float32 accumulator by the copy engine, with FS_ORDERED in the
// order of the key tiles. One producer thread loads tiles, a second warp the rows' log-sum-exp and
// delta, two more send dQ off. Which row tiles are visited is read from the schedule's tables.
// Without FS_FUSED there is no dQ: the three-pass form leaves it to hopper_dq.
//
// With FS_ONCE a row tile has one visit, and its keys are all here. So delta is a sum of what this
// block has, P dP over keys, and nobody ran before; and dQ is complete: it is rounded, and stored.
// With FS_DLSE as well, delta is less the LSE's gradient; elsewhere flash_delta has seen to that.
#include "tile_scheduler.cuh"

constexpr int D = FS_D, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K;  // D: both head dims, padded
constexpr int WARPGROUPS = BLOCK_K / 64, STAGES = 2, CHUNKS = D / 64;
// Of these, the products take the columns that exist (a cluster shares them out in pieces of 32).
constexpr int COLUMNS = columns_taken(FS_CLUSTER > 1 ? 32 : 16);
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
// The scores' accumulators start at -lse / scale, unless a softcap needs the scores themselves.
constexpr bool START = !FS_SCALED;
// dV is issued in slices of so many queries, each as soon as its part of P is there. Few of them,
// since wgmma_wait counts up to 7 groups. A function of scores may read memory: one slice then
// waits for it once.
constexpr int SLICE = BLOCK_Q == 128 ? 32 : FS_SCORE_MOD ? 64 : 16, SLICES = BLOCK_Q / SLICE;
// Where a visit's exponentials take longer than dP, which is then waited for in their middle.
constexpr bool HALFWAY = BLOCK_Q == 128 && !FS_ONCE && !FS_SCORE_LATE;
// dK of a visit is waited for in the next one, where registers allow for that.
constexpr bool CARRY = D == 128 && BLOCK_Q == 64 && !FS_SOFTCAP && !FS_SCORE_MOD;
// Where the next visit's scores start is loaded while this one's last products run: of so many rows
// that takes long. (Where dP starts, too, has no registers, or at 32 columns is slower; so is this
// there under a mask.)
constexpr bool EARLY =
    FS_FUSED && START && BLOCK_Q == 128 && !FS_ONCE && (COLUMNS > 32 || !FS_RIGHT);
// dQ of a visit is computed in the next one, so that no warpgroup waits for the other's dS.
[[maybe_unused]] constexpr bool DEFERRED = FS_DEFERRED;
// dQ^T, D x BLOCK_Q, is shared out in pieces of 64 columns of dQ by DQ_ROWS queries: at D = 128 a
// warpgroup takes half of the columns, at 64 half of the queries. It leaves in boxes of 128 bytes a
// row: 32 columns, or 64 if they are rounded.
constexpr bool SPLIT_COLUMNS = D == 128;
// Up to 32 columns it is dQ that is computed: dQ^T would have 64 rows, the least of a product.
[[maybe_unused]] constexpr bool UPRIGHT = COLUMNS <= 32;
constexpr int DQ_ROWS = SPLIT_COLUMNS ? BLOCK_Q : BLOCK_Q / 2;
[[maybe_unused]] constexpr int DQ_BOXES = FS_ONCE ? 1 : 2;
[[maybe_unused]] constexpr int DQ_FLOATS = UPRIGHT ? 16 : DQ_ROWS / 2;
__device__ inline int dq_row(int g) { return SPLIT_COLUMNS ? 0 : DQ_ROWS * g; }
__device__ inline int dq_column(int g, int box) { return (SPLIT_COLUMNS ? 64 * g : 0) + 32 * box; }
static_assert(!UPRIGHT || DQ_ROWS == 64, "the rows of a product");
static_assert((D == 64 || D == 128) && COLUMNS <= D, "");
static_assert(BLOCK_Q % 16 == 0 && WARPGROUPS == 2 && DQ_ROWS % 8 == 0, "");
// dS^T in shared memory: a row is a key, DS_WIDE queries to a chunk (ptx.cuh).
constexpr int DS_WIDE = BLOCK_Q % 64 ? 16 : 64;
[[maybe_unused]] constexpr u64 DS_SWIZZLE = DS_WIDE == 16 ? SWIZZLE_32 : SWIZZLE_128;

// Of a cluster's blocks: bytes between two of a thread's floats of dK and dV, laid down for the
// others where k, v, q and dout are.
[[maybe_unused]] constexpr int ROW_OF_THREADS = 128 * WARPGROUPS * 4;
static_assert(FS_CLUSTER == 1 || !(FS_ORDERED || FS_TIMELINE), "items have one block there");
static_assert(!FS_ONCE || (FS_FUSED && !FS_ORDERED && !FS_SOFTCAP && BLOCK_Q % 32 == 0), "");
static_assert(!FS_ONCE || !FS_SCORE_MOD, "delta is no sum of what it has");
static_assert(FS_ONCE || !FS_DLSE, "delta has it already");
static_assert(!FS_ONCE || !FS_DEFERRED, "no visit follows in which dQ would be computed");
static_assert(D * ROW_OF_THREADS <= 2 * (2 * BLOCK_K + 2 * STAGES * BLOCK_Q) * D, "room for both");

struct OnChip {
    alignas(1024) u16 k[CHUNKS][BLOCK_K * 64];             // lives for one item
    alignas(1024) u16 v[CHUNKS][BLOCK_K * 64];             // lives for one item
    alignas(1024) u16 q[STAGES][CHUNKS][BLOCK_Q * 64];     // ring, one visit each
    alignas(1024) u16 dout[STAGES][CHUNKS][BLOCK_Q * 64];  // ring, one visit each
#if FS_FUSED
    alignas(1024) u16 ds[STAGES][BLOCK_Q / DS_WIDE][BLOCK_K * DS_WIDE];  // dS^T
#if FS_ONCE
    alignas(1024) u16 dq[WARPGROUPS][DQ_BOXES][DQ_ROWS * 64];    // leaving for dQ
    float sums[STAGES][4 * WARPGROUPS][BLOCK_Q], delta[4 * WARPGROUPS][BLOCK_Q];  // of each warp
#if FS_DLSE
    float dlse[STAGES][BLOCK_Q];
#endif
#else
    alignas(1024) float dq[WARPGROUPS][DQ_BOXES][DQ_ROWS * 32];  // leaving for the accumulator
#endif
#endif
    float lse[STAGES][BLOCK_Q];                            // negative, in the scores' unit
#if !FS_ONCE
    float delta[STAGES][BLOCK_Q];                          // negative
#endif
    u64 kv_full, k_empty, v_empty;                         // of k and v
    u64 ds_full[STAGES], ds_free[STAGES];                  // of ds, where dQ is deferred
    u64 full[STAGES], empty[STAGES];                       // of q, dout, lse, delta or dlse
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_kernels.py and OnChip must agree");

// Named barriers; 0 is __syncthreads. dS is written; a warpgroup's piece of dQ is sent off, and is
// staged; no product of an item that a cluster shares needs a tile any more; sums are written.
enum NamedBarrier { DS_READY = 1, DQ_FREE = 2, DQ_FULL = 4, TILES_READ = 6, SUMS_READY = 7 };

#if FS_FUSED
#define STAGES_DQ
#endif
#include "kv_outer.cuh"

// S^T (+)= K Q^T or dP^T += V dO^T, issued and committed: `mine` is 64 rows of a key-side tile.
template <bool ADD>
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_Q / 2], const u16* mine,
                                             const u16* visited) {
    const u64 da = descriptor(mine, 0), db = descriptor(visited, 0);
#pragma unroll
    for (int x = 0; x < COLUMNS / 16; ++x)
        wgmma_ss<0, 0>(S, da + along_row(x, BLOCK_K), db + along_row(x, BLOCK_Q), ADD || x > 0);
    wgmma_commit();
}

// The statistic of each of this thread's scores.
__device__ __forceinline__ void load_rows(float (&S)[BLOCK_Q / 2], const float* statistic) {
#pragma unroll
    for (int j = 0; j < BLOCK_Q / 8; ++j) {
        const float2 pair = query_pair(statistic, j);
        S[4 * j] = S[4 * j + 2] = pair.x, S[4 * j + 1] = S[4 * j + 3] = pair.y;
    }
}

// dV += P^T dO or dK += dS^T Q over `rows` queries from the one numbered `first`, issued and
// committed; the left operand comes from registers.
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
// The queries of dS^T that make warpgroup g's piece of dQ; they may begin inside a chunk.
__device__ __forceinline__ const u16* piece_of_ds(
    const u16 (&ds)[BLOCK_Q / DS_WIDE][BLOCK_K * DS_WIDE], int g) {
    const int first = SPLIT_COLUMNS ? 0 : g * DQ_ROWS;
    return &ds[first / DS_WIDE][first % DS_WIDE];
}
#endif

#if FS_SCORE_MOD
// P of the slice of queries from the one numbered `first`, rounded; see `probability`.
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
    const bool speaks = lane == 0;  // for its warp
    const int kv_heads = a.heads / a.group;
#if FS_FUSED
    // Where this thread's row of dS^T starts (for store_matrices), swizzled.
    const int ds_row = 64 * g + threadIdx.x / 32 % 4 * 16 + lane % 16;
    const int ds_turn = DS_WIDE == 16 ? ds_row / 4 % 2 : ds_row % 8;
    const u32 ds_at =
        shared_address(s.ds[0][0]) + ds_row * DS_WIDE * 2 + (lane / 16 ^ ds_turn) * 16;
#if !FS_ONCE
    // Where its part of dQ^T is staged (rows are queries), if those columns exist.
    const int dq_row = lane % 4 * 2, dq_piece = threadIdx.x / 32 % 2 * 4 + lane / 16;
    const bool dq_sent = dq_column(g, threadIdx.x / 64 % 2) < FS_HEAD_DIM;
    const u32 dq_at = shared_address(&s.dq[g][threadIdx.x / 64 % 2][dq_row * 32]) +
                      (dq_piece ^ dq_row) * 16 + lane / 4 % 4 * 4;
#endif
#endif
    Ring ring, slot;
    u32 kv_parity = 0;
    while (true) {
        const Item& it = s.items.look(slot);  // not a copy: no registers are left for one
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
        FlashSums sums;  // of one query head
#endif
        if (EARLY) {
            if (steps > 0) wait(&s.full[ring.stage], ring.parity);
            load_rows(S, s.lse[ring.stage]);
        }
#pragma unroll 1
        for (int left = steps; left; --left) {
            const Visit visit = visits(a, step.v);
            const int stage = ring.stage;
            const int walk = it.walk * a.group + step.member;  // of the query head
            u64* stamps = visit_stamps(a, i64(walk) * a.n_visits + it.visits.first + step.v);
            float dP[BLOCK_Q / 2];
            u32 P[BLOCK_Q / 16][4], dS[BLOCK_Q / 16][4];
            // -- S^T = K Q^T - lse / scale and dP^T = V dO^T - delta ------------------------------
            // The statistics are where the accumulators start, so they take no registers. Both are
            // loaded before either product starts: ptxas would make the second wait for the first.
            stamp(stamps, 0);
            if (!EARLY) wait(&s.full[stage], ring.parity);
            stamp(stamps, 1);
            if (START && !EARLY) load_rows(S, s.lse[stage]);
#if !FS_ONCE
            load_rows(dP, s.delta[stage]);
#endif
            if (CARRY) wgmma_wait<0>(), pin(dK);  // ptxas would wait here anyway
            else if (FS_ONCE) pin(S);
            else pin(S), pin(dP);  // all of dP is loaded here, none of it behind S
            wgmma_fence();
            issue_scores<START>(S, &s.k[0][64 * g * 64], s.q[stage][0]);
            wgmma_fence();
            issue_scores<!FS_ONCE>(dP, &s.v[0][64 * g * 64], s.dout[stage][0]);
            if (CARRY && speaks && left < steps) arrive(&s.empty[stage ^ 1]);
#if FS_SCORE_MOD
            const Head at = head_of(a, it, step);
            const int query = it.base + visit.tile * BLOCK_Q + fragment_column();
            const bool exact = is_exact(it, it.base + visit.tile * BLOCK_Q);
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
            // ptxas would put the multiplications of all slices before the first exponential, which
            // costs where there are many. It does not know that no exponential has a sign: so each
            // slice's factor, which never changes, waits for one of the slice before.
            u32 unit = __float_as_uint(to_log2), early = 0;
#pragma unroll
            for (int first = 0; first < BLOCK_Q; first += SLICE) {
                if (HALFWAY) unit |= early & 0x80000000u;
                const float factor = __uint_as_float(unit);
#if FS_SCORE_MOD
                make_slice(P, S, a, it, at, visit.masked, exact, factor, s.lse[stage], first, key,
                           query);
                early = __float_as_uint(S[first / 2]);
#else
#pragma unroll
                for (int e = first / 2; e < (first + SLICE) / 2; e += 2) {
                    const float2 lse = START ? float2{0.0f, 0.0f} : query_pair(s.lse[stage], e / 4);
                    const float p0 = exp2_approx(S[e] * factor + lse.x);
                    const float p1 = exp2_approx(S[e + 1] * factor + lse.y);
                    P[e / 8][e / 2 % 4] = pack(p0, p1);
                    if (e == first / 2) early = __float_as_uint(p0);
#if FS_SOFTCAP  // S is tanh, or -inf; from here on it is P times the cap's slope, 1 - tanh^2
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
                for (int e = 0; e < SLICE / 2; ++e) {  // of dS, the slices of the first half
                    const int at = (first - BLOCK_Q / 2) / 2 + e;
                    dP[at] *= S[at];
                }
            }
            // -- dS^T = P^T dP^T, under dV --------------------------------------------------------
            if (!HALFWAY) wgmma_wait<SLICES>(), pin(dP);  // dP is complete
            if (speaks && left == 1) arrive(&s.v_empty);  // the next item's V may come
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
            // All warps' are written. Those of the visit before the last, which lay here, were read
            // before anybody came to the last one's barrier.
            named_sync(SUMS_READY, 128 * WARPGROUPS);
#if FS_DLSE
            subtract_delta(dP, S, s.sums[stage], s.delta[warp], s.dlse[stage]);
#else
            subtract_delta(dP, S, s.sums[stage], s.delta[warp]);
#endif
#endif
            round_operand(dS, dP);
#if FS_FUSED
            // Both warpgroups' dQ of the visit before the last has read what was here.
            if (DEFERRED) wait(&s.ds_free[stage], ring.parity ^ 1);
#pragma unroll
            for (int x = 0; x < BLOCK_Q / 16; ++x) {
                const u32 at = ds_at + stage * sizeof(s.ds[0]);
                if (DS_WIDE == 16) store_matrices(at + x * BLOCK_K * 32, dS[x]);
                else store_matrices((at ^ x % 4 * 32) + x / 4 * BLOCK_K * 128, dS[x]);
            }
            fence_async_shared();
            // -- dQ^T = K^T dS^T, dK += dS^T Q ----------------------------------------------------
            // Deferred, dQ is the last visit's. In an item's first visit its product is computed of
            // what is there, and not used: ptxas gives up asynchronous products behind a branch.
            const int of = DEFERRED ? stage ^ 1 : stage;
            const bool due = !DEFERRED || left < steps;
            if (DEFERRED) {
                __syncwarp();
                if (speaks) arrive(&s.ds_full[stage]);
                if (due) wait(&s.ds_full[of], stage ? ring.parity : ring.parity ^ 1);
            } else {
                // All of dS is written. The other stage's is free from here on: both warpgroups
                // waited for the last visit's products before they came here.
                named_sync(DS_READY, 128 * WARPGROUPS);
            }
            float dQ[DQ_FLOATS];
            issue_dq(dQ, s.k[SPLIT_COLUMNS ? g : 0], piece_of_ds(s.ds[of], g));
            issue_grad(dK, dS, s.q[stage][0], 0, BLOCK_Q);
            wgmma_wait<1>();  // dV and dQ are complete
            pin(dQ);
            if (!DEFERRED && speaks && left == 1) arrive(&s.k_empty);  // the next item's K may come
            // -- dQ leaves under dK: staged, to be sent off by another warp -----------------------
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
            if (EARLY) {  // where no visit follows, of what is there
                Ring next = ring;
                next.next(STAGES);
                if (left > 1) wait(&s.full[next.stage], next.parity);
                load_rows(S, s.lse[next.stage]);
            }
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
        // Every block lays its own down where tiles were, and takes some columns of all blocks', to
        // add them up in the blocks' order.
        constexpr int PIECES = COLUMNS / 32;  // of dK; as many of dV
        const u32 mine = shared_address(s.k) + (threadIdx.x - 128) * 4;
        named_sync(TILES_READ, 128 * WARPGROUPS);  // no product needs one any more
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
        cluster_sync();  // the others have read what is ours
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
    named_sync(DQ_FREE + g, 160);  // shared memory outlives the copies that read it
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
    cluster_sync();  // nobody copies to a block whose barriers do not exist
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
