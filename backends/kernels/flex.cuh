// Mask and score functions of the user. Source text generated from them
// (backends/launch/functions.py) precedes the kernel and defines FlashCaptured, flash_mask,
// flash_score and flash_score_grad. Included after `scaled`, which scales and caps a raw score.
#if FS_FLEX

// The query head of a tile pair, and where its packed sequence starts.
struct Head {
    FlashHead at;
#if FS_VARLEN
    int2 starts;

    __device__ __forceinline__ FlashAt query(FlashAt q) const {
        return {q.base - starts.x, q.step};
    }
    __device__ __forceinline__ FlashAt key(FlashAt k) const { return {k.base - starts.y, k.step}; }
#else
    __device__ __forceinline__ FlashAt query(FlashAt q) const { return q; }
    __device__ __forceinline__ FlashAt key(FlashAt k) const { return k; }
#endif
};

// Returns the Head for query head `head` and outer tile `outer`.
__device__ __forceinline__ Head head_at(const Args& a, int batch, int head, int outer) {
#if FS_VARLEN
    return {flash_head(a.captured, batch, head), a.starts[outer]};
#else
    return {flash_head(a.captured, batch, head)};
#endif
}

// A position that exists: if a function reads arrays, a position past the end is replaced by the
// last.
__device__ __forceinline__ FlashAt existing(int base, int step, int end) {
    return FS_READS ? FlashAt(min(base + step, end - 1)) : FlashAt(base, step);
}
__device__ __forceinline__ FlashAt existing(int position, int end) {
    return existing(position, 0, end);
}

// Whether the mask keeps a score. Both positions must exist; see `existing`.
__device__ __forceinline__ bool kept(const Args& a, const Head& at, FlashAt q, FlashAt k) {
#if FS_MASK_MOD
    return flash_mask(a.captured, at.at, at.query(q), at.key(k));
#else
    return true;
#endif
}

#if FLASH_RANGES
// The mask function keeps one range of keys per query, and one range of queries per key. Hopper
// kernels therefore do not call it per score. A Kept is the range that all masks keep in a row of a
// tile pair, relative to the thread's first score of that row.
template <bool LOW, bool HIGH>
struct Kept {
    int first, last;

    // `step` is a constant, so this is one comparison per limit.
    __device__ __forceinline__ bool operator()(int step) const {
        return (!LOW || step >= first) && (!HIGH || step <= last);
    }
};
using KeptKeys = Kept<FS_LEFT || FLASH_KEYS_LOW, true>;
using KeptQueries = Kept<true, FS_LEFT || FLASH_QUERIES_HIGH>;

// The keys of `query` that are kept, relative to `first`. `query` may be past the last one.
__device__ __forceinline__ KeptKeys kept_keys(const Args& a, const Head& at, int query, int first,
                                              Range own, int end) {
    const Keep keep(a, query, own.offset, end);
    const FlashRange keys = flash_keys(a.captured, at.at, at.query(min(query, own.stop - 1)));
    const int start = -at.key(0).base;  // of the sequence
    return {max(keep.lo, keys.low + start) - first, min(keep.hi, keys.high + start) - first};
}

// The queries of `key` that are kept, relative to `first`. `key` may be past the last one.
__device__ __forceinline__ KeptQueries kept_queries(const Args& a, const Head& at, int key,
                                                    int first, Range own) {
    const KeepColumn keep(a, key, own);
    const FlashRange queries = flash_queries(a.captured, at.at, at.key(min(key, own.stop - 1)));
    const int start = -at.query(0).base;  // of the sequence
    return {max(keep.lo, queries.low + start) - first, min(keep.hi, queries.high + start) - first};
}
#endif

#if FS_DISTANCES
// Returns the term that the score function adds at a distance between query and key, if the term
// depends on nothing else. `query` and `key` are the first ones of a tile pair. A distance that is
// not between existing positions is replaced by the nearest.
__device__ __forceinline__ float term_at(const Args& a, const Head& at, int distance, int query,
                                         int last_query, int key, int last_key) {
    const int least = at.query(query).base - at.key(last_key).base;
    const int most = at.query(last_query).base - at.key(key).base;
    return flash_score(a.captured, -0.0f, at.at, max(least, min(distance, most)), 0);
}
#endif

// The score that a score function receives: scaled and capped.
__device__ __forceinline__ float before_function(const Args& a, float raw) {
    return FS_SOFTCAP ? a.softcap * fast_tanh(raw * (a.scale / a.softcap)) : raw * a.scale;
}

