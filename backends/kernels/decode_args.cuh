// The one argument of the kernels that decode; what is not a tile's.
struct DecodeArgs {
    Tensor q, o, k, v;       // k, v: (batch, kv_heads, n, d); in pages (pages, kv_heads, PAGE, d)
    float* lse;              // (batch * heads, n_q)
    float *o_part, *l_part;  // (slots, kv_heads, rows, FS_HEAD_DIM_V), (slots, kv_heads, rows)
    u32* arrived;            // (batch, kv_heads, row tiles): splits done; 0 between launches
    const int4* items;       // launch_policy.decode_plan.items: two of each
    const int* table;        // (batch, table_row): each sequence's pages
    // FS_DYNAMIC: of each sequence where its live keys end, where they begin, and its entry of the
    // cache; where absent a.capacity, 0, and its own number. With pages only the first counts.
    const int *lengths, *starts, *entries;
    u32 *visit_counts, *item_counts;  // (batch, kv_heads, row tiles, n_visits, 8), (blocks, 8)
    u64 *visit_stamps, *item_stamps;  // the same, 5 of a visit, 6 of a block
    int n_q, heads, group, kv_heads, left, right, row_tiles, table_row, pages, n_visits;
    int batch, prefix, prefix_tiles;  // keys that all sequences share; their row tiles
    int capacity;                     // FS_DYNAMIC: rows of a sequence in the cache
    float scale, softcap;
#if FS_FLEX
    alignas(8) FlashCaptured captured;  // what the functions read besides positions
#endif
#if FS_SINKS
    const float* sinks;  // of each query head
#endif
};
static_assert(sizeof(DecodeArgs) == FS_DECODE_ARGS_BYTES, "see decode_kernels.py");
