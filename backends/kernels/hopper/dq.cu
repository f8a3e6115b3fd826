// dQ of the deterministic three-pass backward for Hopper: Q-outer, without atomics or an
// accumulator in HBM. Each of two consumer warpgroups keeps dQ of 64 query rows in registers. Per
// visit it recomputes S = Q K^T and dP = dO V^T, and computes dS = P (dP - delta), which in
// registers already is the left operand of dQ += dS K. With row tiles of 128, the warpgroups divide
// the rows. With 64, they divide the keys of each visit, and their two dQ are added at the end. One
// producer thread fills a ring of K and V tiles. The schedule's tables say which tiles are visited.
#include "tile_scheduler.cuh"
#include "flex.cuh"

constexpr int D = FS_D, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K;  // D: both head dims, padded
constexpr int WARPGROUPS = 2, ROW_GROUPS = BLOCK_Q / 64, STAGES = 2, CHUNKS = D / 64;
constexpr int COLUMNS = columns_taken(16);  // the columns that the products use
constexpr bool SPLIT_KEYS = ROW_GROUPS == 1;
constexpr int KEYS = SPLIT_KEYS ? BLOCK_K / 2 : BLOCK_K;  // keys per visit and warpgroup
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
static_assert(D % 64 == 0 && KEYS % 16 == 0 && (BLOCK_Q == 64 || BLOCK_Q == 128), "wgmma's shapes");

struct OnChip {
    alignas(1024) u16 q[ROW_GROUPS][CHUNKS][64 * 64];     // lives for one work tile
    alignas(1024) u16 dout[ROW_GROUPS][CHUNKS][64 * 64];  // lives for one work tile
    alignas(1024) u16 k[STAGES][CHUNKS][BLOCK_K * 64];    // ring; a stage lives for one visit
    alignas(1024) u16 v[STAGES][CHUNKS][BLOCK_K * 64];    // ring; a stage lives for one visit
    float partial[SPLIT_KEYS ? 32 : 1][128];              // 64 columns of the second warpgroup's dQ
    u64 own_full[ROW_GROUPS], own_empty[ROW_GROUPS];      // barriers of q and dout
    u64 full[STAGES], empty[STAGES];                      // barriers of k and v
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_kernels.py and OnChip must agree");

__device__ void produce(OnChip& s, const Args& a, const TensorMap* map_q, const TensorMap* map_k,
                        const TensorMap* map_v, const TensorMap* map_dout, u32* counter) {
    Ring ring, slot;
    u32 own_parity = 0;
    const int items = a.walks * a.tiles;
    for (int w = first_work();; w = next_work(counter, items)) {
        const Item& it = s.items.write(slot, a, w, items, true);
        if (it.walk < 0) return;
        const int head = it.walk % a.heads, batch = it.walk / a.heads, kv_head = head / a.group;
        stamp_item(a, it.walk, it.outer, false);
#pragma unroll 1
        for (int g = 0; g < ROW_GROUPS; ++g) {
            wait(&s.own_empty[g], own_parity ^ 1);  // the last work tile's products are complete
            arrive_expect(&s.own_full[g], sizeof(s.q[0]) + sizeof(s.dout[0]));
            const Place own = place(it.own.start + 64 * g, it.own.stop, batch);
            copy_tile(s.q[g], map_q, &s.own_full[g], own, head);
            copy_tile(s.dout[g], map_dout, &s.own_full[g], own, head);
        }
        own_parity ^= 1;
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        const int rows = it.own.stop - it.own.start;
        report_one(counts, rows * FS_COUNTED * 2);
        report_one(counts + 1, rows * FS_COUNTED_V * 2);
        for (int n = 0; n < it.visits.count; ++n) {
            const int key = it.base + it.visits(a, n).tile * BLOCK_K;
            const i64 visit = i64(it.walk) * a.n_visits + it.visits.first + n;
            u64* stamps = visit_stamps(a, visit);
            stamp(stamps, 0);
            wait(&s.empty[ring.stage], ring.parity ^ 1);  // its last readers are done
            stamp(stamps, 1);
            arrive_expect(&s.full[ring.stage], sizeof(s.k[0]) + sizeof(s.v[0]));
            const Place from = place(key, it.end, batch);
            copy_tile(s.k[ring.stage], map_k, &s.full[ring.stage], from, kv_head);
            copy_tile(s.v[ring.stage], map_v, &s.full[ring.stage], from, kv_head);
            stamp(stamps, 4);
            ring.next(STAGES);
            const int keys = min(BLOCK_K, it.end - key);
            report_one(a.visit_counts + visit * 8, keys * FS_COUNTED * 2);
            report_one(a.visit_counts + visit * 8 + 1, keys * FS_COUNTED_V * 2);
        }
        stamp_item(a, it.walk, it.outer, true);
    }
}

// Issues and commits S = Q K^T or dP = dO V^T.
__device__ __forceinline__ void issue_scores(float (&S)[KEYS / 2], const u16* mine,
                                             const u16* visited) {
    const u64 da = descriptor(mine, 0), db = descriptor(visited, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < COLUMNS / 16; ++x)
        wgmma_ss<0, 0>(S, da + along_row(x, 64), db + along_row(x, BLOCK_K), x > 0);
    wgmma_commit();
}

// Issues and commits dQ += dS K.
__device__ __forceinline__ void issue_dq(float (&dQ)[COLUMNS / 2], const u32 (&dS)[KEYS / 16][4],
                                         const u16* k) {
    const u64 db = descriptor(k, BLOCK_K * 128);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < KEYS / 16; ++x) wgmma_rs<1>(dQ, dS[x], db + down_rows(x), 1);
    wgmma_commit();
}

