// FlashAttention-3 forward in FP8 (arXiv:2407.08608, section 3.3) for Hopper: Q, K and V^T of 8-bit
// floats with float32 scales; bfloat16 output, float32 LSE. As in forward.cu, one producer thread
// fills rings of K and V^T tiles, and each consumer warpgroup owns 64 query rows. The differences:
//
// - FP8 products need both operands K-major, so V is stored transposed. Its keys are permuted
// within each sixteen (quantize.cu), so that packed scores in an accumulator are an operand of P.
// - P = 2^8 exp2(s - m) in e4m3, whose largest number is 448 and whose smallest is 2^-9; l is
// scaled alike.
// - The tensor cores add FP8 products with about 14 bits, since each addition truncates the
// accumulator. So an accumulator holds the products of one visit only: O = alpha O + P V in
// float32, with the instructions that the rescaling of O needs anyway.
// - A warpgroup's own products do not run during its softmax, which would need more registers. The
// products of the other warpgroups do (ping-pong scheduling).
#include "tile_scheduler.cuh"
#include "softmax.cuh"
#include "pack_fp8.cuh"
#include "wgmma_fp8.cuh"

using u8 = unsigned char;
constexpr int D = FS_D, DV = FS_DV, BLOCK_Q = FS_BLOCK_Q, BLOCK_K = FS_BLOCK_K, STAGES = FS_STAGES;
constexpr int WARPGROUPS = BLOCK_Q / 64;  // consumers
constexpr int CHUNKS = (D + 127) / 128;   // of 128 columns each
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr float LN2 = 1.0f / LOG2E;
constexpr int P_BITS = 8;  // P is stored times 2^8
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
static_assert(registers_suffice<THREADS>(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "or all hang");
static_assert(BLOCK_Q == 128 || BLOCK_Q == 192, "two or three warpgroups of 64 rows");

constexpr int CHUNKS_V = BLOCK_K / 128;   // of 128 keys each
static_assert(BLOCK_K % 128 == 0 && D % 32 == 0, "wgmma's shapes");
// Columns of V per product: two such accumulators fit beside O.
constexpr int SLICE = DV < FS_SLICE ? DV : FS_SLICE;
static_assert(DV % SLICE == 0, "whole slices");

struct OnChip {
    alignas(1024) u8 q[WARPGROUPS][CHUNKS][64 * 128];     // lives for one work tile
    alignas(1024) u8 k[STAGES][CHUNKS][BLOCK_K * 128];    // ring; a stage lives for one visit
    alignas(1024) u8 v[STAGES][CHUNKS_V][DV * 128];       // ring; a stage lives for one visit
    // Full: TMA has written the tile. Empty: the product that reads the tile is complete: the
    // scores for Q and K, the output for V.
    u64 q_full[WARPGROUPS], q_empty[WARPGROUPS];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    // with K: its scale and V's; with Q: x is Q's scale
    float2 kv_scale[STAGES], q_scale[WARPGROUPS];
    Items items;
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "hopper_fp8.py and OnChip must agree");

// Granularity of an input's scales: one for the tensor, per head, or per ROWS rows of a head; or
// none.
enum Scales { TENSOR, HEAD, BLOCK, NONE };
constexpr Scales SCALES = static_cast<Scales>(FS_SCALES);
// Returns the scale of row `row` of head `walk` of `walks`, each of which has `n` rows.
template <int ROWS>
__device__ __forceinline__ float scale_of(const float* scales, int walk, int row, int n) {
    if (SCALES == NONE) return 1.0f;
    if (SCALES == TENSOR) return __ldg(scales);
    if (SCALES == HEAD) return __ldg(scales + walk);
    return __ldg(scales + walk * ((n + ROWS - 1) / ROWS) + row / ROWS);
}
// Slots of the report: the schedule's transfers in order. Without scales, the scales' slots are
// absent.
constexpr int K_SCALE = 1, V = SCALES == NONE ? 1 : 2, V_SCALE = 3;
constexpr int Q_SCALE = 1, O_OUT = SCALES == NONE ? 1 : 2, LSE_OUT = O_OUT + 1;

// Starts TMA copies of a tile, 128 bytes of each row per box, and credits `bar` with its bytes.
template <int N, int BYTES>
__device__ inline void copy_chunks(u8 (&to)[N][BYTES], const TensorMap* map, u64* bar, int column,
                                   int row, int head, int batch) {
#pragma unroll 1
    for (int c = 0; c < N; ++c) copy_box(to[c], map, bar, column + 128 * c, row, head, batch);
}

__device__ void produce(OnChip& s, const Args& a, const TensorMap* map_q, const TensorMap* map_k,
                        const TensorMap* map_v, u32* counter) {
    Ring ring_k, ring_v, slot;
    u32 q_parity = 0;
    const int items = a.walks * a.tiles;
    for (int w = first_work();; w = next_work(counter, items)) {
        const Item& it = s.items.write(slot, a, w, items, true);
        if (it.walk < 0) return;
        const int head = it.walk % a.heads, batch = it.walk / a.heads, kv_head = head / a.group;
        const int kv_walk = batch * (a.heads / a.group) + kv_head, n = it.visits.count;
        const i64 first = i64(it.walk) * a.n_visits + it.visits.first;
        stamp_item(a, it.walk, it.outer, false);
        // in the order in which consumers need them: K0 Q, K1 V0, K2 V1, ...
        for (int v = 0; v <= n; ++v) {
            if (v < n) {
                const int key = it.base + it.visits(a, v).tile * BLOCK_K;
                u64* stamps = visit_stamps(a, first + v);
                stamp(stamps, 0);
                const float k_scale = scale_of<FS_SCALE_KEYS>(a.k_scale, kv_walk, key, a.n_kv);
                const float v_scale = scale_of<FS_SCALE_KEYS>(a.v_scale, kv_walk, key, a.n_kv);
                wait(&s.k_empty[ring_k.stage], ring_k.parity ^ 1);  // its last reader is done
                stamp(stamps, 1);
                s.kv_scale[ring_k.stage] = make_float2(k_scale, v_scale);
                arrive_expect(&s.k_full[ring_k.stage], sizeof(s.k[0]));
                copy_chunks(s.k[ring_k.stage], map_k, &s.k_full[ring_k.stage], 0, key,
                            kv_head, batch);
                ring_k.next(STAGES);
                u32* counts = a.visit_counts + (first + v) * 8;
                report_one(counts, min(BLOCK_K, it.end - key) * FS_COUNTED);
                if (SCALES != NONE) {
                    report_one(counts + K_SCALE, 4), report_one(counts + V_SCALE, 4);
                }
            }
            if (v > 0) {
                const int key = it.base + it.visits(a, v - 1).tile * BLOCK_K;
                wait(&s.v_empty[ring_v.stage], ring_v.parity ^ 1);  // its last reader is done
                arrive_expect(&s.v_full[ring_v.stage], sizeof(s.v[0]));
                copy_chunks(s.v[ring_v.stage], map_v, &s.v_full[ring_v.stage], key, 0,
                            kv_head, batch);
                stamp(visit_stamps(a, first + v - 1), 4);
                ring_v.next(STAGES);
                report_one(a.visit_counts + (first + v - 1) * 8 + V,
                           min(BLOCK_K, it.end - key) * FS_COUNTED_V);
            } else {
#pragma unroll 1
                for (int g = 0; g < WARPGROUPS; ++g) {
                    // the scores of the last work tile are complete
                    wait(&s.q_empty[g], q_parity ^ 1);
                    const int row = min(it.own.start + 64 * g, a.n_q - 1);
                    s.q_scale[g].x = scale_of<FS_SCALE_QUERIES>(a.q_scale, it.walk, row, a.n_q);
                    arrive_expect(&s.q_full[g], sizeof(s.q[0]));
                    copy_chunks(s.q[g], map_q, &s.q_full[g], 0, it.own.start + 64 * g,
                                head, batch);
                }
                q_parity ^= 1;
                u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
                report_one(counts, (it.own.stop - it.own.start) * FS_COUNTED);
                if (SCALES == BLOCK) {
                    const int from = it.own.start / FS_SCALE_QUERIES;
                    report_one(counts + Q_SCALE,
                               4 * ((it.own.stop - 1) / FS_SCALE_QUERIES - from + 1));
                } else if (SCALES != NONE) {
                    report_one(counts + Q_SCALE, 4);
                }
            }
        }
        stamp_item(a, it.walk, it.outer, true);
    }
}

// Issues and commits S = Q K^T without waiting; `dk` is K's descriptor.
__device__ __forceinline__ void issue_scores(float (&S)[BLOCK_K / 2], const u8* q, u64 dk) {
    const u64 dq = descriptor(q, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < D / 32; ++x)
        wgmma_qk(S, dq + along_row(x, 64), dk + along_row(x, BLOCK_K), x > 0);
    wgmma_commit();
}

// Issues and commits T = P V for columns `first` to `first` + N of V, without waiting.
template <int N>
__device__ __forceinline__ void issue_output(float (&T)[N / 2], const u32 (&P)[BLOCK_K / 32][4],
                                             const u8* v, int first) {
    const u64 dv = descriptor(v, 0);
    wgmma_fence();
#pragma unroll
    for (int x = 0; x < BLOCK_K / 32; ++x)
        wgmma_pv(T, P[x], dv + along_row(x, DV) + first * 128 / 16, x > 0);
    wgmma_commit();
}

// Of 16 columns of scores, a thread holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a row. As an
// operand these are k = 4t to 4t + 3; V^T has its keys in this order.
__device__ __forceinline__ void round_operand_fp8(u32 (&P)[BLOCK_K / 32][4],
                                                  const float (&S)[BLOCK_K / 2]) {
#pragma unroll
    for (int x = 0; x < BLOCK_K / 32; ++x)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int e = 16 * x + 8 * (i / 2) + 2 * (i % 2);
            P[x][i] = pack_fp8<false>(S[e], S[e + 1], S[e + 4], S[e + 5]);
        }
}

