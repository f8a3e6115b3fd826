// The second stage of flash-decoding, if it is a kernel of its own: merges the parts of a
// sequence's splits in their order, with a warp per row. A row's parts are float32 and normalised;
// their LSEs give the weight of each part.
#include "common.cuh"
#include "decode_args.cuh"

constexpr int WIDTH = FS_HEAD_DIM_V, WARPS = FS_WARPS, PIECES = (WIDTH + 127) / 128;
constexpr int BATCH = 4;  // splits whose parts a lane has in flight at once

// `items`: for each sequence that is merged, its number, its first slot, its splits, its first work
// tile. `shared`: the number of parts of a shared prefix, which come first, and the distance
// between their slots.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
flash_decode_merge(const __grid_constant__ DecodeArgs a) {
    const int lane = threadIdx.x % 32, kv_head = blockIdx.y % a.kv_heads;
    const int4 of = a.items[blockIdx.y / a.kv_heads * 2];
    const int4 shared = a.items[blockIdx.y / a.kv_heads * 2 + 1];
    const int batch = of.x, splits = shared.x + of.z, rows = a.n_q * a.group;
    const int row = blockIdx.x * WARPS + threadIdx.x / 32;
    let_what_runs_next_start();
    wait_for_what_ran_before();
    if (row >= rows) return;  // a whole warp exits; there is no barrier below
    auto part_of = [&](int s) {  // address of part s of this row
        const i64 slot = s < shared.x ? s * shared.y + batch : of.y + s - shared.x;
        return (slot * a.kv_heads + kv_head) * rows + row;
    };
    float top = NEG_INF, sum = 0.0f;
    for (int s = lane; s < splits; s += 32) top = fmaxf(top, __ldcg(a.l_part + part_of(s)));
    for (int x = 16; x; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
    const float base = top == NEG_INF ? 0.0f : top;
    float4 total[PIECES] = {};
    u32 o_part_bytes = 0, l_part_bytes = 0;
    for (int s0 = 0; s0 < splits; s0 += 32) {
        const int n = min(32, splits - s0);
        float weight = 0.0f;  // of split s0 + lane
        if (lane < n) {
            weight = exp2_approx((__ldcg(a.l_part + part_of(s0 + lane)) - base) * LOG2E);
            l_part_bytes += 4;
        }
        sum += weight;
        for (int s = 0; s < n; s += BATCH) {
            float4 y[BATCH][PIECES];
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
#pragma unroll
                for (int c = 0; c < PIECES; ++c) {
                    const int column = (c * 32 + lane) * 4;
                    y[u][c] = float4{0, 0, 0, 0};
                    if (s + u < n && column < WIDTH) {
                        const float* part = a.o_part + part_of(s0 + s + u) * WIDTH;
                        y[u][c] = __ldcg(reinterpret_cast<const float4*>(part + column));
                        o_part_bytes += ValueRow::counted(WIDTH - column, 4) * 4;
                    }
                }
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const float w = __shfl_sync(~0u, weight, s + u & 31);
#pragma unroll
                for (int c = 0; c < PIECES; ++c) {
                    const float4 of_part = y[u][c];
                    const float f = s + u < n ? w : 0.0f;
                    total[c].x += f * of_part.x, total[c].y += f * of_part.y;
                    total[c].z += f * of_part.z, total[c].w += f * of_part.w;
                }
            }
        }
    }
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no key: O = 0, LSE = -inf
    const int head = kv_head * a.group + row % a.group, query = row / a.group;
    u32 o_bytes = 0;
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
        const int column = (c * 32 + lane) * 4;
        if (column < WIDTH) {
            const float4 x = total[c];
            *reinterpret_cast<uint2*>(a.o.at(batch, head, query) + column * FS_BYTES) =
                uint2{pack(x.x * inverse, x.y * inverse), pack(x.z * inverse, x.w * inverse)};
            o_bytes += ValueRow::counted(WIDTH - column, 4) * FS_BYTES;
        }
    }
    if (lane == 0)
        a.lse[(i64(batch) * a.heads + head) * a.n_q + query] =
            sum == 0.0f ? NEG_INF : top + logf(sum);
    u32* count =
        a.item_counts + ((i64(of.w) * a.kv_heads + kv_head) * a.row_tiles +
                         (FS_CASCADE ? 0 : row / FS_BLOCK_Q)) * 8;
    report(count + 3, o_bytes), report(count + 4, lane == 0 ? 4 : 0);
    report(count + 5, o_part_bytes), report(count + 6, l_part_bytes);
}
