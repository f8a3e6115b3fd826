// Runs a kernel compiled behind cuda_on_cpu.h.
//
// Blocks run one after the other, those of a cluster by turns. A block's threads are coroutines: one
// warp runs as far as barriers let it, then the next, in odd blocks from the last warp to the first;
// so a barrier that is missing shows, whichever warp it held back. A round in which nobody gets
// further is a deadlock.
// Shared memory starts as NaN, and what cp.async copies arrives no sooner than the thread waits for
// it.
#include "cuda_on_cpu.h"

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <ucontext.h>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;

// -- Threads, barriers ----------------------------------------------------------------------------
struct Copy { char* to; const char* from; int size, bytes; long group; };
struct Thread {
    jmp_buf place;
    char* stack;
    std::vector<Copy> copies;  // that cp.async started
    long group = 0;            // of copies, that is not committed yet
    bool begun = false, done = false;
    long cluster = 0;  // meetings that its cluster had held when it arrived at the next
};
struct Meeting {  // of a warp's, a group's or a block's threads
    int size, here = 0;
    long held = 0;
};
constexpr size_t STACK = 1 << 17;
std::vector<Thread> threads;
std::vector<Meeting> warps;
Meeting block, groups[16];  // groups: the block's numbered barriers, of which 0 is `block`
Meeting cluster;
jmp_buf scheduler;
long progress;  // meetings held, threads ended
unsigned (*slots)[8];  // what each thread shows its warp

void yield() {
    const unsigned me = threadIdx.x;
    if (!_setjmp(threads[me].place)) _longjmp(scheduler, 1);
}
void come(Meeting& m) {
    if (++m.here == m.size) m.here = 0, ++m.held, ++progress;
}
void meet(Meeting& m) {
    const long number = m.held;
    come(m);
    while (m.held == number) yield();
}
void meet_warp() { meet(warps[threadIdx.x / 32]); }
void __syncthreads() { meet(block); }
void __syncwarp() { meet_warp(); }

const void* arguments;
void body() {
    kernel();
    threads[threadIdx.x].done = true, ++progress;
    _longjmp(scheduler, 1);
}

void start(Thread& t) {  // returns to run_block as soon as the thread first waits
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = t.stack, context.uc_stack.ss_size = STACK;
    makecontext(&context, body, 0);
    setcontext(&context);
}

void resume(unsigned t) {  // returns when the thread waits
    threadIdx = {t, 0, 0};
    if (_setjmp(scheduler)) return;
    if (threads[t].begun) _longjmp(threads[t].place, 1);
    threads[t].begun = true;
    start(threads[t]);
}

struct Block {  // of a cluster: what the names above stand for while it has its turn
    Index place;
    std::vector<Thread> its_threads;
    std::vector<Meeting> its_warps;
    Meeting its_block, its_groups[16];
    unsigned (*its_slots)[8];
    std::vector<char> its_shared;

    explicit Block(unsigned count) : its_threads(count), its_warps(count / 32) {
        for (Thread& t : its_threads) t.stack = new char[STACK];
        its_slots = new unsigned[count][8];
        its_shared.resize(shared_size);
    }
    ~Block() {
        for (Thread& t : its_threads) delete[] t.stack;
        delete[] its_slots;
    }
    void begin(Index at, int count) {
        place = at, its_block = {count};
        for (Meeting& g : its_groups) g = {0};
        for (Meeting& w : its_warps) w = {32};
        for (Thread& t : its_threads) t.begun = t.done = false, t.group = 0, t.copies.clear();
    }
    void turn() {  // in or out
        threads.swap(its_threads), warps.swap(its_warps);
        std::swap(block, its_block), std::swap(groups, its_groups), std::swap(slots, its_slots);
        std::swap(place, blockIdx);
        if (cluster_size > 1) std::swap_ranges(shared, shared + shared_size, its_shared.data());
    }
};
std::vector<Block*> blocks;  // of the cluster
unsigned whose;              // turn it is