// O = alpha O + T; `first` is T's first column.
template <int N>
__device__ __forceinline__ void flush(float (&O)[DV / 2], const float (&T)[N / 2], int first,
                                      const float (&alpha)[2]) {
#pragma unroll
    for (int e = 0; e < N / 2; ++e) {
        float& o = O[first / 2 + e];
        o = o * alpha[e / 2 % 2] + T[e];
    }
}

// O = alpha O + P V, SLICE columns of V at a time; the next slice's product runs meanwhile.
__device__ __forceinline__ void add_output(float (&O)[DV / 2], const u32 (&P)[BLOCK_K / 32][4],
                                           const u8* v, const float (&alpha)[2]) {
    constexpr int SLICES = DV / SLICE;
    float T[2][SLICE / 2];
    issue_output<SLICE>(T[0], P, v, 0);
#pragma unroll
    for (int x = 0; x < SLICES; ++x) {
        if (x + 1 < SLICES) {
            issue_output<SLICE>(T[(x + 1) % 2], P, v, (x + 1) * SLICE);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        pin(T[x % 2]);
        flush<SLICE>(O, T[x % 2], x * SLICE, alpha);
    }
}

__device__ void consume(OnChip& s, const Args& a, int g) {
    const int lane = threadIdx.x % 32;
    const bool speaks = lane == 0;                                 // one arrival per warp
    const int turn = 1 + g, next_turn = 1 + (g + 1) % WARPGROUPS;  // named barriers
    Ring ring_k, ring_v, slot;
    u32 q_parity = 0;
    if (g == WARPGROUPS - 1) named_arrive(next_turn, 256);  // warpgroup 0 goes first
    while (true) {
        const Item it = s.items.read(slot);
        if (it.walk < 0) return;
        const int n = it.visits.count, query = it.own.start + 64 * g + fragment_row();
        const int head = it.walk % a.heads, batch = it.walk / a.heads;
        const i64 first = i64(it.walk) * a.n_visits + it.visits.first;
        stamp_item(a, it.walk, it.outer, false);
        Softmax<BLOCK_K, true, P_BITS> softmax;  // c includes the scales of Q and K
        float O[DV / 2], alpha[2], v_scale = 1.0f;
#pragma unroll
        for (int e = 0; e < DV / 2; ++e) O[e] = 0.0f;

        wait(&s.q_full[g], q_parity);
        q_parity ^= 1;
        const float to_log2 = a.scale * LOG2E * s.q_scale[g].x;
        if (n > 0) {
            u32 P[BLOCK_K / 32][4];
            // Products of warpgroups alternate: a warpgroup's turn is the output of a visit and the
            // scores of the next visit. Its softmax runs during the others' turns.
            named_sync(turn, 256);
#pragma unroll 1
            for (int v = 0; v < n; ++v) {
                {
                    float S[BLOCK_K / 2];
                    stamp(visit_stamps(a, first + v), 0);
                    wait(&s.k_full[ring_k.stage], ring_k.parity);
                    stamp(visit_stamps(a, first + v), 1);
                    issue_scores(S, s.q[g][0], descriptor(s.k[ring_k.stage][0], 0));
                    named_arrive(next_turn, 256);
                    const float2 scales = s.kv_scale[ring_k.stage];
                    const float ratio = SCALES == BLOCK ? __fdividef(v_scale, scales.y) : 1.0f;
                    v_scale = scales.y;
                    wgmma_wait<0>();
                    pin(S);
                    if (speaks) arrive(&s.k_empty[ring_k.stage]);
                    // the next work tile's Q may be loaded
                    if (v == n - 1 && speaks) arrive(&s.q_empty[g]);
                    ring_k.next(STAGES);
                    stamp(visit_stamps(a, first + v), 2);
                    mask_scores(S, a, it, it.visits(a, v), query);
                    softmax(S, alpha, to_log2 * scales.x);
                    alpha[0] *= ratio, alpha[1] *= ratio;
                    round_operand_fp8(P, S);
                    stamp(visit_stamps(a, first + v), 3);
                }
                wait(&s.v_full[ring_v.stage], ring_v.parity);
                named_sync(turn, 256);
                add_output(O, P, s.v[ring_v.stage][0], alpha);
                if (speaks) arrive(&s.v_empty[ring_v.stage]);
                stamp(visit_stamps(a, first + v), 4);
                ring_v.next(STAGES);
            }
            named_arrive(next_turn, 256);
        } else if (speaks) {
            arrive(&s.q_empty[g]);
        }

        // -- O / l and L = m + log l, straight from registers -------------------------------------
        u32 o_bytes = 0, lse_bytes = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float l = softmax.l[r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const int row = query + 8 * r;
            const bool exists = row < it.own.stop;
            if (exists && lane % 4 == 0) {
                a.lse[i64(it.walk) * a.n_q + row] =
                    l == 0.0f ? NEG_INF : (softmax.m[r] - P_BITS) * LN2 + __logf(l);
                lse_bytes += 4;
            }
            const float inverse = l == 0.0f ? 0.0f : __fdividef(v_scale, l);
            o_bytes += store_row<ValueRow>(a.o, batch, head, row, O, r, inverse, exists);
        }
        u32* counts = a.tile_counts + (i64(it.walk) * a.tiles + it.outer) * 8;
        report(counts + O_OUT, o_bytes), report(counts + LSE_OUT, lse_bytes);
        stamp_item(a, it.walk, it.outer, true);
        __syncwarp();  // see forward.cu
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_forward_fp8(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ Args a,
                   u32* counter) {
    extern __shared__ __align__(1024) char shared[];
    OnChip& s = *reinterpret_cast<OnChip*>(shared);
    if (threadIdx.x == 0) {
        init_rings<WARPGROUPS, STAGES>(s);
    }
    const int role = take_role<PRODUCER_REGISTERS, CONSUMER_REGISTERS>();
    if (role == 0) {
        if (threadIdx.x == 0) produce(s, a, &map_q, &map_k, &map_v, counter);
    } else {
        consume(s, a, role - 1);
    }
}
