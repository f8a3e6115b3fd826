// FlashAttention-2 forward (arXiv:2307.08691, Algorithm 1) in float32, without tensor cores: every
// product is a float32 multiply-add. The loops and phases are forward.cu's.
// Where tensors are held: Q in shared memory for the whole block; K, then V, in one shared tile; P
// in shared memory for one visit; O, m, l, S in registers.
#include "common.cuh"
#include "simt.cuh"
#include "scores.cuh"

constexpr int BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, D = FS_D, DV = FS_DV;
constexpr int RT = BLOCK_Q / SIDE, CT = BLOCK_K / SIDE;

struct OnChip {  // the launcher asks for exactly sizeof(OnChip) bytes
    Mat<BLOCK_Q, D> Q;        // whole block
    union {
        Mat<BLOCK_K, D> K;    // from B1 to B2 of one visit
        Mat<BLOCK_K, DV> V;   // from B3 to the end of it
    };
    Mat<BLOCK_Q, BLOCK_K> P;  // one visit
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "portable_kernels.py and OnChip must agree");

extern "C" __global__ void __launch_bounds__(THREADS)
flash_forward(const __grid_constant__ Args a) {
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

    // -- Phase 1: load Q --------------------------------------------------------------------------
    const char* q = a.q.at(batch, head, rows.start);
    report(tile_count, load_tile<KeyRow>(t.Q, q, a.q.row, n_rows));
    float o[RT][DV / SIDE] = {}, m[RT], l[RT] = {};
#pragma unroll
    for (int r = 0; r < RT; ++r) m[r] = NEG_INF;

    for (int n = 0; n < walk.count; ++n) {
        const Visit visit = walk(a, n);
        const Range cols = col_tile(a, visit.tile);
        const i64 slot = i64(work.walk) * a.n_visits + walk.first + n;
        const i64 at = batch * a.k.batch + kv_head * a.k.head + cols.start * a.k.row;
        const i64 at_v = batch * a.v.batch + kv_head * a.v.head + cols.start * a.v.row;
        STAMP(a.visit_stamps + slot * 5, 0);
        __syncthreads();  // B0: all threads have read the last visit's V and P
        report(a.visit_counts + slot * 8,
               load_tile<KeyRow>(t.K, a.k.data + at * 4, a.k.row, cols.stop - cols.start));
        __syncthreads();  // B1: K (at first Q too) is complete
        STAMP(a.visit_stamps + slot * 5, 1);
        // -- Phase 2: S = Q K^T -------------------------------------------------------------------
        float s[RT][CT] = {};
        product_abt(s, t.Q, t.K);
        STAMP(a.visit_stamps + slot * 5, 2);
        // -- Phase 3: mask, m_new = max(m, rowmax S), P = exp(S - m_new), l and O rescaled --------
#pragma unroll
        for (int r = 0; r < RT; ++r) {
            const int row = tile_y() + r * SIDE;
            const Keep keep(a, rows.start + row, rows.offset, cols.stop);
            float top = m[r];
#pragma unroll
            for (int c = 0; c < CT; ++c) {
                s[r][c] = score(a, s[r][c], nullptr);
#if FS_FLEX
                const Head at_head = head_at(a, batch, head, work.outer);
                const int key = cols.start + tile_x() + c * SIDE;
                const FlashAt k = existing(key, cols.stop);
                const FlashAt query = existing(rows.start + row, rows.stop);
                s[r][c] = of_function(a, at_head, s[r][c], query, k);
                if (visit.masked && !kept(a, at_head, query, k)) s[r][c] = NEG_INF;
#endif
                if (visit.masked && !keep(cols.start + tile_x() + c * SIDE)) s[r][c] = NEG_INF;
                top = fmaxf(top, s[r][c]);
            }
            top = row_max(top);
            const float base = top == NEG_INF ? 0.0f : top;  // no key yet: avoids inf - inf
            const float alpha = expf(m[r] - base);
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < CT; ++c)
                sum += t.P[row][tile_x() + c * SIDE] = expf(s[r][c] - base);
            l[r] = l[r] * alpha + sum;  // this thread's columns; the row adds at the end
            m[r] = top;
#pragma unroll
            for (int x = 0; x < DV / SIDE; ++x) o[r][x] *= alpha;
        }
        STAMP(a.visit_stamps + slot * 5, 3);
        // -- Phase 4: O += P V --------------------------------------------------------------------
        __syncthreads();  // B2: all threads have read K, whose place V takes
        report(a.visit_counts + slot * 8 + 1,
               load_tile<ValueRow>(t.V, a.v.data + at_v * 4, a.v.row, cols.stop - cols.start));
        __syncthreads();  // B3: V and P are complete
        product_ab<false>(o, t.P, t.V);
        STAMP(a.visit_stamps + slot * 5, 4);
    }

    // -- Phase 5: O /= l, L = m + log l; store ----------------------------------------------------
    u32 lse_bytes = 0;
#pragma unroll
    for (int r = 0; r < RT; ++r) {
        float sum = row_sum(l[r]);
        const int row = tile_y() + r * SIDE;
#if FS_SINKS
        const float lse = with_sink(a.sinks[head], m[r], sum);
#endif
        if (tile_x() == 0 && row < n_rows) {
            a.lse[i64(work.walk) * a.n_q + rows.start + row] =
#if FS_SINKS
                lse;
#else
                sum == 0.0f ? NEG_INF : m[r] + logf(sum);
#endif
            lse_bytes += 4;
        }
#pragma unroll
        for (int x = 0; x < DV / SIDE; ++x) o[r][x] = sum == 0.0f ? 0.0f : o[r][x] / sum;
    }
    report(tile_count + 2, lse_bytes);
    char* out = a.o.at(batch, head, rows.start);
    report(tile_count + 1, store_part<ValueRow>(o, out, a.o.row, n_rows, 1.0f));
    stamp_block(tile_stamp, true);
}
