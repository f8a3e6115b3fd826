// Flash-decoding of latent attention (MLA: DeepSeek-V2, arXiv:2405.04434, as in FlashMLA): V is the
// first columns of K, so one load of a tile serves both, and all heads share it. A block processes
// a range of key tiles for 64 packed rows (row = query * group + head). Two pairs of warps load
// alternate tiles by cp.async, with pages of any size, each pair into its own stage. The first
// consumer warpgroup computes the scores and their softmax. It and the second one each hold half of
// the columns of O, 64 x FS_DV / 2, in registers; P passes to the second through shared memory. The
// O and LSE of each split go to HBM in float32, and decode_merge.cu merges them.
#include "tile_scheduler.cuh"
#include "softmax.cuh"
#include "decode_args.cuh"

constexpr int D = FS_D, DV = FS_DV, PAGE = FS_PAGE, WIDTH = FS_HEAD_DIM_V, HALF = DV / 2;
constexpr int ROWS = 64, BLOCK_K = 64, STAGES = 2, CHUNKS = D / 64, THREADS = 384;
constexpr int CHUNK = 64 * 64;                   // elements of 64 rows by 64 columns
constexpr int PIECES = KeyRow::WIDTH / 8;        // 16-byte pieces of a row in HBM
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
static_assert(FS_BLOCK_Q == ROWS && FS_BLOCK_K == BLOCK_K && D % 64 == 0, "see decode_kernels.py");
static_assert(DV % 128 == 0 && DV <= D && DV <= 512, "each warpgroup has chunks of its own");

struct OnChip {  // the launcher asks for exactly sizeof(OnChip) bytes
    alignas(1024) u16 q[CHUNKS][CHUNK];
    alignas(1024) u16 k[STAGES][CHUNKS][CHUNK];  // one stage per pair of producer warps
    alignas(1024) u16 p[CHUNK];                  // P of one tile, for the second warpgroup
    float alpha[ROWS];                           // factor of its O per visit
    float inverse[ROWS];                         // factor of its O at the end
    u64 full[STAGES], empty[STAGES];  // barriers of k; empty: no product reads it any more
    u32 bad;  // whether the page table names a page that does not exist
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "decode_kernels.py and OnChip must agree");

// Named barriers between the two consumer warpgroups. P_FULL: p and alpha (at the end `inverse`)
// are written. P_EMPTY: both are read. Q_FULL: the rows of q that each warpgroup copied are
// complete.
constexpr int P_FULL = 1, P_EMPTY = 2, Q_FULL = 3;

struct Block {  // what a block owns
    int kv_head, row_tile, number, batch, first_tile, tiles, slot, splits, length;
    int rows, row0, n_rows, offset;
    u32 *visit_count, *item_count;

    __device__ explicit Block(const DecodeArgs& a) {
        // row tiles of a split run together: L2 has their keys
        row_tile = blockIdx.x % a.row_tiles;
        kv_head = blockIdx.x / a.row_tiles % a.kv_heads;
        number = blockIdx.x / a.row_tiles / a.kv_heads;
        const int4 item = a.items[number * 2], sequence = a.items[number * 2 + 1];
        batch = item.x, first_tile = item.y, tiles = item.z - item.y, slot = item.w;
        splits = sequence.y, length = sequence.z;
        rows = a.n_q * a.group, row0 = row_tile * ROWS, n_rows = min(ROWS, rows - row0);
        offset = length - a.n_q;
        const i64 walk = (i64(batch) * a.kv_heads + kv_head) * a.row_tiles + row_tile;
        visit_count = a.visit_counts + (walk * a.n_visits + first_tile) * 8;
        item_count =
            a.item_counts + ((i64(number) * a.kv_heads + kv_head) * a.row_tiles + row_tile) * 8;
    }
    __device__ int head(const DecodeArgs& a, int r) const {
        return kv_head * a.group + (row0 + r) % a.group;
    }
    __device__ int query(const DecodeArgs& a, int r) const { return (row0 + r) / a.group; }
};

