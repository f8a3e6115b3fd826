// The softmax of a row of score tiles, in a consumer warpgroup's registers.
// Of this thread's two rows; l is this thread's share, the quad adds up at the end.
template <int BLOCK_K>
struct Softmax {
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.0f, 0.0f};

    // m_new = max(m, rowmax S), P = exp2(c (S - m_new)) in S's place, l = alpha l + rowsum P;
    // returns in alpha what O must be multiplied by.
    __device__ __forceinline__ void operator()(float (&S)[BLOCK_K / 2], float (&alpha)[2],
                                               float to_log2) {
        row<0>(S, alpha[0], to_log2);
        row<1>(S, alpha[1], to_log2);
    }

    // Exponentials take longest, so they should begin early and never wait: row 0's as soon as its
    // maximum is known, row 1's maximum in the gaps between them. ptxas schedules what has the
    // longest chain ahead of it first, so row 0's maximum is one chain and row 1's two, and it is
    // the other way round with the sums. Two neighbours first: half the length of a chain.
    template <int R>
    __device__ __forceinline__ void row(float (&S)[BLOCK_K / 2], float& alpha, float to_log2) {
        constexpr int PAIRS = BLOCK_K / 8;
        float top = m[R], top1 = fmaxf(S[2 * R], S[2 * R + 1]);
#pragma unroll
        for (int e = 1; e < PAIRS; ++e) {
            float& chain = R == 0 || e % 2 == 0 ? top : top1;
            chain = fmaxf(chain, fmaxf(S[4 * e + 2 * R], S[4 * e + 2 * R + 1]));
        }
        top = fmaxf(top, top1);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == NEG_INF ? 0.0f : top * to_log2;  // no key yet: no inf - inf
        alpha = exp2_approx(m[R] * to_log2 - base);
        m[R] = top;
        float sum = l[R] * alpha, sum1 = 0.0f;
#pragma unroll
        for (int e = 0; e < PAIRS; ++e) {
            float &p = S[4 * e + 2 * R], &p1 = S[4 * e + 2 * R + 1];
            p = exp2_approx(p * to_log2 - base);
            p1 = exp2_approx(p1 * to_log2 - base);
            (R == 1 || e % 2 == 0 ? sum : sum1) += p + p1;
        }
        l[R] = R == 1 ? sum : sum + sum1;
    }
};
