// FlashAttention-2 backward, KV-outer (arXiv:2307.08691, Algorithm 2), on tensor cores. A block
// owns column tile j of one KV head and visits, for every query head of the group, the row tiles
// that the schedule lists. It computes transposed scores, S^T = K Q^T, so that P^T and dS^T leave
// the products in exactly the registers that dV += P^T dO and dK += dS^T Q need.
// If a row of dK and dV exceeds one warp's registers, FS_PARTS warps share its keys. Each computes
// the scores of its part of the queries, exchanges them through shared memory, and accumulates its
// part of the columns. A warp then uses each element of Q and dO that it reads for more keys.
// With FS_FUSED the kernel also adds dQ += dS K into a float32 accumulator in HBM (the order of the
// additions, and so the last bit, varies); without it a second kernel (backward_dq.cu) computes dQ.
// dQ is computed one visit late, so that dS needs no barrier of its own. With FS_HALVES, half of
// the warps compute it before their scores and half after: while one warp of a scheduler computes
// exponentials, another one keeps the tensor cores busy.
// Where tensors are held: K, V in shared memory for the whole block; Q, dO in FS_STAGES shared
// stages; dK, dV, S^T, dP^T in registers; P^T, dS^T in registers, or in shared memory if warps
// exchange them.
#include "common.cuh"
#include "mma.cuh"
#include "scores.cuh"

constexpr int BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, D = FS_D, DV = FS_DV, WARPS = FS_WARPS;
constexpr int THREADS = 32 * WARPS, STAGES = FS_STAGES;
constexpr int PARTS = FS_PARTS;  // warps that share 16 KT keys
constexpr int KT = BLOCK_K * PARTS / (16 * WARPS);  // 16-key blocks per warp
constexpr int CHUNK = FS_CHUNK;  // queries whose scores are in registers at a time
constexpr int DP = D / PARTS, DVP = DV / PARTS, QUERIES = BLOCK_Q / PARTS;  // a warp's part of each
static_assert(KT * 16 * WARPS == BLOCK_K * PARTS && QUERIES % CHUNK == 0 && CHUNK % 16 == 0 &&
              DP % 16 == 0 && DVP % 16 == 0, "see launch.dkdv_kernel");

struct OnChip {
    Tile<BLOCK_K, D> K;    // whole block; at the end dK, staged for wide stores
    Tile<BLOCK_K, DV> V;   // whole block; at the end dV
    Tile<BLOCK_Q, D> Q[STAGES];    // one visit
    Tile<BLOCK_Q, DV> dO[STAGES];  // one visit
#if FS_PARTS > 1
    Tile<BLOCK_K, BLOCK_Q> P;  // P^T: written before B2 of a visit, read after
#endif
#if FS_PARTS > 1 || FS_FUSED
    Tile<BLOCK_K, BLOCK_Q> dS[1 + FS_FUSED];  // dS^T: as P^T; for dQ read in the next visit
#endif
    float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];  // one visit
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "portable_kernels.py and OnChip must agree");

#if FS_FUSED
// Adds a warp's fragments of dQ to HBM, from `row` on. A WHOLE tile, which nearly all are, needs no
// comparison. Returns the bytes that this thread reduced.
template <bool WHOLE, int MT, int FRAGMENTS>
__device__ inline u32 add_rows(float* acc, const float (&dq)[MT][FRAGMENTS][4], int row, int n_rows,
                               int columns) {
    u32 reduced = 0;
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < FRAGMENTS; c += 2) {
                const int r = row + i * 16 + h * 8 + threadIdx.x % 32 / 4;
                const float *left = dq[i][c] + h * 2, *right = dq[i][c + 1] + h * 2;
                reduced += reduce_pair(acc + r * FS_HEAD_DIM + c * 8, left[0], left[1], right[0],
                                       right[1], WHOLE || r < n_rows, WHOLE ? 16 : columns - c * 8);
            }
    return reduced;
}

