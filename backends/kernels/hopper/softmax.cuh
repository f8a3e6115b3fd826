// Code that the Hopper forward kernels share: barriers, the mask, and the softmax of a row of score
// tiles in a consumer warpgroup's registers.

// Initialises the barriers of Q, one per warpgroup, and of the rings of K and V. One thread calls
// it. `more` warps, besides the consumers', read the work tiles.
template <int WARPGROUPS, int STAGES, class OnChip>
__device__ inline void init_rings(OnChip& s, int more = 0) {
    for (int i = 0; i < WARPGROUPS; ++i)
        barrier_init(&s.q_full[i], 1), barrier_init(&s.q_empty[i], 4);
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&s.k_full[i], 1), barrier_init(&s.k_empty[i], 4 * WARPGROUPS);
        barrier_init(&s.v_full[i], 1), barrier_init(&s.v_empty[i], 4 * WARPGROUPS);
    }
    s.items.init(4 * WARPGROUPS + more);
    barrier_init_fence();
}

// Sets to -inf the scores of a visit, of rows `row` and row + 8, that the mask drops.
template <int N>
__device__ __forceinline__ void mask_scores(float (&S)[N], const Args& a, const Item& it,
                                            Visit visit, int row) {
    if (!visit.masked) return;
    const int key = it.base + visit.tile * 2 * N + fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Keep keep(a, query_of(row + 8 * r), it.own.offset, it.end);
        const int first = keep.lo - key, last = keep.hi - key;  // in-tile columns that are kept
#pragma unroll
        for (int e = 0; e < N; ++e) {
            const int c = e / 4 * 8 + e % 2;
            if (e / 2 % 2 == r && (c > last || (FS_LEFT && c < first))) S[e] = NEG_INF;
        }
    }
}

// The maximum over the four threads that share a row.
template <class T> __device__ __forceinline__ T quad_max(T x) {
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}

// The softmax of this thread's two rows. l is this thread's share; the four threads of a row add
// theirs at the end. If each visit may have its own factor (VARIES), m is kept in units of log 2,
// times that factor.
template <int BLOCK_K, bool VARIES = false, int BITS = 0>
struct Softmax {
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.0f, 0.0f};

    // Computes m_new = max(m, rowmax S), l = alpha l + rowsum P, and P = 2^BITS exp2(c (S -
    // m_new)), which replaces S. Sets alpha, by which O must be multiplied.
    __device__ __forceinline__ void operator()(float (&S)[BLOCK_K / 2], float (&alpha)[2],
                                               float to_log2) {
        // The maximum is taken over the floats' bits as integers, three per instruction. Integers
        // have the order of the floats unless both are negative. So if all that a thread has seen
        // are negative, the maximum is taken again over floats; but not if m is at least 0, since m
        // is then the maximum.
        const int bits[2] = {largest<0>(S), largest<1>(S)};
        const int m0 = __float_as_int(m[0]), m1 = __float_as_int(m[1]);
        const int signs = VARIES ? bits[0] & m0 | bits[1] & m1 : bits[0] | bits[1];
        const bool below = __any_sync(~0u, signs < 0);
        float top[2] = {__int_as_float(quad_max(bits[0])), __int_as_float(quad_max(bits[1]))};
        if (__builtin_expect(below, false)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = VARIES ? NEG_INF : m[r];
#pragma unroll
            for (int e = 0; e < BLOCK_K / 2; ++e) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], S[e]);
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = quad_max(top[r]);
        }
        row<0>(S, top[0], alpha[0], to_log2);
        row<1>(S, top[1], alpha[1], to_log2);
    }

    // The largest bits of row R and, if factors do not vary, of its m.
    template <int R>
    __device__ __forceinline__ int largest(const float (&S)[BLOCK_K / 2]) const {
        constexpr int LEAST = 0x80000000;
        int chain[2] = {VARIES ? LEAST : __float_as_int(m[R]), LEAST};
#pragma unroll
        for (int e = 2 * R; e < BLOCK_K / 2; e += 4) {
            int& top = chain[e / 4 % 2];
            top = max(max(top, __float_as_int(S[e])), __float_as_int(S[e + 1]));
        }
        return max(chain[0], chain[1]);
    }

    // Exponentials take longest, so they should start early and never wait. ptxas schedules the
    // longest dependency chain first: so row 0's sum is two chains, and row 1's is one.
    template <int R>
    __device__ __forceinline__ void row(float (&S)[BLOCK_K / 2], float top, float& alpha,
                                        float to_log2) {
        constexpr int PAIRS = BLOCK_K / 8;
        if (VARIES) top = fmaxf(top * to_log2, m[R]);
        const float unit = VARIES ? 1.0f : to_log2;
        const float base = top == NEG_INF ? 0.0f : top * unit;  // no key yet: avoids inf - inf
        alpha = exp2_approx(m[R] * unit - base);
        m[R] = top;
        const float start = BITS ? base - BITS : base;
        float sum = l[R] * alpha, sum1 = 0.0f;
#pragma unroll
        for (int e = 0; e < PAIRS; ++e) {
            float &p = S[4 * e + 2 * R], &p1 = S[4 * e + 2 * R + 1];
            p = exp2_approx(p * to_log2 - start);
            p1 = exp2_approx(p1 * to_log2 - start);
            (R == 1 || e % 2 == 0 ? sum : sum1) += p + p1;
        }
        l[R] = R == 1 ? sum : sum + sum1;
    }
};

// The softmax of scores between -bound and bound. It needs no running maximum and never rescales O.
// A row's m is its maximum in the first tile where the mask keeps a key of it. Limits of bound - 60
// and 60 - bound keep every exponential between e^-60 and e^60. Within these limits, P of a row's
// only key is exactly 1. Up to a bound of 30 they limit nothing.
struct BoundedSoftmax {
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.0f, 0.0f};
    const float bound;  // a natural logarithm

    __device__ __forceinline__ explicit BoundedSoftmax(float bound) : bound(bound) {}
    // P = exp2(c (S - m)) replaces S; l = l + rowsum P. O keeps its scale.
    template <int N>
    __device__ __forceinline__ void operator()(float (&S)[N], float (&alpha)[2], float to_log2) {
        if (__any_sync(~0u, m[0] == NEG_INF || m[1] == NEG_INF)) begin(S, to_log2);
        float start[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) start[r] = m[r] == NEG_INF ? 0.0f : m[r] * to_log2;
        alpha[0] = alpha[1] = 1.0f;
#pragma unroll
        for (int e = 0; e < N; ++e) {
            S[e] = exp2_approx(S[e] * to_log2 - start[e / 2 % 2]);
            l[e / 2 % 2] += S[e];
        }
    }
    // Sets m of rows that have seen no key so far.
    template <int N>
    __device__ __forceinline__ void begin(const float (&S)[N], float to_log2) {
        const float least = (bound - 60.0f) * LOG2E / to_log2;
        const float most = (60.0f - bound) * LOG2E / to_log2;
        float top[2] = {NEG_INF, NEG_INF};
#pragma unroll
        for (int e = 0; e < N; ++e) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], S[e]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = quad_max(top[r]);
            if (m[r] == NEG_INF && top[r] != NEG_INF) m[r] = fminf(fmaxf(top[r], least), most);
        }
    }
};
