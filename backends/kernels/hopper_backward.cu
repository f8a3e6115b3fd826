// FlashAttention-3 backward (arXiv:2407.08608, Algorithm 3) for Hopper: 16-bit inputs, float32
// accumulators, keys outside. A block owns one tile of keys of one key head; each of two consumer
// warpgroups owns 64 of its keys and keeps their dK and dV in registers. Scores are computed
// transposed, keys by queries, so that P^T is already the left operand of dV = P^T dO. Only dS
// passes through shared memory, for dK = dS^T Q and dQ = dS K; dQ is added into a float32
// accumulator by the copy engine. One producer thread loads tiles, another warp the rows'
// log-sum-exp and delta. Which row tiles are visited is read from the schedule's tables.
// Without FS_FUSED there is no dQ: the deterministic form leaves it to hopper_dq.
#include "hopper_work.cuh"

constexpr int D = FS_D, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K;  // D: both head dims, padded
constexpr int WARPGROUPS = BLOCK_K / 64, STAGES = 2, CHUNKS = D / 64, Q_CHUNKS = BLOCK_Q / 64;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
// dQ's tile is shared out among the warpgroups in pieces of 64 rows by DQ_COLUMNS.
constexpr int DQ_COLUMNS = D * Q_CHUNKS / WARPGROUPS;
// Registers enough to start dV before dS is computed, and to load statistics ahead of their use.
constexpr bool AHEAD = BLOCK_Q == 64;
static_assert(D % 64 == 0 && BLOCK_Q % 64 == 0 && WARPGROUPS == 2 && DQ_COLUMNS == 64, "");

struct OnChip {
    alignas(1024) u16 k[CHUNKS][BLOCK_K * 64];             // lives for one item
    alignas(1024) u16 v[CHUNKS][BLOCK_K * 64];             // lives for one item
    alignas(1024) u16 q[STAGES][CHUNKS][BLOCK_Q * 64];     // ring, one visit each
    alignas(1024) u16 dout[STAGES][CHUNKS][BLOCK_Q * 64];  // ring, one visit each
    alignas(1024) u16 ds[STAGES][Q_CHUNKS][BLOCK_K * 64];  // dS^T: a row is a key, 64 queries wide
    alignas(1024) float dq[WARPGROUPS][DQ_COLUMNS / 32][64 * 32];  // leaving for the accumulator
    float lse[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];    // lse in units of log 2
    u64 kv_full, kv_empty;
    u64 full[STAGES], empty[STAGES];                       // of q, dout, lse and delta
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "backends.hopper and OnChip must agree");

// Named barriers; 0 is __syncthreads, STAGING + g is warpgroup g's own.
enum NamedBarrier { DS_READY = 1, STAGING = 2 };

// The heads and visits of an item, in order: for each query head of the group, each row tile.
struct Step {
    int member = 0, v = 0;
    __device__ inline void next(int visits) {
        if (++v == visits) v = 0, ++member;
    }
};