// dQ += dS K for one row tile, reduced into HBM. The block's warps form a WARPS_Q x WARPS_D grid
// over the (BLOCK_Q, D) tile. Returns the bytes that this thread reduced.
__device__ inline u32 reduce_dq(const Args& a, const OnChip& t, int stage, int head, Range rows) {
    constexpr int WARPS_Q = FS_WARPS_Q, WARPS_D = WARPS / WARPS_Q, MT = BLOCK_Q / (16 * WARPS_Q);
    constexpr int PAIRS = D / 16, NT = (PAIRS + WARPS_D - 1) / WARPS_D;  // 16 columns at a time
    static_assert(MT * 16 * WARPS_Q == BLOCK_Q, "see launch.dkdv_kernel");
    const int warp = threadIdx.x / 32;
    const int my_rows = warp % WARPS_Q * MT * 16, my_pair = warp / WARPS_Q * NT;
    const auto ds_at = read_a_trans(t.dS[stage]);
    const auto k_at = read_b(t.K);
    float dq[MT][2 * NT][4] = {};
#pragma unroll
    for (int kk = 0; kk < BLOCK_K / 16; ++kk) {
        FragmentA sa[MT];
#pragma unroll
        for (int i = 0; i < MT; ++i) sa[i] = ds_at(kk * 16, my_rows + i * 16);
#pragma unroll
        for (int c = 0; c < NT; ++c) {
            if (PAIRS % WARPS_D != 0 && my_pair + c >= PAIRS) break;
            const FragmentB b = k_at(kk * 16, (my_pair + c) * 16);
#pragma unroll
            for (int i = 0; i < MT; ++i) mma(dq[i][2 * c], dq[i][2 * c + 1], sa[i], b);
        }
    }
#if FS_TF32  // scales dQ here, since the accumulator is the output; elsewhere flash_convert scales
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int c = 0; c < 2 * NT; ++c)
#pragma unroll
            for (int x = 0; x < 4; ++x) dq[i][c][x] *= a.scale;
#endif
    const int n_rows = rows.stop - rows.start;
    float* acc = a.dq_acc + (i64(head) * a.n_q + rows.start) * FS_HEAD_DIM + my_pair * 16;
    if (KeyRow::EXIST == 16 * NT * WARPS_D && n_rows == BLOCK_Q)
        return add_rows<true>(acc, dq, my_rows, n_rows, 16);
    return add_rows<false>(acc, dq, my_rows, n_rows, FS_HEAD_DIM - my_pair * 16);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
