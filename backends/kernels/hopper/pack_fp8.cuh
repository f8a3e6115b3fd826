// Rounds four floats to 8 bits, e4m3 or e5m2, saturating to the largest number; the first is in the
// lowest byte.
template <bool E5M2>
__device__ __forceinline__ u32 pack_fp8(float a, float b, float c, float d) {
    u32 r;
    if constexpr (E5M2)
        asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;\n"
            "cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;\nmov.b32 %0, {lo, hi};\n}"
            : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    else
        asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\nmov.b32 %0, {lo, hi};\n}"
            : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}
