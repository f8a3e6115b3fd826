// Shared code of the KV-outer backward kernels (backward.cu, backward_roles.cu, backward_wide.cu):
// the loads, the mask and softmax of scores, and, with STAGES_DQ, the sending of dQ (send_dq.cuh).
// Included after a kernel's constants, its OnChip and its named barriers.

// The heads and visits of a work tile, in order: for each query head of the group, each row tile.
// The blocks of a cluster divide them into consecutive ranges.
//
// With FS_IN_STEP the order is: for each row tile, each query head. This is for GQA heads under a
// causal mask whose tensors exceed L2. If all key tiles of a head reach a row tile at about the
// same time, its Q, dO and dQ are in L2 once, and only briefly. So all work tiles of the first wave
// start together at the last row tile and loop backwards. A shorter work tile ends sooner, and its
// block takes a longer one next, whose first row tile is about where the others are. So the second
// wave loops forwards, all its work tiles end together, and the third wave is like the first.
struct Step {
    int member = 0, v = 0;
    // Moves to this block's first step; returns its number of steps.
    __device__ inline int begin(const Args& a, const Item& it, int visits) {
        const int steps = a.group * visits;
#if FS_IN_STEP
        if (it.way < 0) v = visits - 1;
#endif
        if (FS_CLUSTER == 1) return steps;
        const int first = steps * cluster_rank() / FS_CLUSTER;
        if (steps) member = first / visits, v = first % visits;
        return steps * (cluster_rank() + 1) / FS_CLUSTER - first;
    }
    __device__ inline void next(const Args& a, const Item& it, int visits) {
#if FS_IN_STEP
        if (++member == a.group) member = 0, v += it.way;
#else
        if (++v == visits) v = 0, ++member;
#endif
    }
};
static_assert(!FS_IN_STEP || (FS_CLUSTER == 1 && !FS_ORDERED), "these have an order of their own");

#include "flex.cuh"
#if FS_FLEX
// The query head of a step.
__device__ __forceinline__ Head head_of(const Args& a, const Item& it, const Step& step) {
    const int kv_heads = a.heads / a.group;
    return head_at(a, it.walk / kv_heads, it.walk % kv_heads * a.group + step.member, it.outer);
}
#endif

// One thread initialises the barriers; `senders` further warps read the work tiles.
__device__ __forceinline__ void begin_barriers(OnChip& s, int senders) {
    if (threadIdx.x != 0) return;
    barrier_init(&s.kv_full, 1);
    barrier_init(&s.k_empty, 4 * WARPGROUPS), barrier_init(&s.v_empty, 4 * WARPGROUPS);
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&s.full[i], 1 + 32);  // the copies, and the lanes that write the statistics
        barrier_init(&s.empty[i], 4 * WARPGROUPS);
    }
#if FS_DEFERRED
    for (int i = 0; i < STAGES; ++i)
        barrier_init(&s.ds_full[i], 4 * WARPGROUPS), barrier_init(&s.ds_free[i], 4 * WARPGROUPS);
#endif
    s.items.init(4 * WARPGROUPS + 1 + senders);
    barrier_init_fence();
}

// Copies K or V of a work tile. Each block of a cluster fetches some of the boxes, for all blocks.
template <int CHUNKS, int ELEMENTS>
__device__ inline void copy_own_tile(u16 (&to)[CHUNKS][ELEMENTS], const TensorMap* map, u64* bar,
                                     Place from, int head) {
#if FS_CLUSTER > 1
    for (int c = 0; c < CHUNKS; ++c)
        if (c % FS_CLUSTER == cluster_rank())
            copy_box_to_all(to[c], map, bar, 64 * c, from.row, head, from.batch, FS_CLUSTER);
#else
    copy_tile(to, map, bar, from, head);
#endif
}