flash_dkdv(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this block owns ------------------------------------------------------------
    const Work work = take_work(a);
    const int kv_heads = a.heads / a.group;
    const int kv_head = work.walk % kv_heads, batch = work.walk / kv_heads;
    const int first_walk = batch * a.heads + kv_head * a.group;  // of the group's query heads
    const Range cols = col_tile(a, work.outer);
    const Walk walk(a, work.outer);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_keys = warp / PARTS * KT * 16, part = warp % PARTS;
    u32* tile_count = a.tile_counts + (i64(work.walk) * a.tiles + work.outer) * 8;
    u64* tile_stamp = a.tile_stamps + (i64(work.walk) * a.tiles + work.outer) * 5;
    stamp_block(tile_stamp, false);

    // The visit's record: `n` is its number in the loop of query head `head`, counted over the
    // batch.
    auto slot_of = [&](int head, int n) { return i64(head) * a.n_visits + walk.first + n; };
    auto load_q = [&](int stage, int member, int n, Visit visit) {
        const Range rows = row_tile(a, visit.tile);
        const int count = rows.stop - rows.start, head = kv_head * a.group + member;
        const i64 query = i64(first_walk + member) * a.n_q + rows.start;
        u32* slots = a.visit_counts + slot_of(first_walk + member, n) * 8;
        const char* q = a.q.at(batch, head, rows.start);
        const char* dout = a.dout.at(batch, head, rows.start);
        const u32 q_bytes = load_async<KeyRow, THREADS>(t.Q[stage], q, a.q.row, count);
        report(slots, q_bytes,
               load_async<ValueRow, THREADS>(t.dO[stage], dout, a.dout.row, count));
        const u32 lse_bytes =
            load_vector_async<BLOCK_Q, THREADS>(t.lse[stage], a.lse + query, count);
        report(slots + 2, lse_bytes,
               load_vector_async<BLOCK_Q, THREADS>(t.delta[stage], a.delta + query, count));
    };

    // -- Phase 1: start copying K, V and the first Q, dO ------------------------------------------
    const char* k = a.k.at(batch, kv_head, cols.start);
    const char* v = a.v.at(batch, kv_head, cols.start);
    report(tile_count, load_async<KeyRow, THREADS>(t.K, k, a.k.row, cols.stop - cols.start));
    report(tile_count + 1, load_async<ValueRow, THREADS>(t.V, v, a.v.row, cols.stop - cols.start));
    const int total = a.group * walk.count;
    Visit next = {0, false};
    if (total) next = walk(a, 0);
    if (total && STAGES == 2) load_q(0, 0, 0, next);

    const auto k_at = read_a(t.K);
    const auto v_at = read_a(t.V);
    float dk[KT][DP / 8][4] = {}, dv[KT][DVP / 8][4] = {};
    const float to_log2 = FS_SCALED ? LOG2E : a.scale * LOG2E;
    int member = 0, n = 0;  // query head of the group, visit in its loop

#if FS_FUSED
    // this warp computes dQ before its scores
    const bool early = !FS_HALVES || warp < (WARPS + 1) / 2;
    struct { int head, n; Range rows; } last = {};  // the visit whose dQ is next
    auto add_last_dq = [&](int u) {
        const u32 reduced = reduce_dq(a, t, (u - 1) % 2, last.head, last.rows);
        report(a.visit_counts + slot_of(last.head, last.n) * 8 + 4, reduced);
    };
#endif

#if FS_SCORE_SUMS
    FlashSums sums;  // sums of one query head
#endif

    for (int u = 0; u < total + FS_FUSED; ++u) {  // one step more for the last visit's dQ
        const Visit visit = next;
        const int stage_now = STAGES == 2 ? u % 2 : 0, head_now = first_walk + member;
        const i64 slot = slot_of(head_now, n);
#if FS_FUSED
        const int n_now = n;
#endif
        if (u < total) STAMP(a.visit_stamps + slot * 5, 0);
        if (STAGES == 1 && u < total) {
            __syncthreads();  // B0: all warps have read the only stage
            load_q(0, member, n, visit);
        }
        cp_async_wait();
        __syncthreads();  // B1: this visit's Q, dO (at first K, V too) are complete, and where
                          // there is a dQ, the last visit's dS; all warps have read what this
                          // visit's copies, P and dS overwrite
        if (u < total) STAMP(a.visit_stamps + slot * 5, 1);
        if (++n == walk.count) n = 0, ++member;
        if (u + 1 < total) {
            next = walk(a, n);
            if (STAGES == 2) load_q(stage_now ^ 1, member, n, next);
        }
#if FS_FUSED
        // -- Phase 2: dQ += dS K of the last visit, all warps or half of them ---------------------
        if (u && (early || u == total)) add_last_dq(u);
        if (u == total) break;
#endif
        const auto& tQ = t.Q[stage_now];
        const auto& tdO = t.dO[stage_now];
        const Range rows = row_tile(a, visit.tile);
        const auto q_at = read_b_trans(tQ);
        const auto do_at = read_b_trans(tdO);
        const auto q_columns = read_b(tQ);
        const auto do_columns = read_b(tdO);
        // dV += P^T dO and dK += dS^T Q over 16 queries, for this warp's columns.
        auto add_dv = [&](int query, const FragmentA (&pa)[KT]) {
#pragma unroll
            for (int c = 0; c < DVP / 16; ++c) {
                const FragmentB b = do_columns(query, part * DVP + c * 16);
#pragma unroll
                for (int i = 0; i < KT; ++i) mma(dv[i][2 * c], dv[i][2 * c + 1], pa[i], b);
            }
        };
        auto add_dk = [&](int query, const FragmentA (&sa)[KT]) {
#pragma unroll
            for (int c = 0; c < DP / 16; ++c) {
                const FragmentB b = q_columns(query, part * DP + c * 16);
#pragma unroll
                for (int i = 0; i < KT; ++i) mma(dk[i][2 * c], dk[i][2 * c + 1], sa[i], b);
            }
        };

        const int first = part * QUERIES;
#if FS_PARTS > 1 || FS_FUSED
        auto& dS = t.dS[FS_FUSED ? u % 2 : 0];
#endif
#pragma unroll 1
        for (int q0 = first; q0 < first + QUERIES; q0 += CHUNK) {
            // -- Phase 3: S^T = K Q^T, P^T = exp(S^T - L) -----------------------------------------
            float p[KT][CHUNK / 8][4] = {};
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) {
                FragmentA ka[KT];
#pragma unroll
                for (int i = 0; i < KT; ++i) ka[i] = k_at(my_keys + i * 16, kk * 16);
#pragma unroll
                for (int c = 0; c < CHUNK / 16; ++c) {
                    const FragmentB b = q_at(q0 + c * 16, kk * 16);
#pragma unroll
                    for (int i = 0; i < KT; ++i) mma(p[i][2 * c], p[i][2 * c + 1], ka[i], b);
                }
            }
#if FS_SCORE_MOD || (FS_FLEX && FS_SOFTCAP)
            // P times the function's slope, from which dS is computed; with FS_SCORE_SUMS the raw
            // score.
            float slope[KT][CHUNK / 8][4];
#elif FS_SOFTCAP
            float slope[KT][CHUNK / 8][4];  // d softcap(s) / ds = 1 - tanh^2
#endif
#if FS_FLEX
            const Head at_head =
                head_at(a, batch, kv_head * a.group + (head_now - first_walk), work.outer);
#endif
#pragma unroll
            for (int c = 0; c < CHUNK / 8; ++c) {
                const int at = q0 + c * 8 + lane % 4 * 2;
                const float2 lse = *reinterpret_cast<const float2*>(&t.lse[stage_now][at]);
                const float base[2] = {lse.x * LOG2E, lse.y * LOG2E};
#pragma unroll
                for (int i = 0; i < KT; ++i)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
#if FS_FLEX
                        const int key = cols.start + my_keys + i * 16 + x / 2 * 8 + lane / 4;
                        const int query = rows.start + at + x % 2;
                        const FlashAt q = existing(query, rows.stop), k = existing(key, cols.stop);
                        const KeepColumn keep(a, key, cols);
                        const bool there = query < rows.stop &&
                                           (!visit.masked ||
                                            (keep(query) && kept(a, at_head, q, k)));
                        [[maybe_unused]] const float raw = p[i][c][x];
                        [[maybe_unused]] const float with_slope = probability_and_slope(
                            a, at_head, p[i][c][x], to_log2, base[x % 2], q, k, there);
#if FS_SCORE_SUMS
                        slope[i][c][x] = raw;
#elif FS_SCORE_MOD || FS_SOFTCAP
                        slope[i][c][x] = with_slope;
#endif
#else
                        float s = p[i][c][x];
#if FS_SCALED
                        s *= a.scale;
#endif
#if FS_SOFTCAP
                        const float y = fast_tanh(s / a.softcap);
                        s = a.softcap * y, slope[i][c][x] = 1.0f - y * y;
#endif
                        p[i][c][x] = exp2_approx(s * to_log2 - base[x % 2]);
#endif
                    }
            }
            if (q0 == first) STAMP(a.visit_stamps + slot * 5, 2);
            // -- Phase 4: dP^T = V dO^T -----------------------------------------------------------
            float ds[KT][CHUNK / 8][4] = {};
#pragma unroll
            for (int kk = 0; kk < DV / 16; ++kk) {
                FragmentA va[KT];
#pragma unroll
                for (int i = 0; i < KT; ++i) va[i] = v_at(my_keys + i * 16, kk * 16);
#pragma unroll
                for (int c = 0; c < CHUNK / 16; ++c) {
                    const FragmentB b = do_at(q0 + c * 16, kk * 16);
#pragma unroll
                    for (int i = 0; i < KT; ++i) mma(ds[i][2 * c], ds[i][2 * c + 1], va[i], b);
                }
            }
            if (!FS_FLEX && visit.masked) {
#pragma unroll
                for (int i = 0; i < KT; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int key = cols.start + my_keys + i * 16 + h * 8 + lane / 4;
                        const KeepColumn keep(a, key, cols);
#pragma unroll
                        for (int c = 0; c < CHUNK / 8; ++c)
#pragma unroll
                            for (int x = 0; x < 2; ++x)
                                if (!keep(rows.start + q0 + c * 8 + lane % 4 * 2 + x))
                                    p[i][c][h * 2 + x] = 0.0f;
                    }
            }
            // -- Phase 5: dS^T = P^T (dP^T - delta) -----------------------------------------------
#pragma unroll
            for (int c = 0; c < CHUNK / 8; ++c) {
                const int at = q0 + c * 8 + lane % 4 * 2;
                const float2 delta = *reinterpret_cast<const float2*>(&t.delta[stage_now][at]);
#pragma unroll
                for (int i = 0; i < KT; ++i)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
#if FS_SCORE_SUMS
                        const int key = cols.start + my_keys + i * 16 + x / 2 * 8 + lane / 4;
                        ds[i][c][x] = p[i][c][x] * (ds[i][c][x] - (x % 2 ? delta.y : delta.x));
                        if (p[i][c][x] != 0.0f)
                            ds[i][c][x] = function_gradient(
                                a, at_head, sums, slope[i][c][x], ds[i][c][x],
                                existing(rows.start + at + x % 2, rows.stop),
                                existing(key, cols.stop));
#elif FS_SCORE_MOD || (FS_FLEX && FS_SOFTCAP)
                        const float from = ds[i][c][x] - (x % 2 ? delta.y : delta.x);
                        ds[i][c][x] = p[i][c][x] == 0.0f ? 0.0f : slope[i][c][x] * from;
#else
                        ds[i][c][x] = p[i][c][x] * (ds[i][c][x] - (x % 2 ? delta.y : delta.x));
#endif
#if FS_SOFTCAP && !FS_FLEX
                        ds[i][c][x] *= slope[i][c][x];
#endif
                    }
            }
