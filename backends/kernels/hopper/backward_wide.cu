// The backward for head dims of 192 and 256 on Hopper. KV-outer as backward.cu, but the
// accumulators of dK and dV for 64 keys fill the registers of both consumer warpgroups. So the
// warpgroups divide the columns of the head dim. Each computes the scores of all 64 keys by its
// half of the queries. P^T and dS^T pass through shared memory as a whole, and each warpgroup then
// multiplies them for its own columns of dV, dK and dQ. With 192 columns, dQ is staged and sent as
// in backward.cu. With 256, dQ does not fit in shared memory beside the rest and is added to the
// accumulator from registers. Without FS_FUSED there is no dQ. For the fused backward with 192
// columns and many work tiles, backward_roles.cu is faster. The blocks of a cluster share the visits
// of a work tile, as in backward.cu.
#include "tile_scheduler.cuh"

constexpr int D = FS_D, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K;  // D: both head dims, padded
constexpr int WARPGROUPS = 2, STAGES = 2, CHUNKS = D / 64, THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
constexpr bool START = false;  // the scores' accumulators start at 0
constexpr int QUERIES = BLOCK_Q / WARPGROUPS;  // whose scores a warpgroup computes
// A warpgroup's columns: WIDE columns from 128 g on, in whole chunks. At D = 192 it also has NARROW
// columns, half of the middle chunk.
constexpr int WIDE = D == 256 ? 128 : 64, NARROW = D == 256 ? 0 : 32;
// A warpgroup's piece of dQ: boxes of 32 columns by all queries, first the wide columns, then the
// narrow ones.
[[maybe_unused]] constexpr int DQ_ROWS = BLOCK_Q, DQ_BOXES = (WIDE + NARROW) / 32;
__device__ inline int dq_row(int) { return 0; }
// First column of a warpgroup's 32 columns number `box`.
__device__ inline int dq_column(int g, int box) {
    return 32 * box < WIDE ? 128 * g + 32 * box : 64 + 32 * g;
}
static_assert((D == 192 || D == 256) && BLOCK_Q == 64 && BLOCK_K == 64, "tiles of 64 x 64");

struct OnChip {
    alignas(1024) u16 k[CHUNKS][BLOCK_K * 64];             // lives for one work tile
    alignas(1024) u16 v[CHUNKS][BLOCK_K * 64];             // lives for one work tile
    alignas(1024) u16 q[STAGES][CHUNKS][BLOCK_Q * 64];     // ring; a stage lives for one visit
    alignas(1024) u16 dout[STAGES][CHUNKS][BLOCK_Q * 64];  // ring; a stage lives for one visit
    alignas(1024) u16 p[STAGES][BLOCK_K * 64];             // P^T: a row is a key, 64 queries wide
    alignas(1024) u16 ds[STAGES][BLOCK_K * 64];            // dS^T, as P^T
#if FS_FUSED && FS_D == 192
    alignas(1024) float dq[WARPGROUPS][DQ_BOXES][DQ_ROWS * 32];  // staged for the addition to dQ
#endif
    float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];    // -lse in units of log 2, and -delta
    u64 kv_full, k_empty, v_empty;                         // barriers of k and v
    u64 full[STAGES], empty[STAGES];                       // barriers of q, dout, lse and delta
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_kernels.py and OnChip must agree");

// Named barriers. SCORES_READY: P and dS are written. DQ_FREE, DQ_FULL: a warpgroup's piece of dQ
// is sent; is staged. TILES_READ: no product of a shared work tile reads a tile any more.
enum NamedBarrier { SCORES_READY = 1, DQ_FREE = 2, DQ_FULL = 4, TILES_READ = 6 };

#if FS_FUSED && FS_D == 192
#define STAGES_DQ
#endif
#include "kv_outer.cuh"

// An accumulator of 64 rows by this warpgroup's columns.
struct Columns {
    float wide[WIDE / 2], narrow[NARROW ? NARROW / 2 : 1];
};
__device__ __forceinline__ void clear(Columns& c) {
#pragma unroll
    for (float& x : c.wide) x = 0.0f;
#pragma unroll
    for (float& x : c.narrow) x = 0.0f;
}
__device__ __forceinline__ void pin(Columns& c) {
    pin(c.wide);
    if (NARROW) pin(c.narrow);
}
// First wide column of warpgroup g; below, its first narrow column.
__device__ inline int wide_column(int g) { return 128 * g; }
__device__ inline int narrow_column(int g) { return 64 + 32 * g; }