__device__ void produce(OnChip& s, const Args& a, const TensorMap* map_q, const TensorMap* map_k,
                        const TensorMap* map_v, const TensorMap* map_dout, u32* counter) {
    Ring ring, slot;
    u32 kv_parity = 0;
    [[maybe_unused]] u32 dout_parity = 0;
    const int kv_heads = a.heads / a.group;
    if (FS_ONCE) wait_for_what_ran_before();  // no delta kernel ran, which would have waited
    for (int w = a.first + first_work();; w = a.first + next_work(counter, a.stop - a.first)) {
        const Item& it = s.items.write(slot, a, w, a.stop, false);
        if (it.walk < 0) return;
        const int kv_head = it.walk % kv_heads, batch = it.walk / kv_heads;
        stamp_item(a, it.walk, it.outer, false);
        Step step;
        const int steps = step.begin(a, it, it.visits.count);
        int left = steps;
#pragma unroll 1
        do {
            if (steps > 0) {
                const int query = it.base + it.visits(a, step.v).tile * BLOCK_Q;
                const int head = kv_head * a.group + step.member;
                const i64 visit =
                    i64(batch * a.heads + head) * a.n_visits + it.visits.first + step.v;
                u64* stamps = visit_stamps(a, visit);
                stamp(stamps, 0);
                wait(&s.empty[ring.stage], ring.parity ^ 1);  // its last readers are done
                stamp(stamps, 1);
#ifdef ONE_DOUT  // dO has one stage, whose chunks have their own barriers
                arrive_expect(&s.full[ring.stage], sizeof(s.q[0]));
#else
                arrive_expect(&s.full[ring.stage], sizeof(s.q[0]) + sizeof(s.dout[0]));
#endif
                const Place from = place(query, it.end, batch);
                copy_tile(s.q[ring.stage], map_q, &s.full[ring.stage], from, head);
#ifdef ONE_DOUT
#pragma unroll 1
                for (int c = 0; c < CHUNKS; ++c) {
                    wait(&s.dout_empty[c], dout_parity ^ 1);
                    arrive_expect(&s.dout_full[c], sizeof(s.dout[c]));
                    copy_box(s.dout[c], map_dout, &s.dout_full[c], 64 * c, from.row, head,
                             from.batch);
                }
                dout_parity ^= 1;
#else
                copy_tile(s.dout[ring.stage], map_dout, &s.full[ring.stage], from, head);
#endif
                stamp(stamps, 4);
                ring.next(STAGES);
                const int rows = min(BLOCK_Q, it.end - query);
                report_one(a.visit_counts + visit * 8, rows * FS_COUNTED * 2);
                report_one(a.visit_counts + visit * 8 + 1, rows * FS_COUNTED_V * 2);
                step.next(a, it, it.visits.count);
            }
            // The consumers release the last work tile's stages before its V, and its V before its
            // K. So the tiles of the first visit are loaded first. A cluster has only one work
            // tile, so there is nothing to wait for. And the wait could hang: blocks of a cluster
            // load each other's tiles, so a block without visits may have released both before the
            // wait, which would mistake that phase for the one before.
            if (left == steps) {
                if (FS_CLUSTER == 1) wait(&s.v_empty, kv_parity ^ 1);
                arrive_expect(&s.kv_full, sizeof(s.k) + sizeof(s.v));
                const Place own = place(it.own.start, it.own.stop, batch);
                copy_own_tile(s.v, map_v, &s.kv_full, own, kv_head);
                if (FS_CLUSTER == 1) wait(&s.k_empty, kv_parity ^ 1);
                copy_own_tile(s.k, map_k, &s.kv_full, own, kv_head);
                kv_parity ^= 1;
                u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
                // counted once per cluster
                const int keys = cluster_rank() ? 0 : it.own.stop - it.own.start;
                report_one(counts, keys * FS_COUNTED * 2);
                report_one(counts + 1, keys * FS_COUNTED_V * 2);
            }
        } while (--left > 0);
        stamp_item(a, it.walk, it.outer, true);
    }
}

// Reads what the previous kernel wrote: a launch that does not wait for that kernel bypasses L1.
__device__ inline float seen(const float* from) { return FS_AFTER ? __ldcg(from) : *from; }