// What the previous launch wrote. On a GPU, it may become visible as late as at the kernel's wait.
// So it does here, once no thread makes progress without it.
struct Hidden {
    void* to;
    const void* written;
    size_t bytes;
};
std::vector<Hidden> hidden;
extern "C" void hide(void* to, const void* written, size_t bytes) {
    hidden.push_back({to, written, bytes});
}
extern "C" void show() {
    for (const Hidden& h : hidden) memcpy(h.to, h.written, h.bytes);
    hidden.clear();
}

bool run_cluster(bool backwards) {  // false: threads wait for each other in vain
    cluster = {int(blocks.size() * blocks[0]->its_threads.size())};
    for (unsigned left = 1, round = 0; left; ++round) {
        const long before = progress;
        left = 0;
        for (whose = 0; whose < blocks.size(); ++whose) {
            blocks[whose]->turn();
            if (!round) memset(shared, 0xff, shared_size);
            for (long further = -1; further != progress;) {  // as far as it gets alone
                further = progress;
                for (unsigned n = 0; n < warps.size(); ++n) {
                    const unsigned first = 32 * (backwards ? warps.size() - 1 - n : n);
                    for (long here = -1; here != progress;) {
                        here = progress;
                        for (unsigned t = first; t < first + 32; ++t)
                            if (!threads[t].done) resume(t);
                    }
                }
            }
            for (const Thread& t : threads) left += !t.done;
            blocks[whose]->turn();
        }
        if (progress != before) continue;
        if (hidden.empty()) return false;
        show();
    }
    return true;
}

extern "C" bool run(const void* args, unsigned x, unsigned y, unsigned count) {
    arguments = args, gridDim = {x, y, 1}, blockDim = {count, 1, 1};
    for (int n = 0; n < cluster_size; ++n) blocks.push_back(new Block(count));
    bool ended = x % cluster_size == 0;
    for (unsigned n = 0; ended && n < x * y; n += cluster_size) {
        for (unsigned rank = 0; rank < cluster_size; ++rank)
            blocks[rank]->begin({n % x + rank, n / x, 0}, count);
        ended = run_cluster(n / cluster_size % 2);
    }
    for (Block* b : blocks) delete b;
    blocks.clear();
    return ended;
}

// -- Functions and PTX ----------------------------------------------------------------------------

// Shows `mine` to the warp's other lanes and gives what `lane` shows, for every lane that is asked
// for.
template <int N>
struct Shown {
    Shown(const u32 (&mine)[N]) {
        memcpy(slots[threadIdx.x], mine, sizeof mine);
        meet_warp();
    }
    u32 operator()(unsigned lane, int i = 0) const {
        return slots[threadIdx.x / 32 * 32 + lane][i];
    }
    ~Shown() { meet_warp(); }  // all have read
};
u32 __reduce_add_sync(u32, u32 x) {
    const Shown<1> shown({x});
    u32 sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += shown(lane);
    return sum;
}
float __shfl_xor_sync(u32, float x, int mask) {
    const Shown<1> shown({bits<u32>(x)});
    return bits<float>(shown(threadIdx.x % 32 ^ mask));
}
u32 __shfl_xor_sync(u32, u32 x, int mask) {
    const Shown<1> shown({x});
    return shown(threadIdx.x % 32 ^ mask);
}

u32 __shfl_sync(u32, u32 x, int lane) {
    const Shown<1> shown({x});
    return shown(lane);
}
int __shfl_sync(u32, int x, int lane) {
    const Shown<1> shown({u32(x)});
    return int(shown(lane));
}
float __shfl_sync(u32, float x, int lane) {
    const Shown<1> shown({bits<u32>(x)});
    return bits<float>(shown(lane));
}
long long __shfl_sync(u32, long long x, int lane) {
    const Shown<2> shown({u32(x), u32(x >> 32)});
    return (long long)(u64(shown(lane, 1)) << 32 | shown(lane));
}
bool __any_sync(u32, bool x) {
    const Shown<1> shown({u32(x)});
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= shown(lane) != 0;
    return any;
}

