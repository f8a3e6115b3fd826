// Flash-decoding (Dao, Haziza, Massa, Sizov 2023) on tensor cores, float16 or bfloat16: a few
// queries against a long cache, whose keys are split over blocks.
// A block processes a range of key tiles of one KV head. The rows of its tile are the KV head's
// query heads times the queries, so that K and V are read once for all of them. Inside a block each
// warp streams its own 16 keys of every tile through its own ring in shared memory. So the loop has
// no block-wide barrier, and each warp has its own softmax, merged after the last tile.
// The splits of a sequence are merged in their order. In a cluster (FS_CLUSTER splits, sm_90), each
// block merges a share of the result, which the other blocks write into its shared memory. With a
// shared prefix, another kernel merges (decode_merge.cu). Otherwise the block that ends last
// merges.
// Where tensors are held: K, V in a warp's ring; Q, O, m, l, S, P in registers; the splits' O and
// LSE in HBM or in the cluster's shared memory, in float32. A thread counts bytes where it moves
// them (FS_TRACE).
#include "common.cuh"
#include "decode_args.cuh"
#include "mma.cuh"
#include "decode_block.cuh"
#include "decode_copies.cuh"
#include "decode_merging.cuh"

// Two narrow blocks share an SM, and so have half of its registers each.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 128 ? 1 : 2)
flash_decode(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this block owns ------------------------------------------------------------
#if FS_DYNAMIC
    // the previous kernel may write them
    if (a.lengths || a.starts || a.entries) wait_for_what_ran_before();
#endif
    const Owned own(a);
#if FS_CLUSTER > 1
    cluster_arrive();
#endif
    let_what_runs_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *k = own.base(a.k), *v = own.base(a.v);
    const u64 policy = cache_policy();
    u32* visit_count = a.visit_counts + own.visit(a) * 8;
    u32* item_count = a.item_counts + own.item(a) * 8;
    u64* visit_stamp = a.visit_stamps + own.visit(a) * 5;
    u64* item_stamp = a.item_stamps + own.item(a) * 6;

    // Page numbers are read AHEAD tiles before their keys are copied. If the page size is a
    // multiple of KEYS, a warp's keys of a tile lie in one page. Otherwise lane l has the page of
    // the warp's key l % KEYS. If the page table names a page that does not exist, page 0 is read
    // instead, and all results become NaN.
    constexpr bool ONE_PAGE = PAGE != 0 && PAGE % KEYS == 0;
    bool bad = false;
    auto page_of = [&](int n) {
        const int key = own.key(n) + (ONE_PAGE ? 0 : lane % KEYS);
        if (!PAGE || n >= own.tiles || key >= own.length) return 0;
        const int page = a.table[i64(own.batch) * a.table_row + (own.begin + key) / max(PAGE, 1)];
        if (u32(page) < u32(a.pages)) return page;
        bad = true;
        return 0;
    };
    wait_for_what_ran_before();
    stamp_block(item_stamp, false);
    constexpr int AHEAD = 3;
    int pages[AHEAD];  // of the next tiles to be copied
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) pages[n] = page_of(n);
    auto load_kv = [&](int n) {
        if (n < own.tiles) {
            const int first = own.key(n), count = min(KEYS, own.length - first);
            Stage& stage = t.ring[warp][n % STAGES];
            u32 k_bytes, v_bytes;
            const int next = page_of(n + AHEAD), within = (first + lane % KEYS) % max(PAGE, 1);
            if constexpr (PAGE != 0 && !ONE_PAGE) {
                auto row_of = [&](const Tensor& x) {
                    const i64 own_row = pages[0] * x.batch + within * x.row;
                    return [own_row](int r) { return __shfl_sync(~0u, own_row, r); };
                };
                k_bytes = stream<KeyRow>(stage.K, k, count, policy, row_of(a.k));
                v_bytes = stream<ValueRow>(stage.V, v, count, policy, row_of(a.v));
            } else {
                auto from = [&](const char* base, const Tensor& x) {
                    const i64 row = PAGE ? pages[0] * x.batch + first % max(PAGE, 1) * x.row
                                         : first * x.row;
                    return base + row * FS_BYTES;
                };
                auto row_of = [](int stride) { return [stride](int r) { return r * stride; }; };
                k_bytes = stream<KeyRow>(stage.K, from(k, a.k), count, policy,
                                         row_of(int(a.k.row)));
                v_bytes = stream<ValueRow>(stage.V, from(v, a.v), count, policy,
                                           row_of(int(a.v.row)));
            }
            if constexpr (PAGE != 0) {
#pragma unroll
                for (int i = 0; i + 1 < AHEAD; ++i) pages[i] = pages[i + 1];
                pages[AHEAD - 1] = next;
                // Among a tile's keys that lie in one page, the first one counts the page-table
                // entry.
                const bool opens = within == 0 || (warp == 0 && lane == 0);
                report(visit_count + n * 8 + 2, lane < KEYS && lane < count && opens ? 4 : 0);
            }
            report(visit_count + n * 8, k_bytes, v_bytes);
        }
        cp_async_commit();  // also an empty group, so that the waits can count groups
    };

    // -- Phase 1: start copying Q, then the first K, V; Q to registers ----------------------------
    u32 q_bytes = 0;
    for (int at = threadIdx.x; at < ROWS * (D / WIDE); at += THREADS) {
        const int r = at / (D / WIDE), c = at % (D / WIDE);
        const bool inside = r < own.n_rows && (KeyRow::WIDTH == D || c * WIDE < KeyRow::WIDTH);
        const char* from =
            inside ? a.q.at(own.batch_of(r), own.head(a, r), own.query(a, r)) + c * 16 : a.q.data;
        cp_async_16(shared_address(t.Q.data) + Tile<ROWS, D>::offset(r, c), from, inside ? 16 : 0);
        q_bytes += inside ? KeyRow::bytes(c) : 0;
    }
    report(item_count, q_bytes);
    cp_async_commit();
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) load_kv(n);
    cp_async_wait_group<STAGES - 1>();  // waits for Q's copies; those of K and V stay in flight
    __syncthreads();  // B0: Q is complete before any warp reads it
    FragmentA q[MT][D / 16];
    const auto q_at = read_a(t.Q);
    float o[MT][DV / 8][4] = {}, m[MT][2], l[MT][2];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) q[i][kk] = q_at(i * 16, kk * 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) m[i][h] = NEG_INF, l[i][h] = 0.0f;
    }
    const float to_log2 = FS_SCALED ? LOG2E : a.scale * LOG2E;  // exponents in base 2
