// `wgmma` of 8-bit floats: 64 rows by N columns, float32 accumulators, over 32 of k. Both operands
// are K-major (k runs along a row). QK: A and B by descriptors, both of the inputs' type. PV: A is
// an e4m3 fragment in registers. The register lists are those of wgmma.cuh.
#if FS_E5M2
#define KIND_QK "e5m2.e5m2"
#define KIND_PV "e4m3.e5m2"
#else
#define KIND_QK "e4m3.e4m3"
#define KIND_PV "e4m3.e4m3"
#endif
#define WGMMA_FP8(N, K, i0, i1, i2, i3, i4, i5)                                                   \
    __device__ __forceinline__ void wgmma_qk(float (&d)[N / 2], u64 a, u64 b, int accumulate) {   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." KIND_QK                    \
                     " {" REGS##K "}, %" #i0 ", %" #i1 ", p, 1, 1;\n}"                            \
                     : OUTS##K                                                                    \
                     : "l"(a), "l"(b), "r"(accumulate));                                          \
    }                                                                                             \
    __device__ __forceinline__ void wgmma_pv(float (&d)[N / 2], const u32 (&a)[4], u64 b,         \
                                             int accumulate) {                                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." KIND_PV " {" REGS##K "}, " \
                     "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1;\n}"            \
                     : OUTS##K                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));      \
    }
WGMMA_FP8(64, 4, 32, 33, 34, 35, 36, 37)
WGMMA_FP8(128, 8, 64, 65, 66, 67, 68, 69)
