// Hopper's own instructions (sm_90a), one small function each, named after what they do. Source of
// every encoding: NVIDIA's PTX ISA 9.0, sections "mbarrier", "cp.async.bulk.tensor", "stmatrix",
// "setmaxnreg" and "Asynchronous Warpgroup Level Matrix Instructions".

using u16 = unsigned short;

// 128 opaque bytes made by cuTensorMapEncodeTiled on the host, passed by value.
struct alignas(64) TensorMap { char bytes[128]; };

__device__ inline u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// -- mbarrier: counts arrivals and outstanding bytes; has a phase bit -----------------------------
// A barrier completes phases of parity 0, 1, 0, ...; wait(parity) returns once the phase of that
// parity is complete. A new barrier behaves as if a phase of parity 1 had just completed.
__device__ inline void barrier_init(u64* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ inline void barrier_init_fence() {  // makes the barriers visible to TMA too
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(shared_address(bar)) : "memory");
}
__device__ inline void arrive_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ inline void wait(u64* bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
    } while (!done);
}

// -- named barriers: 0 is __syncthreads; 1 to 15 are the kernels' own -----------------------------
__device__ inline void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// -- clusters of blocks ---------------------------------------------------------------------------
// Waits for all threads of the cluster that have not exited, and makes their writes to shared
// memory visible.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Loads a float from another block's shared memory, at the same offset as `address` in this
// block's.
__device__ inline float load_from(u32 address, int block) {
    float x;
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %1, %2;\n"
                 "ld.shared::cluster.f32 %0, [there];\n}"
                 : "=f"(x) : "r"(address), "r"(block) : "memory");
    return x;
}

// -- TMA ------------------------------------------------------------------------------------------
// A tensor map of packed sequences has one more axis, on which every box has this coordinate. The
// stride to it wraps around 64 bits, back by as many rows (tensor_maps.py).
[[maybe_unused]] constexpr int ROUND = 1 << 30;

