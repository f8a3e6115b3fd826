"""Mask and score functions in the Python tensor-core kernels, without a GPU: what is computed for
each lane's fragment, that kernels compile with them, and which kernels are chosen.
"""

import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

binding = pytest.importorskip("llvmlite.binding")
pytest.importorskip("numba_cuda")

from compiled import compares_maxima, kernels_only, thorough, usage  # noqa: E402
from gpus import kernel_of, passes_of  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba.cuda import cgutils  # noqa: E402
from test_numba_kernels import SPILL_BYTES, compiled, ptxas  # noqa: E402

from flashsim import Problem, Tiling  # noqa: E402
from flashsim.backends.launch import kernel as launch  # noqa: E402
from flashsim.backends.launch.functions import (  # noqa: E402
    arrays_of_mask,
    functions_of,
    sources_of,
)
from flashsim.backends.numba_gpu import compiler, ptx  # noqa: E402
from flashsim.backends.numba_gpu.emit import F32, I16, I32, I64, f32, i32  # noqa: E402
from flashsim.backends.numba_gpu.launch_policy import HOPPER, TENSOR  # noqa: E402
from flashsim.backends.numba_gpu.tensor import functions, gradients, softmax  # noqa: E402
from flashsim.functions.derivative import adjoints  # noqa: E402

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


def relative(s, b, h, q, k):
    return s + table[h, q - k + 50]


def mask(b, h, q, k):
    return (q + 3 >= k) & (documents[b, q] == documents[b, k])


def scattered(b, h, q, k):
    return ((q + k) % 3 != 0) & (documents[b, q] == documents[b, k])


def problem(**more):
    given = {"batch": 2, "heads": 4, "dtype": "bfloat16", "score_mod": score, "mask_mod": mask}
    given |= {"head_dim": 32, "score_grads": ("slopes", "table")}
    return Problem(45, 50, **given | more)


#: 64-bit numbers of a kernel's arguments here, of which the addresses of arrays are the last.
WORDS = launch.ARGS.itemsize // 8 + 16


