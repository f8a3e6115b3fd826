// The CUDA C++ that the portable kernels use, on a CPU: emulator.py puts this before a kernel, and
// links it with cuda_on_cpu.cpp, which runs it.
//
// PTX instructions are functions, named after their opcode.

#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's own: C++'s <cmath> takes longer than most kernels
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <string.h>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))

using u32 = unsigned int;
using u64 = unsigned long long;
struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern struct Index { unsigned x, y, z; } threadIdx, blockIdx, blockDim, gridDim;
// Of a kernel; emulator.py writes them behind it.
extern char shared[];
extern const unsigned shared_size, cluster_size;  // in bytes, in blocks
void kernel();  // with these arguments:
extern const void* arguments;

// -- Functions ------------------------------------------------------------------------------------
template <class To, class From>
To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(u32 x) { return bits<float>(x); }
inline float __int_as_float(int x) { return bits<float>(x); }
inline int __float_as_int(float x) { return bits<int>(x); }
inline u32 __float_as_uint(float x) { return bits<u32>(x); }
inline float __fdividef(float x, float y) { return x / y; }
#define __logf logf  // glibc has one of this name of its own
inline int min(int a, int b) { return a < b ? a : b; }
extern "C" int abs(int) noexcept;
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline u32 atomicInc(u32* to, u32 last) {
    const u32 old = *to;
    *to = old >= last ? 0 : old + 1;
    return old;
}
inline u32 atomicCAS(u32* at, u32 old, u32 x) {
    const u32 was = *at;
    if (was == old) *at = x;
    return was;
}
inline u32 atomicAdd(u32* to, u32 x) { return *to += x, *to - x; }
inline float atomicAdd(float* to, float x) { const float old = *to; *to = old + x; return old; }
inline void __threadfence() {}
inline float __log2f(float x) { return log2f(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
template <class T>
T __ldcg(const T* from) { return *from; }
void __syncthreads();
void __syncwarp();
u32 __reduce_add_sync(u32, u32 x);
float __shfl_xor_sync(u32, float x, int mask);
u32 __shfl_xor_sync(u32, u32 x, int mask);
inline int __shfl_xor_sync(u32 all, int x, int mask) {
    return int(__shfl_xor_sync(all, u32(x), mask));
}
int __shfl_sync(u32, int x, int lane);
u32 __shfl_sync(u32, u32 x, int lane);
float __shfl_sync(u32, float x, int lane);
long long __shfl_sync(u32, long long x, int lane);
bool __any_sync(u32, bool x);

// -- PTX ------------------------------------------------------------------------------------------
inline u32 __cvta_generic_to_shared(const void* p) {
    return u32(static_cast<const char*>(p) - shared);
}
void yield();  // lets other threads run
void ptx_griddepcontrol_wait();
void ptx_griddepcontrol_launch_dependents();
void ptx_barrier_cluster_arrive_release_aligned();
void ptx_barrier_cluster_wait_acquire_aligned();
void ptx_mapa_shared_cluster_u32(u32& to, u32 here, u32 rank);
void ptx_st_shared_cluster_f32(u32 to, float x);
void ptx_st_shared_cluster_v4_f32(u32 to, float x, float y, float z, float w);
void ptx_bar_sync(u32 number, int count);
void ptx_bar_arrive(u32 number, int count);
void ptx_cp_async_cg_shared_global(u32 to, const void* from, int bytes = 16);
void ptx_cp_async_ca_shared_global(u32 to, const void* from, int bytes);
void ptx_createpolicy_fractional_L2_evict_first_b64(u64& policy);
void ptx_createpolicy_fractional_L2_evict_normal_b64(u64& policy);
void ptx_cp_async_cg_shared_global_L2_cache_hint(u32 to, const void* from, int bytes, u64);
void ptx_cp_async_wait_all();
void ptx_cp_async_commit_group();
void ptx_cp_async_wait_group(int left);
void ptx_ld_shared_f32(float& x, u32 at);
void ptx_ld_shared_v2_f32(float& x, float& y, u32 at);
void ptx_red_global_add_v4_f32(float* to, float a, float b, float c, float d);
inline void ptx_red_global_add_v2_f32(float* to, float a, float b) { to[0] += a, to[1] += b; }
void ptx_mov_u64(u64& t);
void ptx_mov_u32(u32& t);
void ptx_ex2_approx_ftz_f32(float& y, float x);
void ptx_cvt_rn_bf16x2_f32(u32& r, float high, float low);
void ptx_cvt_rn_f16x2_f32(u32& r, float high, float low);
void ptx_mov_b32(float& low, float& high, u32 x);
void ptx_cvt_rna_tf32_f32(u32& r, float x);
inline void ptx_cvt_f32_f16(float& y, unsigned short x) { y = float(bits<_Float16>(x)); }
inline void ptx_xor_b32(int& r, int a, int b) { r = a ^ b; }
// As wrong as the hardware may be, a relative 2^-11, up or down by a bit of x.
inline void ptx_tanh_approx_f32(float& y, float x) {
    y = tanhf(x);
    y *= bits<u32>(x) & 8 ? 1 + 1.0f / 2048 : 1 - 1.0f / 2048;
    y = y > 1 ? 1 : y < -1 ? -1 : y;
}
void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 at);
void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 at);
void ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(
    float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
