// Flash-decoding (Dao, Haziza, Massa, Sizov 2023) on tensor cores, float16 or bfloat16: a few
// queries against a long cache, whose keys are split over blocks.
// A block takes a range of key tiles of one key head. Packed into the rows of its tile are the
// head's query heads times the queries, so that K and V are read once for all of them. Inside a
// block each warp streams its own 16 keys of every tile through its own ring in shared memory: no
// barrier stands in the loop, and each warp has a softmax of its own, merged after the last tile.
// The splits of a sequence are merged in their order: where they are a cluster (FS_CLUSTER of them,
// sm_90), each block by shares that the others write into its shared memory; behind a shared prefix
// by another kernel (decode_merge.cu); elsewhere by the block that ends last.
// Where things live: K, V in a warp's ring; Q, O, m, l, S, P in registers; the splits' O and LSE in
// HBM or in the cluster's shared memory, in float32. What a thread moves is counted where it moves
// it (FS_TRACE).
#include "common.cuh"
#include "decode_args.cuh"
#include "mma.cuh"

constexpr int D = FS_D, DV = FS_DV, WARPS = FS_WARPS, STAGES = FS_STAGES, PAGE = FS_PAGE;
constexpr int MT = FS_BLOCK_Q / 16, ROWS = FS_BLOCK_Q, WIDTH = FS_HEAD_DIM_V;
constexpr int KEYS = 16, BLOCK_K = KEYS * WARPS, THREADS = 32 * WARPS;
// Blocks that merge with each other, and what is each one's share of a result, in float4.
constexpr int CLUSTER = FS_CLUSTER;
[[maybe_unused]] constexpr int SHARE = (ROWS * WIDTH / 4 + CLUSTER - 1) / CLUSTER;
static_assert(MT * 16 == ROWS && BLOCK_K == FS_BLOCK_K && STAGES >= 2, "see families.decode");

struct Stage {  // lives from its copy, STAGES - 1 tiles ahead, to the end of its tile
    Tile<KEYS, D> K;
    Tile<KEYS, DV> V;
};
struct OnChip {  // the launcher asks for exactly sizeof(OnChip) bytes
    Tile<ROWS, D> Q;  // until it is in registers
    union {
        Stage ring[WARPS][STAGES];
        float O[WARPS][ROWS][DV];       // after the last tile: each warp's
        float weight[FS_SPLITS][ROWS];  // of each split, while they are merged
    };
    alignas(128) float m[WARPS][ROWS];  // each warp's, with O
    float l[WARPS][ROWS];
    alignas(128) bool last;  // is this block the last one of its sequence?
#if FS_CLUSTER > 1  // written by the cluster's blocks
    alignas(128) float4 share[CLUSTER][SHARE];
    float lse[CLUSTER][ROWS];
#endif
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "families.decode and OnChip must agree");
// Where column c of row r of a warp's O lies: neighbouring rows in other banks.
__device__ inline int spread(int r, int c) { return c ^ r % (DV % 32 ? 2 : 4) * 8; }
static_assert(sizeof(OnChip::weight) <= sizeof(OnChip::ring), "the ring says how large it is");

// -- Copies ---------------------------------------------------------------------------------------
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void cp_async_wait_group() {  // until LEFT of them are under way
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ inline u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// A cache is read once: it leaves L2 first, and takes none of what stays there.
__device__ inline void cp_async_once(u32 to, const char* from, int bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(bytes), "l"(policy) : "memory");
}

// Start a warp's copies of KEYS rows, of which `count` exist; the rest becomes zero and is not read
// (of V it must: 0 * NaN is NaN). `at` says where row r begins, in elements. Returns bytes read.
template <class R, class T, class At>
__device__ inline u32 stream(const T& tile, const char* base, int count, u64 policy, const At& at) {
    constexpr bool EVEN = 32 % T::CHUNKS == 0;  // an instruction then takes whole rows
    const int lane = threadIdx.x % 32;
    const u32 to = shared_address(tile.data);
    u32 bytes = 0;
#pragma unroll
    for (int e = 0; e < KEYS * T::CHUNKS / 32; ++e) {
        const int r = EVEN ? e * (32 / T::CHUNKS) + lane / T::CHUNKS : (e * 32 + lane) / T::CHUNKS;
        const int c = EVEN ? lane % T::CHUNKS : (e * 32 + lane) % T::CHUNKS;
        const i64 row = at(r);  // every lane asks: with pages, lanes ask each other
        const bool inside = r < count && (R::WIDTH == T::COLS || c * WIDE < R::WIDTH);
        cp_async_once(to + T::offset(r, c), base + (inside ? (row + c * WIDE) * FS_BYTES : 0),
                      inside ? 16 : 0, policy);
        bytes += inside ? R::bytes(c) : 0;
    }
    return bytes;
}

