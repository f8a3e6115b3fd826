// FlashAttention-3 forward (arXiv:2407.08608, Algorithms 1 and 2) for Hopper: 16-bit inputs,
// float32 accumulators. One producer thread fills rings of K and V tiles by TMA. Each of WARPGROUPS
// consumer warpgroups owns 64 query rows, with S, P and O in registers. The schedule's tables say
// which key tiles a row tile visits, and which of them need a mask. Blocks are persistent: each
// takes the next work tile (row tile, head) of the launch's list. With FS_PACK, a row tile has rows
// of all query heads of a GQA group, which share K and V.
#define FS_WARPGROUPS (FS_BLOCK_Q / 64)  // consumers
#include "tile_scheduler.cuh"
#include "softmax.cuh"
#include "flex.cuh"

constexpr int D = FS_D, DV = FS_DV, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, STAGES = FS_STAGES;
constexpr int WARPGROUPS = FS_WARPGROUPS;
constexpr int CHUNKS = (D + 63) / 64, CHUNKS_V = (DV + 63) / 64;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr float LN2 = 1.0f / LOG2E;
// Registers per thread after setmaxnreg. A score function needs some beside the widest O.
constexpr bool SCORED_WIDE = WARPGROUPS == 2 && FS_SCORE_MOD && DV > 224;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : SCORED_WIDE ? 24 : 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : SCORED_WIDE ? 240 : 232;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
static_assert(BLOCK_Q == 128 || BLOCK_Q == 192, "two or three warpgroups of 64 rows");
static_assert(64 % FS_PACK == 0 && !(FS_PACK > 1 && (FS_VARLEN || FS_FLEX)), "see packs_heads");
static_assert(D % 16 == 0 && DV % 16 == 0 && BLOCK_K % 16 == 0 && BLOCK_K <= 256, "wgmma's shapes");

// If visits are short, or three warpgroups must release a stage, K is released as soon as its
// scores are complete. Otherwise K is released a little later, where the arrival keeps ptxas from
// moving the wait for O.
constexpr bool RELEASE_EARLY = DV <= 64 || WARPGROUPS == 3;
// Ping-pong scheduling: warpgroups issue their products in a fixed order. With many visits per work
// tile at head_dim 128, warpgroups alternate by themselves, and the barriers would only add
// instructions.
constexpr bool TURNS = FS_TURNS;

// With more than 128 columns, O = P V takes long, so O is rescaled while the next visit's scores
// are computed. Otherwise O is rescaled as soon as it is complete, between the exponentials.
// Bounded scores need no rescaling.
constexpr bool RESCALE_LATE = DV > 128;
// Named barriers: 1 to 3 order the warpgroups' products (TURNS). STEP_FREE + g: no product of
// warpgroup g reads the last step, or its new step is written (see Ramp).
enum NamedBarrier { STEP_FREE = 4 };

#if FS_TILE
// Captured elements that the score function reads per query and key. The elements of a tile pair
// pass through shared memory: 64 rows per warpgroup, in boxes of 128 bytes per row, swizzled. With
// FS_TILE_INTERLEAVED, rows are in the order of copy_interleaved_box.
struct Elements {
    static constexpr int COLUMNS = 128 / FS_TILE_BYTES, BOXES = (BLOCK_K + COLUMNS - 1) / COLUMNS;
    alignas(1024) char box[BOXES][64 * 128];

    // The element of this thread's score e. Two neighbours are read in one access.
    template <class A, class H>
    __device__ __forceinline__ float operator()(const A&, const H&, int e) const {
        const float2 two = pair(e - e % 2);
        return e % 2 ? two.y : two.x;
    }
    __device__ __forceinline__ float2 pair(int e) const {
        // TMA permutes a row's 16-byte pieces by the row's place among eight. Half a warp reads two
        // pieces of each of four rows. In float32, the pieces of neighbouring places would have
        // bank conflicts, so the places of these rows are interleaved with those of the next four.
        const int row_of_eight = threadIdx.x % 32 / 4;
        const int at_place =
            FS_TILE_INTERLEAVED ? row_of_eight % 4 * 2 + row_of_eight / 4 : row_of_eight;
        const int mine = fragment_column() * FS_TILE_BYTES ^ at_place * 16;
        const int column = e / 4 * 8, row = threadIdx.x / 32 % 4 * 16 + at_place + e / 2 % 2 * 8;
        const char* at = box[column / COLUMNS] + row * 128 +
                         (mine ^ column % COLUMNS * FS_TILE_BYTES);
#if FS_TILE_BYTES == 4
        return *reinterpret_cast<const float2*>(at);
#elif FS_TILE_BF16
        const u32 two = *reinterpret_cast<const u32*>(at);
        return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
#else
        const u32 two = *reinterpret_cast<const u32*>(at);
        return {flash_half(two & 0xffffu), flash_half(two >> 16)};
#endif
    }
};
#endif