#pragma unroll
            for (int i = 0; i < KT; ++i) {
#if FS_PARTS > 1
                stage(t.P, my_keys + i * 16, q0, p[i], 1.0f, 1.0f);
#endif
#if FS_PARTS > 1 || FS_FUSED
                stage(dS, my_keys + i * 16, q0, ds[i], 1.0f, 1.0f);
#endif
            }
            // -- Phase 6: dV += P^T dO, dK += dS^T Q, over queries with scores in registers -------
            FragmentA fragment[KT];
#pragma unroll
            for (int kk = 0; kk < CHUNK / 16; ++kk) {
#pragma unroll
                for (int i = 0; i < KT; ++i) fragment[i] = to_a(p[i][2 * kk], p[i][2 * kk + 1]);
                add_dv(q0 + kk * 16, fragment);
            }
#pragma unroll
            for (int kk = 0; kk < CHUNK / 16; ++kk) {
#pragma unroll
                for (int i = 0; i < KT; ++i) fragment[i] = to_a(ds[i][2 * kk], ds[i][2 * kk + 1]);
                add_dk(q0 + kk * 16, fragment);
            }
        }
#if FS_SCORE_SUMS
        if (n == 0 || u + 1 == total)
            add_sums(a, head_at(a, batch, kv_head * a.group + (head_now - first_walk), work.outer),
                     sums);