#if FS_STATISTICS
// STATISTICS: the scores and dP start at a row's statistics, and a product brings them there:
// reading them from shared memory takes longer, since every thread needs every second pair. A row
// of 16 columns has each statistic as a sum of three bfloat16 numbers, which is exact to float32:
// -lse / scale in columns 0 to 2, -delta in columns 4 to 6. The other columns are 0.
//
// With FS_RAMP a score function adds a linear function of the positions (ALiBi). A row then starts
// at -lse / scale plus the function's value at the tile's first key. Columns 8 to 10 have the
// function's step per key, which the product multiplies by the number of the key in the tile.
constexpr float LOWEST = -0x1p126f;  // instead of -inf, which the product would multiply by 0
__device__ inline uint4 three_parts(float first, float second) {
    u32 parts[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float x = i ? second : first;
        const float high = unpack(pack(x, 0.0f)).x, middle = unpack(pack(x - high, 0.0f)).x;
        parts[2 * i] = pack(high, middle), parts[2 * i + 1] = pack(x - high - middle, 0.0f);
    }
    return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}
__device__ inline void write_statistics(u16* rows, int row, float first, float second,
                                        uint4 rest) {
    const uint4 parts = three_parts(first, second);
    const int turn = row / 4 % 2;  // the 32-byte swizzle
    uint4* to = reinterpret_cast<uint4*>(rows + row * 16);
    to[turn] = parts;
    to[1 - turn] = rest;
}
#endif

// A warp: writes the initial values of each visit's scores and dP, and arrives at the tiles'
// barriers. A row past the end, or one that sees no key, gets -inf, so that its P is exactly 0.
// With FS_ONCE there is no delta yet, only, with FS_DLSE, the LSE's gradient, which is subtracted
// later.
__device__ void produce_statistics(OnChip& s, const Args& a) {
    constexpr int PER_LANE = (BLOCK_Q + 31) / 32;
    const int lane = threadIdx.x % 32;
    const float unit = START ? -1.0f / a.scale : -LOG2E;
    Ring ring, slot;
    // All other accesses to what the previous kernel wrote depend on these reads, except those to
    // dQ's flags (send_dq.cuh).
    if (!FS_AFTER) wait_for_what_ran_before();
    // Lets dQ's kernel start, whose blocks need a whole SM each. The conversion kernel is not
    // started early: its blocks would crowd on the few SMs that are idle by now.
    if (!FS_FUSED || FS_MORE) let_what_runs_next_start();
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) break;
        Step step;
#pragma unroll 1
        for (int left = step.begin(a, it, it.visits.count); left; --left) {
            const int walk = it.walk * a.group + step.member;  // index of the query head
            const int first = it.base + it.visits(a, step.v).tile * BLOCK_Q;
            u32* counts = a.visit_counts + (i64(walk) * a.n_visits + it.visits.first + step.v) * 8;
            float lse[PER_LANE];
            [[maybe_unused]] float delta[PER_LANE];  // or dlse
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {  // before the wait, to hide the latency
                const int x = lane + 32 * i;
                const bool exists = x < BLOCK_Q && first + x < it.end;
                const i64 row = i64(walk) * a.n_q + first + x;
                lse[i] = exists ? seen(a.lse + row) : NEG_INF;
                report(counts + 2, 4 * exists);
                if (FS_ONCE && !FS_DLSE) continue;
                delta[i] = exists ? seen((FS_DLSE ? a.dlse : a.delta) + row) : 0.0f;
                report(counts + 3, 4 * exists);
            }
            wait(&s.empty[ring.stage], ring.parity ^ 1);  // its last readers are done
#if FS_RAMP
            const Head at = head_of(a, it, step);
            const uint4 step_per_key =
                three_parts(flash_ramp_step(a.captured, at.at) * -unit, 0.0f);
#endif
#if FS_STATISTICS
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                if (lane + 32 * i < BLOCK_Q)
#if FS_RAMP  // the function's value at the first key, minus the log-sum-exp
                    write_statistics(
                        s.statistics[ring.stage], lane + 32 * i,
                        lse[i] == NEG_INF
                            ? LOWEST
                            : flash_score(a.captured, -lse[i], at.at,
                                          at.query(existing(first + lane + 32 * i, it.end)),
                                          at.key(it.own.start)) * -unit,
                        -delta[i], step_per_key);
#else
                    write_statistics(s.statistics[ring.stage], lane + 32 * i,
                                     lse[i] == NEG_INF ? LOWEST : lse[i] * unit, -delta[i],
                                     make_uint4(0, 0, 0, 0));
#endif
            fence_async_shared();
#else
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int x = lane + 32 * i;
                if (x < BLOCK_Q) {
                    s.lse[ring.stage][x] = lse[i] == NEG_INF ? NEG_INF : lse[i] * unit;
#if FS_ONCE && FS_DLSE
                    s.dlse[ring.stage][x] = delta[i];
#elif !FS_ONCE
                    s.delta[ring.stage][x] = -delta[i];
#endif
                }
            }