#if FS_DISTANCES
// Captured elements that depend only on the distance between query and key, for all distances in a
// tile pair, the smallest first. A distance out of range has the nearest element. With FS_ADDED,
// they are the terms that the score function adds to a scaled score.
constexpr int DISTANCES = BLOCK_Q + BLOCK_K;  // one more than there are
struct Distances {
    const float* mine;  // the element of this thread's first row and first key

    template <class A, class H>
    __device__ __forceinline__ float operator()(const A&, const H&, int e) const {
        return mine[e / 2 % 2 * 8 - e / 4 * 8 - e % 2];
    }
};
#endif

#if FS_RAMP
// A score function adds a linear function of the positions (ALiBi). Within a tile pair, that is a
// number per row plus `step` times the key's column. Softmax does not depend on the number per row.
// The columns' part is a product of two matrices of 16 rows: it is one more product of 16 columns
// of Q and K, so no instruction per score is needed. A step is the sum of three 16-bit numbers, and
// columns are below 256, so all products are exact.
struct Ramp {
    alignas(1024) u16 step[WARPGROUPS][16 * 64];             // rows 0 to 2: high, middle, low part
    alignas(1024) u16 column[(BLOCK_K + 63) / 64][16 * 64];  // rows 0 to 2: the columns' numbers

    // All threads: writes what does not depend on the head.
    __device__ void init() {
        u32* words = reinterpret_cast<u32*>(this);
        for (int i = threadIdx.x; i < int(sizeof(Ramp)) / 4; i += THREADS) {
            const int tile = i / 512 - WARPGROUPS, row = i % 512 / 32, piece = i % 32 / 4 ^ row % 8;
            const float first = tile * 64 + piece * 8 + i % 4 * 2;
            words[i] = tile >= 0 && row < 3 ? pack(first, first + 1.0f) : 0;
        }
        fence_async_shared();
    }
    // Warpgroup g, none of whose products runs: sets the step of a head, in units of raw scores.
    __device__ __forceinline__ void set(int g, float x) {
        named_sync(STEP_FREE + g, 128);
        const int row = threadIdx.x % 128 / 8;
        if (row > 0) x -= unpack(pack(x, x)).x;
        if (row > 1) x -= unpack(pack(x, x)).x;
        const u32 two = pack(x, x);
        if (row < 3)
            reinterpret_cast<uint4*>(step[g])[threadIdx.x % 128] = make_uint4(two, two, two, two);
        fence_async_shared();
        named_sync(STEP_FREE + g, 128);  // the step is written
    }
};
#endif

struct OnChip {
    alignas(1024) u16 q[WARPGROUPS][CHUNKS][64 * 64];     // lives for one work tile
    alignas(1024) u16 k[STAGES][CHUNKS][BLOCK_K * 64];    // ring; a stage lives for one visit
    alignas(1024) u16 v[STAGES][CHUNKS_V][BLOCK_K * 64];  // ring; a stage lives for one visit
#if FS_TILE
    Elements tile[WARPGROUPS][FS_TILE];                   // rings; a stage lives for one visit
    u64 tile_full[WARPGROUPS][FS_TILE], tile_empty[WARPGROUPS][FS_TILE];
#endif
#if FS_DISTANCES
    float distances[FS_DISTANCES][DISTANCES];             // ring; a stage lives for one visit
    u64 distances_full[FS_DISTANCES], distances_empty[FS_DISTANCES];
#endif
#if FS_RAMP
    Ramp ramp;
#endif
    // Full: TMA has written the tile. Empty: the product that reads the tile is complete: the
    // scores for Q and K, the output for V.
    u64 q_full[WARPGROUPS], q_empty[WARPGROUPS];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_kernels.py and OnChip must agree");

// Starts TMA copies of 64 rows of Q, and credits `bar` with their bytes.
__device__ inline void copy_queries(u16 (&to)[CHUNKS][64 * 64], const TensorMap* map, u64* bar,
                                    int row, int stop, int head, int batch) {
#if FS_PACK > 1
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c)
        copy_box_of_group(to[c], map, bar, 64 * c, query_of(row), head, batch);
#else
    copy_tile(to, map, bar, place(row, stop, batch), head);
#endif
}

