// What the portable kernels make of a raw score, and functions of scores and masks.

// Scaled and capped, in the unit of natural logarithms.
[[maybe_unused]] __device__ inline float scaled(const Args& a, float raw) {
    const float s = raw * a.scale;
    return FS_SOFTCAP ? a.softcap * fast_tanh(s / a.softcap) : s;
}
#include "flex.cuh"