// Issues and commits acc (+)= A B for this warpgroup's columns. A, 64 x 64, is the P or dS of a
// visit, stored transposed if TRANS_A; B, 64 rows, is a tile of K, Q or dO.
template <int TRANS_A, bool ADD>
__device__ __forceinline__ void issue_product(Columns& acc, const u16* scores, const u16* tile,
                                              int g) {
    const u64 da = descriptor(scores, 0);
    const u64 wide = descriptor(tile + wide_column(g) * 64, 64 * 128);
    const u64 narrow = descriptor(tile + 64 * 64 + 32 * g, 64 * 128);  // inside the second chunk
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const u64 a = da + (TRANS_A ? down_rows(x) : along_row(x, 64));
        wgmma_ss<TRANS_A, 1>(acc.wide, a, wide + down_rows(x), ADD || x > 0);
#if FS_D == 192
        wgmma_ss<TRANS_A, 1>(acc.narrow, a, narrow + down_rows(x), ADD || x > 0);
#endif
    }
    wgmma_commit();
}

// Issues and commits S^T = K Q^T or dP^T = V dO^T for this warpgroup's queries.
__device__ __forceinline__ void issue_scores(float (&S)[QUERIES / 2], const u16* keys,
                                             const u16* queries) {
    const u64 da = descriptor(keys, 0), db = descriptor(queries, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < columns_taken(16) / 16; ++x)
        wgmma_ss<0, 0>(S, da + along_row(x, BLOCK_K), db + along_row(x, BLOCK_Q), x > 0);
    wgmma_commit();
}

// Stores P^T or dS^T of this warpgroup's queries, rounded.
__device__ __forceinline__ void store_scores(u16* to, const float (&S)[QUERIES / 2], int g) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    u32 rounded[QUERIES / 16][4];
    round_operand(rounded, S);
#pragma unroll
    for (int x = 0; x < QUERIES / 16; ++x) {
        const int piece = 4 * g + 2 * x + lane / 16;  // 8 queries, 16 bytes
        store_matrices(shared_address(&to[row * 64 + (piece ^ row % 8) * 8]), rounded[x]);
    }
}

#if FS_CLUSTER > 1
// The sums of a shared work tile take the place of the tiles: a row of all consumers' threads for
// each of a thread's sums, the wide columns first.
constexpr int ROW_OF_THREADS = 128 * WARPGROUPS * 4;
static_assert(32 * DQ_BOXES * ROW_OF_THREADS <= 2 * (2 * BLOCK_K + 2 * STAGES * BLOCK_Q) * D,
              "room for both");
__device__ __forceinline__ void lay_down(u32 mine, const Columns& c) {
#pragma unroll
    for (int e = 0; e < WIDE / 2; ++e) store_float(mine + e * ROW_OF_THREADS, c.wide[e]);
#pragma unroll
    for (int e = 0; e < NARROW / 2; ++e)
        store_float(mine + (WIDE / 2 + e) * ROW_OF_THREADS, c.narrow[e]);
}
#endif

// Adds two neighbours of a row of dQ to the accumulator in HBM.
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" :: "l"(to), "f"(x), "f"(y) : "memory");
}
// Adds to HBM the columns of dQ from `first` on, for rows that exist. Returns this thread's bytes.
template <int N>
__device__ __forceinline__ u32 add_columns(float* tile, const float (&dQ)[N], int first, int rows) {
    u32 bytes = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = fragment_row() + 8 * r, column = first + fragment_column();
        if (row >= rows) continue;
        float* to = tile + row * FS_HEAD_DIM + column;
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
            const int at = column + 8 * j;
            if (FS_HEAD_DIM == D || at < FS_HEAD_DIM)
                add_pair(to + 8 * j, dQ[4 * j + 2 * r], dQ[4 * j + 2 * r + 1]),
                    bytes += (KeyRow::exists(at) + KeyRow::exists(at + 1)) * 4;
        }
    }
    return bytes;
}

__device__ void consume(OnChip& s, const Args& a, int g) {
    const float to_log2 = exponent_factor(a);
    const bool speaks = threadIdx.x % 32 == 0;  // one arrival per warp
    const int kv_heads = a.heads / a.group;
    Ring ring, slot;
    u32 kv_parity = 0;
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) break;
        const int key = it.own.start + fragment_row();
        Step next;
        const int steps = next.begin(a, it, it.visits.count);
        stamp_item(a, it.walk, it.outer, false);
        Columns dK, dV;
        clear(dK), clear(dV);
#if FS_SCORE_SUMS
        FlashSums sums;  // sums of one query head
#endif
        wait(&s.kv_full, kv_parity);
        kv_parity ^= 1;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const Visit visit = it.visits(a, next.v);
            const int stage = ring.stage, query = it.base + visit.tile * BLOCK_Q;
            // index of the query head
            [[maybe_unused]] const int walk = it.walk * a.group + next.member;
            [[maybe_unused]] const i64 number = i64(walk) * a.n_visits + it.visits.first + next.v;
            u64* stamps = visit_stamps(a, number);