// -- Blocks that merge with each other (sm_90) ----------------------------------------------------
#if FS_CLUSTER > 1
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of the cluster's block `rank`.
__device__ inline u32 there(const void* here, int rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address)
        : "r"(shared_address(here)), "r"(rank));
    return address;
}
__device__ inline void store_there(u32 to, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ inline void store_there(u32 to, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
flash_decode(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(128) char shared[];
    OnChip& t = *reinterpret_cast<OnChip*>(shared);
    // -- Phase 0: what this block owns ------------------------------------------------------------
    // The blocks of a cluster are the items of one sequence, for one key head.
    const int rank = blockIdx.x % CLUSTER, kv_head = blockIdx.x / CLUSTER % a.kv_heads;
    const int number = blockIdx.x / CLUSTER / a.kv_heads * CLUSTER + rank;
    const int4 item = a.items[number * 2], sequence = a.items[number * 2 + 1];
#if FS_CLUSTER > 1
    cluster_arrive();
#endif
    let_what_runs_next_start();
    // Behind a shared prefix (FS_CASCADE), a sequence's keys begin at a.prefix, and an item is of
    // one row tile; the prefix's own are of the rows of all sequences, and its keys the first
    // sequence's.
    const bool of_all = FS_CASCADE && item.x < 0;
    const int row_tile = FS_CASCADE ? sequence.w : blockIdx.y;
    const int batch = FS_CASCADE ? max(item.x, 0) : item.x;
    const int first_tile = item.y, tiles = item.z - item.y;
    const int splits = sequence.y, length = sequence.z;
    const int begin = FS_CASCADE && !of_all ? a.prefix : 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = a.n_q * a.group, row0 = row_tile * ROWS;
    const int n_rows = min(ROWS, rows * (of_all ? a.batch : 1) - row0);
    // Added to a query, gives the key on its diagonal; all see all of a prefix.
    const int offset = of_all ? length : length - a.n_q;
    auto base_of = [&](const Tensor& x) {
        const i64 at = PAGE ? 0 : batch * x.batch + begin * x.row;
        return x.data + (kv_head * x.head + at) * FS_BYTES;
    };
    const char *k = base_of(a.k), *v = base_of(a.v);
    const u64 once = evict_first();
    const int walk = of_all
                         ? a.batch * a.kv_heads * a.row_tiles + kv_head * a.prefix_tiles + row_tile
                         : (batch * a.kv_heads + kv_head) * a.row_tiles + row_tile;
    u32* visit_count = a.visit_counts + (i64(walk) * a.n_visits + first_tile) * 8;
    u32* item_count =
        a.item_counts +
        ((i64(number) * a.kv_heads + kv_head) * a.row_tiles + (FS_CASCADE ? 0 : row_tile)) * 8;
    u64* visit_stamp = a.visit_stamps + (i64(walk) * a.n_visits + first_tile) * 5;
    u64* item_stamp =
        a.item_stamps + ((i64(number) * a.kv_heads + kv_head) * a.row_tiles + row_tile) * 6;
    stamp_block(item_stamp, false);
    // Packed row r is query r / group of the group's head r % group; of a prefix, sequence after
    // sequence.
    auto batch_of = [&](int r) { return of_all ? (row0 + r) / rows : batch; };
    auto head_of = [&](int r) { return kv_head * a.group + (row0 + r) % a.group; };
    auto query_of = [&](int r) { return (FS_CASCADE ? (row0 + r) % rows : row0 + r) / a.group; };
    auto key_of = [&](int n) { return (first_tile + n) * BLOCK_K + warp * KEYS; };

    // A page's number is read a tile ahead; lane l has that of the warp's key l % KEYS. A table may
    // name a page that the pool has not: page 0 is read in its place, and all results become NaN.
    bool bad = false;
    auto page_of = [&](int n) {
        const int key = key_of(n) + lane % KEYS;
        if (!PAGE || n >= tiles || key >= length) return 0;
        const int page = a.table[i64(batch) * a.table_row + (begin + key) / max(PAGE, 1)];
        if (u32(page) < u32(a.pages)) return page;
        bad = true;
        return 0;
    };
    wait_for_what_ran_before();
    int page = page_of(0);
    auto load_kv = [&](int n) {
        if (n < tiles) {
            const int first = key_of(n), count = min(KEYS, length - first);
            Stage& stage = t.ring[warp][n % STAGES];
            u32 k_bytes, v_bytes;
            if constexpr (PAGE != 0) {
                const int next = page_of(n + 1), within = (first + lane % KEYS) % max(PAGE, 1);
                auto row_of = [&](const Tensor& x) {
                    return [&x, page = page, within](int r) {
                        return __shfl_sync(~0u, page, r) * x.batch +
                               __shfl_sync(~0u, within, r) * x.row;
                    };
                };
                k_bytes = stream<KeyRow>(stage.K, k, count, once, row_of(a.k));
                v_bytes = stream<ValueRow>(stage.V, v, count, once, row_of(a.v));
                page = next;
                // Of a tile's keys that lie in one page, the first one counts the entry.
                const bool opens = within == 0 || (warp == 0 && lane == 0);
                report(visit_count + n * 8 + 2, lane < KEYS && lane < count && opens ? 4 : 0);
            } else {
                auto row_of = [](int stride) { return [stride](int r) { return r * stride; }; };
                k_bytes = stream<KeyRow>(stage.K, k + first * a.k.row * FS_BYTES, count, once,
                                         row_of(int(a.k.row)));
                v_bytes = stream<ValueRow>(stage.V, v + first * a.v.row * FS_BYTES, count, once,
                                           row_of(int(a.v.row)));
            }
            report(visit_count + n * 8, k_bytes, v_bytes);
        }
        cp_async_commit();  // also of nothing, so that the waits can count
    };

    // -- Phase 1: start copying the first K, V; then Q, to registers ------------------------------
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) load_kv(n);
    u32 q_bytes = 0;
    for (int at = threadIdx.x; at < ROWS * (D / WIDE); at += THREADS) {
        const int r = at / (D / WIDE), c = at % (D / WIDE);
        const bool inside = r < n_rows && (KeyRow::WIDTH == D || c * WIDE < KeyRow::WIDTH);
        const char* from =
            inside ? a.q.at(batch_of(r), head_of(r), query_of(r)) + c * 16 : a.q.data;
        cp_async_16(shared_address(t.Q.data) + Tile<ROWS, D>::offset(r, c), from, inside ? 16 : 0);
        q_bytes += inside ? KeyRow::bytes(c) : 0;
    }
    report(item_count, q_bytes);
    cp_async_wait();
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

    for (int n = 0; n < tiles; ++n) {
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
            const FragmentB b = k_at(0, kk * 16);
#pragma unroll
            for (int i = 0; i < MT; ++i) mma(s[i][0], s[i][1], q[i][kk], b);
        }
        STAMP(visit_stamp + n * 5, 2);
        const int first = key_of(n);
        const bool masked = first + KEYS > length || FS_LEFT ||
                            (FS_RIGHT && first + KEYS > offset + 1 + a.right);
        FragmentA p[MT];
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            // -- Phase 3: scale and cap (only where the exponent cannot take the scale), mask -----
#if FS_SCALED
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float y = s[i][c][x] * a.scale;
                    s[i][c][x] = FS_SOFTCAP ? a.softcap * fast_tanh(y / a.softcap) : y;
                }
#endif
            if (masked) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int query = query_of(i * 16 + h * 8 + lane / 4);
                    int hi = length - 1;
                    if (FS_RIGHT) hi = min(hi, query + offset + a.right);
                    const int lo = FS_LEFT ? query + offset - a.left : 0;
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
            if (__any_sync(~0u, top[0] > m[i][0] || top[1] > m[i][1])) {  // seldom, after a while
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
            for (int h = 0; h < 2; ++h)  // no key yet: no inf - inf
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
            const FragmentB b = v_at(0, c * 16);
#pragma unroll
            for (int i = 0; i < MT; ++i) mma(o[i][2 * c], o[i][2 * c + 1], p[i], b);
        }
        STAMP(visit_stamp + n * 5, 4);
    }

    // -- Phase 6: the warps' O, m, l to shared; merged, they are the split's ----------------------
    cp_async_wait();  // the last groups, of nothing
    __syncthreads();  // B1: all warps have read their rings; O takes their place
    const bool poisoned = PAGE && __any_sync(~0u, bad);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = i * 16 + h * 8 + lane / 4;
            const float sum = quad_sum(l[i][h]);
            if (r >= n_rows) continue;
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
    auto store = [&](int r, int c, float4 x) {  // four columns of a result; bytes stored
        char* to = a.o.at(batch, head_of(r), query_of(r)) + c * FS_BYTES;
        *reinterpret_cast<uint2*>(to) = uint2{pack(x.x, x.y), pack(x.z, x.w)};
        return ValueRow::counted(WIDTH - c, 4) * FS_BYTES;
    };
    auto store_lse = [&](int r, float lse) {
        a.lse[(i64(batch) * a.heads + head_of(r)) * a.n_q + query_of(r)] = lse;
        return 4;
    };
    const int whole = n_rows * (WIDTH / 4);  // float4 of the result
    u32 o_bytes = 0, l_bytes = 0, o_part_bytes = 0, l_part_bytes = 0;