@pytest.fixture
def machine(monkeypatch):
    """``machine(intrinsic, args, lane, integers, *fragments)``: what a lane gets, on the CPU.

    `args` are the kernel's, and the first two of the `integers` are batch entry and head; the
    others follow the fragments. Instructions that only a GPU has are replaced.
    """
    lanes = []

    def called(name, b, *x):
        kind = ir.FunctionType(F32, [F32] * len(x))
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), x)

    def unpack(b, bf16, word):
        assert not bf16  # no array here is bfloat16
        return [b.fpext(b.bitcast(b.trunc(word, I16), ir.HalfType()), F32)]

    def add_float(b, to, value):
        to = b.inttoptr(to, F32.as_pointer())
        b.store(b.fadd(b.load(to), value), to)

    for module in (functions, gradients):
        monkeypatch.setattr(module, "lane_of", lambda b: lanes[-1])
    for name, value in {
        **{name: partial(called, f"llvm.{name}.f32") for name in ("exp2", "log2")},
        "reciprocal": lambda b, x: b.fdiv(f32(1.0), x),
        **{"unpack": unpack, "add_float_unless_zero": add_float},
        "pack": lambda b, bf16, low, high: (low, high),  # not rounded
    }.items():
        monkeypatch.setattr(ptx, name, value)
    # Lanes run one after another, so that each adds its own part.
    monkeypatch.setattr(functions, "_sum_in_first_lane", lambda b, x: x)
    compiled = {}

    def make(intrinsic, sizes, count):
        module, pointer = ir.Module(), ir.IntType(8).as_pointer()
        kinds = [I32, *[pointer] * (3 + len(sizes))]
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "run")
        b = ir.IRBuilder(function.append_basic_block("entry"))
        lane, args, integers, out, *fragments = function.args
        lanes.append(lane)

        def loaded(at, kind, n):
            at = b.bitcast(at, kind.as_pointer())
            return [b.load(b.gep(at, [i32(x)])) for x in range(n)]

        batch, head, *place = loaded(integers, I32, count)
        values = [loaded(at, F32, n) for at, n in zip(fragments, sizes, strict=True)]
        (a,) = loaded(args, ir.ArrayType(I64, WORDS), 1)
        got = intrinsic.__wrapped__(b, a, batch, head, *values, *place)
        got = [x for y in got for x in (y if isinstance(y, tuple) else (y,))]
        out = b.bitcast(out, F32.as_pointer())
        for x, value in enumerate(got):
            b.store(value, b.gep(out, [i32(x)]))
        b.ret_void()
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        triple, features = binding.Target.from_default_triple(), binding.get_host_cpu_features()
        host = {"cpu": binding.get_host_cpu_name(), "features": features.flatten()}
        target = triple.create_target_machine(**host)  # which converts float16
        engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), target)
        kinds = [ctypes.c_int32, *[ctypes.c_void_p] * (3 + len(sizes))]
        run = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("run"))
        return (engine, target), run, len(got)

    def run(intrinsic, args, lane, integers, *fragments):
        held = [np.array(x, np.float32) for x in fragments]
        if intrinsic not in compiled:
            compiled[intrinsic] = make(intrinsic, [len(x) for x in held], len(integers))
        _, function, n = compiled[intrinsic]
        out, place = np.zeros(n, np.float32), np.array(integers, np.int32)
        function(lane, *(x.ctypes.data for x in (args, place, out, *held)))
        return out

    return run


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("by_row", "mask_mod"), [(True, mask), (False, mask), (False, scattered)])
def test_fragments_hold_what_the_functions_return(by_row, mask_mod, blocks, machine):
    """Every element of a fragment, at positions that exist or past the last one."""
    p, b, h, cap = problem(softcap=2.0, window=(9, 2), mask_mod=mask_mod), 1, 2, 2.0
    assert functions_of(p).plain.ranges == (mask_mod is mask)
    of, (first_q, first_k), reach = functions_of(p).summing, (31, 40), 4
    sums = [np.zeros(x.shape, np.float32) for x in (slopes, table)]
    constants = {"SOFTCAP": 1, "VARLEN": 0, "BF16": 1, "LEFT": 1, "RIGHT": 1}
    kernel = SimpleNamespace(
        functions=of,
        constants=tuple((f"FS_{name}", x) for name, x in constants.items()),
        args=np.dtype([*launch.ARGS.descr, ("more", "V128")]),
    )
    made = functions.fragment_functions(kernel, blocks, 16, by_row=by_row)
    args = np.zeros(1, kernel.args)
    args["softcap"], args["left"], args["right"] = cap, p.left, p.right
    _, of_masks = arrays_of_mask(p.mask_mod)  # with the ends of ranges, if the mask keeps ranges
    data = [x.ctypes.data for x in (slopes, table, *of_masks)]
    packed = sources_of(p)[1].pack(data, [x.ctypes.data for x in sums]).tobytes()
    args.view(np.uint8)[launch.ARGS.itemsize :][: len(packed)] = np.frombuffer(packed, np.uint8)
    place = b, h, first_q, first_k, p.n_q - 1, p.n_kv - 1

    shape = 16 * blocks, 16
    rows, columns = np.mgrid[: shape[0], :16]
    i, j = (rows, columns) if by_row else (columns, rows)
    i, j = i + first_q, j + first_k
    q, k = np.minimum(i, p.n_q - 1), np.minimum(j, p.n_kv - 1)
    s, ds = (RNG.normal(size=shape).astype(np.float32) for _ in range(2))
    ds[3:5] = 0
    lse = RNG.normal(size=16).astype(np.float32)
    at = {"b": b, "h": h, "q": q, "k": k}
    kept = p.mask_graph.evaluate(at, (documents,))
    inside = (j < p.n_kv) & (j <= i + reach + p.right) & (j >= i + reach - p.left)
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
    if blocks == 1 and not by_row:
        expected["probabilities"] = np.exp2(expected["score"] * softmax.LOG2E + lse)
        whole = expected["probabilities"]
        expected["masked_probabilities"] = np.where(kept & inside, whole, 0)
        assert 0 < (kept & inside).sum() < kept.sum()
    else:
        assert made.probabilities is None
    got = {name: np.full(shape, np.nan) for name in expected}
    for lane in range(32):
        y, x = lane // 4 + np.array([0, 0, 8, 8]), lane % 4 * 2 + np.array([0, 1, 0, 1])
        mine = [
            (16 * r + y[n], 8 * c + x[n]) for r in range(blocks) for c in range(2) for n in range(4)
        ]
        fragment, gradient = ([x[at] for at in mine] for x in (s, ds))
        of_columns = [lse[8 * c + lane % 4 * 2 + n] for c in range(2) for n in range(2)]
        for name in expected:
            held = [fragment, gradient] if "slope" in name else [fragment]
            held += [of_columns] if "probabilities" in name else []
            where = (*place, reach) if name == "masked_probabilities" else place
            result = machine(getattr(made, name), args, lane, where, *held)
            for to, value in zip(mine, result, strict=True):
                got[name][to] = value
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for n, (load, gradient) in enumerate(of_score.reads):
        node = of_score.nodes[load]
        total = np.zeros_like(sums[node.value])
        index = tuple(np.broadcast_to(values[x], s.shape) for x in node.args)
        np.add.at(total, index, np.broadcast_to(values[gradient], s.shape))
        np.testing.assert_allclose(sums[node.value], total, rtol=1e-4, atol=1e-5, err_msg=str(n))