void ptx_griddepcontrol_wait() {
    while (!hidden.empty()) yield();
}
void ptx_griddepcontrol_launch_dependents() {}
void ptx_barrier_cluster_arrive_release_aligned() {
    threads[threadIdx.x].cluster = cluster.held;
    if (++cluster.here == cluster.size) cluster.here = 0, ++cluster.held, ++progress;
}
void ptx_barrier_cluster_wait_acquire_aligned() {
    while (cluster.held == threads[threadIdx.x].cluster) yield();
}
constexpr int RANK_SHIFT = 20;  // of an address in another block's shared memory
void ptx_mapa_shared_cluster_u32(u32& to, u32 here, u32 rank) {
    to = here | rank << RANK_SHIFT;
}
static float* in_cluster(u32 at) {
    const u32 rank = at >> RANK_SHIFT, here = at & ((1u << RANK_SHIFT) - 1);
    char* memory = rank == whose ? shared : blocks[rank]->its_shared.data();
    return reinterpret_cast<float*>(memory + here);
}
void ptx_st_shared_cluster_f32(u32 to, float x) { *in_cluster(to) = x; }
void ptx_st_shared_cluster_v4_f32(u32 to, float x, float y, float z, float w) {
    const float all[] = {x, y, z, w};
    memcpy(in_cluster(to), all, sizeof all);
}

void ptx_bar_sync(u32 number, int count) {
    Meeting& m = number ? groups[number] : block;
    m.size = count;
    meet(m);
}
void ptx_bar_arrive(u32 number, int count) {
    groups[number].size = count;
    come(groups[number]);
}
static void start_copy(u32 to, const void* from, int size, int bytes) {
    Thread& t = threads[threadIdx.x];
    t.copies.push_back({shared + to, static_cast<const char*>(from), size, bytes, t.group});
}
void ptx_cp_async_cg_shared_global(u32 to, const void* from, int bytes) {
    start_copy(to, from, 16, bytes);
}
void ptx_cp_async_ca_shared_global(u32 to, const void* from, int bytes) {
    start_copy(to, from, 4, bytes);
}
void ptx_createpolicy_fractional_L2_evict_first_b64(u64& policy) { policy = 1; }
void ptx_createpolicy_fractional_L2_evict_normal_b64(u64& policy) { policy = 2; }
void ptx_cp_async_cg_shared_global_L2_cache_hint(u32 to, const void* from, int bytes, u64) {
    start_copy(to, from, 16, bytes);
}
static void finish_copies(long before) {  // those of groups older than this one
    std::vector<Copy> under_way;
    for (const Copy& c : threads[threadIdx.x].copies) {
        if (c.group >= before) {
            under_way.push_back(c);
            continue;
        }
        memset(c.to, 0, c.size);
        memcpy(c.to, c.from, c.bytes);
    }
    threads[threadIdx.x].copies.swap(under_way);
}
void ptx_cp_async_wait_all() { finish_copies(threads[threadIdx.x].group + 1); }
void ptx_cp_async_commit_group() { ++threads[threadIdx.x].group; }
void ptx_cp_async_wait_group(int left) { finish_copies(threads[threadIdx.x].group - left); }
void ptx_ld_shared_f32(float& x, u32 at) { memcpy(&x, shared + at, 4); }
void ptx_ld_shared_v2_f32(float& x, float& y, u32 at) {
    memcpy(&x, shared + at, 4), memcpy(&y, shared + at + 4, 4);
}
void ptx_red_global_add_v4_f32(float* to, float a, float b, float c, float d) {
    to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}
void ptx_mov_u64(u64& t) {  // a clock: later is more
    static u64 now = 0;
    t = ++now;
}
void ptx_mov_u32(u32& t) { t = 0; }