#if FS_SCORE_MOD
// Replaces raw scores by P times the function's slope.
template <bool KEPT>
__device__ __forceinline__ void make_slopes(float (&S)[KEYS / 2], const Args& a, const Item& it,
                                            const Head& at, int query, int key,
                                            const float (&lse)[2]) {
    const FlashAt q[2] = {existing(query, it.own.stop), existing(query + 8, it.own.stop)};
    const int first = key + fragment_column();
#if FLASH_RANGES
    const KeptKeys keep[2] = {kept_keys(a, at, query, first, it.own, it.end),
                              kept_keys(a, at, query + 8, first, it.own, it.end)};
#else
    const Keep keep[2] = {{a, query, it.own.offset, it.end},
                          {a, query + 8, it.own.offset, it.end}};
#endif
#pragma unroll
    for (int e = 0; e < KEYS / 2; ++e) {
        const int r = e / 2 % 2, step = e / 4 * 8 + e % 2;
        const FlashAt k = KEPT ? FlashAt(first, step) : existing(first, step, it.end);
#if FLASH_RANGES
        const bool inside = KEPT || keep[r](step);
#else
        const bool inside = KEPT || (keep[r](first + step) && kept(a, at, q[r], k));
#endif
        probability<KEPT>(a, at, S[e], LOG2E, -lse[r], q[r], k, inside);
    }
}
#endif

__device__ void consume(OnChip& s, const Args& a, int g) {
    [[maybe_unused]] const float to_log2 = exponent_factor(a);
    const bool speaks = threadIdx.x % 32 == 0;                  // one arrival per warp
    const int part = SPLIT_KEYS ? 0 : g, my_key = SPLIT_KEYS ? KEYS * g : 0;
    Ring ring, slot;
    u32 own_parity = 0;
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) break;
        const int query = it.own.start + 64 * part + fragment_row();
        stamp_item(a, it.walk, it.outer, false);
        // This thread's two rows. A row past the end, or one that sees no key, gets lse = +inf, so
        // that its P is exactly 0.
        float lse[2], delta[2], dQ[COLUMNS / 2];
        u32 row_bytes = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = query + 8 * r;
            const bool exists = row < it.own.stop;
            const i64 at = i64(it.walk) * a.n_q + row;
            const float l = exists ? __ldcg(&a.lse[at]) : NEG_INF;
            lse[r] = l == NEG_INF ? -NEG_INF : l * LOG2E;
            delta[r] = exists ? __ldcg(&a.delta[at]) : 0.0f;
            row_bytes += exists && threadIdx.x % 4 == 0 && !(SPLIT_KEYS && g) ? 4 : 0;
        }
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; ++e) dQ[e] = 0.0f;
#if FS_FLEX
        const Head at = head_at(a, it.walk / a.heads, it.walk % a.heads, it.outer);
#endif
        wait(&s.own_full[part], own_parity);
        own_parity ^= 1;