#if FS_SINKS
    // A sink is one more score, without a value. One lane of a sequence's first warp starts with
    // it.
    if (own.first_tile == 0 && !own.of_all && warp == 0)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                m[i][h] = a.sinks[own.head(a, i * 16 + h * 8 + lane / 4)] * (LOG2E / to_log2);
                l[i][h] = lane % 4 == 0 ? 1.0f : 0.0f;
            }
#endif

    for (int n = 0; n < own.tiles; ++n) {
        STAMP(visit_stamp + n * 5, 0);
        cp_async_wait_group<STAGES - 2>();
        __syncwarp();  // W0: this tile's K, V of the warp are complete, and all its lanes have read
                       // the stage that the next copies overwrite
        load_kv(n + STAGES - 1);
        const Stage& stage = t.ring[warp][n % STAGES];
        STAMP(visit_stamp + n * 5, 1);
        // -- Phase 2: S = Q K^T -------------------------------------------------------------------
        const auto k_at = read_b_trans(stage.K);
        float s[MT][2][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            const FragmentB f = k_at(0, kk * 16);
#pragma unroll
            for (int i = 0; i < MT; ++i) mma(s[i][0], s[i][1], q[i][kk], f);
        }
        STAMP(visit_stamp + n * 5, 2);
        const int first = own.key(n);
        const bool masked = first + KEYS > own.length || FS_LEFT ||
                            (FS_RIGHT && first + KEYS > own.offset + 1 + a.right);
        FragmentA p[MT];
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            // -- Phase 3: scale and cap (if the exponent cannot apply the scale), mask ------------
#if FS_SCALED
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float y = s[i][c][x] * a.scale;
                    s[i][c][x] = FS_SOFTCAP ? a.softcap * fast_tanh(y / a.softcap) : y;
                }