void ptx_ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }
static u32 bf16(float x) {  // to nearest, ties to even
    const u32 u = bits<u32>(x);
    return std::isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
void ptx_cvt_rn_bf16x2_f32(u32& r, float high, float low) {
    r = bf16(high) << 16 | bf16(low);
}
static u32 f16(float x) {
    const u32 sign = bits<u32>(x) >> 16 & 0x8000, u = bits<u32>(std::fabs(x));
    if (std::isnan(x)) return 0x7fff;
    if (std::fabs(x) >= 65520.0f) return sign | 0x7c00;
    if (std::fabs(x) < 0x1p-14f) return sign | u32(std::nearbyint(std::fabs(x) * 0x1p24f));
    return sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112 << 10));
}
static float from_f16(u32 x) {
    const u32 sign = (x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest < 0x400) return bits<float>(bits<u32>(rest * 0x1p-24f) | sign);
    return bits<float>(sign | (rest << 13) + ((rest < 0x7c00 ? 112 : 224) << 23));
}
void ptx_cvt_rn_f16x2_f32(u32& r, float high, float low) { r = f16(high) << 16 | f16(low); }
void ptx_mov_b32(float& low, float& high, u32 x) {  // and to float32
    low = from_f16(x & 0xffff), high = from_f16(x >> 16);
}
void ptx_cvt_rna_tf32_f32(u32& r, float x) { r = (bits<u32>(x) + 0x1000) & ~0x1fffu; }

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i.
static u32 half_at(u32 at) {
    unsigned short x;
    memcpy(&x, shared + at, 2);
    return x;
}
template <bool TRANSPOSE>
void load_matrices(u32* const (&r)[4], u32 at) {
    const Shown<1> row({at});
    const unsigned lane = threadIdx.x % 32, y = lane / 4, x = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        const u32 first = TRANSPOSE ? row(8 * i + x) + 2 * y : row(8 * i + y) + 2 * x;
        const u32 second = TRANSPOSE ? row(8 * i + x + 1) + 2 * y : first + 2;
        *r[i] = half_at(first) | half_at(second) << 16;
    }
}
void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 at) {
    load_matrices<false>({&a, &b, &c, &d}, at);
}
void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d,
                                                               u32 at) {
    load_matrices<true>({&a, &b, &c, &d}, at);
}

// Likewise to shared memory; `TRANSPOSE`: a row in memory is a column.
template <bool TRANSPOSE>
void store_matrices(u32 at, const u32 (&from)[4]) {
    const Shown<1> row({at});
    const unsigned lane = threadIdx.x % 32, y = lane / 4, x = lane % 4 * 2;
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) {
            const u32 to = TRANSPOSE ? row(8 * i + x + e) + 2 * y : row(8 * i + y) + 2 * (x + e);
            const unsigned short half = from[i] >> 16 * e;
            memcpy(shared + to, &half, 2);
        }
}
void ptx_stmatrix_sync_aligned_m8n8_x4_shared_cta_b16(u32 at, u32 a, u32 b, u32 c, u32 d) {
    store_matrices<false>(at, {a, b, c, d});
}
void ptx_stmatrix_sync_aligned_m8n8_x4_trans_shared_cta_b16(u32 at, u32 a, u32 b, u32 c, u32 d) {
    store_matrices<true>(at, {a, b, c, d});
}
void ptx_movmatrix_sync_aligned_m8n8_trans_b16(u32& y, u32 x) {
    const Shown<1> lanes({x});
    const unsigned row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    y = 0;
    for (int e = 0; e < 2; ++e)
        y |= (lanes(4 * (column + e) + row / 2) >> 16 * (row % 2) & 0xffff) << 16 * e;
}

