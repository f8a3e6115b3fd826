"""Show what compute-sanitizer's racecheck reports as a race, for a kernel of a few lines.

    python benchmarks/racecheck_probe.py          # all cases, each under racecheck
    python benchmarks/racecheck_probe.py arrive   # one, plain

Two warpgroups pass a row of shared memory back and forth, four times: one writes, the other reads
and sums. They are ordered by barriers at which both wait ("sync"), by barriers at which the first
one only arrives ("arrive"), by mbarriers at which one lane of each warp arrives ("mbarrier"), or
not at all ("none", a race). By the PTX ISA 9.0, "barrier", barrier.arrive, like barrier.sync,
"guarantees that when the barrier completes, prior memory accesses requested by this thread are
performed relative to all threads participating in the barrier". mbarrier.arrive is a release and
the wait an acquire. So the second and the third case are no races, and racecheck would report the
same for any kernel that synchronises like them (docs/reference/hopper.md).
"""

import os
import subprocess
import sys

CASES = ("sync", "arrive", "mbarrier", "none")
SOURCE = r"""
__device__ unsigned at(const void* p) { return __cvta_generic_to_shared(p); }
template <int CASE> struct Order {  // of one direction, number `id`
    unsigned long long* bar; int id, parity;
    __device__ void done() {  // by those who have read or written
        if (CASE == 0) asm volatile("bar.sync %0, 256;" :: "r"(id) : "memory");
        if (CASE == 1) asm volatile("bar.arrive %0, 256;" :: "r"(id) : "memory");
        if (CASE == 2) {
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(bar)) : "memory");
        }
    }
    __device__ void wait() {  // by those who go next
        if (CASE < 2) asm volatile("bar.sync %0, 256;" :: "r"(id) : "memory");
        if (CASE == 2)
            asm volatile("{\n.reg .pred p;\nagain:\n"
                         "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                         "@!p bra again;\n}" :: "r"(at(bar)), "r"(parity) : "memory");
        parity ^= 1;
    }
};
extern "C" __global__ void probe(int* out) {
    __shared__ int row[128];
    __shared__ unsigned long long bars[2];
    if (threadIdx.x < 2)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" :: "r"(at(bars + threadIdx.x)));
    __syncthreads();
    Order<WHICH> full{bars, 1, 0}, empty{bars + 1, 2, 0};
    const int i = threadIdx.x % 128;
    int sum = 0;
    for (int round = 0; round < 4; ++round) {
        if (threadIdx.x < 128) {
            if (round) empty.wait();
            row[i] = 1000 * round + i;
            full.done();
        } else {
            full.wait();
            sum += row[127 - i];
            if (round < 3) empty.done();
        }
    }
    if (threadIdx.x >= 128) out[i] = sum;
}
"""


def run(case: str) -> None:
    """Run one case on the GPU."""
    import cupy
    import numpy as np

    options = (f"-DWHICH={CASES.index(case)}",)
    out = cupy.zeros(128, "int32")
    cupy.RawModule(code=SOURCE, options=options).get_function("probe")((1,), (256,), (out,))
    right = (out.get() == 6000 + 4 * (127 - np.arange(128))).all()
    print(f"{case}: sums are {'right' if right else 'wrong'}")


def main() -> None:
    """Run each case under racecheck, and print how many hazards it reports."""
    if len(sys.argv) > 1:
        run(sys.argv[1])
        return
    tool = ("compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "hazard")
    for case in CASES:
        words = [*tool, "--print-limit", "0", sys.executable, __file__, case]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False)
        said = done.stdout.splitlines()
        print(*(x for x in said if x.startswith(case) or "SUMMARY" in x), sep="; ", flush=True)
        if done.returncode:
            print(done.stdout[-500:] + done.stderr[-500:])


if __name__ == "__main__":
    main()
