// The rotation of incoherent processing: multiplies rows of 16-bit elements by a Hadamard matrix.
#if FS_BF16
#define KIND16 "bf16.bf16"
#else
#define KIND16 "f16.f16"
#endif
// y = h b for 16 x 16 `h` and 16 x 8 `b`.
__device__ __forceinline__ void multiply(float (&y)[4], const u32 (&h)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND16 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
        : "r"(h[0]), "r"(h[1]), "r"(h[2]), "r"(h[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
// This thread's part of a Hadamard matrix over bits 0, 3, 4 and 5 of a column number, as a left
// operand. The bits of its column index k: bit 0 = k's lowest bit; bits 3 and 4 = the thread in the
// quad; bit 5 = k's highest bit. This matches how the pieces of a row are held. Of its row index,
// the highest bit is bit 0, and the others are bits 3 to 5: eight neighbouring columns of the
// result are in one thread.
__device__ __forceinline__ void hadamard_operand(u32 (&h)[4]) {
    const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr u32 ONES = FS_BF16 ? 0x3f803f80u : 0x3c003c00u;
    const u32 near = __popc(g & t) % 2 * 0x80008000u, far = near ^ g / 4 * 0x80008000u;
    h[0] = ONES ^ near, h[1] = h[0] ^ 0x80000000u;
    h[2] = ONES ^ far, h[3] = h[2] ^ 0x80000000u;
}

// x = raw H, not yet divided by sqrt(D). Tensor cores process four bits of the column number; they
// sum sixteen 16-bit elements almost exactly. A butterfly processes each of the other bits. A warp
// has 8 * ROWS rows, and four neighbouring threads have ROWS of them. Afterwards a thread owns
// other rows and columns (turned_row and turned_column in quantize.cu).
template <int D, int ROWS>
__device__ __forceinline__ void rotate(float (&x)[ROWS * D / 32][8],
                                       const u32 (&raw)[ROWS * D / 32][4], const u32 (&h)[4]) {
    constexpr int J = D / 32, PIECES = ROWS * J;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < J / 2; ++i)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float y[4];
                multiply(y, h, raw[r * J + 2 * i][w], raw[r * J + 2 * i + 1][w]);
                float(&even)[8] = x[r * J + i], (&odd)[8] = x[r * J + J / 2 + i];
                even[2 * w] = y[0], odd[2 * w] = y[1];
                even[2 * w + 1] = y[2], odd[2 * w + 1] = y[3];
            }
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int bit = 2; bit < 8; bit *= 2)
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (!(c & bit)) {
                    const float a = x[p][c], b = x[p][c | bit];
                    x[p][c] = a + b, x[p][c | bit] = a - b;
                }
#pragma unroll
    for (int bit = 1; bit < J / 2; bit *= 2)
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (!(p & bit)) {
                    const float a = x[p][c], b = x[p | bit][c];
                    x[p][c] = a + b, x[p | bit][c] = a - b;
                }
}