__device__ void produce(OnChip& s, const Args& a, const TensorMap* map_q, const TensorMap* map_k,
                        const TensorMap* map_v, u32* counter) {
    Ring ring_k, ring_v, slot;
    u32 q_parity = 0;
    const int items = a.walks * a.tiles;
    // the previous kernel may have written Q, K and V, and used the counter
    wait_for_what_ran_before();
    for (int w = first_work();; w = next_work(counter, items)) {
        Item& it = s.items.prepare(slot, a, w, items, true);
        if (!FS_SHARES || it.walk < 0) s.items.release(slot);
        if (it.walk < 0) return;
        const int heads = a.heads / FS_PACK, head = it.walk % heads, batch = it.walk / heads;
        const int kv_head = FS_PACK > 1 ? head : head / a.group, n = it.visits.count;
        const i64 first = i64(it.walk) * a.n_visits + it.visits.first;
        stamp_item(a, it.walk, it.outer, false);
        // in the order in which consumers need them: K0 Q, K1 V0, K2 V1, ...
        for (int v = 0; v <= n; ++v) {
            if (v < n) {
                const int key = it.base + it.visits(a, v).tile * BLOCK_K;
                u64* stamps = visit_stamps(a, first + v);
                stamp(stamps, 0);
                wait(&s.k_empty[ring_k.stage], ring_k.parity ^ 1);  // its last reader is done
                stamp(stamps, 1);
                arrive_expect(&s.k_full[ring_k.stage], sizeof(s.k[0]));
                copy_tile(s.k[ring_k.stage], map_k, &s.k_full[ring_k.stage],
                          place(key, it.end, batch), kv_head);
                ring_k.next(STAGES);
                report_one(a.visit_counts + (first + v) * 8,
                           min(BLOCK_K, it.end - key) * FS_COUNTED * 2);
            }
            if (v > 0) {
                const int key = it.base + it.visits(a, v - 1).tile * BLOCK_K;
                wait(&s.v_empty[ring_v.stage], ring_v.parity ^ 1);  // its last reader is done
                arrive_expect(&s.v_full[ring_v.stage], sizeof(s.v[0]));
                copy_tile(s.v[ring_v.stage], map_v, &s.v_full[ring_v.stage],
                          place(key, it.end, batch), kv_head);
                stamp(visit_stamps(a, first + v - 1), 4);
                ring_v.next(STAGES);
                report_one(a.visit_counts + (first + v - 1) * 8 + 1,
                           min(BLOCK_K, it.end - key) * FS_COUNTED_V * 2);
            } else {
#pragma unroll 1
                for (int g = 0; g < WARPGROUPS; ++g) {
                    // the scores of the last work tile are complete
                    wait(&s.q_empty[g], q_parity ^ 1);
                    arrive_expect(&s.q_full[g], sizeof(s.q[0]));
                    copy_queries(s.q[g], map_q, &s.q_full[g], it.own.start + 64 * g, it.own.stop,
                                 head, batch);
                }
                q_parity ^= 1;
                report_one(a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8,
                           (it.own.stop - it.own.start) * FS_COUNTED * 2);
#if FS_SHARES  // read while the first tiles arrive
                for (int g = 0; g < WARPGROUPS; ++g)
                    it.shares[g] = a.shares[it.outer * 4 + g];
                s.items.release(slot);
#endif
            }
        }
        stamp_item(a, it.walk, it.outer, true);
    }
}

