// Conversion between floats and 16-bit elements, of which a register holds two.

// Rounds two floats to 16 bits; the first is in the low half.
__device__ inline u32 pack(float lo, float hi) {
    u32 r;
#if FS_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
    return r;
}
__device__ inline float2 unpack(u32 x) {
#if FS_BF16
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
#else
    float2 r;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
#endif
}