#endif
        STAMP(a.visit_stamps + slot * 5, 3);
#if FS_FUSED
        // -- Phase 7: dQ += dS K of the last visit, the other half of the warps -------------------
        if (u && !early) add_last_dq(u);
        last = {head_now, n_now, rows};
#endif
#if FS_PARTS > 1
        // -- Phase 8: dV += P^T dO, dK += dS^T Q, over the other warps' queries -------------------
        sync_group(warp / PARTS, 32 * PARTS);  // B2: the warps that share these keys have written
                                               // their P^T and dS^T
        const auto p_at = read_a(t.P);
        const auto ds_at = read_a(dS);
        FragmentA fragment[KT];
#pragma unroll
        for (int kk = 0; kk < (BLOCK_Q - QUERIES) / 16; ++kk) {
            const int query = (first + QUERIES + kk * 16) % BLOCK_Q;
#pragma unroll
            for (int i = 0; i < KT; ++i) fragment[i] = p_at(my_keys + i * 16, query);
            add_dv(query, fragment);
        }
#pragma unroll
        for (int kk = 0; kk < (BLOCK_Q - QUERIES) / 16; ++kk) {
            const int query = (first + QUERIES + kk * 16) % BLOCK_Q;
#pragma unroll
            for (int i = 0; i < KT; ++i) fragment[i] = ds_at(my_keys + i * 16, query);
            add_dk(query, fragment);
        }
#endif
        STAMP(a.visit_stamps + slot * 5, 4);
    }

    // -- Phase 9: dK *= scale; store dK, dV -------------------------------------------------------
    cp_async_wait();  // a block without visits still has copies of K, V in flight
    __syncthreads();  // B3: all warps have read K and V; dK and dV are staged over them
#pragma unroll
    for (int i = 0; i < KT; ++i) {
        stage(t.K, my_keys + i * 16, part * DP, dk[i], a.scale, a.scale);
        stage(t.V, my_keys + i * 16, part * DVP, dv[i], 1.0f, 1.0f);
    }
    __syncthreads();  // B4: dK, dV are complete; a thread stores rows that other warps staged
    char* dk_out = a.dk.at(batch, kv_head, cols.start);
    char* dv_out = a.dv.at(batch, kv_head, cols.start);
    const int n_cols = cols.stop - cols.start;
    report(tile_count + 2, store_tile<KeyRow, THREADS>(t.K, dk_out, a.dk.row, n_cols));
    report(tile_count + 3, store_tile<ValueRow, THREADS>(t.V, dv_out, a.dv.row, n_cols));
    stamp_block(tile_stamp, true);
}