// pads to 16 bytes with zeros
__device__ inline void cp_async(u32 to, const char* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Starts copying a row to its place in a tile of chunks: eight neighbouring threads copy 128 bytes.
// Returns this thread's bytes.
__device__ inline u32 copy_row(u32 tile, int row, const char* from, bool exists) {
    const int piece = threadIdx.x % 8;
    const u32 to = tile + row * 128 + ((piece ^ row % 8) << 4);
    u32 bytes = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const bool inside = exists && (PIECES == D / 8 || c * 8 + piece < PIECES);
        cp_async(to + c * CHUNK * 2, from + (inside ? (c * 64 + piece * 8) * 2 : 0),
                 inside ? 16 : 0);
        bytes += inside ? KeyRow::bytes(c * 8 + piece) : 0;
    }
    return bytes;
}

// A pair of warps loads every other tile into its stage.
__device__ void produce(OnChip& s, const DecodeArgs& a, const Block& b) {
    constexpr int AT_ONCE = 8;  // rows that the pair copies at once, with eight threads each
    const int stage = threadIdx.x / 64, group = threadIdx.x % 64 / 8;
    const char* k = a.k.data + (b.kv_head * a.k.head + (PAGE ? 0 : b.batch * a.k.batch)) * 2;
    const int* table = a.table + i64(b.batch) * a.table_row;
    const u32 tile = shared_address(s.k[stage][0]);
    // addresses of a tile's rows, computed while the previous tile loads
    const char* rows[BLOCK_K / AT_ONCE];
    auto find_rows = [&](int n) {
        const int first = (b.first_tile + n) * BLOCK_K, count = min(BLOCK_K, b.length - first);
        int pages[BLOCK_K / AT_ONCE];
        u32 bytes = 0;
#pragma unroll
        for (int e = 0; e < BLOCK_K / AT_ONCE; ++e) {
            const int row = e * AT_ONCE + group;
            pages[e] = PAGE && row < count ? table[(first + row) / max(PAGE, 1)] : 0;
            const bool opens = row == 0 || (first + row) % max(PAGE, 1) == 0;
            bytes += row < count && opens && threadIdx.x % 8 == 0 ? 4 : 0;
        }
        if (PAGE && n < b.tiles) report(b.visit_count + n * 8 + 2, bytes);
        // If the page table names a page that does not exist, page 0 is read instead, and all
        // results become NaN.
        bool bad = false;
#pragma unroll
        for (int e = 0; e < BLOCK_K / AT_ONCE; ++e) {
            const int row = first + e * AT_ONCE + group;
            const bool known = !PAGE || u32(pages[e]) < u32(a.pages);
            bad |= !known;
            rows[e] = k + (PAGE ? (known ? pages[e] : 0) * a.k.batch + row % max(PAGE, 1) * a.k.row
                                : row * a.k.row) * 2;
        }
        if (bad) s.bad = 1;
    };
    u32 parity = 1;
    find_rows(stage);
    for (int n = stage; n < b.tiles; n += STAGES, parity ^= 1) {
        const int count = min(BLOCK_K, b.length - (b.first_tile + n) * BLOCK_K);
        wait(&s.empty[stage], parity);  // its last readers are done
        u32 bytes = 0;
#pragma unroll
        for (int e = 0; e < BLOCK_K / AT_ONCE; ++e) {
            const int row = e * AT_ONCE + group;
            bytes += copy_row(tile, row, row < count ? rows[e] : k, row < count);
        }
        find_rows(n + STAGES);
        report(b.visit_count + n * 8, bytes);
        cp_async_wait();
        fence_async_shared();  // makes the copies visible to the tensor cores
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&s.full[stage]);
    }
}

// Issues and commits S = Q K^T without waiting.
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_K / 2], const u16* q, const u16* k) {
    const u64 dq = descriptor(q, 0), dk = descriptor(k, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D / 16; ++x)
        wgmma_ss<0, 0>(S, dq + along_row(x, ROWS), dk + along_row(x, BLOCK_K), x > 0);
    wgmma_commit();
}

