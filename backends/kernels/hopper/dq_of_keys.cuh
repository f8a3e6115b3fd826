// dQ of the KV-outer backward (backward.cu): its product, and its staging for the warp that sends
// it. With FS_ONCE also delta, which is computed from P dP. Included after the kernel's constants,
// its OnChip and kv_outer.cuh.

#if FS_ONCE
// Sums a visit's P dP over this warp's keys, one sum per query. Eight lanes hold the same queries:
// in each of three steps a lane sends half of its sums to another lane, and adds what it receives
// to the half that it keeps.
__device__ __forceinline__ void sum_keys(float* sums, const float (&PdP)[BLOCK_Q / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int x = 0; x < BLOCK_Q / 32; ++x) {
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int e = 16 * x + i / 2 * 4 + i % 2;  // two keys of a query
            sum[i] = PdP[e] + PdP[e + 2];
        }
#pragma unroll
        for (int half = 4; half; half /= 2) {
            const bool upper = lane & 4 * half;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float given = upper ? sum[i] : sum[i + half];
                sum[i] = (upper ? sum[i + half] : sum[i]) + __shfl_xor_sync(~0u, given, 4 * half);
            }
        }
        sums[32 * x + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2] = sum[0];
    }
}

// dS^T = P^T (dP^T - delta), from P and P dP. Each warp adds all warps' sums itself, in a fixed
// order. `dlse`, if the LSE has a gradient, is the gradient of the visit's rows.
__device__ __forceinline__ void subtract_delta(float (&dP)[BLOCK_Q / 2],
                                               const float (&P)[BLOCK_Q / 2],
                                               const float (&sums)[4 * WARPGROUPS][BLOCK_Q],
                                               float* total, const float* dlse = nullptr) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int x = lane; x < BLOCK_Q; x += 32) {
        float sum = sums[0][x];
#pragma unroll
        for (int w = 1; w < 4 * WARPGROUPS; ++w) sum += sums[w][x];
        total[x] = FS_DLSE ? sum - dlse[x] : sum;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < BLOCK_Q / 8; ++j) {
        const float2 delta = query_pair(total, j);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            dP[4 * j + 2 * r] -= P[4 * j + 2 * r] * delta.x;
            dP[4 * j + 2 * r + 1] -= P[4 * j + 2 * r + 1] * delta.y;
        }
    }
}

// Stages a piece of dQ^T, or of dQ, as rows of dQ, rounded and swizzled.
__device__ __forceinline__ void stage_rounded(u16* to, const float (&dQ)[DQ_FLOATS], float scale) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 2, high = lane / 8 % 2;
    const int row = UPRIGHT ? 8 * (first + high) : lane / 16 * 8;
    const int piece = UPRIGHT ? lane / 16 : first + high;
    const u32 at = shared_address(to) + (row + lane % 8) * 128 + (piece ^ lane % 8) * 16;
#pragma unroll
    for (int x = 0; x < DQ_FLOATS / 8; ++x) {
        u32 part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            part[i] = pack(dQ[8 * x + 2 * i] * scale, dQ[8 * x + 2 * i + 1] * scale);
        if (UPRIGHT) store_matrices(at ^ 32 * x, part);  // 16 columns further
        else store_transposed(at + 2048 * x, part);      // 16 queries further
    }
}
#endif

#if FS_FUSED
// Issues and commits this warpgroup's piece of dQ^T = K^T dS^T, or of dQ = dS K.
__device__ __forceinline__ void issue_dq(float (&dQ)[DQ_FLOATS], const u16* k, const u16* ds) {
    const u64 dk = descriptor(k, 0), dds = descriptor(ds, BLOCK_K * DS_WIDE * 2, DS_SWIZZLE);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_K / 16; ++x)
        if (UPRIGHT) wgmma_ss<1, 1>(dQ, dds + down_rows(x), dk + down_rows(x), x > 0);
        else
            wgmma_ss<1, 1>(dQ, dk + down_rows(x), dds + x * DS_WIDE * 2, x > 0);
    wgmma_commit();
}

#if FS_ONCE
// Stages this warpgroup's piece of dQ and notifies the warp that sends it.
__device__ __forceinline__ void hand_over_dq(OnChip& s, const float (&dQ)[DQ_FLOATS], int g,
                                             float scale) {
    named_sync(DQ_FREE + g, 160);  // the previous piece is sent
    stage_rounded(s.dq[g][0], dQ, scale);
    fence_async_shared();
    named_arrive(DQ_FULL + g, 160);
}
#else
// Stages a piece of dQ^T; `first` is the address of this thread's first element.
__device__ __forceinline__ void stage_transposed(u32 first, const float (&dQ)[DQ_FLOATS]) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        // Rows 8 j + p of the box, from the thread's first row on. Their piece, 2 h from the
        // thread's first piece, is swizzled by the row: a warp's 32 elements fall into 32 banks.
        const int p = x % 2, h = x / 2;
        u32 at = first;
        opaque(at);  // recomputed each visit: caching it would cost four registers
        at ^= 16 * p + 32 * h;
#pragma unroll
        for (int j = 0; j < DQ_FLOATS / 4; ++j) store_float(at + 128 * (8 * j + p), dQ[4 * j + x]);
    }
}

// Stages this warpgroup's piece of dQ and notifies the warp that sends it.
__device__ __forceinline__ void hand_over_dq(OnChip& s, const float (&dQ)[DQ_FLOATS], int g,
                                             u32 dq_at, bool dq_sent) {
    named_sync(DQ_FREE + g, 160);  // the previous piece is sent
    if (UPRIGHT) stage_columns(&s.dq[g][0], dQ);
    else if (D - FS_HEAD_DIM < 32 || dq_sent) stage_transposed(dq_at, dQ);
    fence_async_shared();
    named_arrive(DQ_FULL + g, 160);
}
#endif
#endif