#if FS_CLUSTER > 1
    const int share = (whole + CLUSTER - 1) / CLUSTER;
    cluster_wait();  // C0: the others' shared memory is there
#elif !FS_CASCADE
    const i64 part_rows = i64(a.kv_heads) * rows;        // of one slot
    const i64 row_in_slot = i64(kv_head) * rows + row0;  // of this block's first row
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
        if (splits == 1 && !FS_CASCADE) {
            o_bytes += store(r, c, x);
            if (c == 0) l_bytes += store_lse(r, lse);
#if FS_CLUSTER > 1
        } else {
            const int owner = at / share, place = at - owner * share;
            store_there(there(&t.share[rank][place], owner), x);
            o_part_bytes += ValueRow::counted(WIDTH - c, 4) * 4;
            if (c == 0) {  // to all, for a row may be more than one's; counted once
                for (int to = 0; to < CLUSTER; ++to) store_there(there(&t.lse[rank][r], to), lse);
                l_part_bytes += 4;
            }
        }
#else
        } else {
#if FS_CASCADE  // a part of the prefix takes a slot of each sequence
            const i64 slot = item.w + (row0 + r) / rows;
            const i64 row = (slot * a.kv_heads + kv_head) * rows + (row0 + r) % rows;
#else
            const i64 row = item.w * part_rows + row_in_slot + r;
#endif
            *reinterpret_cast<float4*>(a.o_part + row * WIDTH + c) = x;
            o_part_bytes += ValueRow::counted(WIDTH - c, 4) * 4;
            if (c == 0) a.l_part[row] = lse, l_part_bytes += 4;
        }
