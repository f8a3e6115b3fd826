"""Mask and score functions in the Python tensor-core kernels, without a GPU: what the generated
functions compute for each lane's fragment, that kernels compile with them, and what is refused.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from compiled import kernels_only, thorough
from gpus import GPUS

from flashsim import Problem, Tiling
from flashsim.backends.launch.functions import functions_of
from flashsim.backends.numba_gpu import compiler
from flashsim.backends.numba_gpu.launch_policy import HOPPER, TENSOR
from flashsim.backends.numba_gpu.tensor import functions
from flashsim.errors import UnsupportedError
from flashsim.functions.derivative import adjoints

pytestmark = pytest.mark.promise("twice plain attention's error", "kernels compile")

RNG = np.random.default_rng(5)
ARRAYS = {
    "slopes": RNG.normal(size=4).astype(np.float32),
    "table": RNG.normal(size=(4, 100)).astype(np.float16),
    "documents": np.sort(RNG.integers(0, 4, (2, 50))).astype(np.int16),
}
slopes, table, documents = ARRAYS.values()


def score(s, b, h, q, k):
    return s * s * slopes[h] + np.where(q > k, table[h, q - k + 50], s)


def mask(b, h, q, k):
    return (q + 3 >= k) & (documents[b, q] == documents[b, k])


def problem(**more):
    given = {"batch": 2, "heads": 4, "dtype": "bfloat16", "score_mod": score, "mask_mod": mask}
    return Problem(45, 50, 32, **given | {"score_grads": ("slopes", "table")} | more)


class Machine:
    """Runs generated functions as Python: `lane` is the thread's, arrays are at small addresses."""

    def __init__(self, arrays):
        self.lane, self.arrays = 0, arrays

    def device(self, text, **names):
        known = {"I": int, "F": np.float32, "math": math, "add": self.add} | names
        known |= {f"read_{dtype}": self.read for dtype in functions._TYPES}
        known["cuda"] = SimpleNamespace(threadIdx=self)
        exec(text.replace("np.int64", "I").replace("np.", "math."), known)
        return known["made"]

    @property
    def x(self):
        return self.lane

    def read(self, address, index):
        return self.arrays[address].ravel()[index]

    def add(self, address, index, x):
        self.arrays[address].ravel()[index] += x


@pytest.mark.parametrize("by_row", [True, False])
def test_fragments_hold_what_the_functions_return(by_row, monkeypatch):
    """Every element of a 32 x 16 fragment, at positions that exist or past the last one."""
    p, b, h, cap = problem(softcap=2.0), 1, 2, 2.0
    of, (first_q, first_k) = functions_of(p).summing, (31, 40)
    sums = [np.zeros(x.shape, np.float32) for x in (slopes, table)]
    machine = Machine([slopes, table, documents, *sums])
    monkeypatch.setattr(functions, "_device", machine.device)
    constants = (("FS_SOFTCAP", 1), ("FS_VARLEN", 0))
    kernel = SimpleNamespace(functions=of, constants=constants)
    made = functions.fragment_functions(kernel, 2, 16, by_row=by_row)
    a = SimpleNamespace(softcap=cap, **{f"word_{n}": n for n in range(5)})
    place = first_q, first_k, p.n_q - 1, p.n_kv - 1

    rows, columns = np.mgrid[:32, :16]
    q, k = (rows, columns) if by_row else (columns, rows)
    q, k = np.minimum(q + first_q, p.n_q - 1), np.minimum(k + first_k, p.n_kv - 1)
    s, ds = (RNG.normal(size=(32, 16)).astype(np.float32) for _ in range(2))
    ds[3:5] = 0
    at = {"b": b, "h": h, "q": q, "k": k}
    kept = p.mask_graph.evaluate(at, (documents,))
    of_score = adjoints(p.score_mod, ("slopes", "table"))
    graph = type(p.score_mod)(of_score.nodes, of_score.root, of_score.arrays)
    values = graph.values(at | {"score": s, "dout": ds}, (slopes, table), "float32")
    expected = {
        "mask": np.where(kept, s, -np.inf),
        "keep": np.where(kept, s, 0),
        "score": p.score_mod.evaluate(at | {"score": s}, (slopes, table), "float32"),
        "slope_alone": values[of_score.score] * (1 - (s / cap) ** 2),
    }
    expected["slope"] = expected["slope_alone"]
    got = {name: np.full((32, 16), np.nan) for name in expected}
    for lane in range(32):
        machine.lane = lane
        i, j = lane // 4 + np.array([0, 0, 8, 8]), lane % 4 * 2 + np.array([0, 1, 0, 1])
        mine = [(16 * r + i[x], 8 * c + j[x]) for r in range(2) for c in range(2) for x in range(4)]
        fragment, gradient = ([x[at] for at in mine] for x in (s, ds))
        for name in expected:
            held = (fragment, gradient) if "slope" in name else (fragment,)
            for at, value in zip(mine, getattr(made, name)(a, b, h, *held, *place), strict=True):
                got[name][at] = value
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for n, (load, gradient) in enumerate(of_score.reads):
        node = of_score.nodes[load]
        total = np.zeros_like(sums[node.value])
        index = tuple(np.broadcast_to(values[x], s.shape) for x in node.args)
        np.add.at(total, index, np.broadcast_to(values[gradient], s.shape))
        np.testing.assert_allclose(sums[node.value], total, rtol=1e-4, atol=1e-5, err_msg=str(n))


PACKED = {"cu_seqlens_q": (0, 20, 45), "cu_seqlens_k": (0, 20, 50), "batch": 1}


@pytest.mark.parametrize("more", [{}, thorough(PACKED), thorough({"mask_mod": None})])
@pytest.mark.parametrize(
    "stage", [kernels_only("dq"), *map(thorough, ("forward", "dkdv", "fused"))]
)
def test_kernels_compile(stage, more):
    """Small tiles compile sooner: the code of a fragment's elements is written out one by one."""
    p, gpu = problem(**more), GPUS["sm_90"]
    given = p, Tiling(16, 16), gpu, "ascending", ""
    if stage == "forward":
        passes = TENSOR.forward_passes(*given)
    else:
        passes = TENSOR.backward_passes(*given, "flash2-fused" if stage == "fused" else "flash2")
    (kernel,) = (x.kernel for x in passes if x.stage.name == stage)
    text = compiler.ptx(kernel, gpu.compute_capability)
    adds = "red.global.add.f32" in text
    assert adds == (stage in ("dkdv", "fused"))
    _, log = compiler.assemble(text, gpu.compute_capability)
    assert " 0 bytes spill stores" in log


def test_hoppers_kernels_refuse_functions():
    with pytest.raises(
        UnsupportedError, match="hopper kernels do not support mask_mod; use kernel='tensor'"
    ):
        HOPPER.forward_passes(problem(), None, GPUS["sm_90"], "ascending", "")
