// Mask and score functions in the forward (forward.cu): what loads their captured elements into
// shared memory, and what applies the functions to the scores of a tile pair. Included after the
// kernel's OnChip, if there are functions.

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