#if FS_FLEX
            const Head at = head_of(a, it, next);
            const int first = query + QUERIES * g + fragment_column();
            [[maybe_unused]] const bool ends = FS_IN_STEP || next.v == it.visits.count - 1;
#endif
            next.next(a, it, it.visits.count);
            float S[QUERIES / 2], dP[QUERIES / 2];
            // -- S^T = K Q^T and dP^T = V dO^T, issued after the last visit's products ------------
            stamp(stamps, 0);
            wait(&s.full[stage], ring.parity);
            stamp(stamps, 1);
            issue_scores(S, s.k[0], &s.q[stage][0][QUERIES * g * 64]);
            issue_scores(dP, s.v[0], &s.dout[stage][0][QUERIES * g * 64]);
            float2 delta[QUERIES / 8];  // loaded while the products run
#if !FS_SCORE_MOD
            float2 lse[QUERIES / 8];
#endif
#pragma unroll
            for (int j = 0; j < QUERIES / 8; ++j) {
#if !FS_SCORE_MOD
                lse[j] = query_pair(&s.lse[stage][QUERIES * g], j);
#endif
                delta[j] = query_pair(&s.delta[stage][QUERIES * g], j);
            }
            wgmma_wait<1>();  // S of this visit, dV and dK of the last are complete
            pin(S);
            ring.next(STAGES);  // with two stages, the next stage is also the last visit's
            if (speaks && step > 0) arrive(&s.empty[ring.stage]);
            stamp(stamps, 2);
            // -- P^T = exp2(c S^T - lse) ----------------------------------------------------------
#if FS_SCORE_MOD
            float P[QUERIES / 2];
            const float* minus_lse = &s.lse[stage][QUERIES * g];
            probabilities(P, S, a, it, at, visit.masked, is_exact(it, query), to_log2, minus_lse,
                          key, first);
            store_scores(s.p[stage], P, g);  // see the comment on the other store_scores
#else
#if FS_FLEX
            drop_scores(S, a, it, at, visit.masked, is_exact(it, query), key, first);
#else
            shape_scores(S, a, it, visit.masked, key, query + QUERIES * g + fragment_column());
#endif
            [[maybe_unused]] float slope[QUERIES / 2];
#pragma unroll
            for (int e = 0; e < QUERIES / 2; ++e) {
#if FS_SOFTCAP  // the slope is 1 - tanh^2; S is tanh, or -inf
                const float t = fmaxf(S[e], -1.0f);
                slope[e] = 1.0f - t * t;
#endif
                S[e] = exp2_approx(S[e] * to_log2 + (e % 2 ? lse[e / 4].y : lse[e / 4].x));
            }
            // The other warpgroup may still read the other stage's P and dS. It finished reading
            // this stage before it reached the last visit's SCORES_READY, which this warpgroup has
            // passed.
            store_scores(s.p[stage], S, g);
#endif
            wgmma_wait<0>();
            pin(dP);
            stamp(stamps, 3);
            // -- dS^T = P^T (dP^T - delta) --------------------------------------------------------
#pragma unroll
            for (int e = 0; e < QUERIES / 2; ++e) {
#if FS_SCORE_SUMS
                dP[e] = P[e] * (dP[e] + (e % 2 ? delta[e / 4].y : delta[e / 4].x));
                dP[e] = function_gradient(a, at, sums, S[e], dP[e],
                                          existing(first, e / 4 * 8 + e % 2, it.end),
                                          existing(key + e / 2 % 2 * 8, it.own.stop));
#else
                dP[e] = S[e] * (dP[e] + (e % 2 ? delta[e / 4].y : delta[e / 4].x));
#endif
#if FS_SOFTCAP && !FS_SCORE_MOD
                dP[e] *= slope[e];
#endif
            }
            store_scores(s.ds[stage], dP, g);
            fence_async_shared();
            named_sync(SCORES_READY, 128 * WARPGROUPS);
            // -- dV += P^T dO, dQ = dS K, dK += dS^T Q --------------------------------------------
#ifdef STAGES_DQ  // first, so that dQ is sent while the others run
            Columns dQ;
            issue_product<1, false>(dQ, s.ds[stage], s.k[0], g);
            issue_product<0, true>(dV, s.p[stage], s.dout[stage][0], g);
            issue_product<0, true>(dK, s.ds[stage], s.q[stage][0], g);
            wgmma_wait<2>();  // dQ is complete; dV and dK continue into the next visit
#else
            issue_product<0, true>(dV, s.p[stage], s.dout[stage][0], g);
#if FS_FUSED
            Columns dQ;
            issue_product<1, false>(dQ, s.ds[stage], s.k[0], g);
#endif
            issue_product<0, true>(dK, s.ds[stage], s.q[stage][0], g);
            wgmma_wait<1>();  // dV and dQ are complete; dK continues into the next visit