#endif
    }
    report(item_count + 1, o_part_bytes), report(item_count + 2, l_part_bytes);

#if FS_CLUSTER > 1
    // -- Phase 7: each block merges its share of the splits ---------------------------------------
    STAMP(item_stamp, 5);
    cluster_arrive(), cluster_wait();  // C1: all shares are complete, and nobody writes here again
    o_part_bytes = l_part_bytes = 0;
    for (int x = threadIdx.x; x < min(share, whole - rank * share); x += THREADS) {
        const int r = (rank * share + x) / (WIDTH / 4), c = (rank * share + x) % (WIDTH / 4) * 4;
        float top = NEG_INF, sum = 0.0f;
        for (int s = 0; s < CLUSTER; ++s) top = fmaxf(top, t.lse[s][r]);
        const float base = top == NEG_INF ? 0.0f : top;
        float4 total = {0, 0, 0, 0};
#pragma unroll
        for (int s = 0; s < CLUSTER; ++s) {
            const float w = exp2_approx((t.lse[s][r] - base) * LOG2E);
            const float4 y = t.share[s][x];
            sum += w, total.x += w * y.x, total.y += w * y.y;
            total.z += w * y.z, total.w += w * y.w;
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
        o_part_bytes += CLUSTER * ValueRow::counted(WIDTH - c, 4) * 4;
        o_bytes += store(r, c, total);
        if (c == 0) {
            l_bytes += store_lse(r, sum == 0.0f ? NEG_INF : top + logf(sum));
            l_part_bytes += CLUSTER * 4;
        }
    }
    report(item_count + 5, o_part_bytes), report(item_count + 6, l_part_bytes);
#elif !FS_CASCADE
    // -- Phase 7: the last block to arrive merges the splits: the same bits whichever it is -------
    if (splits > 1) {
        __threadfence();  // this block's parts are seen before its arrival
        __syncthreads();  // B3: all threads have written their parts
        u32* arrived = a.arrived + walk;
        if (threadIdx.x == 0) {
            t.last = atomicAdd(arrived, 1) == splits - 1;
            if (t.last) *arrived = 0;  // for the next launch
        }
        __syncthreads();  // B4: all threads know whether they go on
        if (!t.last) {
            stamp_block(item_stamp, true);
            return;
        }
        STAMP(item_stamp, 5);
        __threadfence();  // the others' parts are read after their arrivals
        o_part_bytes = l_part_bytes = 0;
        constexpr int BATCH = 16;  // splits whose parts a thread has under way at once
        const i64 row_of_first = sequence.x * part_rows + row_in_slot;
        const i64 step = part_rows * WIDTH;
        auto part_of = [&](int at) {  // four columns of a row
            const int r = at / (WIDTH / 4), c = at % (WIDTH / 4) * 4;
            return a.o_part + (row_of_first + r) * WIDTH + c;
        };
        auto fetch = [&](float4(&y)[BATCH], const float* from, int s) {  // of some splits
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                y[u] = s + u < splits
                           ? __ldcg(reinterpret_cast<const float4*>(from + (s + u) * step))
                           : float4{0, 0, 0, 0};
        };
        float4 ahead[BATCH];  // a thread's first parts, fetched before their weights are known
        if (threadIdx.x < n_rows * (WIDTH / 4)) fetch(ahead, part_of(threadIdx.x), 0);
        for (int r = warp; r < n_rows; r += WARPS) {
            const float* part = a.l_part + row_of_first + r;
            float top = NEG_INF, sum = 0.0f;
            for (int s = lane; s < splits; s += 32) {
                const float lse = t.weight[s][r] = __ldcg(part + s * part_rows);
                top = fmaxf(top, lse), l_part_bytes += 4;
            }
            for (int x = 16; x; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
            const float base = top == NEG_INF ? 0.0f : top;
            for (int s = lane; s < splits; s += 32)
                sum += t.weight[s][r] = exp2_approx((t.weight[s][r] - base) * LOG2E);
            for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            for (int s = lane; s < splits; s += 32) t.weight[s][r] *= inverse;
            if (lane == 0) l_bytes += store_lse(r, sum == 0.0f ? NEG_INF : top + logf(sum));
        }
        __syncthreads();  // B5: all rows' weights are complete
        for (int at = threadIdx.x; at < n_rows * (WIDTH / 4); at += THREADS) {
            const int r = at / (WIDTH / 4), c = at % (WIDTH / 4) * 4;
            const float* from = part_of(at);
            float4 x = {0, 0, 0, 0};
            for (int s = 0; s < splits; s += BATCH) {
                float4 y[BATCH];
                if (at == threadIdx.x && s == 0) {
#pragma unroll
                    for (int u = 0; u < BATCH; ++u) y[u] = ahead[u];
                } else {
                    fetch(y, from, s);
                }
#pragma unroll
                for (int u = 0; u < BATCH; ++u) {
                    const float w = s + u < splits ? t.weight[s + u][r] : 0.0f;
                    x.x += w * y[u].x, x.y += w * y[u].y, x.z += w * y[u].z, x.w += w * y[u].w;
                }
            }
            o_part_bytes += splits * ValueRow::counted(WIDTH - c, 4) * 4;
            o_bytes += store(r, c, x);
        }
        report(item_count + 5, o_part_bytes), report(item_count + 6, l_part_bytes);
    }
#endif
    report(item_count + 3, o_bytes), report(item_count + 4, l_bytes);
    stamp_block(item_stamp, true);
}
