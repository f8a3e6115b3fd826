// Fragments of 16-bit elements for mma.m16n8k16. ldmatrix reads them, one 16-byte chunk of each of
// 8 rows at a time.
struct FragmentA { u32 r[4]; };  // 16 x 16
struct FragmentB { u32 r[4]; };  // 16 x 16: two n-tiles of 8, two registers each

template <bool TRANSPOSE>
__device__ inline void ldmatrix(u32 (&r)[4], u32 address) {
    if constexpr (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Where a lane reads its chunks of a tile's 16 x 16 pieces. The swizzle of row r depends only on r
// % 8, so the address of the piece at (row, col) is one XOR and one constant from that at (0, 0).
template <class Fragment, bool TRANSPOSE, class T>
struct Reader {
    u32 base;
    __device__ Reader(const T& t, int row, int chunk)
        : base(shared_address(t.data) + T::offset(row, chunk)) {}
    __device__ Fragment operator()(int row, int col) const {  // multiples of 16
        const int low = col / 8 & (T::SPREAD - 1), high = col / 8 - low;
        Fragment f;
        ldmatrix<TRANSPOSE>(f.r, (base ^ (low << 4)) + row * T::PITCH + (high << 4));
        return f;
    }
};
template <class T>
__device__ inline auto read_a(const T& t) {
    const int lane = threadIdx.x % 32;
    return Reader<FragmentA, false, T>(t, lane % 16, lane / 16);
}
template <class T>
__device__ inline auto read_a_trans(const T& t) {
    const int lane = threadIdx.x % 32;
    return Reader<FragmentA, true, T>(t, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class T>
__device__ inline auto read_b(const T& t) {
    const int lane = threadIdx.x % 32;
    return Reader<FragmentB, true, T>(t, lane % 16, lane / 16);
}
template <class T>
__device__ inline auto read_b_trans(const T& t) {
    const int lane = threadIdx.x % 32;
    return Reader<FragmentB, false, T>(t, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

__device__ inline void mma(float (&c)[4], const FragmentA& a, u32 b0, u32 b1) {
#if FS_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}
// c += A B over 16 of k, for two neighbouring n-tiles.
__device__ inline void mma(float (&left)[4], float (&right)[4], const FragmentA& a,
                           const FragmentB& b) {
    mma(left, a, b.r[0], b.r[1]);
    mma(right, a, b.r[2], b.r[3]);
}

// Accumulators of two neighbouring n-tiles are the A fragment of the next product.
__device__ inline FragmentA to_a(const float (&c0)[4], const float (&c1)[4]) {
    return {pack(c0[0], c0[1]), pack(c0[2], c0[3]), pack(c1[0], c1[1]), pack(c1[2], c1[3])};
}

// A lane's two neighbouring columns of an n-tile to its row of a tile.
template <class T>
__device__ inline void put_pair(T& tile, int row, int n_tile, float x, float y) {
    char* to = reinterpret_cast<char*>(tile.data) + threadIdx.x % 4 * 4;
    *reinterpret_cast<u32*>(to + T::offset(row, n_tile)) = pack(x, y);
}