#endif
#if FS_FUSED
            pin(dQ);
#ifdef STAGES_DQ
            named_sync(DQ_FREE + g, 160);  // the last visit's piece is sent
            stage_columns(&s.dq[g][0], dQ.wide);
            stage_columns(&s.dq[g][WIDE / 32], dQ.narrow);
            fence_async_shared();
            named_arrive(DQ_FULL + g, 160);
#else
            float* tile = a.dq_acc + (i64(walk) * a.n_q + query) * FS_HEAD_DIM;
            const int rows = it.end - query;
            u32 bytes = add_columns(tile, dQ.wide, wide_column(g), rows);
            if (NARROW) bytes += add_columns(tile, dQ.narrow, narrow_column(g), rows);
            report(a.visit_counts + number * 8 + 4, bytes);
#endif
#endif
#if FS_SCORE_SUMS
            if (ends || step == steps - 1) add_sums(a, at, sums);
#endif
            stamp(stamps, 4);
        }
        wgmma_wait<0>();
        pin(dK), pin(dV);
        if (speaks && steps > 0) arrive(&s.empty[ring.stage ^ 1]);
        // the next work tile's V and K may be loaded
        if (speaks) arrive(&s.v_empty), arrive(&s.k_empty);
        // -- dK and dV, straight from registers ---------------------------------------------------
        const int kv_head = it.walk % kv_heads, batch = it.walk / kv_heads;
        u32 dk_bytes = 0, dv_bytes = 0;
#if FS_CLUSTER > 1
        // Each block writes its sums where the tiles were. Then each block reads some of the
        // columns of all blocks, and adds them in the order of the blocks.
        const u32 mine = shared_address(s.k) + (threadIdx.x - 128) * 4;
        named_sync(TILES_READ, 128 * WARPGROUPS);  // no product reads a tile any more
        lay_down(mine, dK);
        lay_down(mine + 16 * DQ_BOXES * ROW_OF_THREADS, dV);
        cluster_sync();
#pragma unroll 1
        for (int piece = cluster_rank(); piece < 2 * DQ_BOXES; piece += FS_CLUSTER) {
            float sum[16];
#pragma unroll
            for (int e = 0; e < 16; ++e) sum[e] = 0.0f;
#pragma unroll 1
            for (int block = 0; block < FS_CLUSTER; ++block)
#pragma unroll
                for (int e = 0; e < 16; ++e)
                    sum[e] += load_from(mine + (16 * piece + e) * ROW_OF_THREADS, block);
            const int column = dq_column(g, piece % DQ_BOXES);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = key + 8 * r;
                const bool exists = row < it.own.stop;
                if (piece < DQ_BOXES)
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
            dk_bytes += store_row<KeyRow>(a.dk, batch, kv_head, row, dK.wide, r, a.scale,
                                               exists, wide_column(g));
            dv_bytes += store_row<ValueRow>(a.dv, batch, kv_head, row, dV.wide, r, 1.0f,
                                                 exists, wide_column(g));
            if (!NARROW) continue;
            dk_bytes += store_row<KeyRow>(a.dk, batch, kv_head, row, dK.narrow, r, a.scale,
                                               exists, narrow_column(g));
            dv_bytes += store_row<ValueRow>(a.dv, batch, kv_head, row, dV.narrow, r, 1.0f,
                                                 exists, narrow_column(g));
        }
#endif
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        report(counts + 2, dk_bytes), report(counts + 3, dv_bytes);
        stamp_item(a, it.walk, it.outer, true);
    }
#ifdef STAGES_DQ
    // the block must not exit before the copies have read its shared memory
    named_sync(DQ_FREE + g, 160);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if FS_CLUSTER > 1
__cluster_dims__(FS_CLUSTER, 1, 1)
#endif
hopper_backward_wide(const __grid_constant__ TensorMap map_q,
                     const __grid_constant__ TensorMap map_k,
                     const __grid_constant__ TensorMap map_v,
                     const __grid_constant__ TensorMap map_dout,
                     const __grid_constant__ TensorMap map_dq, const __grid_constant__ Args a,
                     u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
#ifdef STAGES_DQ
    constexpr int SENDERS = 2;
#else
    constexpr int SENDERS = 0;
#endif
    begin_barriers(s, SENDERS);
#if FS_CLUSTER > 1
    cluster_sync();  // no block copies to another block whose barriers do not exist yet
#endif
    const int role = take_role<PRODUCER_REGISTERS, CONSUMER_REGISTERS>();
    if (role == 0) {
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 1) produce_statistics(s, a);
#ifdef STAGES_DQ
        else if (warp >= 2) send_dq(s, a, &map_dq, warp - 2);
#endif
        else if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, &map_dout, counter);
    } else {
        consume(s, a, role - 1);
    }
}
