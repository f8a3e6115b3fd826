// Microbenchmarks: one small kernel per hardware unit. In kernels that count cycles, each block
// writes its cycles. `keep` is never true at run time; it stops the compiler from removing unused
// results. The host measures the times of whole launches.
using u32 = unsigned int;

__device__ inline u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

#define CHAINS 8
// A block runs `step` on CHAINS independent registers per thread, `rounds` times.
#define ARITHMETIC(NAME, TYPE, FIRST, step)                                              \
    extern "C" __global__ void NAME(int rounds, TYPE keep, TYPE* out, long long* cycles) { \
        TYPE x[CHAINS];                                                                  \
        for (int i = 0; i < CHAINS; ++i) x[i] = FIRST;                                   \
        __syncthreads();                                                                 \
        const long long start = clock64();                                              \
        for (int r = 0; r < rounds; ++r) {                                               \
            _Pragma("unroll") for (int u = 0; u < 8; ++u)                                \
                _Pragma("unroll") for (int i = 0; i < CHAINS; ++i) step;                 \
        }                                                                                \
        __syncthreads();                                                                 \
        if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;                    \
        for (int i = 0; i < CHAINS; ++i)                                                 \
            if (x[i] == keep) *out = x[i];                                               \
    }

ARITHMETIC(exponentials, float, 0.5f * i + threadIdx.x,
           asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i])))
ARITHMETIC(multiply_adds, float, 0.5f * i + threadIdx.x,
           asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(x[i])))
ARITHMETIC(comparisons, float, 0.5f * i + threadIdx.x,
           asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(x[(i + 1) % CHAINS])))
ARITHMETIC(integers, u32, i + threadIdx.x,
           asm volatile("add.u32 %0, %0, %1;" : "+r"(x[i]) : "r"(x[(i + 1) % CHAINS])))
ARITHMETIC(conversions, u32, i + threadIdx.x,
           asm volatile("{.reg .f32 a, b;\nmov.b32 a, %0;\nmov.b32 b, %1;\n"
                        "cvt.rn.bf16x2.f32 %0, a, b;}" : "+r"(x[i]) : "r"(x[(i + 1) % CHAINS])))

// mma.sync.m16n8k16 on 8 independent accumulators per warp.
extern "C" __global__ void products(int rounds, float keep, float* out, long long* cycles) {
    float c[CHAINS][4] = {};
    const u32 a = threadIdx.x, b = threadIdx.x * 3;
    __syncthreads();
    const long long start = clock64();
    for (int r = 0; r < rounds; ++r) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %4, %5}, {%4, %5}, {%0, %1, %2, %3};"
                         : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                         : "r"(a), "r"(b));
    }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
    for (int i = 0; i < CHAINS; ++i)
        if (c[i][0] + c[i][1] + c[i][2] + c[i][3] == keep) *out = c[i][0];
}

// ldmatrix: 512 bytes per warp and instruction, no bank conflict, cycling through 8 addresses.
extern "C" __global__ void shared_reads(int rounds, u32 keep, u32* out, long long* cycles) {
    extern __shared__ __align__(128) unsigned char tile[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 at = shared_address(tile) + warp * 512 + lane * 16;
    u32 x[4], sum = 0;
    __syncthreads();
    const long long start = clock64();
    for (int r = 0; r < rounds; ++r) {
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(at + u * blockDim.x * 16) : "memory");
            sum ^= x[0] ^ x[1] ^ x[2] ^ x[3];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
    if (sum == keep) *out = sum;
}

// Cycles of consecutive barriers among all threads of the block.
extern "C" __global__ void barriers(int rounds, u32 keep, u32* out, long long* cycles) {
    __syncthreads();
    const long long start = clock64();
#pragma unroll 8
    for (int r = 0; r < rounds; ++r) __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
    if (rounds == int(keep)) *out = keep;
}

// All blocks together read `n` 16-byte pieces `rounds` times, bypassing L1; each starts at another
// piece.
extern "C" __global__ void reads(const uint4* at, long long n, int rounds, u32* out) {
    u32 sum = 0;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (int r = 0; r < rounds; ++r) {
        const long long shift = ((blockIdx.x + r * 37) % gridDim.x) * (long long)blockDim.x;
#pragma unroll 8
        for (long long e = shift + threadIdx.x; e < n; e += step) {
            uint4 x;
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at + e));
            sum += x.x ^ x.y ^ x.z ^ x.w;
        }
    }
    if (sum == 1) *out = sum;
}

// Copies 16 bytes at a time.
extern "C" __global__ void copies(const uint4* from, long long n, uint4* to) {
    const long long step = (long long)gridDim.x * blockDim.x;
#pragma unroll 8
    for (long long e = blockIdx.x * (long long)blockDim.x + threadIdx.x; e < n; e += step)
        to[e] = from[e];
}

// All blocks add to the same `n` floats, `rounds` times.
extern "C" __global__ void additions(float* to, long long n, int rounds) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (int r = 0; r < rounds; ++r)
        for (long long e = blockIdx.x * (long long)blockDim.x + threadIdx.x; e < n; e += step)
            asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to + e), "f"(1.0f) : "memory");
}

extern "C" __global__ void nothing() {}
