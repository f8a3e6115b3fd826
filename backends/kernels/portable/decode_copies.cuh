// Asynchronous copies of key rows by a warp, in flight while it computes.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void cp_async_wait_group() {  // waits until LEFT groups are in flight
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// A cache larger than L2 is read once: its lines are evicted first, and displace nothing that is
// kept. A small cache (FS_IN_L2) may stay in L2 for the next call. Its lines must then be normal
// ones, because lines that are evicted first displace only each other.
__device__ inline u64 cache_policy() {
    u64 policy;
#if FS_IN_L2
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#else
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}
__device__ inline void cp_async_hinted(u32 to, const char* from, int bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(bytes), "l"(policy) : "memory");
}

// Starts a warp's copies of KEYS rows, of which `count` exist. The other rows become zeros without
// being read (V's must be zeros: 0 * NaN is NaN). `at` returns the offset of row r, in elements.
// Returns the bytes read.
template <class R, class T, class At>
__device__ inline u32 stream(const T& tile, const char* base, int count, u64 policy, const At& at) {
    constexpr bool EVEN = 32 % T::CHUNKS == 0;  // each instruction then copies whole rows
    const int lane = threadIdx.x % 32;
    const u32 to = shared_address(tile.data);
    u32 bytes = 0;
#pragma unroll
    for (int e = 0; e < KEYS * T::CHUNKS / 32; ++e) {
        const int r = EVEN ? e * (32 / T::CHUNKS) + lane / T::CHUNKS : (e * 32 + lane) / T::CHUNKS;
        const int c = EVEN ? lane % T::CHUNKS : (e * 32 + lane) % T::CHUNKS;
        const i64 row = at(r);  // every lane calls it: with pages, lanes shuffle
        const bool inside = r < count && (R::WIDTH == T::COLS || c * WIDE < R::WIDTH);
        cp_async_hinted(to + T::offset(r, c), base + (inside ? (row + c * WIDE) * FS_BYTES : 0),
                        inside ? 16 : 0, policy);
        bytes += inside ? R::bytes(c) : 0;
    }
    return bytes;
}