// Copies one box of a (d, n, head, batch) tensor to shared memory. Elements outside the tensor are
// not fetched and arrive as zeros. `bar` is credited with the bytes of the whole box.
__device__ inline void copy_box(void* to, const TensorMap* map, u64* bar, int column, int row,
                                int head, int batch) {
#if FS_VARLEN
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %7, %6}], [%2];"
#else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
#endif
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(bar)),
                    "r"(column), "r"(row), "r"(head), "r"(batch), "r"(ROUND) : "memory");
}
// As copy_box, of a (d, query head of the group, n, KV head, batch) tensor. A box has all heads of
// the group, so row r of shared memory is query r / FS_PACK of head r % FS_PACK.
__device__ inline void copy_box_of_group(void* to, const TensorMap* map, u64* bar, int column,
                                         int query, int kv_head, int batch) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %7, %4, %5, %6}], [%2];"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(bar)),
                    "r"(column), "r"(query), "r"(kv_head), "r"(batch), "r"(0) : "memory");
}
// As copy_box, of a (column, 2, 4, n / 8, plane) tensor: each eight rows arrive in the order 0, 4,
// 1, 5, 2, 6, 3, 7. `eight` is the number of the first eight rows.
__device__ inline void copy_interleaved_box(void* to, const TensorMap* map, u64* bar, int column,
                                            int eight, int plane) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %6, %7, %4, %5}], [%2];"
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(bar)),
                    "r"(column), "r"(eight), "r"(plane), "r"(0), "r"(0) : "memory");
}
// As copy_box, to the same offset in every block of a cluster of `blocks` and to each block's
// barrier.
__device__ inline void copy_box_to_all(void* to, const TensorMap* map, u64* bar, int column,
                                       int row, int head, int batch, int blocks) {
#if FS_VARLEN
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %7, %6}], [%2], %8;"
#else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %8;"
#endif
                 :: "r"(shared_address(to)), "l"(map), "r"(shared_address(bar)),
                    "r"(column), "r"(row), "r"(head), "r"(batch), "r"(ROUND),
                    "h"(static_cast<u16>((1 << blocks) - 1)) : "memory");
}
// Adds one float32 box in shared memory to a (d, n, head, batch) tensor. L2 performs the additions;
// elements outside the tensor are dropped.
__device__ inline void reduce_box(const TensorMap* map, const void* from, int column, int row,
                                  int head, int batch) {
#if FS_VARLEN
    asm volatile("cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3, %4, %6, %5}], [%1];"
#else
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];"
#endif
                 :: "l"(map), "r"(shared_address(from)), "r"(column), "r"(row), "r"(head),
                    "r"(batch), "r"(ROUND) : "memory");
}
// Stores one box; what is outside the tensor does not change.
__device__ inline void store_box(const TensorMap* map, const void* from, int column, int row,
                                 int head, int batch) {
#if FS_VARLEN
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4, %6, %5}], [%1];"
#else
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];"
#endif
                 :: "l"(map), "r"(shared_address(from)), "r"(column), "r"(row), "r"(head),
                    "r"(batch), "r"(ROUND) : "memory");
}
__device__ inline void reduce_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void reduce_wait_read() {  // the buffers that this thread sent may be overwritten
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void reduce_wait() {  // this thread's additions are complete
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Makes this thread's ordinary writes to shared memory visible to wgmma and to TMA.
__device__ inline void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8 x 8 blocks of 16-bit elements to shared memory: lane i passes the address of row i
// % 8 of block i / 8.
__device__ inline void store_matrices(u32 to, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// As store_matrices, with each block transposed.
__device__ inline void store_transposed(u32 to, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// Returns an 8 x 8 block of 16-bit elements transposed; each lane holds two neighbours of a row.
__device__ inline u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ inline void store_float(u32 to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(x) : "memory");
}
__device__ inline void store_pair(u32 to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(x), "f"(y) : "memory");
}
// Emits no instruction. The compiler forgets what x is, and recomputes what depends on it.
__device__ inline void opaque(u32& x) { asm volatile("" : "+r"(x)); }

// -- setmaxnreg moves registers from the producer to the consumers --------------------------------
template <int N> __device__ inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}
template <int N> __device__ inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

// -- wgmma (the products themselves are in wgmma.cuh) ---------------------------------------------
// orders earlier accesses to registers and shared memory before the product's
__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// waits for all but the last PENDING groups
template <int PENDING> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
// Emits no instruction. Tells the compiler that the registers change here, since wgmma writes them
// asynchronously.
template <int N> __device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i]) :: "memory");
}

// A tile in shared memory consists of chunks of 64 16-bit columns. Row r of a chunk is the 128
// bytes at r * 128, with its eight 16-byte pieces permuted by r % 8: the 128-byte swizzle, as TMA
// writes it. wgmma's matrix descriptor, in units of 16 bytes: bits 0-13 start; 16-29 leading
// offset; 32-45 stride offset; 62-63 = 1 for the 128-byte swizzle.
// K-major (k runs along a row): stride = 8 rows = 1024 B, leading unused. The next 16 k are 32 B
// further; the next 64 k are in the next chunk.
// MN-major (k runs down the rows): stride = 8 rows = 1024 B, leading = one chunk (the next 64
// columns). The next 16 k are 16 rows = 2048 B further.
// A tile whose width is no multiple of 64 may consist of chunks of 16 columns, with the 32-byte
// swizzle (3 in bits 62-63): row r is the 32 bytes at r * 32, with its two pieces swapped if r / 4
// is odd; stride = 8 rows = 256 B.
// Offsets are added to all 64 bits, although only the low half varies: if the two halves were
// joined per product, ptxas would move both each time.
constexpr u64 SWIZZLE_128 = u64(1024 >> 4 | 1u << 30) << 32;
[[maybe_unused]] constexpr u64 SWIZZLE_32 = u64(256 >> 4 | 3u << 30) << 32;
__device__ inline u64 descriptor(const void* tile, u32 leading_bytes, u64 swizzle = SWIZZLE_128) {
    return swizzle | (shared_address(tile) & 0x3FFFF) >> 4 | leading_bytes >> 4 << 16;
}
// Offset of 16 `x` further k, in descriptor units.
__device__ inline constexpr u32 along_row(int x, int rows) {
    return (x / 4 * rows * 128 + x % 4 * 32) / 16;
}
__device__ inline constexpr u32 down_rows(int x) { return x * 2048 / 16; }
