// FlashAttention-2 backward, Q-outer: computes dQ in float32; the loops are backward_dq.cu's.
// Where tensors are held: Q, dO in shared memory for the whole block; K, V, dS in shared memory for
// one visit; dQ, S, dP in registers.
#include "common.cuh"
#include "simt.cuh"
#include "scores.cuh"

constexpr int BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, D = FS_D, DV = FS_DV;
constexpr int RT = BLOCK_Q / SIDE, CT = BLOCK_K / SIDE;

struct OnChip {
    Mat<BLOCK_Q, D> Q;    // whole block
    Mat<BLOCK_Q, DV> dO;  // whole block
    Mat<BLOCK_K, D> K;    // one visit
    Mat<BLOCK_K, DV> V;   // one visit
    Mat<BLOCK_Q, BLOCK_K> dS;  // one visit
    float lse[BLOCK_Q], delta[BLOCK_Q];  // whole block
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "portable_kernels.py and OnChip must agree");

extern "C" __global__ void __launch_bounds__(THREADS) flash_dq(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this block owns ------------------------------------------------------------
    const Work work = take_work(a);
    const int head = work.walk % a.heads, batch = work.walk / a.heads, kv_head = head / a.group;
    const Range rows = row_tile(a, work.outer);
    const int n_rows = rows.stop - rows.start;
    const Walk walk(a, work.outer);
    u32* tile_count = a.tile_counts + (i64(work.walk) * a.tiles + work.outer) * 8;
    u64* tile_stamp = a.tile_stamps + (i64(work.walk) * a.tiles + work.outer) * 5;
    stamp_block(tile_stamp, false);

    // -- Phase 1: load Q, dO, L, delta ------------------------------------------------------------
    const i64 query = i64(work.walk) * a.n_q + rows.start;
    const char* q = a.q.at(batch, head, rows.start);
    const char* dout = a.dout.at(batch, head, rows.start);
    report(tile_count, load_tile<KeyRow>(t.Q, q, a.q.row, n_rows));
    report(tile_count + 1, load_tile<ValueRow>(t.dO, dout, a.dout.row, n_rows));
    report(tile_count + 2, load_vector<BLOCK_Q>(t.lse, a.lse + query, n_rows));
    report(tile_count + 3, load_vector<BLOCK_Q>(t.delta, a.delta + query, n_rows));
    float dq[RT][D / SIDE] = {};

    for (int n = 0; n < walk.count; ++n) {
        const Visit visit = walk(a, n);
        const Range cols = col_tile(a, visit.tile);
        const int n_cols = cols.stop - cols.start;
        const i64 slot = i64(work.walk) * a.n_visits + walk.first + n;
        const char* k = a.k.at(batch, kv_head, cols.start);
        const char* v = a.v.at(batch, kv_head, cols.start);
        STAMP(a.visit_stamps + slot * 5, 0);
        __syncthreads();  // B0: all threads have read the last visit's K, V and dS
        report(a.visit_counts + slot * 8, load_tile<KeyRow>(t.K, k, a.k.row, n_cols));
        report(a.visit_counts + slot * 8 + 1, load_tile<ValueRow>(t.V, v, a.v.row, n_cols));
        __syncthreads();  // B1: K, V (at first Q, dO, L, delta too) are complete
        STAMP(a.visit_stamps + slot * 5, 1);
        // -- Phase 2: S = Q K^T, dP = dO V^T ------------------------------------------------------
        float s[RT][CT] = {}, dp[RT][CT] = {};
        product_abt(s, t.Q, t.K);
        product_abt(dp, t.dO, t.V);
        STAMP(a.visit_stamps + slot * 5, 2);
        // -- Phase 3: P = exp(S - L), dS = P (dP - delta) -----------------------------------------
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
                [[maybe_unused]] FlashSums none;
                float gradient = p * (dp[r][c] - t.delta[y]);
#if FS_SCORE_MOD
                if (p != 0.0f)
                    gradient = flash_score_grad(a.captured, none, from, gradient, at.at,
                                                at.query(q_at), at.key(k_at));
#endif
                t.dS[y][x] = gradient * slope;
#else
                float slope, p = expf(score(a, s[r][c], &slope) - t.lse[y]);
                if (visit.masked && !keep(cols.start + x)) p = 0.0f;
                t.dS[y][x] = p * (dp[r][c] - t.delta[y]) * slope;
#endif
            }
        }
        STAMP(a.visit_stamps + slot * 5, 3);
        // -- Phase 4: dQ += dS K ------------------------------------------------------------------
        __syncwarp();  // dS is complete: a thread reads a row that its own warp wrote
        product_ab<false>(dq, t.dS, t.K);
        STAMP(a.visit_stamps + slot * 5, 4);
    }

    // -- Phase 5: dQ *= scale; store --------------------------------------------------------------
    char* out = a.dq.at(batch, head, rows.start);
    report(tile_count + 4, store_part<KeyRow>(dq, out, a.dq.row, n_rows, a.scale));
    stamp_block(tile_stamp, true);
}