// Scales and caps the scores (if the exponent cannot apply the scale), and masks them (if the tile
// needs it).
__device__ __forceinline__ void shape_scores(float (&S)[BLOCK_K / 2], const DecodeArgs& a,
                                             const Block& b, int n) {
#if FS_SCALED
#pragma unroll
    for (int e = 0; e < BLOCK_K / 2; ++e) {
        const float y = S[e] * a.scale;
        S[e] = FS_SOFTCAP ? a.softcap * fast_tanh(y / a.softcap) : y;
    }
#endif
    const int first = (b.first_tile + n) * BLOCK_K;
    if (first + BLOCK_K <= b.length && !FS_LEFT &&
        !(FS_RIGHT && first + BLOCK_K > b.offset + 1 + a.right))
        return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int query = b.query(a, fragment_row() + 8 * r);
        int hi = b.length - 1;
        if (FS_RIGHT) hi = min(hi, query + b.offset + a.right);
        const int lo = FS_LEFT ? query + b.offset - a.left : 0;
#pragma unroll
        for (int e = 0; e < BLOCK_K / 2; ++e) {
            const int key = first + fragment_column() + e / 4 * 8 + e % 2;
            if (e / 2 % 2 == r && (key > hi || (FS_LEFT && key < lo))) S[e] = NEG_INF;
        }
    }
}

// Multiplies the rows of O by alpha; with an unchanged maximum, which is common, alpha is 1.
__device__ __forceinline__ void rescale(float (&O)[HALF / 2], float top, float bottom) {
    if (!__any_sync(~0u, top != 1.0f || bottom != 1.0f)) return;
#pragma unroll
    for (int e = 0; e < HALF / 2; ++e) O[e] *= e / 2 % 2 ? bottom : top;
}

// Stores this thread's part of the block's results: two rows, half of the columns.
__device__ void store(const DecodeArgs& a, const Block& b, const float (&O)[HALF / 2], int half,
                      float top, float bottom) {
    u32 o_bytes = 0, part_bytes = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = fragment_row() + 8 * r;
        const bool exists = row < b.n_rows;
        const float factor = r ? bottom : top;
        if (b.splits == 1) {
            o_bytes += store_row<ValueRow>(a.o, b.batch, b.head(a, row), b.query(a, row), O, r,
                                           factor, exists, half * HALF);
        } else if (exists) {
            const i64 at = (i64(b.slot) * a.kv_heads + b.kv_head) * b.rows + b.row0 + row;
#pragma unroll
            for (int c = 0; c < HALF / 8; ++c) {
                const int column = half * HALF + c * 8 + fragment_column();
                if (column < WIDTH) {
                    *reinterpret_cast<float2*>(a.o_part + at * WIDTH + column) =
                        float2{O[c * 4 + r * 2] * factor, O[c * 4 + r * 2 + 1] * factor};
                    part_bytes += ValueRow::counted(WIDTH - column, 2) * 4;
                }
            }
        }
    }
    __syncwarp();
    report(b.item_count + 1, part_bytes), report(b.item_count + 3, o_bytes);
}

