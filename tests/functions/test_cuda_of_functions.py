"""The CUDA C++ text of random functions, compiled for this CPU, computes what their graphs do."""

import ctypes
import itertools
import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
from random_functions import Random

from flashsim.functions.derivative import DOUT, adjoints
from flashsim.functions.emit import cuda_source
from flashsim.functions.graph import Graph, add_at
from flashsim.functions.tracing import trace_mask, trace_score

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.promise("kernels compile"),
]

B, H, N, M = 2, 3, 11, 13
#: Seeds, and whether indices are checked.
CASES = [*itertools.product(range(6), (True, False))]

#: What the text calls, as this CPU has it; every thread of a warp is the same one.
SHIMS = """
#include <cmath>
#include <cstring>
#include <algorithm>
using std::min; using std::max;
#define __device__
#define __forceinline__ inline
#define __global__
#define __ldg(p) (*(p))
struct Dim { int x, y, z; }; static const Dim threadIdx = {0, 0, 0};
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline float __fdividef(float a, float b) { return a / b; }
#define __logf logf
#define __log2f log2f
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static inline float __shfl_xor_sync(unsigned, float, int) { return 0.0f; }
static inline void atomicAdd(float* to, float x) { *to += x; }
"""
CALLS = """
extern "C" void run_SEED_CHECKED(const FlashCaptured* c, int B, int H, int N, int M, const float* s,
                    const float* dout, float* out, unsigned char* keep, float* ds, int sums) {
    for (int b = 0; b < B; b++) for (int h = 0; h < H; h++) {
        FlashSums kept;
        const FlashHead head = flash_head(*c, b, h);
        for (int q = 0; q < N; q++) for (int k = 0; k < M; k++) {
            const int at = ((b * H + h) * N + q) * M + k;
            const FlashAt i(q - q % 4, q % 4), j(k - k % 5, k % 5);
            out[at] = flash_score(*c, s[at], head, i, j);
            keep[at] = flash_mask(*c, head, i, j);
            ds[at] = sums ? flash_score_grad(*c, kept, s[at], dout[at], head, i, j)
                          : flash_score_grad(*c, s[at], dout[at], head, i, j);
        }
        if (sums) flash_add_sums(*c, kept, head);
    }
}
"""


_XOR = 'asm("xor.b32 %0, %1, %2;" : "=r"(apart) : "r"(a), "r"(b))'


@cache
def made(seed, checked):
    """A random score function and mask, the names of its differentiable arrays, and their text."""
    random = Random(seed, B, H, N, M)
    score, mask = trace_score(random.score_mod(4)), trace_mask(random.mask_mod())
    names = tuple(a.name for a in score.graph.differentiable)
    extents = None if checked else {"b": B, "h": H, "q": N, "k": M}
    return score, mask, names, cuda_source(mask.graph, score.graph, names, extents)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """All texts, compiled together, each in a namespace of its own."""
    folder = tmp_path_factory.mktemp("compiled")
    texts = [SHIMS]
    for seed, checked in CASES:
        text = made(seed, checked)[-1].text + CALLS.replace("SEED_CHECKED", f"{seed}_{checked}")
        text = text.replace(_XOR, "apart = a ^ b")
        lines = [line for line in text.splitlines() if "asm(" not in line]
        texts += [f"namespace of_{seed}_{checked} {{", *lines, "}"]
    (folder / "f.cpp").write_text("\n".join(texts))
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-o", str(folder / "f.so"), "f.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "f.so"))


@pytest.mark.parametrize(("seed", "checked"), CASES)
def test_the_text_computes_what_the_graph_does(seed, checked, library):
    """Also where indices that stay inside their arrays are not checked."""
    score, mask, names, text = made(seed, checked)
    arrays = [np.ascontiguousarray(x) for x in (*score.arrays, *mask.arrays)]
    rng = np.random.default_rng(seed)
    s, dout = rng.standard_normal((2, B, H, N, M)).astype(np.float32)
    given = dict(zip("bhqk", np.ogrid[:B, :H, :N, :M], strict=True))
    made_of = adjoints(score.graph, names)
    whole = Graph(made_of.nodes, made_of.root, made_of.arrays)
    values = whole.values({"score": s, DOUT: dout, **given}, score.arrays)
    for sums in (0, 1):
        gradients = {
            a.name: np.zeros(a.shape, np.float32) for a in score.graph.arrays if a.name in names
        }
        out, ds = np.zeros_like(s), np.zeros_like(s)
        keep = np.zeros(s.shape, np.uint8)
        packed = text.pack(
            [x.ctypes.data for x in arrays], [gradients[n].ctypes.data for n in text.gradients]
        )
        pointers = (ctypes.c_void_p(x.ctypes.data) for x in (s, dout, out, keep, ds))
        getattr(library, f"run_{seed}_{checked}")(
            ctypes.c_void_p(packed.ctypes.data), B, H, N, M, *pointers, sums
        )
        close = {"rtol": 2e-4, "atol": 2e-4}
        assert np.allclose(out, values[whole.root], **close)
        assert np.array_equal(
            keep, np.broadcast_to(mask.graph.evaluate(given, mask.arrays), s.shape)
        )
        assert np.allclose(ds, np.broadcast_to(values[made_of.score], s.shape), **close)
        for name, gradient in gradients.items():
            total = np.zeros(gradient.shape)
            for n, g in made_of.reads:
                if whole.arrays[whole.nodes[n].value].name == name:
                    at = (values[a] for a in whole.nodes[n].args)
                    add_at(total, at, np.broadcast_to(values[g], s.shape))
            assert np.allclose(gradient, total, rtol=1e-3, atol=5e-3), name