#endif
#if FS_DISTANCES
            // The function's terms by distance, the smallest distance first; in units of log 2, or
            // of raw scores if these start at them.
            const float factor = FS_STARTED ? -unit : LOG2E;
            const Head head = head_of(a, it, step);
            const int nearest =
                head.query(first).base - head.key(it.own.start).base - FS_BLOCK_K + 1;
#pragma unroll
            for (int x = 0; x < DISTANCES; x += 32) {
                s.distances[ring.stage][x + lane] =
                    factor * term_at(a, head, nearest + x + lane, first, it.end - 1, it.own.start,
                                     it.own.stop - 1);
            }
#endif
            arrive(&s.full[ring.stage]);  // every lane arrives for what it wrote
            ring.next(STAGES);
            step.next(a, it, it.visits.count);
        }
    }
    if (FS_AFTER) wait_for_what_ran_before();
}

#ifdef STAGES_DQ
#include "send_dq.cuh"
#endif

// A statistic of the two queries in this thread's columns of the j-th eight.
__device__ __forceinline__ float2 query_pair(const float* statistic, int j) {
    return *reinterpret_cast<const float2*>(&statistic[8 * j + fragment_column()]);
}

#if FS_FLEX
// Whether both tiles of a pair that starts at `query` are complete. Then all positions of its
// scores exist, at fixed distances. Otherwise a function that reads arrays gets positions clamped
// to those that exist.
__device__ __forceinline__ bool is_exact(const Item& it, int query) {
    return !FS_READS || (query + FS_BLOCK_Q <= it.end && it.own.start + FS_BLOCK_K <= it.own.stop);
}

// Sets to -inf the scores that the masks drop.
template <bool EXACT, int N>
__device__ __forceinline__ void drop_masked(float (&S)[N], const Args& a, const Item& it,
                                            const Head& at, int key, int query) {
#if FLASH_RANGES
    const KeptQueries keep[2] = {kept_queries(a, at, key, query, it.own),
                                 kept_queries(a, at, key + 8, query, it.own)};
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < N; ++e)
            if (e / 2 % 2 == r && !keep[r](e / 4 * 8 + e % 2)) S[e] = NEG_INF;
#else
    const KeepColumn keep[2] = {{a, key, it.own}, {a, key + 8, it.own}};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        // Row by row, unless both rows need what is read per query.
        const int e = FS_READS ? i : i / 2 % (N / 4) * 4 + i / (N / 2) * 2 + i % 2;
        const int step = e / 4 * 8 + e % 2, r = e / 2 % 2;
        const FlashAt q = EXACT ? FlashAt(query, step) : existing(query, step, it.end);
        const FlashAt k = EXACT ? FlashAt(key, 8 * r) : existing(key, 8 * r, it.own.stop);
        if (!(keep[r](query + step) & kept(a, at, q, k))) S[e] = NEG_INF;
    }
#endif
}