def many(s, b, h, q, k):
    """Operations on floats."""
    x, y = abs(s) + 0.5, np.where(q == k, s, -s)
    total = np.exp(s) + np.exp2(s) + np.expm1(s) + np.log(x) + np.log2(x) + np.log1p(x)
    total = total + np.sqrt(x) - 1 / np.sqrt(x) + np.tanh(s) + np.sin(s) * np.cos(y)
    total = total + np.floor(3 * s) + np.ceil(y) + x**1.5 + s / (x + 1) + s // x - (s % x) + s / 3
    return total + np.minimum(s, y * 2) * np.maximum(s, 0.25) + np.where((s < y) | (s >= 1), s, -y)


def whole(s, b, h, q, k):
    """Operations on integers and booleans, with divisors of either sign and 0."""
    x, y = q - k, k - 40
    total = x // 3 + x % 3 + x // 8 - x % 8 + q // 5 + q % 5 + x // y + x % y + x // -7 + x % -7
    total = total + abs(x) * 2 - (-y) + np.minimum(x, y) + np.maximum(q, 33) + (x & 6) + (x | 5)
    total = total + (q << 2) + (x >> 1) + (x ^ y) + ((q > k) & ~(x == 2)) + (q != k)
    return s + total


def of_functions(p):
    """Arguments with room for what functions capture, and what is read of a kernel with them."""
    args = np.zeros(1, np.dtype([*launch.ARGS.descr, ("more", "V128")]))
    kernel = SimpleNamespace(
        functions=functions_of(p).plain,
        constants=tuple((f"FS_{x}", 0) for x in ("SOFTCAP", "VARLEN", "BF16", "LEFT", "RIGHT")),
        args=args.dtype,
    )
    return args, kernel


@pytest.mark.parametrize("function", [many, whole])
def test_every_operation(function, machine, monkeypatch):
    p = problem(score_mod=function, mask_mod=None, score_grads=())
    library = {"__nv_rsqrtf": lambda b, x: b.fdiv(f32(1.0), functions._library(b, "sqrtf", x))}
    library["__nv_fast_fdividef"] = lambda b, x, y: b.fdiv(x, y)
    plain = functions._library

    def of_the_cpu(b, name, *x):
        if name in library:
            return library[name](b, *x)
        return plain(b, name.removeprefix("__nv_"), *x)

    monkeypatch.setattr(functions, "_library", of_the_cpu)
    monkeypatch.setattr(functions, "asm", lambda b, text, how, x, kind: plain(b, "tanhf", *x))
    args, kernel = of_functions(p)
    made = functions.fragment_functions(kernel, 1, 16, by_row=True)
    for lane in range(32):
        s = RNG.normal(size=8).astype(np.float32)
        got = machine(made.score, args, lane, (0, 1, 29, 34, p.n_q - 1, p.n_kv - 1), s)
        q = 29 + lane // 4 + np.array([0, 0, 8, 8] * 2)
        k = 34 + lane % 4 * 2 + np.array([0, 1, 0, 1, 8, 9, 8, 9])
        at = {"b": 0, "h": 1, "q": np.minimum(q, 44), "k": np.minimum(k, 49), "score": s}
        np.testing.assert_allclose(
            got, p.score_mod.evaluate(at, (), "float32"), rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("by_row", [True, False])
def test_a_pole_past_the_end_is_not_seen(by_row, machine):
    """The logarithm of 0 and of negative numbers, at positions that do not exist."""
    p = problem(score_mod=lambda s, b, h, q, k: s + np.log(45.0 - q), mask_mod=None, score_grads=())
    args, kernel = of_functions(p)
    made = functions.fragment_functions(kernel, 1, 8, by_row=by_row)
    seen = set()
    for lane in range(32):
        s = RNG.normal(size=4).astype(np.float32)
        got = machine(made.score, args, lane, (0, 1, 35, 44, p.n_q - 1, p.n_kv - 1), s)
        down, across = lane // 4 + np.array([0, 0, 8, 8]), lane % 4 * 2 + np.array([0, 1, 0, 1])
        q, k = (35 + down, 44 + across) if by_row else (35 + across, 44 + down)
        exists = (q < p.n_q) & (k < p.n_kv)
        right = np.where(exists, s + np.log(np.maximum(45 - q, 1)), -np.inf)
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
        seen |= {*exists}
    assert seen == {True, False}


def test_rows_with_a_sink(machine, monkeypatch):
    """Also where the scores are far below the sink or above it, and where there is no key."""
    monkeypatch.setattr(ptx, "shuffle_xor", lambda b, x, mask: f32(0.0))  # the other lanes' sums
    monkeypatch.setattr(ptx, "maximum", lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))

    def flat(b, a, batch, head, m, l, units, *_):
        inverse, lse = softmax.finish_rows_with_sink.__wrapped__(b, m, l, *units)
        return inverse + lse

    flat.__wrapped__ = flat
    m = np.array([0.5, -np.inf, -90.0, 80.0], np.float32)
    l = np.array([3.0, 0.0, 2.0, 1.5], np.float32)
    args = np.zeros(1, np.dtype([*launch.ARGS.descr, ("more", "V128")]))
    for sink in (-1.0, 4.0, 90.0, -np.inf):
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.logaddexp(m + np.log(l.astype(np.float64)), sink)
            inverse = np.where(l > 0, np.exp(m - lse), 0)
        got = machine(flat, args, 0, (0, 0), m, l, (1.0, sink))
        np.testing.assert_allclose(got[:4], inverse, rtol=1e-5, atol=1e-30)
        np.testing.assert_allclose(got[4:], lse, rtol=1e-5)


