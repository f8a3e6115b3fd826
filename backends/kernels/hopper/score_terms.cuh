// Terms of a score function that the forward (forward.cu) holds in shared memory: captured elements
// per query and key, captured elements per distance, and a linear term. Included after the kernel's
// constants and before its OnChip.

#if FS_TILE
// Captured elements that the score function reads per query and key. The elements of a tile pair
// pass through shared memory: 64 rows per warpgroup, in boxes of 128 bytes per row, swizzled. With
// FS_TILE_INTERLEAVED, rows are in the order of copy_interleaved_box.
struct Elements {
    static constexpr int COLUMNS = 128 / FS_TILE_BYTES, BOXES = (BLOCK_K + COLUMNS - 1) / COLUMNS;
    alignas(1024) char box[BOXES][64 * 128];

    // The element of this thread's score e. Two neighbours are read in one access.
    template <class A, class H>
    __device__ __forceinline__ float operator()(const A&, const H&, int e) const {
        const float2 two = pair(e - e % 2);
        return e % 2 ? two.y : two.x;
    }
    __device__ __forceinline__ float2 pair(int e) const {
        // TMA permutes a row's 16-byte pieces by the row's place among eight. Half a warp reads two
        // pieces of each of four rows. In float32, the pieces of neighbouring places would have
        // bank conflicts, so the places of these rows are interleaved with those of the next four.
        const int row_of_eight = threadIdx.x % 32 / 4;
        const int at_place =
            FS_TILE_INTERLEAVED ? row_of_eight % 4 * 2 + row_of_eight / 4 : row_of_eight;
        const int mine = fragment_column() * FS_TILE_BYTES ^ at_place * 16;
        const int column = e / 4 * 8, row = threadIdx.x / 32 % 4 * 16 + at_place + e / 2 % 2 * 8;
        const char* at = box[column / COLUMNS] + row * 128 +
                         (mine ^ column % COLUMNS * FS_TILE_BYTES);
#if FS_TILE_BYTES == 4
        return *reinterpret_cast<const float2*>(at);
#elif FS_TILE_BF16
        const u32 two = *reinterpret_cast<const u32*>(at);
        return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
#else
        const u32 two = *reinterpret_cast<const u32*>(at);
        return {flash_half(two & 0xffffu), flash_half(two >> 16)};
#endif
    }
};
#endif

#if FS_DISTANCES
// Captured elements that depend only on the distance between query and key, for all distances in a
// tile pair, the smallest first. A distance out of range has the nearest element. With FS_ADDED,
// they are the terms that the score function adds to a scaled score.
constexpr int DISTANCES = BLOCK_Q + BLOCK_K;  // one more than there are
struct Distances {
    const float* mine;  // the element of this thread's first row and first key

    template <class A, class H>
    __device__ __forceinline__ float operator()(const A&, const H&, int e) const {
        return mine[e / 2 % 2 * 8 - e / 4 * 8 - e % 2];
    }
};
#endif

#if FS_RAMP
// A score function adds a linear function of the positions (ALiBi). Within a tile pair, that is a
// number per row plus `step` times the key's column. Softmax does not depend on the number per row.
// The columns' part is a product of two matrices of 16 rows: it is one more product of 16 columns
// of Q and K, so no instruction per score is needed. A step is the sum of three 16-bit numbers, and
// columns are below 256, so all products are exact.
struct Ramp {
    alignas(1024) u16 step[WARPGROUPS][16 * 64];             // rows 0 to 2: high, middle, low part
    alignas(1024) u16 column[(BLOCK_K + 63) / 64][16 * 64];  // rows 0 to 2: the columns' numbers

    // All threads: writes what does not depend on the head.
    __device__ void init() {
        u32* words = reinterpret_cast<u32*>(this);
        for (int i = threadIdx.x; i < int(sizeof(Ramp)) / 4; i += THREADS) {
            const int tile = i / 512 - WARPGROUPS, row = i % 512 / 32, piece = i % 32 / 4 ^ row % 8;
            const float first = tile * 64 + piece * 8 + i % 4 * 2;
            words[i] = tile >= 0 && row < 3 ? pack(first, first + 1.0f) : 0;
        }
        fence_async_shared();
    }
    // Warpgroup g, none of whose products runs: sets the step of a head, in units of raw scores.
    __device__ __forceinline__ void set(int g, float x) {
        named_sync(STEP_FREE + g, 128);
        const int row = threadIdx.x % 128 / 8;
        if (row > 0) x -= unpack(pack(x, x)).x;
        if (row > 1) x -= unpack(pack(x, x)).x;
        const u32 two = pack(x, x);
        if (row < 3)
            reinterpret_cast<uint4*>(step[g])[threadIdx.x % 128] = make_uint4(two, two, two, two);
        fence_async_shared();
        named_sync(STEP_FREE + g, 128);  // the step is written
    }
};
#endif