__device__ void produce(OnChip& s, const Args& a, const TensorMap* map_q, const TensorMap* map_k,
                        const TensorMap* map_v, const TensorMap* map_dout, u32* counter) {
    Ring ring, slot;
    u32 kv_parity = 0;
    const int kv_heads = a.heads / a.group;
    for (int w = first_work();; w = next_work(counter)) {
        const Item& it = s.items.write(slot, a, w, a.walks * a.tiles, false);
        if (it.walk < 0) return;
        const int kv_head = it.walk % kv_heads, batch = it.walk / kv_heads;
        stamp_item(a, it.walk, it.outer, false);
        wait(&s.kv_empty, kv_parity ^ 1);  // the last item is done with K and V
        kv_parity ^= 1;
        arrive_expect(&s.kv_full, sizeof(s.k) + sizeof(s.v));
        const Place own = place(it.own.start, it.own.stop, a.n_kv, batch);
        copy_tile(s.k, map_k, &s.kv_full, own, kv_head);
        copy_tile(s.v, map_v, &s.kv_full, own, kv_head);
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        const int keys = it.own.stop - it.own.start;
        report_one(counts, keys * FS_HEAD_DIM * 2);
        report_one(counts + 1, keys * FS_HEAD_DIM_V * 2);
        Step step;
#pragma unroll 1
        for (int left = a.group * it.visits.count; left; --left) {
            const int query = it.base + it.visits(a, step.v).tile * BLOCK_Q;
            const int head = kv_head * a.group + step.member;
            const i64 visit = i64(batch * a.heads + head) * a.n_visits + it.visits.first + step.v;
            u64* stamps = visit_stamps(a, visit);
            stamp(stamps, 0);
            wait(&s.empty[ring.stage], ring.parity ^ 1);  // its last readers are done
            stamp(stamps, 1);
            arrive_expect(&s.full[ring.stage], sizeof(s.q[0]) + sizeof(s.dout[0]));
            const Place from = place(query, it.end, a.n_q, batch);
            copy_tile(s.q[ring.stage], map_q, &s.full[ring.stage], from, head);
            copy_tile(s.dout[ring.stage], map_dout, &s.full[ring.stage], from, head);
            stamp(stamps, 4);
            ring.next(STAGES);
            const int rows = min(BLOCK_Q, it.end - query);
            report_one(a.visit_counts + visit * 8, rows * FS_HEAD_DIM * 2);
            report_one(a.visit_counts + visit * 8 + 1, rows * FS_HEAD_DIM_V * 2);
            step.next(it.visits.count);
        }
        stamp_item(a, it.walk, it.outer, true);
    }
}

// A warp: log-sum-exp and delta of each visit's rows, on the tiles' barriers. A row past the end,
// or one that sees no key, gets lse = +inf, so that its P is exactly 0.
__device__ void produce_statistics(OnChip& s, const Args& a) {
    const int lane = threadIdx.x % 32;
    Ring ring, slot;
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) return;
        Step step;
        for (int left = a.group * it.visits.count; left; --left) {
            const int walk = it.walk * a.group + step.member;  // of the query head
            const int first = it.base + it.visits(a, step.v).tile * BLOCK_Q;
            u32* counts = a.visit_counts + (i64(walk) * a.n_visits + it.visits.first + step.v) * 8;
            wait(&s.empty[ring.stage], ring.parity ^ 1);  // its last readers are done
#pragma unroll
            for (int x = lane; x < BLOCK_Q; x += 32) {
                const bool exists = first + x < it.end;
                const i64 row = i64(walk) * a.n_q + first + x;
                const float lse = exists ? a.lse[row] : NEG_INF;
                s.lse[ring.stage][x] = lse == NEG_INF ? -NEG_INF : lse * LOG2E;
                s.delta[ring.stage][x] = exists ? a.delta[row] : 0.0f;
                report(counts + 2, 4 * exists), report(counts + 3, 4 * exists);
            }
            arrive(&s.full[ring.stage]);  // every lane for what it wrote
            ring.next(STAGES);
            step.next(it.visits.count);
        }
    }
}

// S^T = K Q^T or dP^T = V dO^T, issued and committed: `mine` is 64 rows of a key-side tile.
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_Q / 2], const u16* mine,
                                             const u16* visited) {
    const u32 da = descriptor(mine, 0), db = descriptor(visited, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D / 16; ++x)
        wgmma_ss<0, 0>(S, da + along_row(x, BLOCK_K), db + along_row(x, BLOCK_Q), x > 0);
    wgmma_commit();
}

// A statistic of the two queries that are this thread's columns in the j-th eight; of all of them.
__device__ __forceinline__ float2 query_pair(const float* statistic, int j) {
    return *reinterpret_cast<const float2*>(&statistic[8 * j + fragment_column()]);
}
__device__ __forceinline__ void load_rows(float2 (&rows)[BLOCK_Q / 8], const float* statistic) {
#pragma unroll
    for (int j = 0; j < BLOCK_Q / 8; ++j) rows[j] = query_pair(statistic, j);
}

