// FlashAttention-2 backward, KV-outer, in float32, without tensor cores; the loops are
// backward_dkdv.cu's.
// Where tensors are held: K, V in shared memory for the whole block; Q, dO, P, dS in shared memory
// for one visit; dK, dV, S, dP in registers.
#include "common.cuh"
#include "simt.cuh"
#include "scores.cuh"

constexpr int BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, D = FS_D, DV = FS_DV;
constexpr int RT = BLOCK_Q / SIDE, CT = BLOCK_K / SIDE;

struct OnChip {
    Mat<BLOCK_K, D> K;    // whole block
    Mat<BLOCK_K, DV> V;   // whole block
    Mat<BLOCK_Q, D> Q;    // one visit
    Mat<BLOCK_Q, DV> dO;  // one visit
    Mat<BLOCK_Q, BLOCK_K> P, dS;  // one visit
    float lse[BLOCK_Q], delta[BLOCK_Q];  // one visit
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "portable_kernels.py and OnChip must agree");

extern "C" __global__ void __launch_bounds__(THREADS) flash_dkdv(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this block owns ------------------------------------------------------------
    const Work work = take_work(a);
    const int kv_heads = a.heads / a.group;
    const int kv_head = work.walk % kv_heads, batch = work.walk / kv_heads;
    const Range cols = col_tile(a, work.outer);
    const int n_cols = cols.stop - cols.start;
    const Walk walk(a, work.outer);
    u32* tile_count = a.tile_counts + (i64(work.walk) * a.tiles + work.outer) * 8;
    u64* tile_stamp = a.tile_stamps + (i64(work.walk) * a.tiles + work.outer) * 5;
    stamp_block(tile_stamp, false);

    // -- Phase 1: load K, V -----------------------------------------------------------------------
    const char* k = a.k.at(batch, kv_head, cols.start);
    const char* v = a.v.at(batch, kv_head, cols.start);
    report(tile_count, load_tile<KeyRow>(t.K, k, a.k.row, n_cols));
    report(tile_count + 1, load_tile<ValueRow>(t.V, v, a.v.row, n_cols));
    float dk[CT][D / SIDE] = {}, dv[CT][DV / SIDE] = {};

    for (int member = 0; member < a.group; ++member) {  // the query heads that share this KV head
#if FS_FLEX
        [[maybe_unused]] FlashSums sums;
#endif
        for (int n = 0; n < walk.count; ++n) {
            const Visit visit = walk(a, n);
            const Range rows = row_tile(a, visit.tile);
            const int head = kv_head * a.group + member, n_rows = rows.stop - rows.start;
            const i64 query_walk = i64(batch) * a.heads + head;
            const i64 row = query_walk * a.n_q + rows.start;
            const i64 slot = query_walk * a.n_visits + walk.first + n;
            u32* slots = a.visit_counts + slot * 8;
            const char* q = a.q.at(batch, head, rows.start);
            const char* dout = a.dout.at(batch, head, rows.start);
            STAMP(a.visit_stamps + slot * 5, 0);
            __syncthreads();  // B0: all threads have read the last visit's tiles
            report(slots, load_tile<KeyRow>(t.Q, q, a.q.row, n_rows));
            report(slots + 1, load_tile<ValueRow>(t.dO, dout, a.dout.row, n_rows));
            report(slots + 2, load_vector<BLOCK_Q>(t.lse, a.lse + row, n_rows));
            report(slots + 3, load_vector<BLOCK_Q>(t.delta, a.delta + row, n_rows));
            __syncthreads();  // B1: Q, dO, L, delta (at first K, V too) are complete
            STAMP(a.visit_stamps + slot * 5, 1);
            // -- Phase 2: S = Q K^T, dP = dO V^T --------------------------------------------------
            float s[RT][CT] = {}, dp[RT][CT] = {};
            product_abt(s, t.Q, t.K);
            product_abt(dp, t.dO, t.V);
            STAMP(a.visit_stamps + slot * 5, 2);
            // -- Phase 3: P = exp(S - L), dS = P (dP - delta) -------------------------------------
#pragma unroll
            for (int r = 0; r < RT; ++r) {
                const int y = tile_y() + r * SIDE;
                const Keep keep(a, rows.start + y, rows.offset, cols.stop);
#pragma unroll
                for (int c = 0; c < CT; ++c) {
                    const int x = tile_x() + c * SIDE;
#if FS_FLEX
                    const Head at = head_at(a, batch, head, work.outer);
                    const FlashAt q_at = existing(rows.start + y, rows.stop);
                    const FlashAt k_at = existing(cols.start + x, cols.stop);
                    float slope;
                    const float from = score(a, s[r][c], &slope);
                    const float made = of_function(a, at, from, q_at, k_at);
                    const bool there = y < n_rows && made != NEG_INF &&
                                       (!visit.masked ||
                                        (keep(cols.start + x) && kept(a, at, q_at, k_at)));
                    const float p = there ? expf(made - t.lse[y]) : 0.0f;
                    t.P[y][x] = p;
                    float gradient = p * (dp[r][c] - t.delta[y]);
#if FS_SCORE_MOD
                    if (p != 0.0f)
                        gradient = flash_score_grad(a.captured, sums, from, gradient, at.at,
                                                at.query(q_at), at.key(k_at));
#endif
                    t.dS[y][x] = gradient * slope;
#else
                    float slope, p = expf(score(a, s[r][c], &slope) - t.lse[y]);
                    if (visit.masked && !keep(cols.start + x)) p = 0.0f;
                    t.P[y][x] = p;
                    t.dS[y][x] = p * (dp[r][c] - t.delta[y]) * slope;
#endif
                }
            }
            __syncthreads();  // B2: P and dS are complete; a thread reads rows that others wrote
            STAMP(a.visit_stamps + slot * 5, 3);
            // -- Phase 4: dV += P^T dO, dK += dS^T Q, dQ += dS K ----------------------------------
            product_ab<true>(dv, t.P, t.dO);
            product_ab<true>(dk, t.dS, t.Q);
#if FS_FUSED
            float dq[RT][D / SIDE] = {};
            product_ab<false>(dq, t.dS, t.K);
            u32 reduced = 0;
#pragma unroll
            for (int r = 0; r < RT; ++r)
#pragma unroll
                for (int x = 0; x < D / SIDE; ++x) {
                    const int y = tile_y() + r * SIDE, col = tile_x() + x * SIDE;
                    if (y < n_rows && col < KeyRow::WIDTH) {
                        atomicAdd(a.dq_acc + (row + y) * FS_HEAD_DIM + col, dq[r][x] * a.scale);
                        reduced += KeyRow::exists(col) ? 4 : 0;
                    }
                }
            report(slots + 4, reduced);
#endif
            STAMP(a.visit_stamps + slot * 5, 4);
        }
#if FS_SCORE_SUMS
        add_sums(a, head_at(a, batch, kv_head * a.group + member, work.outer), sums);
#endif
    }

    // -- Phase 5: dK *= scale; store dK, dV -------------------------------------------------------
    char* dk_out = a.dk.at(batch, kv_head, cols.start);
    char* dv_out = a.dv.at(batch, kv_head, cols.start);
    report(tile_count + 2, store_part<KeyRow>(dk, dk_out, a.dk.row, n_cols, a.scale));
    report(tile_count + 3, store_part<ValueRow>(dv, dv_out, a.dv.row, n_cols, 1.0f));
    stamp_block(tile_stamp, true);
}
