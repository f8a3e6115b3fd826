// Masks and scores that are functions of the caller's. The text ahead of the kernel, which is
// generated from them, defines FlashCaptured, flash_mask, flash_score and flash_score_grad
// (backends/launch/functions.py). Included after `scaled`, which gives a score as exponents take
// it.
#if FS_FLEX

// The query head that a tile pair belongs to, and where its packed sequence starts.
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

// Of query head `head` and the outer tile `outer` of its loop.
__device__ __forceinline__ Head head_at(const Args& a, int batch, int head, int outer) {
#if FS_VARLEN
    return {flash_head(a.captured, batch, head), a.starts[outer]};
#else
    return {flash_head(a.captured, batch, head)};
#endif
}

// Where a function reads arrays, a position past the end takes the last one's place.
__device__ __forceinline__ FlashAt existing(int base, int step, int end) {
    return FS_READS ? FlashAt(min(base + step, end - 1)) : FlashAt(base, step);
}
__device__ __forceinline__ FlashAt existing(int position, int end) {
    return existing(position, 0, end);
}

// Whether the mask keeps a score. Both positions exist, see `existing`.
__device__ __forceinline__ bool kept(const Args& a, const Head& at, FlashAt q, FlashAt k) {
#if FS_MASK_MOD
    return flash_mask(a.captured, at.at, at.query(q), at.key(k));
#else
    return true;
#endif
}

// A score as the function of scores takes it: scaled and capped.
__device__ __forceinline__ float before_function(const Args& a, float raw) {
    return FS_SOFTCAP ? a.softcap * fast_tanh(raw * (a.scale / a.softcap)) : raw * a.scale;
}

// A scaled and capped score after the function of scores. `tile` is the element that the kernel has
// in shared memory, if it has one there.
template <class... Tile>
__device__ __forceinline__ float of_function(const Args& a, const Head& at, float s, FlashAt q,
                                             FlashAt k, Tile... tile) {
#if FS_SCORE_MOD
    return flash_score(a.captured, s, tile..., at.at, at.query(q), at.key(k));
#else
    return s;
#endif
}

// A raw score after the function of scores, in the unit of natural logarithms. Without one it is as
// the kernel's exponents take it.
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
// `gradient` is that of the function's result; returns that of the scaled score before a softcap.
// With FS_SCORE_SUMS it adds the gradients of captured arrays, those of a whole head to `sums`.
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
// Adds a head's sums to the gradients in HBM. A whole warp; the sums begin anew.
__device__ __forceinline__ void add_sums(const Args& a, const Head& at, FlashSums& sums) {
    flash_add_sums(a.captured, sums, at.at);
    sums = FlashSums();
}
#endif

// P of a raw score. In the score's place comes P times the function's slope, of which dS is made;
// with FS_SCORE_LATE the score stays, and dS is made by function_gradient, of the rounded P.
template <bool KEPT>
__device__ __forceinline__ float probability(const Args& a, const Head& at, float& S, float factor,
                                             float minus_lse, FlashAt q, FlashAt k, bool inside) {
    const float raw = S, s = after_function(a, at, raw, q, k);
    float p = exp2_approx(s * factor + minus_lse);
    if (!KEPT && !(inside && kept(a, at, q, k))) p = 0.0f;
#if !FS_SCORE_LATE
    FlashSums none;
    S = function_gradient(a, at, none, raw, p, q, k);
    if (!KEPT && p == 0.0f) S = 0.0f;  // the slope may be infinite
#endif
    return p;
}
#endif

// As `probability`, for kernels that keep no scores: P comes in the score's place, and the result
// is P times the function's slope (0 with FS_SCORE_SUMS). P is 0 if the score is not `there`.
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