// dV += P^T dO, issued and committed; P^T comes from registers.
__device__ __forceinline__ void issue_dv(float (&dV)[D / 2], const u32 (&P)[BLOCK_Q / 16][4],
                                         const u16* dout) {
    const u32 db = descriptor(dout, BLOCK_Q * 128);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_Q / 16; ++x) wgmma_rs<1>(dV, P[x], db + down_rows(x), 1);
    wgmma_commit();
}

// dK += dS^T Q, issued and committed; `ds` is this warpgroup's 64 rows. They come from shared
// memory, so that their registers are free while the product goes on into the next visit.
__device__ __forceinline__ void issue_dk(float (&dK)[D / 2], const u16* ds, const u16* q) {
    const u32 da = descriptor(ds, 0), db = descriptor(q, BLOCK_Q * 128);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_Q / 16; ++x)
        wgmma_ss<0, 1>(dK, da + along_row(x, BLOCK_K), db + down_rows(x), 1);
    wgmma_commit();
}

// This warpgroup's piece of dQ = dS K, issued and committed.
__device__ __forceinline__ void issue_dq(float (&dQ)[DQ_COLUMNS / 2], const u16* ds, const u16* k) {
    const u32 da = descriptor(ds, 0), db = descriptor(k, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_K / 16; ++x)
        wgmma_ss<1, 1>(dQ, da + down_rows(x), db + down_rows(x), x > 0);
    wgmma_commit();
}

// Scales and caps the scores (where the exponent cannot take the scale), masks them (where asked).
// Queries past the end need none: their lse is +inf.
__device__ __forceinline__ void shape_scores(float (&S)[BLOCK_Q / 2], const Args& a, const Item& it,
                                             Visit visit, int key) {
#if FS_SCALED
#pragma unroll
    for (int e = 0; e < BLOCK_Q / 2; ++e) {
        S[e] = scaled(a, S[e]);
    }
#endif
    if (!visit.masked) return;
    const int query = it.base + visit.tile * BLOCK_Q + fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const KeepColumn keep(a, key + 8 * r, it.own);
        const int first = keep.lo - query, last = FS_LEFT ? keep.hi - query : BLOCK_Q;
#pragma unroll
        for (int e = 0; e < BLOCK_Q / 2; ++e) {
            const int c = e / 4 * 8 + e % 2;
            if (e / 2 % 2 == r && (c < first || (FS_LEFT && c > last))) S[e] = NEG_INF;
        }
    }
}

__device__ void consume(OnChip& s, const Args& a, const TensorMap* map_dq, int g) {
    const float to_log2 = FS_SCALED ? LOG2E : a.scale * LOG2E;  // exponents in base 2
    [[maybe_unused]] const float uncap = 1.0f / a.softcap;
    const int lane = threadIdx.x % 32;
    const bool speaks = lane == 0;              // for its warp
    const bool leads = threadIdx.x % 128 == 0;  // owns the warpgroup's copies out
    const int ds_row = 64 * g + threadIdx.x / 32 % 4 * 16 + lane % 16;  // for store_matrices
    const int kv_heads = a.heads / a.group;
    Ring ring, slot;
    u32 kv_parity = 0;
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) break;
        const int key = it.own.start + 64 * g + fragment_row();
        const int steps = a.group * it.visits.count;
        stamp_item(a, it.walk, it.outer, false);
        float dK[D / 2], dV[D / 2];