#pragma unroll 1
        for (int n = 0; n < it.visits.count; ++n) {
            const Visit visit = it.visits(a, n);
            const int key = it.base + visit.tile * BLOCK_K + my_key, stage = ring.stage;
            u64* stamps = visit_stamps(a, i64(it.walk) * a.n_visits + it.visits.first + n);
            float S[KEYS / 2], dP[KEYS / 2];
            u32 dS[KEYS / 16][4];
            stamp(stamps, 0);
            wait(&s.full[stage], ring.parity);
            stamp(stamps, 1);
            issue_scores(S, s.q[part][0], &s.k[stage][0][my_key * 64]);
            issue_scores(dP, s.dout[part][0], &s.v[stage][0][my_key * 64]);
            wgmma_wait<1>();
            pin(S);
            stamp(stamps, 2);
#if FS_SCORE_MOD
            if (visit.masked) make_slopes<false>(S, a, it, at, query, key, lse);
            else make_slopes<true>(S, a, it, at, query, key, lse);
#else
#if FS_SCALED
#pragma unroll
            for (int e = 0; e < KEYS / 2; ++e) {
                S[e] = scaled(a, S[e]);
            }
#endif
            if (visit.masked) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#if FLASH_RANGES
                    const KeptKeys keep = kept_keys(a, at, query + 8 * r, key + fragment_column(),
                                                    it.own, it.end);
#pragma unroll
                    for (int e = 0; e < KEYS / 2; ++e)
                        if (e / 2 % 2 == r && !keep(e / 4 * 8 + e % 2)) S[e] = NEG_INF;
#else
                    const Keep keep(a, query + 8 * r, it.own.offset, it.end);
                    const int first = keep.lo - key - fragment_column();
                    const int last = keep.hi - key - fragment_column();  // in-tile columns kept
#pragma unroll
                    for (int e = 0; e < KEYS / 2; ++e) {
                        const int c = e / 4 * 8 + e % 2;
#if FS_MASK_MOD
                        if (e / 2 % 2 == r && !kept(a, at,
                                                    existing(query + 8 * r, it.own.stop),
                                                    existing(key + fragment_column() + c, it.end)))
                            S[e] = NEG_INF;
#endif
                        if (e / 2 % 2 == r && (c > last || (FS_LEFT && c < first))) S[e] = NEG_INF;
                    }
#endif
                }
            }
#pragma unroll
            for (int e = 0; e < KEYS / 2; ++e) {
                const float p = exp2_approx(S[e] * to_log2 - lse[e / 2 % 2]);
#if FS_SOFTCAP  // S is tanh, or -inf; times the cap's slope, 1 - tanh^2
                const float t = fmaxf(S[e], -1.0f);
                S[e] = p * (1.0f - t * t);
#else
                S[e] = p;
#endif
            }
#endif
            stamp(stamps, 3);
            wgmma_wait<0>();
            pin(dP);
#pragma unroll
            for (int e = 0; e < KEYS / 2; ++e) dP[e] = S[e] * (dP[e] - delta[e / 2 % 2]);
            round_operand(dS, dP);
            issue_dq(dQ, dS, &s.k[stage][0][my_key * 64]);
            wgmma_wait<0>();
            pin(dQ);
            if (speaks) arrive(&s.empty[stage]);
            ring.next(STAGES);
            stamp(stamps, 4);
        }
        if (speaks) arrive(&s.own_empty[part]);  // the next work tile's Q and dO may be loaded
        if (SPLIT_KEYS) {  // the first warpgroup adds, always in this order
#pragma unroll
            for (int c = 0; c < COLUMNS / 2; c += 32) {
                named_sync(1, 256);  // warpgroup 0 has read the last columns
                if (g == 1)
#pragma unroll
                    for (int e = 0; e < min(32, COLUMNS / 2 - c); ++e)
                        s.partial[e][threadIdx.x % 128] = dQ[c + e];
                named_sync(1, 256);  // warpgroup 1's columns are complete
                if (g == 0)
#pragma unroll
                    for (int e = 0; e < min(32, COLUMNS / 2 - c); ++e)
                        dQ[c + e] += s.partial[e][threadIdx.x % 128];
            }
        }
        const int head = it.walk % a.heads, batch = it.walk / a.heads;
        u32 dq_bytes = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            dq_bytes += store_row<KeyRow>(a.dq, batch, head, query + 8 * r, dQ, r, a.scale,
                                               query + 8 * r < it.own.stop && !(SPLIT_KEYS && g));
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        report(counts + 2, row_bytes), report(counts + 3, row_bytes), report(counts + 4, dq_bytes);
        stamp_item(a, it.walk, it.outer, true);
    }
    // dK and dV, which this kernel does not read, are computed at the same time: their kernel let
    // this one start when delta was complete (`produce_statistics`). But a kernel that waits for
    // this one waits for both.
    wait_for_what_ran_before();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_dq(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
          const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
          const __grid_constant__ Args a, u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < ROW_GROUPS; ++i) {
            barrier_init(&s.own_full[i], 1);
            barrier_init(&s.own_empty[i], 4 * WARPGROUPS / ROW_GROUPS);
        }
        for (int i = 0; i < STAGES; ++i)
            barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 4 * WARPGROUPS);
        s.items.init(4 * WARPGROUPS);
        barrier_init_fence();
    }
    const int role = take_role<PRODUCER_REGISTERS, CONSUMER_REGISTERS>();
    if (role == 0) {
        if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, &map_dout, counter);
    } else {
        consume(s, a, role - 1);
    }
}