#endif
#if FS_FLEX
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = min(i * 16 + h * 8 + lane / 4, own.n_rows - 1);
                const FlashHead at = flash_head(a.captured, own.batch, own.head(a, r));
                const int query = own.query(a, r);
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int x = 0; x < 2; ++x) {
                        const int key = min(first + c * 8 + lane % 4 * 2 + x, own.length - 1);
                        float& y = s[i][c][h * 2 + x];
#if FS_SCORE_MOD
                        y = flash_score(a.captured, y, at, query, key);
#endif
                        if (!flash_mask(a.captured, at, query, key)) y = NEG_INF;
                    }
            }
#endif
            if (masked) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int query = own.query(a, i * 16 + h * 8 + lane / 4);
                    int hi = own.length - 1;
                    if (FS_RIGHT) hi = min(hi, query + own.offset + a.right);
                    const int lo = FS_LEFT ? query + own.offset - a.left : 0;
#pragma unroll
                    for (int c = 0; c < 2; ++c)
#pragma unroll
                        for (int x = 0; x < 2; ++x) {
                            const int key = first + c * 8 + lane % 4 * 2 + x;
                            if (key > hi || (FS_LEFT && key < lo)) s[i][c][h * 2 + x] = NEG_INF;
                        }
                }
            }
            // -- Phase 4: m_new = max(m, rowmax S); l, O rescaled; P = exp(S - m_new) -------------
            float top[2], base[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                top[h] = quad_max(fmaxf(fmaxf(s[i][0][h * 2], s[i][0][h * 2 + 1]),
                                        fmaxf(s[i][1][h * 2], s[i][1][h * 2 + 1])));
            // rarely true after the first tiles
            if (__any_sync(~0u, top[0] > m[i][0] || top[1] > m[i][1])) {
                float alpha[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float now = fmaxf(m[i][h], top[h]);
                    alpha[h] = now == NEG_INF ? 1.0f : exp2_approx((m[i][h] - now) * to_log2);
                    m[i][h] = now, l[i][h] *= alpha[h];
                }
#pragma unroll
                for (int c = 0; c < DV / 8; ++c)
#pragma unroll
                    for (int x = 0; x < 4; ++x) o[i][c][x] *= alpha[x / 2];
            }
#pragma unroll
            for (int h = 0; h < 2; ++h)  // no key yet: avoids inf - inf
                base[h] = m[i][h] == NEG_INF ? 0.0f : m[i][h] * to_log2;
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x)
                    l[i][x / 2] += s[i][c][x] = exp2_approx(s[i][c][x] * to_log2 - base[x / 2]);
            p[i] = to_a(s[i][0], s[i][1]);
        }
        STAMP(visit_stamp + n * 5, 3);
        // -- Phase 5: O += P V --------------------------------------------------------------------
        const auto v_at = read_b(stage.V);
#pragma unroll
        for (int c = 0; c < DV / 16; ++c) {
            const FragmentB f = v_at(0, c * 16);
#pragma unroll
            for (int i = 0; i < MT; ++i) mma(o[i][2 * c], o[i][2 * c + 1], p[i], f);
        }
        STAMP(visit_stamp + n * 5, 4);
    }

    // -- Phase 6: the warps' O, m, l to shared memory; merged, they are the split's ---------------
    cp_async_wait();  // the last groups, which are empty
    __syncthreads();  // B1: all warps have read their rings; O takes their place
    const bool poisoned = PAGE && __any_sync(~0u, bad);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = i * 16 + h * 8 + lane / 4;
            const float sum = quad_sum(l[i][h]);
            if (r >= own.n_rows) continue;
            if (lane % 4 == 0) {
                t.m[warp][r] = m[i][h] == NEG_INF ? NEG_INF : m[i][h] * to_log2;
                t.l[warp][r] = poisoned ? __int_as_float(0x7fffffff) : sum;
            }
