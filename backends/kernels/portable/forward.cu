// FlashAttention-2 forward (arXiv:2307.08691, Algorithm 1) on tensor cores, float16 or bfloat16. A
// block owns row tile i of one head and visits the column tiles that the schedule lists for it.
// Where tensors are held: K, V in two shared stages each, so that a visit's copies overlap with the
// visit before; O, m, l, S, P in registers. Q is in registers if they suffice (FS_Q_REGS), else in
// shared memory; so is l (FS_SUMS_SHARED), which the compiler would otherwise spill to local memory
// in HBM.
#include "common.cuh"
#include "mma.cuh"
#include "scores.cuh"

constexpr int BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, D = FS_D, DV = FS_DV, WARPS = FS_WARPS;
constexpr int THREADS = 32 * WARPS, MT = BLOCK_Q / (16 * WARPS);  // 16-row blocks per warp
static_assert(MT * 16 * WARPS == BLOCK_Q && BLOCK_K % 16 == 0, "see launch.forward_kernel");

struct OnChip {  // the launcher asks for exactly sizeof(OnChip) bytes
    union {
        struct {
            Tile<BLOCK_Q, D> Q;     // lives for the whole block
            // a stage lives for one visit; it is filled during the visit before
            Tile<BLOCK_K, D> K[2];
            Tile<BLOCK_K, DV> V[2];
        };
        Tile<BLOCK_Q, DV> O;        // after the last visit: staging for wide stores
    };
#if FS_SUMS_SHARED
    float l[MT][2][THREADS];        // one per thread, for the whole block
#endif
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
    const Walk walk(a, work.outer);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char* q = a.q.at(batch, head, rows.start);
    const char* k = a.k.data + (batch * a.k.batch + kv_head * a.k.head) * FS_BYTES;
    const char* v = a.v.data + (batch * a.v.batch + kv_head * a.v.head) * FS_BYTES;
    u32* tile_count = a.tile_counts + (i64(work.walk) * a.tiles + work.outer) * 8;
    u32* visit_count = a.visit_counts + (i64(work.walk) * a.n_visits + walk.first) * 8;
    u64* tile_stamp = a.tile_stamps + (i64(work.walk) * a.tiles + work.outer) * 5;
    u64* visit_stamp = a.visit_stamps + (i64(work.walk) * a.n_visits + walk.first) * 5;
    stamp_block(tile_stamp, false);

    auto load_kv = [&](int n, Visit visit) {
        const Range cols = col_tile(a, visit.tile);
        const int count = cols.stop - cols.start;
        const u32 k_bytes = load_async<KeyRow, THREADS>(
            t.K[n % 2], k + cols.start * a.k.row * FS_BYTES, a.k.row, count);
        const u32 v_bytes = load_async<ValueRow, THREADS>(
            t.V[n % 2], v + cols.start * a.v.row * FS_BYTES, a.v.row, count);
        report(visit_count + n * 8, k_bytes, v_bytes);
    };

    // -- Phase 1: start copying Q and the first K, V ----------------------------------------------
    report(tile_count, load_async<KeyRow, THREADS>(t.Q, q, a.q.row, rows.stop - rows.start));
    Visit next = {0, false};
    if (walk.count) load_kv(0, next = walk(a, 0));

    const auto q_at = read_a(t.Q);
    float o[MT][DV / 8][4] = {}, m[MT][2];
#if FS_SUMS_SHARED
    auto l = [&](int i, int h) -> float& { return t.l[i][h][threadIdx.x]; };
#else
    float sums[MT][2];
    auto l = [&](int i, int h) -> float& { return sums[i][h]; };
#endif
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) m[i][h] = NEG_INF, l(i, h) = 0.0f;
#if FS_Q_REGS
    FragmentA q_regs[D / 16][MT];
    cp_async_wait();
    __syncthreads();  // B0: Q is complete before any warp reads it
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
        for (int i = 0; i < MT; ++i) q_regs[kk][i] = q_at((warp * MT + i) * 16, kk * 16);
#endif
    const float to_log2 = FS_SCALED ? LOG2E : a.scale * LOG2E;  // exponents in base 2

    for (int n = 0; n < walk.count; ++n) {
        const Visit visit = next;
        STAMP(visit_stamp + n * 5, 0);
        cp_async_wait();
        __syncthreads();  // B1: this visit's K, V are complete (on the first one Q too), and all
                          // warps have read the stage that the next copies overwrite
        STAMP(visit_stamp + n * 5, 1);
        if (n + 1 < walk.count) load_kv(n + 1, next = walk(a, n + 1));

        // -- Phase 2: S = Q K^T -------------------------------------------------------------------
        const auto k_at = read_b_trans(t.K[n % 2]);
        float s[MT][BLOCK_K / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            FragmentA qa[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i)
#if FS_Q_REGS
                qa[i] = q_regs[kk][i];
#else
                qa[i] = q_at((warp * MT + i) * 16, kk * 16);
#endif
#pragma unroll
            for (int c = 0; c < BLOCK_K / 16; ++c) {
                const FragmentB b = k_at(c * 16, kk * 16);
#pragma unroll
                for (int i = 0; i < MT; ++i) mma(s[i][2 * c], s[i][2 * c + 1], qa[i], b);
            }
        }
        STAMP(visit_stamp + n * 5, 2);
        // -- Phase 3: scale and cap (if the exponent cannot apply the scale), mask ----------------
#if FS_FLEX
        const Range columns = col_tile(a, visit.tile);
        const Head at_head = head_at(a, batch, head, work.outer);
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int query = rows.start + (warp * MT + i) * 16 + h * 8 + lane / 4;
                const FlashAt q = existing(query, rows.stop);
                const Keep keep(a, query, rows.offset, columns.stop);
#pragma unroll
                for (int c = 0; c < BLOCK_K / 8; ++c)
#pragma unroll
                    for (int x = 0; x < 2; ++x) {
                        float& y = s[i][c][h * 2 + x];
                        const int key = columns.start + c * 8 + lane % 4 * 2 + x;
                        const FlashAt k = existing(key, columns.stop);
                        y = after_function(a, at_head, y, q, k);
                        if (visit.masked && !(keep(key) && kept(a, at_head, q, k)))
                            y = NEG_INF;
                    }
            }
