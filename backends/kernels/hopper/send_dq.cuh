// How dQ leaves a KV-outer kernel: consumers stage pieces in shared memory, and a warp sends them
// by TMA. Included in kv_outer.cuh by kernels that stage dQ.

__device__ inline u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Addition in a fixed order: `turn` counts the additions to a piece of dQ so far.
__device__ inline void wait_turn(const u32* turn, u32 mine) {
    while (load_acquire(turn) != mine) {}
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ inline void pass_turn(u32* turn) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(turn) : "memory");
}

#if FS_FIRST
// The first block to reach a piece of dQ stores it, and no kernel writes zeros. `piece` is 0
// before, 1 while that block stores, and 2 afterwards. Other blocks wait for 2 and then add. The
// first block already has its piece in shared memory, so it never waits for another one. `flag` is
// the value before the piece was complete: reading it then hides the latency of most visits.
__device__ inline bool comes_first(u32* piece, u32 flag) {
    if (flag == 0 && atomicCAS(piece, 0, 1) == 0) return true;
    while (flag != 2) flag = load_acquire(piece);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return false;
}
__device__ inline void let_others_add(u32* piece) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(piece), "r"(2) : "memory");
}
#endif

// Stages a piece of dQ that is not transposed, 32 columns per box, whose rows are swizzled. Odd
// rows write the other half of a box's columns first: otherwise two rows would conflict in the same
// banks.
template <int N>
__device__ __forceinline__ void stage_columns(float (*boxes)[DQ_ROWS * 32], const float (&dQ)[N]) {
    const int row = fragment_row(), lane = threadIdx.x % 32;
    const bool odd = row % 2;
    const u32 to = shared_address(boxes[0]) + row * 128 + lane % 2 * 8;
#pragma unroll
    for (int box = 0; box < N / 16; ++box)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int even = 16 * box + 4 * j + 2 * r, other = 16 * box + 4 * (j ^ 2) + 2 * r;
                const u32 piece = (2 * j + lane / 2 % 2) ^ (row % 8) ^ (odd ? 4 : 0);
                store_pair(to + box * sizeof(boxes[0]) + r * 1024 + piece * 16,
                           odd ? dQ[other] : dQ[even], odd ? dQ[other + 1] : dQ[even + 1]);
            }
}

// One warp per warpgroup g: adds its piece of dQ, once staged, to the accumulator; or stores it, if
// it is complete. DQ_FREE + g and DQ_FULL + g pass the piece between the two.
__device__ void send_dq(OnChip& s, const Args& a, const TensorMap* map_dq, int g) {
    const bool leads = threadIdx.x % 32 == 0;
    Ring slot;
    // The delta kernel clears the flags, and a flag is read before the piece is complete, which
    // depends on delta.
    if (FS_FIRST && !FS_AFTER) wait_for_what_ran_before();
    named_arrive(DQ_FREE + g, 160);
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) return;
        Step step;
#pragma unroll 1
        for (int left = step.begin(a, it, it.visits.count); left; --left) {
            const int walk = it.walk * a.group + step.member;  // index of the query head
            const int first = it.base + it.visits(a, step.v).tile * BLOCK_Q;
            [[maybe_unused]] bool stores = false;
#if FS_FIRST
            u32* piece = a.turns + (i64(walk) * a.n_q + first) * 2 + g;
            const u32 flag = leads ? load_acquire(piece) : 0;
#endif
            named_sync(DQ_FULL + g, 160);  // the piece is complete
            if (leads) {
#if FS_ORDERED
                u32* turn = a.turns + (i64(walk) * a.n_q + first) * 2 + g;
                wait_turn(turn, a.ranks[a.ptr[it.outer] + step.v]);
#endif
                const int row = first + dq_row(g);
                const Place to = place(row, it.end, walk / a.heads);
                int columns = 0;  // columns that exist
#if FS_FIRST
                stores = comes_first(piece, flag);
                if (stores)
#pragma unroll 1  // few registers
                    for (int c = 0; c < DQ_BOXES; ++c)
                        store_box(map_dq, s.dq[g][c], dq_column(g, c), to.row, walk % a.heads,
                                  to.batch);
#endif
#pragma unroll
                for (int c = 0; c < DQ_BOXES; ++c) {
                    const int column = dq_column(g, c);
                    if (column >= FS_HEAD_DIM) continue;
                    if (!stores)
                        (FS_ONCE ? store_box : reduce_box)(map_dq, s.dq[g][c], column, to.row,
                                                           walk % a.heads, to.batch);
                    columns += min(FS_ONCE ? 64 : 32, FS_COUNTED - column);
                }
                reduce_commit();
                const i64 number = i64(walk) * a.n_visits + it.visits.first + step.v;
                const int rows = max(0, min(DQ_ROWS, it.end - row));
                report_one(a.visit_counts + number * 8 + (FS_ONCE && !FS_DLSE ? 3 : 4),
                           rows * columns * (FS_ONCE ? 2 : 4));
                reduce_wait_read();
            }
            __syncwarp();
            named_arrive(DQ_FREE + g, 160);  // the piece may be overwritten
#if FS_ORDERED
            if (leads) {
                reduce_wait();
                pass_turn(a.turns + (i64(walk) * a.n_q + first) * 2 + g);
            }
#elif FS_FIRST
            if (stores) {
                reduce_wait();
                let_others_add(piece);
            }
#endif
            step.next(a, it, it.visits.count);
        }
    }
}
