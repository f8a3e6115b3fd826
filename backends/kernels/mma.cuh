// Tensor-core tiles for sm_80 and later: swizzled shared memory, cp.async, ldmatrix, mma.sync.
using half_t = unsigned short;  // 16 bits of float16 or bfloat16, as FS_BF16 says

__device__ inline u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// A ROWS x COLS tile in shared memory. A row is cut into 16-byte chunks, and chunk c of row r lies
// at c ^ f(r), where f spreads 8 consecutive rows over all 32 banks: ldmatrix, which reads one
// chunk from each of 8 rows at a time, then meets no bank conflict, and no byte is spent on padding.
template <int ROWS_, int COLS_>
struct alignas(128) Tile {
    static constexpr int ROWS = ROWS_, COLS = COLS_, CHUNKS = COLS / 8;
    static constexpr int SPREAD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    static constexpr int SHIFT = SPREAD == 8 ? 0 : SPREAD == 4 ? 1 : 2;
    static_assert(COLS % 16 == 0, "ldmatrix takes two chunks at a time");
    half_t data[ROWS * COLS];

    __device__ static int offset(int row, int chunk) {  // bytes
        return row * COLS * 2 + ((chunk ^ ((row >> SHIFT) & (SPREAD - 1))) << 4);
    }
};