// The first consumer warpgroup: scores, softmax, and the left half of O.
__device__ void consume_left(OnChip& s, const DecodeArgs& a, const Block& b) {
    const float to_log2 = FS_SCALED ? LOG2E : a.scale * LOG2E;  // exponents in base 2
    const int lane = threadIdx.x % 32, row = fragment_row();
    const bool speaks = lane == 0;
    // Where this lane's row of four 8 x 8 blocks of P lies, before the swizzle.
    const int p_row = threadIdx.x / 32 % 4 * 16 + lane % 16, p_piece = lane / 16;
    const u32 p_at = shared_address(s.p) + p_row * 128;
    Softmax<BLOCK_K> softmax;
    float O[HALF / 2] = {}, S[BLOCK_K / 2], alpha[2];
    u32 P[BLOCK_K / 16][4];
    if (b.tiles > 0) {
        wait(&s.full[0], 0);
        issue_scores(S, s.q[0], s.k[0][0]);
        wgmma_wait<0>();
        pin(S);
    }
#pragma unroll 1
    for (int n = 0; n < b.tiles; ++n) {
        const int stage = n % STAGES;
        shape_scores(S, a, b, n);
        softmax(S, alpha, to_log2);
        round_operand(P, S);
        if (n > 0) named_sync(P_EMPTY, 256);  // the other warpgroup has read the last P
#pragma unroll
        for (int x = 0; x < BLOCK_K / 16; ++x)
            store_matrices(p_at + ((2 * x + p_piece ^ p_row % 8) << 4), P[x]);
        if (lane % 4 == 0) s.alpha[row] = alpha[0], s.alpha[row + 8] = alpha[1];
        fence_async_shared();
        named_arrive(P_FULL, 256);
        rescale(O, alpha[0], alpha[1]);
        const u64 dv = descriptor(s.k[stage][0], CHUNK * 2);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < BLOCK_K / 16; ++x) wgmma_rs<1>(O, P[x], dv + down_rows(x), 1);
        wgmma_commit();
        if (n + 1 < b.tiles) {
            wait(&s.full[stage ^ 1], (n + 1) / STAGES & 1);
            issue_scores(S, s.q[0], s.k[stage ^ 1][0]);
            wgmma_wait<1>();
            pin(O);
            if (speaks) arrive(&s.empty[stage]);
            wgmma_wait<0>();
            pin(S);
        } else {
            wgmma_wait<0>();
            pin(O);
        }
    }
    float inverse[2];
    u32 l_bytes = 0, l_part_bytes = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float l = softmax.l[r];
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        if (PAGE && *reinterpret_cast<volatile u32*>(&s.bad)) l = __int_as_float(0x7fffffff);
        inverse[r] = l == 0.0f ? 0.0f : 1.0f / l;  // no key: O = 0, LSE = -inf
        const float lse = l == 0.0f ? NEG_INF : softmax.m[r] * (to_log2 / LOG2E) + logf(l);
        if (lane % 4 == 0) {
            const int at = row + 8 * r;
            s.inverse[at] = inverse[r];
            if (at < b.n_rows && b.splits == 1) {
                a.lse[(i64(b.batch) * a.heads + b.head(a, at)) * a.n_q + b.query(a, at)] = lse;
                l_bytes += 4;
            } else if (at < b.n_rows) {
                a.l_part[(i64(b.slot) * a.kv_heads + b.kv_head) * b.rows + b.row0 + at] = lse;
                l_part_bytes += 4;
            }
        }
    }
    named_arrive(P_FULL, 256);
    store(a, b, O, 0, inverse[0], inverse[1]);
    report(b.item_count + 2, l_part_bytes), report(b.item_count + 4, l_bytes);
}

// The second consumer warpgroup: the right half of O.
__device__ void consume_right(OnChip& s, const DecodeArgs& a, const Block& b) {
    const bool speaks = threadIdx.x % 32 == 0;
    const int row = fragment_row();
    float O[HALF / 2] = {};
#pragma unroll 1
    for (int n = 0; n < b.tiles; ++n) {
        const int stage = n % STAGES;
        wait(&s.full[stage], n / STAGES & 1);
        named_sync(P_FULL, 256);
        rescale(O, s.alpha[row], s.alpha[row + 8]);
        const u64 dp = descriptor(s.p, 0);
        const u64 dv = descriptor(s.k[stage][HALF / 64], CHUNK * 2);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < BLOCK_K / 16; ++x)
            wgmma_ss<0, 1>(O, dp + along_row(x, ROWS), dv + down_rows(x), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(O);
        if (n + 1 < b.tiles) named_arrive(P_EMPTY, 256);
        if (speaks) arrive(&s.empty[stage]);
    }
    named_sync(P_FULL, 256);
    store(a, b, O, 1, s.inverse[row], s.inverse[row + 8]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash_decode_latent(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    const Block b(a);
    let_what_runs_next_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&s.full[i], 2), barrier_init(&s.empty[i], 8);
        s.bad = 0;
        barrier_init_fence();
    }
    wait_for_what_ran_before();
    const int role = take_role<PRODUCER_REGISTERS, CONSUMER_REGISTERS>();
    if (role == 0) {
        produce(s, a, b);
        return;
    }
    // -- Q, copied by the consumers: 32 rows at a time --------------------------------------------
    u32 q_bytes = 0;
#pragma unroll
    for (int e = 0; e < ROWS / 32; ++e) {
        const int row = e * 32 + (threadIdx.x - 128) / 8;
        const bool exists = row < b.n_rows;
        const char* from =
            exists ? a.q.at(b.batch, b.head(a, row), b.query(a, row)) : a.q.data;
        q_bytes += copy_row(shared_address(s.q[0]), row, from, exists);
    }
    report(b.item_count, q_bytes);
    cp_async_wait();
    fence_async_shared();
    named_sync(Q_FULL, 256);
    if (role == 1) consume_left(s, a, b);
    else consume_right(s, a, b);
}
