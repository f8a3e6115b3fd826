// What a decoding block owns: a range of key tiles of a sequence, for one KV head and one tile of
// packed rows; a ring per warp; the addresses of its results.
constexpr int D = FS_D, DV = FS_DV, WARPS = FS_WARPS, STAGES = FS_STAGES, PAGE = FS_PAGE;
constexpr int MT = FS_BLOCK_Q / 16, ROWS = FS_BLOCK_Q, WIDTH = FS_HEAD_DIM_V;
constexpr int KEYS = 16, BLOCK_K = KEYS * WARPS, THREADS = 32 * WARPS;
// Number of blocks that merge with each other, and each block's share of a result, in float4.
constexpr int CLUSTER = FS_CLUSTER;
[[maybe_unused]] constexpr int SHARE = (ROWS * WIDTH / 4 + CLUSTER - 1) / CLUSTER;
static_assert(MT * 16 == ROWS && BLOCK_K == FS_BLOCK_K && STAGES >= 2, "see decode_kernels.py");

struct Stage {  // lives from its copy, which starts STAGES - 1 tiles ahead, to the end of its tile
    Tile<KEYS, D> K;
    Tile<KEYS, DV> V;
};
struct OnChip {  // the launcher asks for exactly sizeof(OnChip) bytes
    Tile<ROWS, D> Q;  // until it is in registers
    union {
        Stage ring[WARPS][STAGES];
        float O[WARPS][ROWS][DV];       // after the last tile: each warp's O
        float weight[FS_SPLITS][ROWS];  // weight of each split, during the merge
    };
    alignas(128) float m[WARPS][ROWS];  // each warp's maximum, with O
    float l[WARPS][ROWS];
    alignas(128) bool last;  // whether this block is the last one of its sequence
#if FS_CLUSTER > 1  // written by the cluster's blocks
    alignas(128) float4 share[CLUSTER][SHARE];
    float lse[CLUSTER][ROWS];
#endif
};
static_assert(sizeof(OnChip) == FS_SMEM_BYTES, "decode_kernels.py and OnChip must agree");
// Where column c of row r of a warp's O is stored: neighbouring rows use different banks.
__device__ inline int spread(int r, int c) { return c ^ r % (DV % 32 ? 2 : 4) * 8; }
static_assert(sizeof(OnChip::weight) <= sizeof(OnChip::ring), "the ring says how large it is");

// Packed row r is query r / group of the group's head r % group; rows of a shared prefix list one
// sequence after the other. With a shared prefix (FS_CASCADE), a sequence's own keys begin at
// a.prefix, and a work tile has one row tile. The prefix's work tiles have the rows of all
// sequences, and read the keys of the first sequence. With FS_DYNAMIC a work tile says which part
// of its sequence it is; the range of key tiles follows from the lengths that are read here, after
// the block has waited for the kernel that writes them.
struct Owned {
    int rank, kv_head, number, row_tile, batch, first_tile, tiles, slot, first_slot, splits, length;
    int begin, rows, row0, n_rows, walk;
    int entry;   // of the cache that holds its keys
    // query + offset is the key on the query's diagonal; with a prefix all queries see all of its
    // keys
    int offset;
    bool of_all;

    // The blocks of a cluster are the work tiles of one sequence, for one KV head.
    __device__ explicit Owned(const DecodeArgs& a) {
        rank = blockIdx.x % CLUSTER, kv_head = blockIdx.x / CLUSTER % a.kv_heads;
        number = blockIdx.x / CLUSTER / a.kv_heads * CLUSTER + rank;
        const int4 item = a.items[number * 2], sequence = a.items[number * 2 + 1];
        of_all = FS_CASCADE && item.x < 0;
        row_tile = FS_CASCADE ? sequence.w : blockIdx.y;
        batch = FS_CASCADE ? max(item.x, 0) : item.x;
        first_tile = item.y, tiles = item.z - item.y, slot = item.w;
        first_slot = sequence.x, splits = sequence.y, length = sequence.z;
        begin = FS_CASCADE && !of_all ? a.prefix : 0;
        entry = batch;
#if FS_DYNAMIC
        const int last = a.lengths ? min(max(a.lengths[batch], 0), a.capacity) : a.capacity;
        if (!PAGE && a.starts) begin = min(max(a.starts[batch], 0), last);
        if (!PAGE && a.entries) entry = a.entries[batch];
        length = last - begin;
        const int hi = (length + BLOCK_K - 1) / BLOCK_K;
        const int lo = FS_LEFT ? min(max(length - a.n_q - a.left, 0) / BLOCK_K, hi) : 0;
        first_tile = lo + int(i64(hi - lo) * item.y / splits);
        tiles = lo + int(i64(hi - lo) * (item.y + 1) / splits) - first_tile;
#endif
        rows = a.n_q * a.group, row0 = row_tile * ROWS;
        n_rows = min(ROWS, rows * (of_all ? a.batch : 1) - row0);
        offset = of_all ? length : length - a.n_q;
        walk = of_all ? a.batch * a.kv_heads * a.row_tiles + kv_head * a.prefix_tiles + row_tile
                      : (batch * a.kv_heads + kv_head) * a.row_tiles + row_tile;
    }
    // Its first row of K or V; in a paged cache, its KV head's row of page 0.
    __device__ const char* base(const Tensor& x) const {
        const i64 at = PAGE ? 0 : entry * x.batch + begin * x.row;
        return x.data + (kv_head * x.head + at) * FS_BYTES;
    }
    // Where it records bytes and times: the index of its first visit, and its own.
    __device__ i64 visit(const DecodeArgs& a) const { return i64(walk) * a.n_visits + first_tile; }
    __device__ i64 item(const DecodeArgs& a) const {
        return (i64(number) * a.kv_heads + kv_head) * a.row_tiles + (FS_CASCADE ? 0 : row_tile);
    }

    __device__ int batch_of(int r) const { return of_all ? (row0 + r) / rows : batch; }
    __device__ int head(const DecodeArgs& a, int r) const {
        return kv_head * a.group + (row0 + r) % a.group;
    }
    __device__ int query(const DecodeArgs& a, int r) const {
        return (FS_CASCADE ? (row0 + r) % rows : row0 + r) / a.group;
    }
    __device__ int key(int n) const {  // the warp's first key in tile n
        return (first_tile + n) * BLOCK_K + threadIdx.x / 32 * KEYS;
    }
    // Stores four columns of a result, and once per row its LSE. Returns the bytes stored.
    __device__ u32 store(const DecodeArgs& a, int r, int c, float4 x) const {
        char* to = a.o.at(batch, head(a, r), query(a, r)) + c * FS_BYTES;
        *reinterpret_cast<uint2*>(to) = uint2{pack(x.x, x.y), pack(x.z, x.w)};
        return ValueRow::counted(WIDTH - c, 4) * FS_BYTES;
    }
    __device__ u32 store_lse(const DecodeArgs& a, int r, float lse) const {
        a.lse[(i64(batch) * a.heads + head(a, r)) * a.n_q + query(a, r)] = lse;
        return 4;
    }
};
struct Moved {  // bytes per tensor, for `report`
    u32 o = 0, l = 0, o_part = 0, l_part = 0;
};