#else
#if FS_SCALED
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int c = 0; c < BLOCK_K / 8; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float y = s[i][c][x] * a.scale;
                    s[i][c][x] = FS_SOFTCAP ? a.softcap * fast_tanh(y / a.softcap) : y;
                }
#endif
        if (visit.masked) {
            const Range cols = col_tile(a, visit.tile);
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int query = rows.start + (warp * MT + i) * 16 + h * 8 + lane / 4;
                    const Keep keep(a, query, rows.offset, cols.stop);
#pragma unroll
                    for (int c = 0; c < BLOCK_K / 8; ++c)
#pragma unroll
                        for (int x = 0; x < 2; ++x)
                            if (!keep(cols.start + c * 8 + lane % 4 * 2 + x))
                                s[i][c][h * 2 + x] = NEG_INF;
                }
        }
#endif
        // -- Phase 4: m_new = max(m, rowmax S); l, O rescaled; P = exp(S - m_new) -----------------
        // The rescaling precedes the exponentials, so that these can overlap with the first
        // products of phase 5.
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            float alpha[2], base[2], sum[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top = m[i][h];
#pragma unroll
                for (int c = 0; c < BLOCK_K / 8; ++c)
                    top = fmaxf(top, fmaxf(s[i][c][h * 2], s[i][c][h * 2 + 1]));
                top = quad_max(top);
                base[h] = top == NEG_INF ? 0.0f : top * to_log2;  // no key yet: avoids inf - inf
                alpha[h] = exp2_approx(m[i][h] * to_log2 - base[h]);
                m[i][h] = top;
                sum[h] = l(i, h) * alpha[h];  // this lane's columns; the quad adds at the end
            }
#pragma unroll
            for (int c = 0; c < DV / 8; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) o[i][c][x] *= alpha[x / 2];
#pragma unroll
            for (int c = 0; c < BLOCK_K / 8; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    float& p = s[i][c][x];
                    sum[x / 2] += p = exp2_approx(p * to_log2 - base[x / 2]);
                }
            l(i, 0) = sum[0], l(i, 1) = sum[1];
        }
        STAMP(visit_stamp + n * 5, 3);
        // -- Phase 5: O += P V --------------------------------------------------------------------
        const auto v_at = read_b(t.V[n % 2]);
#pragma unroll
        for (int kk = 0; kk < BLOCK_K / 16; ++kk) {
            FragmentA p[MT];
#pragma unroll
            for (int i = 0; i < MT; ++i) p[i] = to_a(s[i][2 * kk], s[i][2 * kk + 1]);
#pragma unroll
            for (int c = 0; c < DV / 16; ++c) {
                const FragmentB b = v_at(kk * 16, c * 16);
#pragma unroll
                for (int i = 0; i < MT; ++i) mma(o[i][2 * c], o[i][2 * c + 1], p[i], b);
            }
        }
        STAMP(visit_stamp + n * 5, 4);
    }

    // -- Phase 6: O /= l, L = m + log l -----------------------------------------------------------
    cp_async_wait();  // a block without visits still has a copy of Q in flight
    __syncthreads();  // B2: all warps have read K, V and Q; O is staged over them
    u32 lse_bytes = 0;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = quad_sum(l(i, h));
#if FS_SINKS
            const float lse = with_sink(a.sinks[head], m[i][h] * (to_log2 / LOG2E), sum);
#endif
            inverse[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int row = rows.start + (warp * MT + i) * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && row < rows.stop) {
                a.lse[i64(work.walk) * a.n_q + row] =
#if FS_SINKS
                    lse;
#else
                    sum == 0.0f ? NEG_INF : m[i][h] * (to_log2 / LOG2E) + logf(sum);
#endif
                lse_bytes += 4;
            }
        }
        stage(t.O, (warp * MT + i) * 16, 0, o[i], inverse[0], inverse[1]);
    }
    report(tile_count + 2, lse_bytes);
    __syncthreads();  // B3: O is complete; a thread stores rows that other warps staged
    char* out = a.o.at(batch, head, rows.start);
    const int n_rows = rows.stop - rows.start;
    report(tile_count + 1, store_tile<ValueRow, THREADS>(t.O, out, a.o.row, n_rows));
    stamp_block(tile_stamp, true);
}