PACKED = {"cu_seqlens_q": (0, 20, 45), "cu_seqlens_k": (0, 20, 50), "batch": 1}


@pytest.mark.parametrize("more", [{}, thorough(PACKED), thorough({"mask_mod": None})])
@pytest.mark.parametrize(
    "stage", [kernels_only("dq"), *map(thorough, ("forward", "dkdv", "fused"))]
)
def test_tensor_kernels_compile(stage, more):
    text = ptx_of(TENSOR, stage, problem(**more), Tiling(16, 16))
    assert ("red.global.add.f32" in text) == (stage in ("dkdv", "fused"))
    _, log = compiler.assemble(text, (9, 0))
    assert " 0 bytes spill stores" in log


def of_extremes(b, h, q, k):
    return (np.maximum(np.minimum(q, k), 0) == k) | (h == 1)


def test_a_maximum_is_compared_by_an_instruction_of_its_own():
    """ptxas has an instruction that computes both, and its result is wrong."""
    p = problem(score_mod=None, score_grads=(), mask_mod=of_extremes)
    text = ptx_of(TENSOR, "forward", p, Tiling(16, 16))
    cubin, _ = compiler.assemble(text, (9, 0))
    assert "max.s32" in text
    assert not compares_maxima(cubin)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("dq", {}),
        *(kernels_only(stage, {"head_dim": 128}) for stage in ("forward", "fused")),
        *(thorough(stage, PACKED) for stage in ("forward", "fused", "dkdv", "dq")),
        *(thorough("forward", {"head_dim": d, "sinks": True}) for d in (64, 192, 256)),
        *(thorough("dkdv", {"head_dim": d}) for d in (64, 192, 256)),
        *(thorough("dq", {"head_dim": d}) for d in (128, 192, 256)),
        *(thorough("fused", {"head_dim": d}) for d in (64, 192)),
        thorough("fused", {"head_dim": 192, "score_mod": None, "score_grads": ()}),
    ],
)
def test_hopper_kernels_compile(stage, more):
    """With products that stay asynchronous."""
    given = {"score_mod": relative, "score_grads": ("table",), **more}
    log, _ = ptxas(ptx_of(HOPPER, stage, problem(**given)))
    assert "C75" not in log, log
    registers, _, spilled = usage(log)
    assert registers <= 168
    assert spilled <= SPILL_BYTES


def linear(s, b, h, q, k):
    return s + slopes[h] * (k - q)


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize(("function", "name"), [(linear, "slopes"), (relative, "table")])
def test_functions_get_scaled_scores(function, name, algorithm):
    """Unlike C++ kernels, which may add a term to scores minus log-sum-exp."""
    for wanted in ((), (name,)):
        p = problem(score_mod=function, score_grads=wanted, head_dim=64)
        every = (*passes_of(HOPPER, p), *passes_of(HOPPER, p, algorithm))
        made = [dict(x.kernel.constants) for x in every if x.kernel.boxes]
        assert [(x["FS_SCALED"], x["FS_SCORE_MOD"]) for x in made] == [(1, 1)] * len(made)
        assert len(made) == (2 if algorithm == "flash2-fused" else 3)


def ptx_of(family, stage, p, tiling=None):
    """The PTX of a stage's kernel."""
    return compiled(kernel_of(family, p, stage, tiling=tiling), (9, 0))