__device__ inline void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void cp_async_16(u32 to, const void* from, int bytes) {  // fills up with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void cp_async_4(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Start copying `rows` rows of WIDTH elements into a tile; the rest of it becomes zero. Returns the
// bytes that this thread reads from HBM. A whole tile, which nearly all are, takes no comparison,
// and where a thread's rows lie a multiple of 8 apart both its addresses advance by constants.
template <int WIDTH, int THREADS, class T>
__device__ inline u32 load_async(const T& tile, const char* from, i64 stride, int rows) {
    constexpr int TOTAL = T::ROWS * T::CHUNKS, STEP = THREADS / T::CHUNKS;
    constexpr bool EVEN = TOTAL % THREADS == 0 && THREADS % T::CHUNKS == 0 && STEP % 8 == 0;
    const u32 to = shared_address(tile.data);
    if (EVEN && WIDTH == T::COLS && rows == T::ROWS) {
        const int r = threadIdx.x / T::CHUNKS, c = threadIdx.x % T::CHUNKS;
        const u32 at = to + T::offset(r, c);
        const char* source = from + (r * int(stride) + c * 8) * 2;
#pragma unroll
        for (int e = 0; e < TOTAL / THREADS; ++e)
            cp_async_16(at + e * STEP * T::COLS * 2, source + e * (STEP * int(stride) * 2));
        return TOTAL / THREADS * 16;
    }
    u32 bytes = 0;
#pragma unroll 1
    for (int at = threadIdx.x; at < TOTAL; at += THREADS) {
        const int r = at / T::CHUNKS, c = at % T::CHUNKS;
        const bool inside = r < rows && (WIDTH == T::COLS || c * 8 < WIDTH);
        const int taken = inside ? 16 : 0;
        cp_async_16(to + T::offset(r, c), from + (inside ? (r * int(stride) + c * 8) * 2 : 0), taken);
        bytes += taken;
    }
    return bytes;
}

// Start copying one float a row (LSE, delta); rows past the end become 0.
template <int ROWS, int THREADS>
__device__ inline u32 load_vector_async(float* to, const float* from, int rows) {
    u32 bytes = 0;
#pragma unroll
    for (int e = 0; e < ROWS; e += THREADS) {
        const int r = e + threadIdx.x;
        if (r < ROWS) {
            const bool inside = r < rows;
            cp_async_4(shared_address(to + r), from + (inside ? r : 0), inside ? 4 : 0);
            bytes += inside ? 4 : 0;
        }
    }
    return bytes;
}

// Write a staged tile to HBM in 16-byte pieces; returns this thread's bytes.
template <int WIDTH, int THREADS, class T>
__device__ inline u32 store_tile(const T& tile, char* to, i64 stride, int rows) {
    constexpr int TOTAL = T::ROWS * T::CHUNKS;
    u32 bytes = 0;
#pragma unroll
    for (int e = 0; e < TOTAL; e += THREADS) {
        const int at = e + threadIdx.x, r = at / T::CHUNKS, c = at % T::CHUNKS;
        if (TOTAL % THREADS != 0 && at >= TOTAL) break;
        if (r < rows && (WIDTH == T::COLS || c * 8 < WIDTH)) {
            const char* from = reinterpret_cast<const char*>(tile.data) + T::offset(r, c);
            *reinterpret_cast<uint4*>(to + (r * int(stride) + c * 8) * 2) =
                *reinterpret_cast<const uint4*>(from);
            bytes += 16;
        }
    }
    return bytes;
}

// -- Fragments of mma.m16n8k16: lane l holds rows l/4 and l/4 + 8, columns 2(l%4) and the next ----
__device__ inline void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ inline void ldmatrix_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Where a lane reads its chunks of a tile's 16 x 16 pieces. The swizzle of row r depends on r % 8
// alone, so from the piece at (0, 0) the one at (row, col) is one XOR and one constant away.
template <class T>
struct Pieces {
    u32 base;
    __device__ Pieces(const T& t, int row, int chunk)
        : base(shared_address(t.data) + T::offset(row, chunk)) {}
    __device__ u32 at(int row, int col) const {  // multiples of 8 and 16 elements
        const int low = col / 8 & (T::SPREAD - 1), high = col / 8 - low;
        return (base ^ (low << 4)) + row * T::COLS * 2 + (high << 4);
    }
};
// The four orders in which a lane's row and chunk give A or (two) B fragments of a product, for a
// tile stored as the name says: A is [m][k], its transpose [k][m]; B is [k][n], its transpose [n][k].
template <class T>
__device__ inline Pieces<T> pieces_a(const T& t) {
    const int lane = threadIdx.x % 32;
    return Pieces<T>(t, lane % 16, lane / 16);
}
template <class T>
__device__ inline Pieces<T> pieces_a_trans(const T& t) {
    const int lane = threadIdx.x % 32;
    return Pieces<T>(t, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class T>
__device__ inline Pieces<T> pieces_b(const T& t) {
    return pieces_a(t);
}
template <class T>
__device__ inline Pieces<T> pieces_b_trans(const T& t) {
    return pieces_a_trans(t);
}

__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if FS_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Accumulators of two neighbouring n-tiles are the A fragment of the next product.
__device__ inline void to_a(u32 (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
    a[0] = pack(c0[0], c0[1]), a[1] = pack(c0[2], c0[3]);
    a[2] = pack(c1[0], c1[1]), a[3] = pack(c1[2], c1[3]);
}

__device__ inline float quad_max(float x) {  // the four lanes of a quad share a row
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Stage a 16-row block of accumulators, times `factor[half]`, in shared memory as 16-bit elements.
template <int N, class T>
__device__ inline void stage(T& tile, int row, int col, const float (&c)[N][4], float top,
                             float bottom) {
    const int lane = threadIdx.x % 32, r = row + lane / 4;
    char* base = reinterpret_cast<char*>(tile.data) + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        *reinterpret_cast<u32*>(base + T::offset(r, col / 8 + n)) =
            pack(c[n][0] * top, c[n][1] * top);
        *reinterpret_cast<u32*>(base + T::offset(r + 8, col / 8 + n)) =
            pack(c[n][2] * bottom, c[n][3] * bottom);
    }
}

// Add a row's part of two neighbouring 8-column fragments to HBM: (x, y) this lane's elements of the
// left one, (z, w) of the right one, `row` the left one's first column, of which `columns` are left in
// the row. From sm_90 on two lanes trade, so that each adds four neighbours in one instruction.
// Every lane of the warp must call it; `inside` says whether its row exists. Returns bytes added.
__device__ inline u32 reduce_pair(float* row, float x, float y, float z, float w, bool inside, int columns) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    const bool right = lane % 2;  // which fragment this lane adds
    const float give_x = right ? x : z, give_y = right ? y : w;
    const float got_x = __shfl_xor_sync(~0u, give_x, 1), got_y = __shfl_xor_sync(~0u, give_y, 1);
    if (!inside || right * 8 >= columns) return 0;
    float* to = row + right * 8 + lane % 4 / 2 * 4;
    const float a = right ? got_x : x, b = right ? got_y : y, c = right ? z : got_x, d = right ? w : got_y;
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
    return 16;
#else
    float* to = row + lane % 4 * 2;
    if (inside && columns > 0) atomicAdd(to, x), atomicAdd(to + 1, y);
    if (inside && columns > 8) atomicAdd(to + 8, z), atomicAdd(to + 9, w);
    return inside ? (columns > 8 ? 16 : columns > 0 ? 8 : 0) : 0;
#endif
}
