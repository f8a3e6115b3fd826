// The argument struct of the decoding kernels. Values that differ per tile are computed in the
// kernel.
struct DecodeArgs {
    Tensor q, o, k, v;  // k, v: (batch, kv_heads, n, d); paged (pages, kv_heads, PAGE, d)
    float* lse;              // (batch * heads, n_q)
    float *o_part, *l_part;  // (slots, kv_heads, rows, FS_HEAD_DIM_V), (slots, kv_heads, rows)
    u32* arrived;  // (batch, kv_heads, row tiles): number of finished splits; 0 between launches
    const int4* items;       // two int4 per work tile, from launch_policy.decode_plan.items
    const int* table;        // (batch, table_row): each sequence's page numbers
    // FS_DYNAMIC: per sequence, the end of its live keys, their begin, and its entry of the cache.
    // If absent, these are a.capacity, 0, and the sequence's number. A paged cache uses only
    // `lengths`.
    const int *lengths, *starts, *entries;
    u32 *visit_counts, *item_counts;  // (batch, kv_heads, row tiles, n_visits, 8), (blocks, 8)
    u64 *visit_stamps, *item_stamps;  // as above, with 5 stamps per visit and 6 per block
    int n_q, heads, group, kv_heads, left, right, row_tiles, table_row, pages, n_visits;
    int batch, prefix, prefix_tiles;  // prefix: keys that all sequences share; its row tiles
    int capacity;                     // FS_DYNAMIC: rows per sequence in the cache
    float scale, softcap;
#if FS_FLEX
    alignas(8) FlashCaptured captured;  // arrays and numbers that the mask and score functions read
#endif
#if FS_SINKS
    const float* sinks;  // one per query head
#endif
};
static_assert(sizeof(DecodeArgs) == FS_DECODE_ARGS_BYTES, "see decode_kernels.py");