#pragma unroll
            for (int c = 0; c < DV / 8; ++c)
                *reinterpret_cast<float2*>(&t.O[warp][r][spread(r, c * 8 + lane % 4 * 2)]) =
                    float2{o[i][c][h * 2], o[i][c][h * 2 + 1]};
        }
    __syncthreads();  // B2: all warps' O, m and l are complete
    const int whole = own.n_rows * (WIDTH / 4);  // float4 of the result
    Moved moved;
#if FS_CLUSTER > 1
    const int share = (whole + CLUSTER - 1) / CLUSTER;
    cluster_wait();  // C0: the others' shared memory exists
#endif
    for (int at = threadIdx.x; at < whole; at += THREADS) {
        const int r = at / (WIDTH / 4), c = at % (WIDTH / 4) * 4;
        float top = NEG_INF, sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, t.m[w][r]);
        float4 x = {0, 0, 0, 0};
        for (int w = 0; w < WARPS; ++w) {
            const float f = top == NEG_INF ? 0.0f : exp2_approx(t.m[w][r] - top);
            const float4 y = *reinterpret_cast<const float4*>(&t.O[w][r][spread(r, c)]);
            sum += f * t.l[w][r];
            x.x += f * y.x, x.y += f * y.y, x.z += f * y.z, x.w += f * y.w;
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: O = 0, LSE = -inf
        const float lse = sum == 0.0f ? NEG_INF : top / LOG2E + logf(sum);
        x.x *= inverse, x.y *= inverse, x.z *= inverse, x.w *= inverse;
        if (own.splits == 1 && !FS_CASCADE) {
            moved.o += own.store(a, r, c, x);
            if (c == 0) moved.l += own.store_lse(a, r, lse);
#if FS_CLUSTER > 1
        } else {
            const int owner = at / share, place = at - owner * share;
            store_there(there(&t.share[own.rank][place], owner), x);
            moved.o_part += ValueRow::counted(WIDTH - c, 4) * 4;
            if (c == 0) {  // to all blocks, since several may merge parts of the row; counted once
                for (int to = 0; to < CLUSTER; ++to)
                    store_there(there(&t.lse[own.rank][r], to), lse);
                moved.l_part += 4;
            }
        }
#else
        } else {
            // A part of a shared prefix has a slot per sequence.
            const int rows = own.row0 + r, several = FS_CASCADE ? rows / own.rows : 0;
            const i64 row = (i64(own.slot + several) * a.kv_heads + own.kv_head) * own.rows +
                            (rows - several * own.rows);
            *reinterpret_cast<float4*>(a.o_part + row * WIDTH + c) = x;
            moved.o_part += ValueRow::counted(WIDTH - c, 4) * 4;
            if (c == 0) a.l_part[row] = lse, moved.l_part += 4;
        }
#endif
    }
    report(item_count + 1, moved.o_part), report(item_count + 2, moved.l_part);
    report(item_count + 3, moved.o), report(item_count + 4, moved.l);

    // -- Phase 7: the splits are merged -----------------------------------------------------------
#if FS_CLUSTER > 1
    STAMP(item_stamp, 5);
    cluster_arrive(), cluster_wait();  // C1: all shares are complete, and nobody writes here again
    const Moved merged = merge_shares(t, a, own, share);
#elif !FS_CASCADE
    if (own.splits == 1 || !arrives_last(t, a, own)) {
        stamp_block(item_stamp, true);
        return;
    }
    STAMP(item_stamp, 5);
    const Moved merged = merge_parts(t, a, own);
#endif
#if FS_CLUSTER > 1 || !FS_CASCADE
    report(item_count + 3, merged.o), report(item_count + 4, merged.l);
    report(item_count + 5, merged.o_part), report(item_count + 6, merged.l_part);
#endif
    stamp_block(item_stamp, true);
}
