// How the portable kernels scale and cap a raw score; mask and score functions.

// Returns the scaled and capped score, a natural logarithm.
[[maybe_unused]] __device__ inline float scaled(const Args& a, float raw) {
    const float s = raw * a.scale;
    return FS_SOFTCAP ? a.softcap * fast_tanh(s / a.softcap) : s;
}
#include "flex.cuh"