#if FS_TILE
// One warp: loads the captured elements for warpgroup g.
__device__ void produce_elements(OnChip& s, const Args& a, const TensorMap* map, int g) {
    Ring ring, slot;
    wait_for_what_ran_before();  // the previous kernel may have written the array
    while (true) {
        const Item& next = s.items.look(slot);
        const Item it = next;
        const Share share = next.share(g);
        s.items.let_go(slot);
        if (it.walk < 0) return;
        if (threadIdx.x % 32) continue;
        const Head at = head_at(a, it.walk / a.heads, it.walk % a.heads, it.outer);
        const int plane = flash_tile_plane(a.captured, at.at), row = it.own.start + 64 * g;
        for (int v = share.first; v < share.stop; ++v) {
            const int key = it.base + it.visits(a, v).tile * BLOCK_K;
            u64* full = &s.tile_full[g][ring.stage];
            wait(&s.tile_empty[g][ring.stage], ring.parity ^ 1);  // its last readers are done
            arrive_expect(full, sizeof(Elements));
            for (int c = 0; c < Elements::BOXES; ++c)
#if FS_TILE_INTERLEAVED
                copy_interleaved_box(s.tile[g][ring.stage].box[c], map, full,
                                     key + c * Elements::COLUMNS, row / 8, plane);
#else
                copy_box(s.tile[g][ring.stage].box[c], map, full, key + c * Elements::COLUMNS, row,
                         plane, 0);
#endif
            ring.next(FS_TILE);
        }
    }
}
#endif

#if FS_DISTANCES
// One warp: reads the elements of each visit's distances.
__device__ void produce_distances(OnChip& s, const Args& a) {
    Ring ring, slot;
    wait_for_what_ran_before();  // the previous kernel may have written the array
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) return;
        const Head at = head_at(a, it.walk / a.heads, it.walk % a.heads, it.outer);
        const int query = at.query(it.own.start).base;
        for (int v = 0; v < it.visits.count; ++v) {
            const int first = it.base + it.visits(a, v).tile * BLOCK_K, key = at.key(first).base;
            wait(&s.distances_empty[ring.stage], ring.parity ^ 1);  // its last readers are done
#pragma unroll
            for (int i = 0; i < DISTANCES; i += 32) {
                const int n = i + threadIdx.x % 32;
                if (n >= DISTANCES) break;  // it need not be a multiple of 32
                const int distance = query - key - (BLOCK_K - 1) + n;
#if FS_ADDED
                s.distances[ring.stage][n] = term_at(a, at, distance, it.own.start,
                                                     it.own.stop - 1, first, it.end - 1);
#else
                s.distances[ring.stage][n] = flash_band(a.captured, at.at, distance);
#endif
            }
            arrive(&s.distances_full[ring.stage]);
            ring.next(FS_DISTANCES);
        }
    }
}
#endif

// Issues and commits S = Q K^T of warpgroup g without waiting; `dk` is K's descriptor.
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_K / 2], OnChip& s, int g, u64 dk) {
    const u64 dq = descriptor(s.q[g][0], 0);
    wgmma_fence();
#if FS_RAMP
    wgmma_ss<1, 1>(S, descriptor(s.ramp.step[g], 0), descriptor(s.ramp.column, 2048), 0);
#endif
#pragma unroll
    for (int x = 0; x < D / 16; ++x)
        wgmma_ss<0, 0>(S, dq + along_row(x, 64), dk + along_row(x, BLOCK_K), FS_RAMP || x > 0);
    wgmma_commit();
}

// Issues and commits O += P V without waiting.
__device__ __forceinline__ void issue_output(float (&O)[DV / 2], const u32 (&P)[BLOCK_K / 16][4],
                                             const u16* v) {
    const u64 dv = descriptor(v, BLOCK_K * 128);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_K / 16; ++x) wgmma_rs<1>(O, P[x], dv + down_rows(x), 1);
    wgmma_commit();
}

// Multiplies O by the factor of each of the thread's two rows.
__device__ __forceinline__ void rescale(float (&O)[DV / 2], const float (&alpha)[2]) {
#pragma unroll
    for (int e = 0; e < DV / 2; ++e) O[e] *= alpha[e / 2 % 2];
}

#if FS_FLEX
struct Nothing {};  // no captured element is in shared memory for the function

// Applies the score function, with the captured element if it is loaded already.
__device__ __forceinline__ float with_element(const Args& a, const Head& at, float raw, FlashAt q,
                                              FlashAt k, const Nothing&, int) {
    return after_function(a, at, raw, q, k);
}
template <class Tile>
__device__ __forceinline__ float with_element(const Args& a, const Head& at, float raw, FlashAt q,
                                              FlashAt k, const Tile& tile, int e) {
#if FS_ADDED
    return before_function(a, raw) + tile(a, at, e);
#else
    return after_function(a, at, raw, q, k, tile(a, at, e));
#endif
}

