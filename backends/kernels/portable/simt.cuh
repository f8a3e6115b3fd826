// float32 tiles without tensor cores. 256 threads form a 16 x 16 grid over a tile; thread (y, x)
// owns its rows y, y + 16, ... and columns x, x + 16, .... Operands of products are in shared
// memory.
constexpr int SIDE = 16, THREADS = SIDE * SIDE;

template <int ROWS_, int COLS_>
struct Mat {  // rows padded by 16 bytes: float4 reads of neighbouring rows meet no bank conflict
    static constexpr int ROWS = ROWS_, COLS = COLS_, STRIDE = COLS + 4;
    static_assert(COLS % SIDE == 0, "columns are dealt to 16 threads");
    float data[ROWS * STRIDE];
    __device__ float* operator[](int row) { return data + row * STRIDE; }
    __device__ const float* operator[](int row) const { return data + row * STRIDE; }
};

__device__ inline int tile_y() { return threadIdx.x / SIDE; }
__device__ inline int tile_x() { return threadIdx.x % SIDE; }

// Copies `rows` rows of an R (see Row) to a tile, and zeros elsewhere. Returns the bytes that this
// thread reads from HBM.
template <class R, class T>
__device__ inline u32 load_tile(T& tile, const char* from, i64 stride, int rows) {
    u32 bytes = 0;
    for (int e = threadIdx.x; e < T::ROWS * (T::COLS / 4); e += THREADS) {
        const int r = e / (T::COLS / 4), c = e % (T::COLS / 4) * 4;
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
        if (r < rows && c < R::WIDTH) {
            x = *reinterpret_cast<const float4*>(from + (r * stride + c) * 4);
            bytes += R::bytes(c / 4);
        }
        *reinterpret_cast<float4*>(&tile[r][c]) = x;
    }
    return bytes;
}

// Copies one float per row (LSE, delta); rows past the end become 0.
template <int ROWS>
__device__ inline u32 load_vector(float* to, const float* from, int rows) {
    u32 bytes = 0;
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
        to[r] = r < rows ? from[r] : 0.0f;
        bytes += r < rows ? 4 : 0;
    }
    return bytes;
}

// C += A B^T; A is stored as (M, K), B as (N, K).
template <class A, class B, int RT, int CT>
__device__ inline void product_abt(float (&c)[RT][CT], const A& a, const B& b) {
    static_assert(A::COLS == B::COLS && A::ROWS == RT * SIDE && B::ROWS == CT * SIDE, "shapes");
#pragma unroll 4
    for (int k = 0; k < A::COLS; k += 4) {
        float4 x[RT], y[CT];
#pragma unroll
        for (int r = 0; r < RT; ++r)
            x[r] = *reinterpret_cast<const float4*>(&a[tile_y() + r * SIDE][k]);
#pragma unroll
        for (int i = 0; i < CT; ++i)
            y[i] = *reinterpret_cast<const float4*>(&b[tile_x() + i * SIDE][k]);
#pragma unroll
        for (int r = 0; r < RT; ++r)
#pragma unroll
            for (int i = 0; i < CT; ++i) {
                c[r][i] += x[r].x * y[i].x;
                c[r][i] += x[r].y * y[i].y;
                c[r][i] += x[r].z * y[i].z;
                c[r][i] += x[r].w * y[i].w;
            }
    }
}

// C += A B; A is stored as (M, K), or with TRANSPOSED as (K, M); B is stored as (K, N).
template <bool TRANSPOSED, class A, class B, int RT, int CT>
__device__ inline void product_ab(float (&c)[RT][CT], const A& a, const B& b) {
    static_assert((TRANSPOSED ? A::ROWS : A::COLS) == B::ROWS && B::COLS == CT * SIDE, "shapes");
#pragma unroll 4
    for (int k = 0; k < B::ROWS; ++k) {
        float x[RT], y[CT];
#pragma unroll
        for (int r = 0; r < RT; ++r)
            x[r] = TRANSPOSED ? a[k][tile_y() + r * SIDE] : a[tile_y() + r * SIDE][k];
#pragma unroll
        for (int i = 0; i < CT; ++i) y[i] = b[k][tile_x() + i * SIDE];
#pragma unroll
        for (int r = 0; r < RT; ++r)
#pragma unroll
            for (int i = 0; i < CT; ++i) c[r][i] += x[r] * y[i];
    }
}

// The 16 threads of a row are in one half-warp.
__device__ inline float row_max(float x) {
#pragma unroll
    for (int w = SIDE / 2; w; w /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, w));
    return x;
}
__device__ inline float row_sum(float x) {
#pragma unroll
    for (int w = SIDE / 2; w; w /= 2) x += __shfl_xor_sync(~0u, x, w);
    return x;
}

// Stores a thread's part of `rows` rows of an R, times `factor`; returns its bytes.
template <class R, int RT, int CT>
__device__ inline u32 store_part(const float (&c)[RT][CT], char* to, i64 stride, int rows,
                                 float factor) {
    u32 bytes = 0;
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int i = 0; i < CT; ++i) {
            const int row = tile_y() + r * SIDE, col = tile_x() + i * SIDE;
            if (row < rows && col < R::WIDTH) {
                reinterpret_cast<float*>(to)[row * stride + col] = c[r][i] * factor;
                bytes += R::exists(col) ? 4 : 0;
            }
        }
    return bytes;
}

// Returns the scaled, capped score. Sets `slope`, if it is given, to the cap's derivative, 1 -
// tanh^2.
__device__ inline float score(const Args& a, float qk, float* slope) {
    const float s = qk * a.scale;
#if FS_SOFTCAP
    const float y = tanhf(s / a.softcap);
    if (slope) *slope = 1.0f - y * y;
    return a.softcap * y;
#else
    if (slope) *slope = 1.0f;
    return s;
#endif
}