#pragma unroll
        for (int e = 0; e < D / 2; ++e) dK[e] = dV[e] = 0.0f;
        wait(&s.kv_full, kv_parity);
        kv_parity ^= 1;
        Step next;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const Visit visit = it.visits(a, next.v);
            const int stage = ring.stage;
            const int walk = it.walk * a.group + next.member;  // of the query head
            const i64 number = i64(walk) * a.n_visits + it.visits.first + next.v;
            u64* stamps = visit_stamps(a, number);
            next.next(it.visits.count);
            float S[BLOCK_Q / 2], dP[BLOCK_Q / 2];
            u32 P[BLOCK_Q / 16][4], dS[BLOCK_Q / 16][4];
            // -- S^T = K Q^T and dP^T = V dO^T, queued behind the last visit's dK -----------------
            stamp(stamps, 0);
            wait(&s.full[stage], ring.parity);
            stamp(stamps, 1);
            issue_scores(S, &s.k[0][64 * g * 64], s.q[stage][0]);
            issue_scores(dP, &s.v[0][64 * g * 64], s.dout[stage][0]);
            float2 rows[BLOCK_Q / 8];  // a statistic of this thread's query pairs: lse, then delta
            if (AHEAD) load_rows(rows, s.lse[stage]);  // under the products
            wgmma_wait<1>();  // S of this visit and dK of the last are complete
            pin(S);
            ring.next(STAGES);  // of two stages, the next one is also the last visit's
            if (speaks && step > 0) arrive(&s.empty[ring.stage]);
            stamp(stamps, 2);
            // -- P^T = exp2(c S^T - lse) ----------------------------------------------------------
            shape_scores(S, a, it, visit, key);
#pragma unroll
            for (int e = 0; e < BLOCK_Q / 2; e += 2) {
                const float2 lse = AHEAD ? rows[e / 4] : query_pair(s.lse[stage], e / 4);
                const float p0 = exp2_approx(S[e] * to_log2 - lse.x);
                const float p1 = exp2_approx(S[e + 1] * to_log2 - lse.y);
                P[e / 8][e / 2 % 4] = pack(p0, p1);
#if FS_SOFTCAP  // from here on S is P times the slope of c tanh(x / c), 1 - tanh^2; S may be -inf
                const float t0 = fmaxf(S[e] * uncap, -1.0f), t1 = fmaxf(S[e + 1] * uncap, -1.0f);
                S[e] = p0 * (1.0f - t0 * t0), S[e + 1] = p1 * (1.0f - t1 * t1);
#else
                S[e] = p0, S[e + 1] = p1;
#endif
            }
            // -- dV += P^T dO, and under it dS^T = P^T (dP^T - delta) -----------------------------
            if (AHEAD) load_rows(rows, s.delta[stage]), issue_dv(dV, P, s.dout[stage][0]);
            wgmma_wait<AHEAD ? 1 : 0>();
            pin(dP);
            stamp(stamps, 3);
#pragma unroll
            for (int e = 0; e < BLOCK_Q / 2; e += 2) {
                const float2 delta = AHEAD ? rows[e / 4] : query_pair(s.delta[stage], e / 4);
                dP[e] = S[e] * (dP[e] - delta.x);
                dP[e + 1] = S[e + 1] * (dP[e + 1] - delta.y);
            }
            round_operand(dS, dP);
#pragma unroll
            for (int x = 0; x < BLOCK_Q / 16; ++x) {
                const int piece = x % 4 * 2 + lane / 16;  // 8 queries, 16 bytes
                store_matrices(&s.ds[stage][x / 4][ds_row * 64 + (piece ^ ds_row % 8) * 8], dS[x]);
            }
            if (!AHEAD) issue_dv(dV, P, s.dout[stage][0]);
            fence_async_shared();
            // All of dS is written. The other stage's dS is free from here on: its products were
            // waited for before this visit's scores were used.
            named_sync(DS_READY, 128 * WARPGROUPS);
            // -- dQ = dS K, dK += dS^T Q ----------------------------------------------------------
