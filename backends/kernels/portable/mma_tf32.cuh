// Fragments of float32 elements rounded to tf32 (10 bits of mantissa, to nearest) for mma.m16n8k8.
// ldmatrix cannot transpose 32-bit elements, so lanes load their elements themselves. Within 8
// steps of k, position p < 4 of a fragment is element 2p, and position p + 4 is element 2p + 1, in
// A and in B alike. A sum may be taken in any order. So a lane's accumulators are its part of the
// next product's A, and one 8-byte load reads two neighbouring elements.
struct FragmentA { u32 r[8]; };  // 16 x 16: two halves of k, four registers each
struct FragmentB { u32 r[8]; };  // 16 x 16: two n-tiles of 8, two halves of k each, two registers

__device__ inline u32 tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
__device__ inline float load_one(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
__device__ inline float2 load_two(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// Where a lane finds its first element of a tile's 16 x 16 pieces; see mma_half.cuh's Reader.
template <class T>
struct Pieces {
    u32 base;
    __device__ Pieces(const T& t, int row, int col)
        : base(shared_address(t.data) + T::offset(row, col / WIDE) + col % WIDE * 4) {}
    __device__ u32 at(int row, int col) const {  // multiples of 8
        const int low = col / WIDE & (T::SPREAD - 1), high = col / WIDE - low;
        return (base ^ (low << 4)) + row * T::PITCH + (high << 4);
    }
    __device__ u32 below(u32 even) const {  // the row after an even one
        return (even ^ (T::swizzle(1) << 4)) + T::PITCH;
    }
};
// k along the rows of a tile: one load reads two neighbours.
template <class T>
struct ReadA : Pieces<T> {
    __device__ ReadA(const T& t) : Pieces<T>(t, threadIdx.x % 32 / 4, threadIdx.x % 4 * 2) {}
    __device__ FragmentA operator()(int row, int col) const {
        FragmentA f;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float2 x = load_two(this->at(row, col + 8 * k));
            const float2 y = load_two(this->at(row + 8, col + 8 * k));
            f.r[4 * k] = tf32(x.x), f.r[4 * k + 1] = tf32(y.x);
            f.r[4 * k + 2] = tf32(x.y), f.r[4 * k + 3] = tf32(y.y);
        }
        return f;
    }
};
template <class T>
struct ReadBTrans : Pieces<T> {
    __device__ ReadBTrans(const T& t) : Pieces<T>(t, threadIdx.x % 32 / 4, threadIdx.x % 4 * 2) {}
    __device__ FragmentB operator()(int row, int col) const {
        FragmentB f;
#pragma unroll
        for (int x = 0; x < 4; ++x) {  // n-tile x / 2, half x % 2 of k
            const float2 pair = load_two(this->at(row + x / 2 * 8, col + x % 2 * 8));
            f.r[2 * x] = tf32(pair.x), f.r[2 * x + 1] = tf32(pair.y);
        }
        return f;
    }
};
// k down the columns of a tile.
template <class T>
struct ReadATrans : Pieces<T> {
    __device__ ReadATrans(const T& t) : Pieces<T>(t, threadIdx.x % 4 * 2, threadIdx.x % 32 / 4) {}
    __device__ FragmentA operator()(int row, int col) const {
        FragmentA f;
#pragma unroll
        for (int x = 0; x < 4; ++x) {  // half x / 2 of k, rows 8 (x % 2) and on of A
            const u32 even = this->at(row + x / 2 * 8, col + x % 2 * 8);
            f.r[x / 2 * 4 + x % 2] = tf32(load_one(even));
            f.r[x / 2 * 4 + x % 2 + 2] = tf32(load_one(this->below(even)));
        }
        return f;
    }
};
template <class T>
struct ReadB : Pieces<T> {
    __device__ ReadB(const T& t) : Pieces<T>(t, threadIdx.x % 4 * 2, threadIdx.x % 32 / 4) {}
    __device__ FragmentB operator()(int row, int col) const {
        FragmentB f;
#pragma unroll
        for (int x = 0; x < 4; ++x) {  // n-tile x / 2, half x % 2 of k
            const u32 even = this->at(row + x % 2 * 8, col + x / 2 * 8);
            f.r[2 * x] = tf32(load_one(even)), f.r[2 * x + 1] = tf32(load_one(this->below(even)));
        }
        return f;
    }
};
template <class T> __device__ inline auto read_a(const T& t) { return ReadA<T>(t); }
template <class T> __device__ inline auto read_a_trans(const T& t) { return ReadATrans<T>(t); }
template <class T> __device__ inline auto read_b(const T& t) { return ReadB<T>(t); }
template <class T> __device__ inline auto read_b_trans(const T& t) { return ReadBTrans<T>(t); }

// c += A B over 16 of k, for two neighbouring n-tiles.
__device__ inline void mma(float (&left)[4], float (&right)[4], const FragmentA& a,
                           const FragmentB& b) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {  // n-tile x / 2, half x % 2 of k
        float (&c)[4] = x / 2 ? right : left;
        const u32* k = a.r + x % 2 * 4;
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(k[0]), "r"(k[1]), "r"(k[2]), "r"(k[3]), "r"(b.r[2 * x]), "r"(b.r[2 * x + 1]));
    }
}

// Accumulators of two neighbouring n-tiles are the A fragment of the next product.
__device__ inline FragmentA to_a(const float (&c0)[4], const float (&c1)[4]) {
    return {tf32(c0[0]), tf32(c0[2]), tf32(c0[1]), tf32(c0[3]),
            tf32(c1[0]), tf32(c1[2]), tf32(c1[1]), tf32(c1[3])};
}

// A lane's two neighbouring columns of an n-tile to its row of a tile.
template <class T>
__device__ inline void put_pair(T& tile, int row, int n_tile, float x, float y) {
    char* to = reinterpret_cast<char*>(tile.data) + threadIdx.x % 2 * 8;
    *reinterpret_cast<float2*>(to + T::offset(row, 2 * n_tile + threadIdx.x % 4 / 2)) = {x, y};
}