// Applies the user's mask and score functions to the scores of one tile pair. Functions are
// evaluated only at positions that exist: in tiles that are not EXACT, a row or key past the end is
// replaced by the last. In EXACT tiles, positions have fixed distances, and so have the addresses
// of what is read at them.
template <bool EXACT, bool SCORE, bool MASK, class Tile>
__device__ __forceinline__ void ask_functions(float (&S)[BLOCK_K / 2], const Args& a,
                                              const Item& it, const Head& at, const Tile& tile,
                                              int query, int key) {
#if FLASH_RANGES
    const KeptKeys keep[2] = {kept_keys(a, at, query, key, it.own, it.end),
                              kept_keys(a, at, query + 8, key, it.own, it.end)};
#else
    const Keep keep[2] = {{a, query, it.own.offset, it.end}, {a, query + 8, it.own.offset, it.end}};
#endif
#pragma unroll
    for (int e = 0; e < BLOCK_K / 2; ++e) {
        const int step = e / 4 * 8 + e % 2, r = e / 2 % 2;
        const FlashAt q = EXACT ? FlashAt(query, 8 * r) : existing(query, 8 * r, it.own.stop);
        const FlashAt k = EXACT ? FlashAt(key, step) : existing(key, step, it.end);
        if (SCORE) S[e] = with_element(a, at, S[e], q, k, tile, e);
#if FLASH_RANGES
        if (MASK && !keep[r](step)) S[e] = NEG_INF;
#else
        if (MASK && !(keep[r](key + step) & kept(a, at, q, k))) S[e] = NEG_INF;
#endif
    }
}

// Whether all positions of a tile pair exist.
__device__ __forceinline__ bool is_exact(const Item& it, const Visit& visit) {
    return it.base + (visit.tile + 1) * BLOCK_K <= it.end && it.own.start + BLOCK_Q <= it.own.stop;
}

template <class Tile>
__device__ __forceinline__ void shape_scores(float (&S)[BLOCK_K / 2], const Args& a, const Item& it,
                                             const Head& at, const Visit& visit, int query,
                                             const Tile& tile) {
    const int key = it.base + visit.tile * BLOCK_K + fragment_column();
#if FS_READS
    if (!is_exact(it, visit)) {
        ask_functions<false, true, true>(S, a, it, at, tile, query, key);
        return;
    }
    ask_functions<true, true, false>(S, a, it, at, tile, query, key);
    if (visit.masked) ask_functions<true, false, true>(S, a, it, at, tile, query, key);
#else
    if (visit.masked) ask_functions<true, true, true>(S, a, it, at, tile, query, key);
    else ask_functions<true, true, false>(S, a, it, at, tile, query, key);
#endif
}

// As shape_scores, after waiting for captured elements in shared memory.
__device__ __forceinline__ void shape_visit(float (&S)[BLOCK_K / 2], OnChip& s, const Args& a,
                                            const Item& it, const Head& at, const Visit& visit,
                                            int query, int g, Ring& ring) {
#if FS_TILE
    wait(&s.tile_full[g][ring.stage], ring.parity);
    shape_scores(S, a, it, at, visit, query, s.tile[g][ring.stage]);
    __syncwarp();  // the whole warp has read its elements
    if (threadIdx.x % 32 == 0) arrive(&s.tile_empty[g][ring.stage]);
    ring.next(FS_TILE);
#elif FS_DISTANCES
    wait(&s.distances_full[ring.stage], ring.parity);
    const int mine = 64 * g + fragment_row() - fragment_column() + BLOCK_K - 1;
    shape_scores(S, a, it, at, visit, query, Distances{s.distances[ring.stage] + mine});
    __syncwarp();  // the whole warp has read its elements
    if (threadIdx.x % 32 == 0) arrive(&s.distances_empty[ring.stage]);
    ring.next(FS_DISTANCES);
#else
    shape_scores(S, a, it, at, visit, query, Nothing());
#endif
}
#else
// Scales and caps the scores (if the exponent cannot apply the scale), and masks them (if the tile
// needs it).
__device__ __forceinline__ void shape_scores(float (&S)[BLOCK_K / 2], const Args& a, const Item& it,
                                             const Share& share, int v, int query) {
#if FS_SCALED
#pragma unroll
    for (int e = 0; e < BLOCK_K / 2; ++e) {
        S[e] = scaled(a, S[e]);
    }
#endif
    mask_scores(S, a, it, it.visit(a, share, v), query);
}
#endif