#if FS_FUSED
            float dQ[DQ_COLUMNS / 2];
            issue_dq(dQ, s.ds[stage][Q_CHUNKS == 1 ? 0 : g], s.k[Q_CHUNKS == 1 ? g : 0]);
            issue_dk(dK, &s.ds[stage][0][64 * g * 64], s.q[stage][0]);
            wgmma_wait<1>();  // dV and dQ are complete; dK goes on into the next visit
            pin(dQ);
            // -- dQ leaves: staged, then added to the accumulator by the copy engine --------------
            if (leads) reduce_wait_read();
            named_sync(STAGING + g, 128);  // the copy engine has read the last visit's piece
#pragma unroll
            for (int e = 0; e < DQ_COLUMNS / 2; e += 2) {
                // Odd rows take the 8-column group two further on, so that a half-warp's four rows
                // fall into different banks.
                const bool odd = lane / 4 % 2;
                const int row = fragment_row() + e / 2 % 2 * 8, x = e ^ 8;
                const int piece = (e / 4 % 4 ^ odd * 2) * 2 + lane % 4 / 2;
                float* to = &s.dq[g][e / 16][row * 32 + (piece ^ row % 8) * 4 + lane % 2 * 2];
                *reinterpret_cast<float2*>(to) =
                    odd ? float2{dQ[x], dQ[x + 1]} : float2{dQ[e], dQ[e + 1]};
            }
            fence_async_shared();
            named_sync(STAGING + g, 128);  // the piece is complete
            if (leads) {
                const int dq_column = Q_CHUNKS == 1 ? 64 * g : 0;
                const int row = it.base + visit.tile * BLOCK_Q + (Q_CHUNKS == 1 ? 0 : 64 * g);
                const Place to = place(row, it.end, a.n_q, walk / a.heads);
#pragma unroll
                for (int c = 0; c < DQ_COLUMNS / 32; ++c)
                    reduce_box(map_dq, s.dq[g][c], dq_column + 32 * c, to.row, walk % a.heads,
                               to.batch);
                reduce_commit();
                const int rows = max(0, min(64, it.end - row));
                const int columns = max(0, min(DQ_COLUMNS, FS_HEAD_DIM - dq_column));
                report_one(a.visit_counts + number * 8 + 4, rows * columns * 4);
            }
#else
            issue_dk(dK, &s.ds[stage][0][64 * g * 64], s.q[stage][0]);
            wgmma_wait<1>();  // dV is complete; dK goes on into the next visit
#endif
            stamp(stamps, 4);
        }
        wgmma_wait<0>();
        pin(dK), pin(dV);
        if (speaks && steps > 0) arrive(&s.empty[ring.stage ^ 1]);
        if (speaks) arrive(&s.kv_empty);  // the next item's K and V may come
        // -- dK and dV, straight from registers ---------------------------------------------------
        const int kv_head = it.walk % kv_heads, batch = it.walk / kv_heads;
        u32 dk_bytes = 0, dv_bytes = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = key + 8 * r;
            const bool exists = row < it.own.stop;
            dk_bytes += store_row<FS_HEAD_DIM>(a.dk, batch, kv_head, row, dK, r, a.scale, exists);
            dv_bytes += store_row<FS_HEAD_DIM_V>(a.dv, batch, kv_head, row, dV, r, 1.0f, exists);
        }
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        report(counts + 2, dk_bytes), report(counts + 3, dv_bytes);
        stamp_item(a, it.walk, it.outer, true);
    }
    if (leads) reduce_wait_read();  // shared memory must outlive the copies that read it
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_backward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_dout,
                const __grid_constant__ TensorMap map_dq, const __grid_constant__ Args a,
                u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    if (threadIdx.x == 0) {
        barrier_init(&s.kv_full, 1), barrier_init(&s.kv_empty, 4 * WARPGROUPS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1 + 32);  // the copies, and the lanes with the statistics
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        s.items.init(4 * WARPGROUPS + 1);
        barrier_init_fence();
    }
    __syncthreads();  // nobody touches a barrier before it exists
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_give<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 1) produce_statistics(s, a);
        else if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, &map_dout, counter);
    } else {
        registers_take<CONSUMER_REGISTERS>();
        consume(s, a, &map_dq, role - 1);
    }
}
