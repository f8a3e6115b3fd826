"""Measure what the L2 of a GPU keeps: every SM, or one SM each, reads a buffer repeatedly.

    ncu --csv --clock-control none --cache-control none --print-units base \
        --metrics dram__bytes_read.sum,lts__t_sectors_srcunit_tex_op_read.sum \
        --kernel-name 'regex:read_' python benchmarks/l2_probe.py > l2_probe.csv

Two kernels read buffers of 8 to 96 MiB. In ``read_all`` every block reads the whole buffer at the
same pace as the others, as the blocks of one head read K and V. In ``read_own`` each block reads
its own slice. Each size is launched twice, and the second launch finds what the first one left.
With exact LRU and capacity C, the second launch reads nothing from DRAM up to size C, and
everything above it. The behaviour in between calibrates `flashsim.l2` (docs/notebooks/l2.md).
Prints one line per launch, in order: kernel, MiB, first or second.
"""

import cupy

SOURCE = r"""
__device__ unsigned sum_range(const uint4* at, long long first, long long stop) {
    unsigned sum = 0;
#pragma unroll 4
    for (long long e = first + threadIdx.x; e < stop; e += blockDim.x) {
        uint4 x;  // past L1, which would serve what an SM has just read
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at + e));
        sum += x.x ^ x.y ^ x.z ^ x.w;
    }
    return sum;
}
extern "C" __global__ void read_all(const uint4* at, long long n, unsigned* out) {
    const unsigned sum = sum_range(at, 0, n);
    if (sum == 1) *out = sum;  // never: the buffer holds zeros; keeps the loads alive
}
extern "C" __global__ void read_own(const uint4* at, long long n, unsigned* out) {
    const unsigned sum =
        sum_range(at, n * blockIdx.x / gridDim.x, n * (blockIdx.x + 1) / gridDim.x);
    if (sum == 1) *out = sum;
}
"""
MIB = 1 << 20
SIZES = (8, 16, 20, 22, 24, 26, 28, 30, 32, 34, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 96)


def main():
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"]
    out = cupy.zeros(1, cupy.uint32)
    for name in ("read_all", "read_own"):
        kernel = module.get_function(name)
        for mib in SIZES:
            buffer = cupy.zeros(mib * MIB, cupy.uint8)
            for time in ("first", "second"):
                kernel((blocks,), (1024,), (buffer, cupy.int64(mib * MIB // 16), out))
                print(name, mib, time)
            del buffer
            cupy.get_default_memory_pool().free_all_blocks()
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