// The log-sum-exp of a row of a work tile.
__device__ __forceinline__ float& lse_of(const Args& a, int walk, int row) {
    return a.lse[i64(walk * FS_PACK + member_of(row)) * a.n_q + query_of(row)];
}

// Releases the tiles of visits that this warpgroup does not compute, and passes on its turns.
__device__ __forceinline__ void pass_over(OnChip& s, const Args& a, const Item& it, int g,
                                          const Share& share, int from, int to, Ring& ring_k,
                                          Ring& ring_v, Ring& ring_tile) {
    const bool speaks = threadIdx.x % 32 == 0, computes = share.first < share.stop;
    for (int v = from; v < to; ++v) {
        u64* stamps = visit_stamps(a, i64(it.walk) * a.n_visits + it.visits.first + v);
        stamp(stamps, 0);
        wait(&s.k_full[ring_k.stage], ring_k.parity);
        if (speaks) arrive(&s.k_empty[ring_k.stage]);
        ring_k.next(STAGES);
        stamp(stamps, 1), stamp(stamps, 2), stamp(stamps, 3);
#if FS_DISTANCES
        wait(&s.distances_full[ring_tile.stage], ring_tile.parity);
        if (speaks) arrive(&s.distances_empty[ring_tile.stage]);
        ring_tile.next(FS_DISTANCES);
#endif
        wait(&s.v_full[ring_v.stage], ring_v.parity);
        if (speaks) arrive(&s.v_empty[ring_v.stage]);
        ring_v.next(STAGES);
        stamp(stamps, 4);
        // A warpgroup has a turn for every visit but one, which is the first that it computes.
        if (TURNS && (computes || v > 0))
            named_sync(1 + g, 256), named_arrive(1 + (g + 1) % WARPGROUPS, 256);
    }
}

