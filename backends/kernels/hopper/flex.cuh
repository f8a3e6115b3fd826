// Masks and scores that are functions of the caller's. The text ahead of the kernel, which is
// generated from them, defines FlashCaptured, flash_mask, flash_score and flash_score_grad
// (backends/launch/functions.py).
#if FS_FLEX

// The query head that a tile pair belongs to.
struct Head {
    int batch, head;
};

// A score as the function of scores takes it: scaled and capped.
__device__ __forceinline__ float before_function(const Args& a, float raw) {
    return scaled(a, raw);
}

// Whether the mask keeps a score. Both positions exist.
__device__ __forceinline__ bool kept(const Args& a, Head at, int q, int k) {
#if FS_MASK_MOD
    return flash_mask(a.captured, at.batch, at.head, q, k);
#else
    return true;
#endif
}

#if FS_SCORE_MOD
// A raw score, in the unit of natural logarithms, after the function.
__device__ __forceinline__ float after_function(const Args& a, Head at, float raw, int q, int k) {
    return flash_score(a.captured, before_function(a, raw), at.batch, at.head, q, k);
}

// `gradient` is that of the function's result; returns that of the scaled score before a softcap.
__device__ __forceinline__ float function_gradient(const Args& a, Head at, float raw,
                                                   float gradient, int q, int k) {
    const float s = before_function(a, raw);
    gradient = flash_score_grad(a.captured, s, gradient, at.batch, at.head, q, k);
#if FS_SOFTCAP  // the slope of c tanh(x / c) is 1 - tanh^2
    const float t = s / a.softcap;
    gradient *= 1.0f - t * t;
#endif
    return gradient;
}

// P of a raw score. In the score's place comes P times the function's slope, of which dS is made;
// with FS_SCORE_SUMS the score stays, and dS is made by function_gradient.
template <bool KEPT>
__device__ __forceinline__ float probability(const Args& a, Head at, float& S, float factor,
                                             float minus_lse, int q, int k, bool inside) {
    const float raw = S, s = after_function(a, at, raw, q, k);
    float p = exp2_approx(s * factor + minus_lse);
    if (!KEPT && !(inside && kept(a, at, q, k))) p = 0.0f;
#if !FS_SCORE_SUMS
    S = function_gradient(a, at, raw, p, q, k);
    if (!KEPT && p == 0.0f) S = 0.0f;  // the slope may be infinite
#endif
    return p;
}
#endif
#endif
