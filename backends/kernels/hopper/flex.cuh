// Masks and scores that are functions of the caller's. The text ahead of the kernel, which is
// generated from them, defines FlashCaptured, flash_mask, flash_score and flash_score_grad
// (backends/launch/functions.py).
#if FS_FLEX

// The query head that a tile pair belongs to.
struct Head {
    int batch, head;
};

// Where a function reads arrays, a position past the end takes the last one's place.
__device__ __forceinline__ int existing(int position, int end) {
    return FS_READS ? min(position, end - 1) : position;
}

// Whether the mask keeps a score. Both positions exist, see `existing`.
__device__ __forceinline__ bool kept(const Args& a, Head at, int q, int k) {
#if FS_MASK_MOD
    return flash_mask(a.captured, at.batch, at.head, q, k);
#else
    return true;
#endif
}

// A raw score, scaled and capped (where the exponent cannot take the scale), after the function of
// scores.
__device__ __forceinline__ float after_function(const Args& a, Head at, float raw, int q, int k) {
#if FS_SCORE_MOD
    return flash_score(a.captured, scaled(a, raw), at.batch, at.head, q, k);
#else
    return FS_SCALED ? scaled(a, raw) : raw;
#endif
}

#if FS_SCORE_MOD
// `gradient` is that of the function's result; returns that of the scaled score before a softcap.
// With FS_SCORE_SUMS it adds the gradients of captured arrays, those of a whole head to `sums`.
__device__ __forceinline__ float function_gradient(const Args& a, Head at, FlashSums& sums,
                                                   float raw, float gradient, int q, int k) {
    const float s = scaled(a, raw);
    gradient = flash_score_grad(a.captured, sums, s, gradient, at.batch, at.head, q, k);
#if FS_SOFTCAP  // the slope of c tanh(x / c) is 1 - tanh^2
    const float t = s / a.softcap;
    gradient *= 1.0f - t * t;
#endif
    return gradient;
}

#if FS_SCORE_SUMS
// Adds a head's sums to the gradients in HBM. A whole warp; the sums begin anew.
__device__ __forceinline__ void add_sums(const Args& a, Head at, FlashSums& sums) {
    flash_add_sums(a.captured, sums, at.batch, at.head);
    sums = FlashSums();
}
#endif

// P of a raw score. In the score's place comes P times the function's slope, of which dS is made;
// with FS_SCORE_SUMS the score stays, and dS is made by function_gradient.
template <bool KEPT>
__device__ __forceinline__ float probability(const Args& a, Head at, float& S, float factor,
                                             float minus_lse, int q, int k, bool inside) {
    const float raw = S, s = after_function(a, at, raw, q, k);
    float p = exp2_approx(s * factor + minus_lse);
    if (!KEPT && !(inside && kept(a, at, q, k))) p = 0.0f;
#if !FS_SCORE_SUMS
    FlashSums none;
    S = function_gradient(a, at, none, raw, p, q, k);
    if (!KEPT && p == 0.0f) S = 0.0f;  // the slope may be infinite
#endif
    return p;
}
#endif
#endif
