// Merges the splits of a sequence, in their order, by the blocks that computed them. In a cluster,
// each block merges a share of the result, which the others write into its shared memory. Otherwise
// the block that ends last merges all.
#if FS_CLUSTER > 1
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same offset in the shared memory of the cluster's block `rank`.
__device__ inline u32 there(const void* here, int rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address)
        : "r"(shared_address(here)), "r"(rank));
    return address;
}
__device__ inline void store_there(u32 to, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ inline void store_there(u32 to, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// `share`: number of float4 of the result that each block merges.
__device__ inline Moved merge_shares(const OnChip& t, const DecodeArgs& a, const Owned& own,
                                     int share) {
    Moved moved;
    const int first = own.rank * share, whole = own.n_rows * (WIDTH / 4);
    for (int x = threadIdx.x; x < min(share, whole - first); x += THREADS) {
        const int r = (first + x) / (WIDTH / 4), c = (first + x) % (WIDTH / 4) * 4;
        float top = NEG_INF, sum = 0.0f;
        for (int s = 0; s < CLUSTER; ++s) top = fmaxf(top, t.lse[s][r]);
        const float base = top == NEG_INF ? 0.0f : top;
        float4 total = {0, 0, 0, 0};
#pragma unroll
        for (int s = 0; s < CLUSTER; ++s) {
            const float w = exp2_approx((t.lse[s][r] - base) * LOG2E);
            const float4 y = t.share[s][x];
            sum += w, total.x += w * y.x, total.y += w * y.y;
            total.z += w * y.z, total.w += w * y.w;
        }
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
        moved.o_part += CLUSTER * ValueRow::counted(WIDTH - c, 4) * 4;
        moved.o += own.store(a, r, c, total);
        if (c == 0) {
            moved.l += own.store_lse(a, r, sum == 0.0f ? NEG_INF : top + logf(sum));
            moved.l_part += CLUSTER * 4;
        }
    }
    return moved;
}
#elif !FS_CASCADE
// Whether this block is the last one of its sequence and row tile to have written its parts.
__device__ inline bool arrives_last(OnChip& t, const DecodeArgs& a, const Owned& own) {
    __threadfence();  // this block's parts are visible before its arrival
    __syncthreads();  // B3: all threads have written their parts
    u32* arrived = a.arrived + own.walk;
    if (threadIdx.x == 0) {
        t.last = atomicAdd(arrived, 1) == own.splits - 1;
        if (t.last) *arrived = 0;  // for the next launch
    }
    __syncthreads();  // B4: all threads know whether the block goes on
    return t.last;
}

// The merge by the last block. The result has the same bits whichever block is last.
__device__ inline Moved merge_parts(OnChip& t, const DecodeArgs& a, const Owned& own) {
    constexpr int BATCH = 16;  // splits whose parts a thread has in flight at once
    Moved moved;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = own.splits;
    __threadfence();  // the others' parts are read after their arrivals
    const i64 part_rows = i64(a.kv_heads) * own.rows;  // of one slot
    const i64 row_of_first = own.first_slot * part_rows + i64(own.kv_head) * own.rows + own.row0;
    const i64 step = part_rows * WIDTH;
    auto part_of = [&](int at) {  // four columns of a row
        const int r = at / (WIDTH / 4), c = at % (WIDTH / 4) * 4;
        return a.o_part + (row_of_first + r) * WIDTH + c;
    };
    auto fetch = [&](float4(&y)[BATCH], const float* from, int s) {  // parts of BATCH splits
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
            y[u] = s + u < splits ? __ldcg(reinterpret_cast<const float4*>(from + (s + u) * step))
                                  : float4{0, 0, 0, 0};
    };
    float4 ahead[BATCH];  // a thread's first parts, fetched before their weights are known
    if (threadIdx.x < own.n_rows * (WIDTH / 4)) fetch(ahead, part_of(threadIdx.x), 0);
    for (int r = warp; r < own.n_rows; r += WARPS) {
        const float* part = a.l_part + row_of_first + r;
        float top = NEG_INF, sum = 0.0f;
        for (int s = lane; s < splits; s += 32) {
            const float lse = t.weight[s][r] = __ldcg(part + s * part_rows);
            top = fmaxf(top, lse), moved.l_part += 4;
        }
        for (int x = 16; x; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
        const float base = top == NEG_INF ? 0.0f : top;
        for (int s = lane; s < splits; s += 32)
            sum += t.weight[s][r] = exp2_approx((t.weight[s][r] - base) * LOG2E);
        for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int s = lane; s < splits; s += 32) t.weight[s][r] *= inverse;
        if (lane == 0) moved.l += own.store_lse(a, r, sum == 0.0f ? NEG_INF : top + logf(sum));
    }
    __syncthreads();  // B5: all rows' weights are complete
    for (int at = threadIdx.x; at < own.n_rows * (WIDTH / 4); at += THREADS) {
        const int r = at / (WIDTH / 4), c = at % (WIDTH / 4) * 4;
        const float* from = part_of(at);
        float4 x = {0, 0, 0, 0};
        for (int s = 0; s < splits; s += BATCH) {
            float4 y[BATCH];
            if (at == threadIdx.x && s == 0) {
#pragma unroll
                for (int u = 0; u < BATCH; ++u) y[u] = ahead[u];
            } else {
                fetch(y, from, s);
            }
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const float w = s + u < splits ? t.weight[s + u][r] : 0.0f;
                x.x += w * y[u].x, x.y += w * y[u].y, x.z += w * y[u].z, x.w += w * y[u].w;
            }
        }
        moved.o_part += splits * ValueRow::counted(WIDTH - c, 4) * 4;
        moved.o += own.store(a, r, c, x);
    }
    return moved;
}
#endif
