// FlashAttention-2 backward, Q-outer: computes dQ, in the third of three passes without atomics. A
// block owns row tile i of one head, recomputes S and dP for the column tiles that the schedule
// lists, and accumulates dS K in registers, so that equal inputs give equal bits.
// Where tensors are held: Q, dO in shared memory for the whole block; K, V in two shared stages;
// dQ, S, P, dP, dS in registers.
#include "common.cuh"
#include "mma.cuh"
#include "scores.cuh"

constexpr int BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, D = FS_D, DV = FS_DV, WARPS = FS_WARPS;
constexpr int THREADS = 32 * WARPS, MT = BLOCK_Q / (16 * WARPS), STAGES = FS_STAGES;
constexpr int CHUNK = FS_CHUNK;  // keys whose scores are in registers at a time
static_assert(MT * 16 * WARPS == BLOCK_Q && BLOCK_K % CHUNK == 0 && CHUNK % 16 == 0,
              "see launch.dq_kernel");

struct OnChip {
    Tile<BLOCK_Q, D> Q;    // whole block; at the end dQ, staged for wide stores
    Tile<BLOCK_Q, DV> dO;  // whole block
    Tile<BLOCK_K, D> K[STAGES];   // one visit
    Tile<BLOCK_K, DV> V[STAGES];  // one visit
    float lse[BLOCK_Q], delta[BLOCK_Q];  // whole block
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "portable_kernels.py and OnChip must agree");