// -- Hopper (hopper_on_cpu.h) ---------------------------------------------------------------------
// An mbarrier, in its eight bytes of shared memory.
struct Barrier { unsigned char count, pending, phase; int bytes; };
static Barrier& barrier(u32 at) { return *reinterpret_cast<Barrier*>(shared + at); }
static void settle(Barrier& b) {  // the phase may be over
    if (b.pending || b.bytes) return;
    b.pending = b.count, b.phase ^= 1, ++progress;
}
void ptx_mbarrier_init_shared_cta_b64(u32 at, int count) {
    const unsigned char n = count;
    barrier(at) = {n, n, 0, 0};
}
void ptx_mbarrier_arrive_shared_cta_b64(u32 at) { --barrier(at).pending, settle(barrier(at)); }
void ptx_mbarrier_arrive_expect_tx_shared_cta_b64(u32 at, u32 bytes) {
    barrier(at).bytes += bytes;
    ptx_mbarrier_arrive_shared_cta_b64(at);
}
void ptx_mbarrier_try_wait_parity_shared_cta_b64(u32& done, u32 at, u32 parity) {
    done = barrier(at).phase != parity;  // the present phase is the one after it
    if (!done) yield();
}
// The copy engine, which is done at once. emulator.py makes the maps: strides in bytes.
struct Map { char* data; long shape[4], step[4]; int columns, rows, bytes, heads, interleaved; };
static u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }  // rows of 128 bytes
enum Way { LOAD, ADD, STORE };
template <Way WAY>
static u32 move_box(const Map& m, u32 at, int column, int row, int head, int batch, int stop) {
    for (int y = 0; y < m.rows; ++y)
        for (int x = 0; x < m.columns; ++x) {
            char* here = shared + swizzled(at + (y * m.columns + x) * m.bytes);
            const int query = m.interleaved ? (row + y / 8) * 8 + y % 2 * 4 + y % 8 / 2
                                            : row + y / m.heads;  // of packed heads
            const int member = y % m.heads;
            char* there = m.data + (column + x) * m.step[0] + query * m.step[1] +
                          (head * m.heads + member) * m.step[2] + batch * m.step[3];
            const bool exists = column + x < m.shape[0] && query < stop;
            if (WAY == ADD && exists) *(float*)there += *(float*)here;
            if (WAY == STORE && exists) memcpy(there, here, m.bytes);
            if (WAY == LOAD && exists) memcpy(here, there, m.bytes);
            if (WAY == LOAD && !exists) memset(here, 0, m.bytes);
        }
    return m.rows * m.columns * m.bytes;
}
static void load_box(u32 to, const void* map, u32 bar, int column, int row, int head, int batch,
                     int stop) {
    const Map& m = *static_cast<const Map*>(map);
    barrier(bar).bytes -= move_box<LOAD>(m, to, column, row, head, batch, stop);
    settle(barrier(bar));
}
static long rows_of(const void* map) { return static_cast<const Map*>(map)->shape[1]; }
void ptx_cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void* map, u32 bar, int column, int row, int head, int batch, int) {
    load_box(to, map, bar, column, row, head, batch, rows_of(map));
}
// Of packed sequences: in view `stop` the row before it is number `round` - 1 (tile_scheduler.cuh).
// With a `round` of 0, of packed heads: `stop` is then the batch entry (copy_box_of_group in ptx.cuh).
void ptx_cp_async_bulk_tensor_5d_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void* map, u32 bar, int column, int row, int head, int stop, int round) {
    if (round) load_box(to, map, bar, column, row - round + stop, head, 0, stop);
    else load_box(to, map, bar, column, row, head, stop, rows_of(map));
}
void ptx_cp_reduce_async_bulk_tensor_4d_global_shared_cta_add_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int batch, int) {
    move_box<ADD>(*static_cast<const Map*>(map), from, column, row, head, batch, rows_of(map));
}
void ptx_cp_reduce_async_bulk_tensor_5d_global_shared_cta_add_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int stop, int round) {
    move_box<ADD>(*static_cast<const Map*>(map), from, column, row - round + stop, head, 0, stop);
}
void ptx_cp_async_bulk_tensor_4d_global_shared_cta_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int batch, int) {
    move_box<STORE>(*static_cast<const Map*>(map), from, column, row, head, batch, rows_of(map));
}
void ptx_cp_async_bulk_tensor_5d_global_shared_cta_tile_bulk_group(
    const void* map, u32 from, int column, int row, int head, int stop, int round) {
    const Map& m = *static_cast<const Map*>(map);
    move_box<STORE>(m, from, column, row - round + stop, head, 0, stop);
}
void ptx_st_shared_f32(u32 to, float x) { memcpy(shared + to, &x, 4); }
void ptx_st_shared_v2_f32(u32 to, float x, float y) {
    memcpy(shared + to, &x, 4), memcpy(shared + to + 4, &y, 4);
}
// wgmma, each thread its own part at once: A is 64 x 16, B 16 x n / 2 * 4, rows or columns of k.
template <bool BF16>
static void line(float (&to)[16], u64 matrix, bool k_down, int other) {  // a row of A, a column of B
    const u32 start = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4;
    const u32 stride = (matrix >> 32 & 0x3fff) << 4;
    const bool narrow = matrix >> 62 == 3;
    const int row = narrow ? 32 : 128, half = narrow ? 16 : 64;  // bytes of a swizzled row, elements
    const u32 first = start + (k_down ? other / half * leading + other % half * 2
                                      : other / 8 * stride + other % 8 * row);
    for (int k = 0; k < 16; ++k) {
        const u32 at = first + (k_down ? k / 8 * stride + k % 8 * row : k * 2);
        const u32 x = half_at(narrow ? at ^ (at >> 7 & 1) << 4 : swizzled(at));
        to[k] = BF16 ? bits<float>(x << 16) : from_f16(x);
    }
}
// Each element of D: a row of A (one of two) by a column of B, added in the order of k.
template <bool BF16>
static void multiply(float* const* d, int n, const float (&rows)[2][16], u64 b, bool accumulate,
                     bool b_down) {
    const int column = threadIdx.x % 4 * 2;
    for (int e = 0; e < n; e += e % 2 ? 3 : 1) {
        float B[16];
        line<BF16>(B, b, b_down, e / 4 * 8 + column + e % 2);
        for (int i = 0; i < 2; ++i) {
            float& to = *d[e + 2 * i];
            float sum = accumulate ? to : 0.0f;
            for (int k = 0; k < 16; ++k) sum += rows[i][k] * B[k];
            to = sum;
        }
    }
}
template <bool BF16>
void wgmma(float* const* d, int n, u64 a, u64 b, bool accumulate, bool a_down, bool b_down) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float rows[2][16];
    for (int i = 0; i < 2; ++i) line<BF16>(rows[i], a, a_down, row + 8 * i);
    multiply<BF16>(d, n, rows, b, accumulate, b_down);
}
template void wgmma<false>(float* const*, int, u64, u64, bool, bool, bool);
template void wgmma<true>(float* const*, int, u64, u64, bool, bool, bool);

