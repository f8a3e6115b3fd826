// `wgmma` for accumulators of 64 rows by N = 32, 48, ..., 256 columns, float32, over 16 of k. PTX
// requires every register of an instruction by name, hence the lists. The length of the accumulator
// selects the overload. A and B are descriptors (ptx.cuh), or A is a fragment in registers.
// `accumulate` = 0 overwrites d. TRANS = 1: the operand's k runs down its rows (MN-major).

#if FS_BF16
#define KIND "bf16.bf16"
#else
#define KIND "f16.f16"
#endif
#define HOLD(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
                "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// Registers 8 g to 8 g + 7; the first 8 k registers; the operands that hold them.
#define G0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define G1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define G2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define G3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define G4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define G5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define G6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define G7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define G8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define G9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define G10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define G11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define G12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define G13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define G14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define G15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define REGS1 G0
#define REGS2 REGS1 ", " G1
#define REGS3 REGS2 ", " G2
#define REGS4 REGS3 ", " G3
#define REGS5 REGS4 ", " G4
#define REGS6 REGS5 ", " G5
#define REGS7 REGS6 ", " G6
#define REGS8 REGS7 ", " G7
#define REGS9 REGS8 ", " G8
#define REGS10 REGS9 ", " G9
#define REGS11 REGS10 ", " G10
#define REGS12 REGS11 ", " G11
#define REGS13 REGS12 ", " G12
#define REGS14 REGS13 ", " G13
#define REGS15 REGS14 ", " G14
#define REGS16 REGS15 ", " G15
#define OUTS1 HOLD(0)
#define OUTS2 OUTS1, HOLD(8)
#define OUTS3 OUTS2, HOLD(16)
#define OUTS4 OUTS3, HOLD(24)
#define OUTS5 OUTS4, HOLD(32)
#define OUTS6 OUTS5, HOLD(40)
#define OUTS7 OUTS6, HOLD(48)
#define OUTS8 OUTS7, HOLD(56)
#define OUTS9 OUTS8, HOLD(64)
#define OUTS10 OUTS9, HOLD(72)
#define OUTS11 OUTS10, HOLD(80)
#define OUTS12 OUTS11, HOLD(88)
#define OUTS13 OUTS12, HOLD(96)
#define OUTS14 OUTS13, HOLD(104)
#define OUTS15 OUTS14, HOLD(112)
#define OUTS16 OUTS15, HOLD(120)

// i0 to i6 are the numbers of the operands after the accumulator.
#define WGMMA(N, K, i0, i1, i2, i3, i4, i5, i6)                                                   \
    template <int TRANS_A, int TRANS_B>                                                           \
    __device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND                       \
                     " {" REGS##K "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"        \
                     : OUTS##K                                                                    \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B));              \
    }                                                                                             \
    template <int TRANS_B>                                                                        \
    __device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b,         \
                                             int accumulate) {                                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND " {" REGS##K "}, "    \
                     "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"  \
                     : OUTS##K                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),       \
                       "n"(TRANS_B));                                                             \
    }
WGMMA(16, 1, 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
WGMMA(48, 3, 24, 25, 26, 27, 28, 29, 30)
WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
WGMMA(144, 9, 72, 73, 74, 75, 76, 77, 78)
WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
WGMMA(208, 13, 104, 105, 106, 107, 108, 109, 110)
WGMMA(224, 14, 112, 113, 114, 115, 116, 117, 118)
WGMMA(240, 15, 120, 121, 122, 123, 124, 125, 126)
WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)
