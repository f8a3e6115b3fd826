// Hopper's own instructions, behind cuda_on_cpu.h, as far as backward_roles.cu has them. Each is done
// at once by the thread that gives it: what is asynchronous on a GPU is never late here.
using u16 = unsigned short;
void ptx_mbarrier_init_shared_cta_b64(u32 at, int count);
void ptx_mbarrier_arrive_shared_cta_b64(u32 at);
void ptx_mbarrier_arrive_expect_tx_shared_cta_b64(u32 at, u32 bytes);
void ptx_mbarrier_try_wait_parity_shared_cta_b64(u32& done, u32 at, u32 parity);
void ptx_cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void* map, u32 bar, int column, int row, int head, int batch, int round);
void ptx_cp_async_bulk_tensor_5d_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void* map, u32 bar, int column, int row, int head, int stop, int round);
void ptx_cp_reduce_async_bulk_tensor_4d_global_shared_cta_add_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int batch, int round);
void ptx_cp_reduce_async_bulk_tensor_5d_global_shared_cta_add_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int stop, int round);
void ptx_cp_async_bulk_tensor_4d_global_shared_cta_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int batch, int round);
void ptx_cp_async_bulk_tensor_5d_global_shared_cta_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int stop, int round);
void ptx_stmatrix_sync_aligned_m8n8_x4_shared_cta_b16(u32 at, u32 a, u32 b, u32 c, u32 d);
void ptx_stmatrix_sync_aligned_m8n8_x4_trans_shared_cta_b16(u32 at, u32 a, u32 b, u32 c, u32 d);
void ptx_movmatrix_sync_aligned_m8n8_trans_b16(u32& y, u32 x);
void ptx_st_shared_f32(u32 to, float x);
void ptx_st_shared_v2_f32(u32 to, float x, float y);

// Nothing is under way, and registers there are enough.
template <class... X> void ptx_fence_mbarrier_init_release_cluster(X...) {}
template <class... X> void ptx_fence_proxy_async_shared_cta(X...) {}
template <class... X> void ptx_fence_proxy_async_global(X...) {}
template <class... X> void ptx_cp_async_bulk_commit_group(X...) {}
template <class... X> void ptx_cp_async_bulk_wait_group(X...) {}
template <class... X> void ptx_cp_async_bulk_wait_group_read(X...) {}
template <class... X> void ptx_wgmma_fence_sync_aligned(X...) {}
template <class... X> void ptx_wgmma_commit_group_sync_aligned(X...) {}
template <class... X> void ptx_wgmma_wait_group_sync_aligned(X...) {}
template <class... X> void ptx_setmaxnreg_dec_sync_aligned_u32(X...) {}
template <class... X> void ptx_setmaxnreg_inc_sync_aligned_u32(X...) {}
// A thread that reads the same value again and again lets others run.
inline void ptx_ld_acquire_gpu_global_u32(u32& to, const u32* at) {
    static u32 x;
    static const u32* last;
    static int again;
    if (at != last || x != *at) again = 0;
    if (++again > 1000) again = 0, yield();
    last = at, to = x = *at;
}
inline void ptx_st_release_gpu_global_u32(u32* at, u32 x) { *at = x; }
// Not reached: clusters, additions in order.
template <class... X> void ptx_mapa_shared_cluster_u32(X&&...) {}
template <class... X> void ptx_red_release_gpu_global_add_u32(X&&...) {}

template <bool BF16>
void wgmma(float* const* d, int n, u64 a, u64 b, bool accumulate, bool a_down, bool b_down);
template <bool BF16>
void wgmma_rs(float* const* d, int n, const u64* a, u64 b, bool accumulate, bool b_down);
inline float* place(float& x) { return &x; }
template <class X> float* place(const X&) { return nullptr; }
// The accumulator's floats, A, B, whether to add, and whether k runs down each one's rows.
template <bool BF16, class... X>
void wgmma_of(X&&... x) {
    float* const d[] = {place(x)...};
    const u64 rest[] = {u64(x)...};
    constexpr bool REGISTERS = sizeof...(X) % 8 == 7;  // A is there, four for each thread
    constexpr int N = sizeof...(X) - (REGISTERS ? 7 : 5);
    if (REGISTERS) wgmma_rs<BF16>(d, N, rest + N, rest[N + 4], rest[N + 5], rest[N + 6]);
    else wgmma<BF16>(d, N, rest[N], rest[N + 1], rest[N + 2], rest[N + 3], rest[N + 4]);
}
template <class... X> void ptx_wgmma_mma_async_sync_aligned_f32_bf16_bf16(X&&... x) {
    wgmma_of<true>(static_cast<X&&>(x)...);
}
template <class... X> void ptx_wgmma_mma_async_sync_aligned_f32_f16_f16(X&&... x) {
    wgmma_of<false>(static_cast<X&&>(x)...);
}