// As shape_scores below, with a mask function.
template <int N>
__device__ __forceinline__ void drop_scores(float (&S)[N], const Args& a, const Item& it,
                                            const Head& at, bool masked, bool exact, int key,
                                            int query) {
#if FS_SCALED
#pragma unroll
    for (int e = 0; e < N; ++e) S[e] = scaled(a, S[e]);
#endif
    if (!masked) return;
    if (exact) drop_masked<true>(S, a, it, at, key, query);
    else drop_masked<false>(S, a, it, at, key, query);
}

#if FS_SCORE_MOD
// P of raw scores whose rows are keys; see `probability`. `statistic` is the queries' -lse in units
// of log 2. With FS_DISTANCES it is the added term of this thread's first key and first query
// instead, among those of other distances; with FS_ADDED alone it is not read.
template <bool KEPT, bool EXACT, int N>
__device__ __forceinline__ void make_probabilities(float (&P)[N], float (&S)[N], const Args& a,
                                                   const Item& it, const Head& at, float factor,
                                                   const float* statistic, int key, int query) {
#if FLASH_RANGES
    const KeptQueries keep[2] = {kept_queries(a, at, key, query, it.own),
                                 kept_queries(a, at, key + 8, query, it.own)};
#else
    const KeepColumn keep[2] = {{a, key, it.own}, {a, key + 8, it.own}};
#endif
#pragma unroll
    for (int e = 0; e < N; ++e) {
        const int step = e / 4 * 8 + e % 2, r = e / 2 % 2;
        const FlashAt q = EXACT ? FlashAt(query, step) : existing(query, step, it.end);
        const FlashAt k = EXACT ? FlashAt(key, 8 * r) : existing(key, 8 * r, it.own.stop);
        const bool exists =
            !FS_POLES || EXACT || (query + step < it.end && key + 8 * r < it.own.stop);
#if FLASH_RANGES
        const bool inside = KEPT || (exists && keep[r](step));
#else
        const bool inside = KEPT || (exists && keep[r](query + step) && kept(a, at, q, k));
#endif
#if FS_DISTANCES
        P[e] = probability<KEPT>(a, at, S[e], factor, 0.0f, q, k, inside, statistic[step - 8 * r]);
#elif FS_ADDED
        P[e] = probability<KEPT>(a, at, S[e], factor, 0.0f, q, k, inside);
#else
        const float2 lse = query_pair(statistic, e / 4);
        P[e] = probability<KEPT>(a, at, S[e], factor, e % 2 ? lse.y : lse.x, q, k, inside);
#endif
    }
}
template <int N>
__device__ __forceinline__ void probabilities(float (&P)[N], float (&S)[N], const Args& a,
                                              const Item& it, const Head& at, bool masked,
                                              bool exact, float factor, const float* statistic,
                                              int key, int query) {
    if (!exact)
        make_probabilities<false, false>(P, S, a, it, at, factor, statistic, key, query);
    else if (masked)
        make_probabilities<false, true>(P, S, a, it, at, factor, statistic, key, query);
    else
        make_probabilities<true, true>(P, S, a, it, at, factor, statistic, key, query);
}
#endif
#endif

// Scales and caps the scores (if the exponent cannot apply the scale), and masks them (if the tile
// needs it). Queries past the end need no mask: their statistic is -inf (`produce_statistics`), so
// that P is 0. `key` and `query` are the positions of this thread's first score.
template <int N>
__device__ __forceinline__ void shape_scores(float (&S)[N], const Args& a, const Item& it,
                                             bool masked, int key, int query) {
#if FS_SCALED
#pragma unroll
    for (int e = 0; e < N; ++e) {
        S[e] = scaled(a, S[e]);
    }
#endif
    if (!masked) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const KeepColumn keep(a, key + 8 * r, it.own);
        const int first = keep.lo - query, last = FS_LEFT ? keep.hi - query : 2 * N;
#pragma unroll
        for (int e = 0; e < N; ++e) {
            const int c = e / 4 * 8 + e % 2;
            if (e / 2 % 2 == r && (c < first || (FS_LEFT && c > last))) S[e] = NEG_INF;
        }
    }
}