__device__ void consume(OnChip& s, const Args& a, int g) {
    const float to_log2 = exponent_factor(a);
    const int lane = threadIdx.x % 32;
    const bool speaks = lane == 0;                                 // one arrival per warp
    [[maybe_unused]] const int turn = 1 + g, next_turn = 1 + (g + 1) % WARPGROUPS;
    Ring ring_k, ring_v, slot;
    [[maybe_unused]] Ring ring_tile;
    u32 q_parity = 0;
    // Warpgroup 0 goes first.
    if (TURNS && g == WARPGROUPS - 1) named_arrive(next_turn, 256);
    while (true) {
        const Item& next = s.items.look(slot);
        const Item it = next;
        const Share share = next.share(g);
        s.items.let_go(slot);
        if (it.walk < 0) return;
        const int begin = share.first, n = share.stop;
        const int query = it.own.start + 64 * g + fragment_row();
        const i64 first = i64(it.walk) * a.n_visits + it.visits.first;
        stamp_item(a, it.walk, it.outer, false);
#if FS_BOUNDED  // scores that the mask keeps lie between -bound and bound
        BoundedSoftmax softmax(FS_SCORE_MOD ? FLASH_BOUND : a.softcap);
#else
        Softmax<BLOCK_K> softmax;
#endif
        float O[DV / 2], alpha[2];
#pragma unroll
        for (int e = 0; e < DV / 2; ++e) O[e] = 0.0f;

#if FS_FLEX
        const Head at = head_at(a, it.walk / a.heads, it.walk % a.heads, it.outer);
#endif
#if FS_RAMP
        // m counts from a row's value at the first key of the current tile
        const float step = flash_ramp_step(a.captured, at.at) / a.scale;
        int tile = n > begin ? it.visits(a, begin).tile : 0;
        s.ramp.set(g, step);
#endif
        wait(&s.q_full[g], q_parity);
        q_parity ^= 1;
        if (FS_SHARES) pass_over(s, a, it, g, share, 0, begin, ring_k, ring_v, ring_tile);
        if (n > begin) {
            u32 P[BLOCK_K / 16][4];
            {  // first visit: scores and softmax
                float S[BLOCK_K / 2];
                stamp(visit_stamps(a, first + begin), 0);
                wait(&s.k_full[ring_k.stage], ring_k.parity);
                stamp(visit_stamps(a, first + begin), 1);
                issue_scores(S, s, g, descriptor(s.k[ring_k.stage][0], 0));
#if FS_FLEX
                const Visit visit = it.visit(a, share, begin);
#endif
                wgmma_wait<0>();
                pin(S);
                if (speaks) {
                    arrive(&s.k_empty[ring_k.stage]);
                    // the next work tile's Q may be loaded
                    if (n == begin + 1) arrive(&s.q_empty[g]);
                }
                ring_k.next(STAGES);
                stamp(visit_stamps(a, first + begin), 2);
#if FS_FLEX
                shape_visit(S, s, a, it, at, visit, query, g, ring_tile);
#else
                shape_scores(S, a, it, share, begin, query);
#endif
                softmax(S, alpha, to_log2);
                round_operand(P, S);
                stamp(visit_stamps(a, first + begin), 3);
            }
            // A visit's K is waited for at the end of the previous visit: arithmetic hides the wait
            // and the computation of K's address.
            const int last = n - 1;
            if (last > begin) {
                stamp(visit_stamps(a, first + begin + 1), 0);
                wait(&s.k_full[ring_k.stage], ring_k.parity);
                stamp(visit_stamps(a, first + begin + 1), 1);
            }
            u64 dk = descriptor(s.k[ring_k.stage][0], 0);
#pragma unroll 1
            for (int v = begin + 1; v < n; ++v) {
                // The scores of visit v and the output of visit v - 1 are issued together. The
                // softmax of v then runs while the tensor cores compute that output and,
                // alternating, the other warpgroups' products.
                float S[BLOCK_K / 2];
#if FS_FLEX
                // the schedule's table is read while products run
                const Visit visit = it.visit(a, share, v);
#endif
                if (TURNS) named_sync(turn, 256);  // the previous warpgroup has issued its products
                issue_scores(S, s, g, dk);
                if (!FS_BOUNDED && RESCALE_LATE) rescale(O, alpha);
                wait(&s.v_full[ring_v.stage], ring_v.parity);
                issue_output(O, P, s.v[ring_v.stage][0]);
                if (TURNS) named_arrive(next_turn, 256);
                wgmma_wait<1>();
                pin(S);
                if (RELEASE_EARLY && speaks) arrive(&s.k_empty[ring_k.stage]);
                // the next work tile's Q may be loaded
                if (speaks && v == last) arrive(&s.q_empty[g]);
                stamp(visit_stamps(a, first + v), 2);
#if FS_FLEX
                shape_visit(S, s, a, it, at, visit, query, g, ring_tile);
#else
                shape_scores(S, a, it, share, v, query);
#endif
#if FS_RAMP
                const float shift = step * BLOCK_K * (visit.tile - tile);
                softmax.m[0] -= shift, softmax.m[1] -= shift;
                tile = visit.tile;
#endif
                softmax(S, alpha, to_log2);
                // The wait for O belongs after both maxima and the first exponentials, when O is
                // nearly complete; the other exponentials run between the multiplications of O.
                // Without help, ptxas moves the wait before the maxima. It does keep an arrival
                // ahead of the wait. So the arrival gets a false dependency on row 1's alpha, which
                // is never negative, or, with bounded scores, on an exponential. (If K was released
                // already, it is an arrival at Q's barrier, whose address costs nothing, and it is
                // never executed.)
                const bool never = (FS_BOUNDED ? S[0] : alpha[1]) < 0.0f;
                if (RELEASE_EARLY && never) arrive(&s.q_empty[g]);
                if (!RELEASE_EARLY && speaks && !never) arrive(&s.k_empty[ring_k.stage]);
                ring_k.next(STAGES);
                stamp(visit_stamps(a, first + v), 3);
                wgmma_wait<0>();
                pin(O);
                stamp(visit_stamps(a, first + v - 1), 4);
                if (speaks) arrive(&s.v_empty[ring_v.stage]);
                ring_v.next(STAGES);
                round_operand(P, S);
                if (!FS_BOUNDED && !RESCALE_LATE) rescale(O, alpha);
                if (FS_TIMELINE && v < last) stamp(visit_stamps(a, first + v + 1), 0);
                // After the last visit there is no K to wait for. A branch would keep the wait from
                // running under the rescaling, so the wait is then for V, which is needed next
                // anyway. (K's barrier may be one lap ahead by then, and waiting for it could
                // hang.)
                wait(v < last ? &s.k_full[ring_k.stage] : &s.v_full[ring_v.stage],
                     v < last ? ring_k.parity : ring_v.parity);
                if (FS_TIMELINE && v < last) stamp(visit_stamps(a, first + v + 1), 1);
                dk = descriptor(s.k[ring_k.stage][0], 0);
            }
            if (!FS_BOUNDED && RESCALE_LATE) rescale(O, alpha);
            wait(&s.v_full[ring_v.stage], ring_v.parity);
            issue_output(O, P, s.v[ring_v.stage][0]);
            wgmma_wait<0>();
            pin(O);
            stamp(visit_stamps(a, first + n - 1), 4);
            if (speaks) arrive(&s.v_empty[ring_v.stage]);
            ring_v.next(STAGES);
        } else if (speaks) {
            arrive(&s.q_empty[g]);
        }
        if (FS_SHARES)
            pass_over(s, a, it, g, share, n, it.visits.count, ring_k, ring_v, ring_tile);

        // -- O / l and L = m + log l, straight from registers -------------------------------------
        const int heads = a.heads / FS_PACK, walk_head = it.walk % heads, batch = it.walk / heads;
        u32 o_bytes = 0, lse_bytes = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float l = softmax.l[r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const int row = query + 8 * r;
            const bool exists = row < it.own.stop;
            const int head = walk_head * FS_PACK + member_of(row);
#if FS_RAMP
            const FlashAt first_key = at.key(it.base + tile * BLOCK_K);
            const float of_first = flash_score(a.captured, 0.0f, at.at, at.query(row), first_key);
            softmax.m[r] += of_first / a.scale;
#endif
#if FS_SINKS
            const float lse = with_sink(a.sinks[head], softmax.m[r] * (to_log2 * LN2), l);
            if (exists && lane % 4 == 0) {
                lse_of(a, it.walk, row) = lse;
                lse_bytes += 4;
            }
#else
            if (exists && lane % 4 == 0) {
                lse_of(a, it.walk, row) =
                    l == 0.0f ? NEG_INF : softmax.m[r] * (to_log2 * LN2) + __logf(l);
                lse_bytes += 4;
            }
#endif
            const float inverse = l == 0.0f ? 0.0f : __fdividef(1.0f, l);
            o_bytes += store_row<ValueRow>(a.o, batch, head, query_of(row), O, r, inverse, exists);
        }
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        report(counts + 1, o_bytes), report(counts + 2, lse_bytes);
        stamp_item(a, it.walk, it.outer, true);
        // Rows that do not exist skip the stores, so the warp has diverged. If ptxas cannot tell
        // that the warp has converged again, it keeps the loop's addresses per thread instead of
        // per warp.
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_forward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
               const __grid_constant__ TensorMap map_v,
#if FS_TILE
               const __grid_constant__ TensorMap map_tile,
#endif
               const __grid_constant__ Args a, u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
#if FS_RAMP
    s.ramp.init();
#endif
    if (threadIdx.x == 0) {
#if FS_TILE
        for (int i = 0; i < WARPGROUPS * FS_TILE; ++i)
            barrier_init(&s.tile_full[0][i], 1), barrier_init(&s.tile_empty[0][i], 4);
#endif
#if FS_DISTANCES
        for (int i = 0; i < FS_DISTANCES; ++i)
            barrier_init(&s.distances_full[i], 32),
                barrier_init(&s.distances_empty[i], 4 * WARPGROUPS);
#endif
        init_rings<WARPGROUPS, STAGES>(s, FS_TILE ? WARPGROUPS : FS_DISTANCES ? 1 : 0);
    }
    const int role = take_role<PRODUCER_REGISTERS, CONSUMER_REGISTERS>();
    if (role == 0) {
        if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, counter);
#if FS_TILE
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp > 0 && warp <= WARPGROUPS) produce_elements(s, a, &map_tile, warp - 1);
#endif
#if FS_DISTANCES
        if (__shfl_sync(~0u, threadIdx.x / 32, 0) == 1) produce_distances(s, a);
#endif
    } else {
        consume(s, a, role - 1);
    }
}