// Lane 4 g + t holds of A rows g and g + 8, of B column g, of C rows g and g + 8, columns 2 t, 2 t
// + 1. A register is one element of k (tf32: t or t + 4) or two (2 t and the next, or those 8
// further on).
static float bf16_of(u32 x, int i) { return bits<float>(i ? x & 0xffff0000 : x << 16); }
static float f16_of(u32 x, int i) { return from_f16(i ? x >> 16 : x & 0xffff); }
// A from registers: of its sixteen k, lane 4 g + t has those of rows g and g + 8 as in mma_half.
template <bool BF16>
void wgmma_rs(float* const* d, int n, const u64* a, u64 b, bool accumulate, bool b_down) {
    const Shown<4> lanes({u32(a[0]), u32(a[1]), u32(a[2]), u32(a[3])});
    float rows[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) {
            const u32 pair = lanes(threadIdx.x % 32 / 4 * 4 + k % 8 / 2, i + k / 8 * 2);
            rows[i][k] = BF16 ? bf16_of(pair, k % 2) : f16_of(pair, k % 2);
        }
    multiply<BF16>(d, n, rows, b, accumulate, b_down);
}
template void wgmma_rs<false>(float* const*, int, const u64*, u64, bool, bool);
template void wgmma_rs<true>(float* const*, int, const u64*, u64, bool, bool);
template <float half_of(u32, int)>
void mma_half(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
              u32 b1) {
    const Shown<6> lanes({a0, a1, a2, a3, b0, b1});
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const c[2][2] = {{&c0, &c1}, {&c2, &c3}};
    float rows[2][16], columns[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) {
            const int quad = k % 8 / 2, far = k / 8;
            rows[i][k] = half_of(lanes(4 * g + quad, i + 2 * far), k % 2);
            columns[i][k] = half_of(lanes(4 * (2 * t + i) + quad, 4 + far), k % 2);
        }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j)
            for (int k = 0; k < 16; ++k) *c[i][j] += rows[i][k] * columns[j][k];
}
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_half<bf16_of>(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1);
}
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_half<f16_of>(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1);
}
void ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(
    float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const Shown<6> lanes({a0, a1, a2, a3, b0, b1});
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const c[4] = {&c0, &c1, &c2, &c3};
    for (int x = 0; x < 4; ++x)
        for (int k = 0; k < 8; ++k)
            *c[x] += bits<float>(lanes(4 * g + k % 4, x / 2 + 2 * (k / 4))) *
                     bits<float>(lanes(4 * (2 * t + x % 2) + k % 4, 4 + k / 4));
}