// Applies the score function to a scaled and capped score. `tile` is the captured element, if the
// kernel has it in shared memory.
template <class... Tile>
__device__ __forceinline__ float of_function(const Args& a, const Head& at, float s, FlashAt q,
                                             FlashAt k, Tile... tile) {
#if FS_SCORE_MOD
    return flash_score(a.captured, s, tile..., at.at, at.query(q), at.key(k));
#else
    return s;
#endif
}

// Applies scale, cap and score function to a raw score; the result is a natural logarithm. Without
// a score function, returns the form that the kernel's exponents expect.
template <class... Tile>
__device__ __forceinline__ float after_function(const Args& a, const Head& at, float raw,
                                                FlashAt q, FlashAt k, Tile... tile) {
#if FS_SCORE_MOD
    return of_function(a, at, before_function(a, raw), q, k, tile...);
#else
    return FS_SCALED ? scaled(a, raw) : raw;
#endif
}

#if FS_SCORE_MOD
// `gradient` is the gradient of the function's result. Returns the gradient of the scaled score
// before a softcap. With FS_SCORE_SUMS, also adds the gradients of captured arrays; those that are
// one number per head are added to `sums`.
__device__ __forceinline__ float function_gradient(const Args& a, const Head& at, FlashSums& sums,
                                                   float raw, float gradient, FlashAt q,
                                                   FlashAt k) {
    const float s = before_function(a, raw);
    gradient = flash_score_grad(a.captured, sums, s, gradient, at.at,
                                at.query(q), at.key(k));
#if FS_SOFTCAP  // the slope of c tanh(x / c) is 1 - tanh^2
    const float t = s / a.softcap;
    gradient *= 1.0f - t * t;
#endif
    return gradient;
}

#if FS_SCORE_SUMS
// Adds a head's sums to the gradients in HBM and resets the sums. All lanes of a warp must call it.
__device__ __forceinline__ void add_sums(const Args& a, const Head& at, FlashSums& sums) {
    flash_add_sums(a.captured, sums, at.at);
    sums = FlashSums();
}
#endif

// With FS_ADDED the score function adds a term that does not depend on the score. Returns this term
// in units of log 2, or `tile`, if the kernel has that in shared memory.
__device__ __forceinline__ float added_term(const Args& a, const Head& at, FlashAt q, FlashAt k) {
    return LOG2E * of_function(a, at, -0.0f, q, k);
}
__device__ __forceinline__ float added_term(const Args&, const Head&, FlashAt, FlashAt,
                                            float tile) {
    return tile;
}

// Returns P of a raw score. Replaces the score by P times the function's slope, from which dS is
// computed. With FS_SCORE_LATE the raw score stays, and function_gradient computes dS from the
// rounded P. With FS_ADDED the log-sum-exp is subtracted from the score already. Unless KEPT,
// `inside` says whether the masks keep the score.
template <bool KEPT, class... Tile>
__device__ __forceinline__ float probability(const Args& a, const Head& at, float& S, float factor,
                                             float minus_lse, FlashAt q, FlashAt k, bool inside,
                                             Tile... tile) {
#if FS_ADDED
    float p = exp2_approx(S * factor + added_term(a, at, q, k, tile...));
    if (!KEPT && !inside) p = 0.0f;
    if (!FS_SCORE_LATE) S = p;
    return p;
#else
    const float raw = S, s = after_function(a, at, raw, q, k);
    float p = exp2_approx(s * factor + minus_lse);
    if (!KEPT && !inside) p = 0.0f;
#if !FS_SCORE_LATE
    FlashSums none;
    S = function_gradient(a, at, none, raw, p, q, k);
    if (!KEPT && p == 0.0f) S = 0.0f;  // the slope may be infinite where P is 0
#endif
    return p;
#endif
}
#endif

// As `probability`, for kernels that keep no scores: replaces the score by P, and returns P times
// the function's slope (0 with FS_SCORE_SUMS). P is 0 unless the score is `there`.
__device__ __forceinline__ float probability_and_slope(const Args& a, const Head& at, float& S,
                                                       float factor, float lse, FlashAt q,
                                                       FlashAt k, bool there) {
    const float raw = S, s = after_function(a, at, raw, q, k);
    S = there && s != NEG_INF ? exp2_approx(s * factor - lse) : 0.0f;
    if (S == 0.0f) return 0.0f;
#if FS_SCORE_SUMS
    return 0.0f;  // function_gradient is called once, with dS
#elif FS_SCORE_MOD
    FlashSums none;
    return function_gradient(a, at, none, raw, S, q, k);
#elif FS_SOFTCAP
    const float t = s / a.softcap;
    return S * (1.0f - t * t);
#else
    return S;
#endif
}
#endif