extern "C" __global__ void __launch_bounds__(THREADS)
flash_dq(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this block owns ------------------------------------------------------------
    const Work work = take_work(a);
    const int head = work.walk % a.heads, batch = work.walk / a.heads, kv_head = head / a.group;
    const Range rows = row_tile(a, work.outer);
    const int n_rows = rows.stop - rows.start;
    const Walk walk(a, work.outer);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, my_rows = warp * MT * 16;
    const char* k = a.k.data + (batch * a.k.batch + kv_head * a.k.head) * FS_BYTES;
    const char* v = a.v.data + (batch * a.v.batch + kv_head * a.v.head) * FS_BYTES;
    u32* tile_count = a.tile_counts + (i64(work.walk) * a.tiles + work.outer) * 8;
    u32* visit_count = a.visit_counts + (i64(work.walk) * a.n_visits + walk.first) * 8;
    u64* tile_stamp = a.tile_stamps + (i64(work.walk) * a.tiles + work.outer) * 5;
    u64* visit_stamp = a.visit_stamps + (i64(work.walk) * a.n_visits + walk.first) * 5;
    stamp_block(tile_stamp, false);

    auto load_kv = [&](int stage, int n, Visit visit) {
        const Range cols = col_tile(a, visit.tile);
        const int count = cols.stop - cols.start;
        report(visit_count + n * 8, load_async<KeyRow, THREADS>(
            t.K[stage], k + cols.start * a.k.row * FS_BYTES, a.k.row, count));
        report(visit_count + n * 8 + 1, load_async<ValueRow, THREADS>(
            t.V[stage], v + cols.start * a.v.row * FS_BYTES, a.v.row, count));
    };

    // -- Phase 1: start copying Q, dO, L, delta and the first K, V --------------------------------
    const char* q = a.q.at(batch, head, rows.start);
    const char* dout = a.dout.at(batch, head, rows.start);
    const i64 query = i64(work.walk) * a.n_q + rows.start;
    report(tile_count, load_async<KeyRow, THREADS>(t.Q, q, a.q.row, n_rows));
    report(tile_count + 1, load_async<ValueRow, THREADS>(t.dO, dout, a.dout.row, n_rows));
    report(tile_count + 2, load_vector_async<BLOCK_Q, THREADS>(t.lse, a.lse + query, n_rows));
    report(tile_count + 3, load_vector_async<BLOCK_Q, THREADS>(t.delta, a.delta + query, n_rows));
    Visit next = {0, false};
    if (walk.count) next = walk(a, 0);
    if (walk.count && STAGES == 2) load_kv(0, 0, next);

    const auto q_at = read_a(t.Q);
    const auto do_at = read_a(t.dO);
    float dq[MT][D / 8][4] = {};
    const float to_log2 = FS_SCALED ? LOG2E : a.scale * LOG2E;

    for (int n = 0; n < walk.count; ++n) {
        const Visit visit = next;
        const int now = STAGES == 2 ? n % 2 : 0;
        STAMP(visit_stamp + n * 5, 0);
        if (STAGES == 1) {
            __syncthreads();  // B0: all warps have read the only stage
            load_kv(0, n, visit);
        }
        cp_async_wait();
        __syncthreads();  // B1: this visit's K, V (at first Q, dO, L, delta too) are complete; all
                          // warps have read the stage that the next copies overwrite
        STAMP(visit_stamp + n * 5, 1);
        if (n + 1 < walk.count) {
            next = walk(a, n + 1);
            if (STAGES == 2) load_kv(now ^ 1, n + 1, next);
        }
        const Range cols = col_tile(a, visit.tile);
        const auto k_at = read_b_trans(t.K[now]);
        const auto v_at = read_b_trans(t.V[now]);
        const auto k_columns = read_b(t.K[now]);

#pragma unroll 1
        for (int k0 = 0; k0 < BLOCK_K; k0 += CHUNK) {
            // -- Phase 2: S = Q K^T, dP = dO V^T --------------------------------------------------
            float p[MT][CHUNK / 8][4] = {}, ds[MT][CHUNK / 8][4] = {};
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) {
                FragmentA qa[MT];
#pragma unroll
                for (int i = 0; i < MT; ++i) qa[i] = q_at(my_rows + i * 16, kk * 16);
#pragma unroll
                for (int c = 0; c < CHUNK / 16; ++c) {
                    const FragmentB b = k_at(k0 + c * 16, kk * 16);
#pragma unroll
                    for (int i = 0; i < MT; ++i) mma(p[i][2 * c], p[i][2 * c + 1], qa[i], b);
                }
            }
#pragma unroll
            for (int kk = 0; kk < DV / 16; ++kk) {
                FragmentA oa[MT];
#pragma unroll
                for (int i = 0; i < MT; ++i) oa[i] = do_at(my_rows + i * 16, kk * 16);
#pragma unroll
                for (int c = 0; c < CHUNK / 16; ++c) {
                    const FragmentB b = v_at(k0 + c * 16, kk * 16);
#pragma unroll
                    for (int i = 0; i < MT; ++i) mma(ds[i][2 * c], ds[i][2 * c + 1], oa[i], b);
                }
            }
            if (k0 == 0) STAMP(visit_stamp + n * 5, 2);
            // -- Phase 3: P = exp(S - L), dS = P (dP - delta) -------------------------------------
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int r = my_rows + i * 16 + h * 8 + lane / 4;
                    const float base = t.lse[r] * LOG2E, delta = t.delta[r];
                    const Keep keep(a, rows.start + r, rows.offset, cols.stop);
#pragma unroll
                    for (int c = 0; c < CHUNK / 8; ++c)
#pragma unroll
                        for (int x = 0; x < 2; ++x) {
#if FS_FLEX
                            const Head at_head = head_at(a, batch, head, work.outer);
                            const int key = cols.start + k0 + c * 8 + lane % 4 * 2 + x;
                            const FlashAt q = existing(rows.start + r, rows.stop);
                            const FlashAt k = existing(key, cols.stop);
                            const bool there = !visit.masked ||
                                               (keep(key) && kept(a, at_head, q, k));
                            float& e = p[i][c][h * 2 + x];
                            const float slope = probability_and_slope(
                                a, at_head, e, to_log2, base, q, k,
                                there && rows.start + r < rows.stop);
                            ds[i][c][h * 2 + x] =
                                slope == 0.0f ? 0.0f : (ds[i][c][h * 2 + x] - delta) * slope;
#else
                            float s = p[i][c][h * 2 + x], slope = 1.0f;
#if FS_SCALED
                            s *= a.scale;
#endif
#if FS_SOFTCAP
                            const float y = fast_tanh(s / a.softcap);
                            s = a.softcap * y, slope = 1.0f - y * y;
#endif
                            float e = exp2_approx(s * to_log2 - base);
                            if (visit.masked &&
                                !keep(cols.start + k0 + c * 8 + lane % 4 * 2 + x))
                                e = 0.0f;
                            ds[i][c][h * 2 + x] = e * (ds[i][c][h * 2 + x] - delta) * slope;
#endif
                        }
                }
            if (k0 == 0) STAMP(visit_stamp + n * 5, 3);
            // -- Phase 4: dQ += dS K --------------------------------------------------------------
#pragma unroll
            for (int kk = 0; kk < CHUNK / 16; ++kk) {
                FragmentA sa[MT];
#pragma unroll
                for (int i = 0; i < MT; ++i) sa[i] = to_a(ds[i][2 * kk], ds[i][2 * kk + 1]);
#pragma unroll
                for (int c = 0; c < D / 16; ++c) {
                    const FragmentB b = k_columns(k0 + kk * 16, c * 16);
#pragma unroll
                    for (int i = 0; i < MT; ++i) mma(dq[i][2 * c], dq[i][2 * c + 1], sa[i], b);
                }
            }
        }
        STAMP(visit_stamp + n * 5, 4);
    }

    // -- Phase 5: dQ *= scale; store --------------------------------------------------------------
    cp_async_wait();  // a block without visits still has copies of Q, dO in flight
    __syncthreads();  // B2: all warps have read Q, no copy into it is under way; dQ is staged there
#pragma unroll
    for (int i = 0; i < MT; ++i) stage(t.Q, my_rows + i * 16, 0, dq[i], a.scale, a.scale);
    __syncthreads();  // B3: dQ is complete; a thread stores rows that other warps staged
    char* out = a.dq.at(batch, head, rows.start);
    report(tile_count + 4, store_tile<KeyRow, THREADS>(t.Q, out, a.dq.row, n_rows));
    stamp_block(tile_stamp, true);
}
