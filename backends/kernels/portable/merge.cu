// Merges, in place, attention over two sets of keys (flashsim/algorithms/merge.py): each rank of
// ring attention merges each block after its first. cupy_gpu/merge.py sets FS_*.
// FS_LANES threads of one warp process a row; all arithmetic is float32.
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr int ROWS = FS_THREADS / FS_LANES;  // rows per block

__device__ inline float wide(u16 x) {
#if FS_BF16
    return __uint_as_float(u32(x) << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}
__device__ inline float wide(float x) { return x; }

__device__ inline void put(u16& to, float x) {  // rounded to nearest, ties to even
#if FS_BF16
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.0f), "f"(x));
    to = u16(r);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to) : "f"(x));
#endif
}
__device__ inline void put(float& to, float x) { to = x; }

struct alignas(sizeof(FS_TOTAL) * FS_VECTOR) Totals { FS_TOTAL x[FS_VECTOR]; };
struct alignas(sizeof(FS_PART) * FS_VECTOR) Parts { FS_PART x[FS_VECTOR]; };

// out, lse: rows of a longer tensor; out_head, lse_head: elements between heads. part, part_lse:
// dense.
extern "C" __global__ void __launch_bounds__(FS_THREADS)
merge_parts(FS_TOTAL* out, float* lse, const FS_PART* part, const float* part_lse,  //
            i64 out_head, i64 lse_head, int rows) {
    const int row = blockIdx.x * ROWS + threadIdx.x / FS_LANES, lane = threadIdx.x % FS_LANES;
    const i64 head = blockIdx.y;
    if (row >= rows) return;  // no block-wide barrier follows
    const float a = lse[head * lse_head + row], b = part_lse[head * rows + row];
    const float m = fmaxf(a, b);
    const float base = m == __int_as_float(0xff800000) ? 0.0f : m;  // no key on either side
    const float of_a = expf(a - base), of_b = expf(b - base), sum = of_a + of_b;
    const float whole = sum == 0.0f ? 1.0f : sum, share_a = of_a / whole, share_b = of_b / whole;
    FS_TOTAL* to = out + head * out_head + i64(row) * FS_WIDTH;
    const FS_PART* from = part + (head * rows + row) * FS_WIDTH;
    for (int c = lane * FS_VECTOR; c < FS_WIDTH; c += FS_LANES * FS_VECTOR) {
        Totals t = *reinterpret_cast<Totals*>(to + c);
        const Parts p = *reinterpret_cast<const Parts*>(from + c);
#pragma unroll
        for (int i = 0; i < FS_VECTOR; ++i)
            put(t.x[i], share_a * wide(t.x[i]) + share_b * wide(p.x[i]));
        *reinterpret_cast<Totals*>(to + c) = t;
    }
    __syncwarp(__activemask());  // every lane of the row has read its LSE
    if (lane == 0) lse[head * lse_head + row] = m + logf(whole);
}
